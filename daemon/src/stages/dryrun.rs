//! Asking the worker program what stages take at one very shape, without running them: `sd-worker estimate FOLDER …`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;

use sd_proto::v1::Stage;
use serde::Deserialize;

use super::sizes::chunk_bound;
use crate::jobs::request::Admitted;

/// What is asked: stages of a request, as far as their memory depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The stages.
    pub stages: Vec<Stage>,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Prompts that are encoded and denoised together: 2 with guidance.
    pub rows: u64,
    /// Tokens of each prompt, at most.
    pub tokens: u64,
    /// Edge of a tile of the VAE in pixels; 0: whole.
    pub tile: u32,
    /// Overlap of two tiles in pixels.
    pub overlap: u32,
    /// Tiles together.
    pub tile_batch: u32,
    /// What the VAE computes in.
    pub vae_type: String,
}

impl Question {
    /// The question about these stages of a request.
    pub fn of(request: &Admitted, stages: Vec<Stage>) -> Self {
        Self {
            stages,
            width: request.width,
            height: request.height,
            rows: if request.guided() { 2 } else { 1 },
            tokens: chunk_bound(request) * request.model.report.chunk_tokens(),
            tile: request.memory.vae.tile,
            overlap: request.memory.vae.overlap,
            tile_batch: request.memory.vae.batch,
            vae_type: request.plan.vae_dtype.clone(),
        }
    }

    /// As arguments of `sd-worker estimate FOLDER`.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<String> = Vec::new();
        for stage in &self.stages {
            let name = match stage {
                Stage::Unspecified => continue,
                Stage::Encode => "encode",
                Stage::VaeEncode => "vae-encode",
                Stage::Denoise => "denoise",
                Stage::Decode => "decode",
            };
            arguments.extend(["--stage".into(), name.into()]);
        }
        for (flag, value) in [
            ("--width", u64::from(self.width)),
            ("--height", u64::from(self.height)),
            ("--rows", self.rows),
            ("--tokens", self.tokens),
            ("--tile", u64::from(self.tile)),
            ("--overlap", u64::from(self.overlap)),
            ("--tile-batch", u64::from(self.tile_batch)),
        ] {
            arguments.extend([flag.into(), value.to_string()]);
        }
        arguments.extend(["--vae-type".into(), self.vae_type.clone()]);
        arguments.into_iter().map(OsString::from).collect()
    }
}

/// Bytes of working set by the stage's name, to be waited for; the error is for people.
pub type Found<'a> = Pin<Box<dyn Future<Output = Result<HashMap<String, u64>, String>> + Send + 'a>>;

/// What answers: the worker program, or a fake in tests.
pub trait DryRunner: Send + Sync + 'static {
    /// Bytes of working set by the stage's name ("encode", "vae encode", "denoise", "decode").
    fn dry_run<'a>(&'a self, folder: &'a Path, question: &'a Question) -> Found<'a>;
}

/// What the program prints.
#[derive(Deserialize)]
struct Answer {
    stages: Vec<StageAnswer>,
}

#[derive(Deserialize)]
struct StageAnswer {
    task: String,
    working_set_bytes: u64,
}

/// Reads what the program printed.
pub(super) fn answer(json: &[u8]) -> Result<HashMap<String, u64>, String> {
    let answer: Answer =
        serde_json::from_slice(json).map_err(|error| format!("its answer is not understood: {error}"))?;
    Ok(answer.stages.into_iter().map(|stage| (stage.task.replace('_', " "), stage.working_set_bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_becomes_arguments_and_an_answer_numbers() {
        let question = Question::of(&crate::jobs::fixtures::admitted(), vec![Stage::VaeEncode, Stage::Denoise]);
        let arguments = question.arguments();
        let text = arguments.iter().map(|argument| argument.to_string_lossy()).collect::<Vec<_>>().join(" ");
        assert!(
            text.starts_with("--stage vae-encode --stage denoise --width 256 --height 192 --rows 2 --tokens 77"),
            "{text}"
        );
        let found = answer(br#"{"stages": [{"task": "vae_encode", "working_set_bytes": 7}]}"#).unwrap();
        assert_eq!(found.get("vae encode"), Some(&7));
        assert!(answer(b"nonsense").is_err());
    }
}

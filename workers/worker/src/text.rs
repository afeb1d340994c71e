//! The text stage: prompts to conditioning.

use std::path::Path;

use sd_engine::formats::WeightSet;
use sd_engine::models::{ClipTextModel, ModelError};
use sd_engine::pipeline::{self, EncodeRequest, PipelineError};
use sd_engine::text::{Emphasis, Tokenizer};
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{ElementType, Task};

use crate::governor;
use crate::runner::{Control, Finished, RunError, StageModel};
use crate::segment;
use crate::watch::Watch;

/// A CLIP text encoder and its tokenizer.
#[derive(Default)]
pub(crate) struct TextStage {
    loaded: Option<(Tokenizer, ClipTextModel)>,
}

impl StageModel for TextStage {
    fn load(&mut self, folder: &Path, task: &Task, control: &Control<'_>) -> Result<(), RunError> {
        if self.loaded.is_none() {
            let tokenizer = Tokenizer::load(&folder.join("tokenizer")).map_err(PipelineError::from)?;
            self.loaded = Some((tokenizer, ClipTextModel::open(&folder.join("text_encoder"))?));
        }
        if let Some((_, model)) = &mut self.loaded {
            model.set_chunks(governor::chunks(task));
            control.govern(task, &[model.residency()])?;
            control.load(model.residency())?;
        }
        Ok(())
    }

    fn run(&mut self, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
        let (Some((tokenizer, model)), Some(Work::Encode(work))) = (&self.loaded, &task.work) else {
            return Err(PipelineError::Internal("the text stage is not loaded for this task".into()).into());
        };
        let request = EncodeRequest {
            prompt: work.prompt.clone(),
            negative_prompt: work.guidance.then(|| work.negative_prompt.clone()),
            emphasis: if work.emphasis { Emphasis::WebUi } else { Emphasis::Off },
            clip_skip: work.clip_skip as usize,
        };
        let mut observer = Watch::blocks(control);
        let encoded = pipeline::encode(tokenizer, model, &request, &mut observer)?;
        let shape = encoded.conditioning.dims().to_vec();
        let values = segment::values(&encoded.conditioning)?;
        let output = segment::write(task, "conditioning", ElementType::F32, &shape, &segment::f32_bytes(&values))?;
        let notes = (encoded.chunks > 1)
            .then(|| format!("the prompt has {} chunks of 75 tokens, encoded one by one and joined", encoded.chunks));
        Ok(Finished { outputs: vec![output], notes: notes.into_iter().collect(), ..Finished::default() })
    }

    fn unload(&mut self) {
        self.loaded = None;
    }

    fn weights(&self, folder: &Path) -> Result<WeightSet, ModelError> {
        ClipTextModel::weights(&folder.join("text_encoder"))
    }

    fn weights_bytes(&self) -> u64 {
        self.loaded.as_ref().map_or(0, |(_, model)| model.bytes())
    }
}

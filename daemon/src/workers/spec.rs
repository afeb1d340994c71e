//! What a worker is: one stage of one model on one device.

use std::ffi::OsString;
use std::path::PathBuf;

use sd_proto::worker::v1::WorkerStage;

use crate::ids::DeviceId;

/// What to start.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WorkerSpec {
    /// From [`Workers::next_incarnation`](super::Workers::next_incarnation); never used twice.
    pub incarnation: u64,
    /// The stage it runs.
    pub stage: WorkerStage,
    /// The model's registered name, for people.
    pub model: String,
    /// The model's folder.
    pub model_dir: PathBuf,
    /// "cpu", or a GPU's UUID.
    pub device: DeviceId,
    /// Threads that compute.
    pub threads: usize,
    /// Bytes of all weights of the stage once loaded, for people; 0: not known.
    pub weights_total: u64,
}

/// The stage's name on the worker's command line and in lists: `text`, `diffusion`, `vae`.
pub fn stage_name(stage: WorkerStage) -> &'static str {
    match stage {
        WorkerStage::Unspecified => "unspecified",
        WorkerStage::Text => "text",
        WorkerStage::Diffusion => "diffusion",
        WorkerStage::Vae => "vae",
    }
}

impl WorkerSpec {
    /// The worker's command line, without the program itself. The token is not on it: others may read it in `ps`.
    pub fn arguments(&self, socket: &std::path::Path) -> Vec<OsString> {
        vec![
            "serve".into(),
            "--socket".into(),
            socket.into(),
            "--incarnation".into(),
            self.incarnation.to_string().into(),
            "--stage".into(),
            stage_name(self.stage).into(),
            "--model".into(),
            self.model_dir.clone().into(),
            "--device".into(),
            self.device.as_str().into(),
            "--threads".into(),
            self.threads.to_string().into(),
        ]
    }

    /// "diffusion of default", for people.
    pub fn title(&self) -> String {
        format!("{} of {}", stage_name(self.stage), self.model)
    }
}

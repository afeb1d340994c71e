//! What a job has done when its daemon ends in order: recorded with it, so that the next daemon goes on where this one stopped.
//!
//! It is a saving of time and no more: without it, or where a part of it is damaged, the job begins anew and gives the same
//! bytes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prost::Message as _;
use sd_proto::checkpoint;
use sd_proto::v1::{ImageReady, Stage};
use sd_proto::worker::v1::ElementType;
use serde::{Deserialize, Serialize};

use crate::stages::checkpoint::Checkpoint;
use crate::stages::plan::{Role, Slot, StagePlan};

/// A tensor that a finished stage wrote, out of shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedTensor {
    /// What it is of.
    pub element_type: ElementType,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its numbers.
    pub bytes: Vec<u8>,
}

/// What a job has done.
#[derive(Clone, Default, PartialEq)]
pub struct Progress {
    /// What finished stages wrote and later ones read.
    pub tensors: Vec<(Slot, SavedTensor)>,
    /// The image whose denoising was under way, and its newest checkpoint.
    pub checkpoint: Option<(u32, Checkpoint)>,
    /// Pictures that are done.
    pub pictures: Vec<ImageReady>,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tensors: Vec<&Slot> = self.tensors.iter().map(|(slot, _)| slot).collect();
        let step = self.checkpoint.as_ref().map(|(image, checkpoint)| (image, checkpoint.step));
        f.debug_struct("Progress")
            .field("tensors", &tensors)
            .field("checkpoint", &step)
            .field("pictures", &self.pictures.len())
            .finish()
    }
}

/// How a record names a part of the progress; the bytes lie in a file beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Mark {
    Tensor { role: String, image: Option<u32>, element_type: String, shape: Vec<u64> },
    Checkpoint { image: u32 },
    Picture,
}

impl Progress {
    /// Whether nothing is done.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty() && self.checkpoint.is_none() && self.pictures.is_empty()
    }

    /// Its parts as a record names them, each with the bytes of its file.
    pub(super) fn parts(&self) -> Vec<(Mark, Vec<u8>)> {
        let tensors = self.tensors.iter().map(|(slot, tensor)| {
            let mark = Mark::Tensor {
                role: slot.role.name().into(),
                image: slot.image,
                element_type: tensor.element_type.as_str_name().into(),
                shape: tensor.shape.clone(),
            };
            (mark, tensor.bytes.clone())
        });
        let checkpoint =
            self.checkpoint.iter().map(|(image, left)| (Mark::Checkpoint { image: *image }, left.payload.clone()));
        let pictures = self.pictures.iter().map(|picture| (Mark::Picture, picture.encode_to_vec()));
        tensors.chain(checkpoint).chain(pictures).collect()
    }

    /// Takes a part in; `None` where it is not understood.
    pub(super) fn take(&mut self, mark: Mark, bytes: Vec<u8>) -> Option<()> {
        match mark {
            Mark::Tensor { role, image, element_type, shape } => {
                let slot = Slot { role: Role::of_name(&role)?, image };
                let element_type = ElementType::from_str_name(&element_type)?;
                self.tensors.push((slot, SavedTensor { element_type, shape, bytes }));
            }
            Mark::Checkpoint { image } => {
                let (step, _) = checkpoint::open(&bytes).ok()?;
                self.checkpoint = Some((image, Checkpoint { step, payload: bytes }));
            }
            Mark::Picture => self.pictures.push(ImageReady::decode(bytes.as_slice()).ok()?),
        }
        Some(())
    }

    /// Images whose pictures are done.
    pub fn painted(&self) -> BTreeSet<u32> {
        self.pictures.iter().map(|picture| picture.index).collect()
    }

    /// For people, what is done; empty: nothing.
    pub fn told(&self) -> String {
        let mut told = Vec::new();
        match self.pictures.len() {
            0 => {}
            1 => told.push("1 picture is done".into()),
            pictures => told.push(format!("{pictures} pictures are done")),
        }
        if let Some((_, checkpoint)) = &self.checkpoint {
            told.push(format!("denoising goes on after step {}", checkpoint.step));
        } else if !self.tensors.is_empty() {
            told.push("it goes on after its last finished stage".into());
        }
        told.join(", ")
    }
}

/// Which of a plan's runs are still to be done, when these images are painted and these tensors are there.
pub fn remaining(plan: &StagePlan, painted: &BTreeSet<u32>, held: &BTreeSet<Slot>) -> Vec<bool> {
    let mut wanted: BTreeSet<Slot> = BTreeSet::new();
    let mut remaining: Vec<bool> = Vec::with_capacity(plan.runs().len());
    // From the end: a run is needed for what it writes.
    for run in plan.runs().iter().rev() {
        let needed = match run.stage {
            Stage::Decode => !painted.contains(&run.image),
            Stage::Unspecified | Stage::Encode | Stage::VaeEncode | Stage::Denoise => {
                run.outputs.iter().any(|slot| wanted.contains(slot) && !held.contains(slot))
            }
        };
        if needed {
            wanted.extend(&run.inputs);
        }
        remaining.push(needed);
    }
    remaining.reverse();
    remaining
}

/// Where a job's progress is handed over: by the record of an earlier daemon to the driver, and by a driver that was told to stop
/// to the record. Empty in between.
#[derive(Debug, Clone, Default)]
pub struct Handover {
    progress: Arc<Mutex<Option<Progress>>>,
}

impl Handover {
    /// With what an earlier daemon left.
    pub fn new(progress: Progress) -> Self {
        Self { progress: Arc::new(Mutex::new(Some(progress))) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Progress>> {
        // Only ever replaced as a whole.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is there; `None` where nothing was left that could be used.
    pub fn take(&self) -> Option<Progress> {
        self.lock().take()
    }

    /// Puts down what is left.
    pub fn leave(&self, progress: Progress) {
        *self.lock() = Some(progress);
    }
}

/// Where a runner that is told to stop puts the newest checkpoint of its run.
#[derive(Debug, Clone, Default)]
pub struct Rescue {
    checkpoint: Arc<Mutex<Option<Checkpoint>>>,
}

impl Rescue {
    /// Puts a checkpoint down.
    pub fn leave(&self, checkpoint: Option<Checkpoint>) {
        *self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner) = checkpoint;
    }

    /// Takes what is there.
    pub fn take(&self) -> Option<Checkpoint> {
        self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use crate::jobs::request::Admitted;
    use crate::stages::plan::Grouping;

    fn slot(role: Role, image: Option<u32>) -> Slot {
        Slot { role, image }
    }

    #[test]
    fn only_what_is_not_done_remains() {
        let request = Admitted { count: 2, ..fixtures::admitted() };
        let stages = |plan: &StagePlan, painted: &[u32], held: &[Slot]| {
            let (painted, held) = (painted.iter().copied().collect(), held.iter().copied().collect());
            let remaining = remaining(plan, &painted, &held);
            let left = plan.runs().iter().zip(remaining).filter(|(_, remains)| *remains);
            left.map(|(run, _)| (run.stage, run.image)).collect::<Vec<_>>()
        };
        use Stage::{Decode, Denoise, Encode};
        let plan = StagePlan::of(&request, Grouping::ByImage);
        let all = [(Encode, 0), (Denoise, 0), (Decode, 0), (Denoise, 1), (Decode, 1)];
        assert_eq!(stages(&plan, &[], &[]), all);
        let conditioning = slot(Role::Conditioning, None);
        assert_eq!(stages(&plan, &[0], &[conditioning]), [(Denoise, 1), (Decode, 1)]);
        assert_eq!(stages(&plan, &[0], &[]), [(Encode, 0), (Denoise, 1), (Decode, 1)]);
        assert_eq!(stages(&plan, &[0, 1], &[]), []);
        let plan = StagePlan::of(&request, Grouping::ByStage);
        let latents = [slot(Role::Latents, Some(0)), slot(Role::Latents, Some(1))];
        assert_eq!(stages(&plan, &[], &latents), [(Decode, 0), (Decode, 1)], "the prompt is not needed any more");
        assert_eq!(stages(&plan, &[], &[latents[0], conditioning]), [(Denoise, 1), (Decode, 0), (Decode, 1)]);
    }

    #[test]
    fn progress_is_what_its_parts_are() {
        let body = [1, 2, 3];
        let payload = [&checkpoint::head(7, &body)[..], &body].concat();
        let tensor = SavedTensor { element_type: ElementType::F32, shape: vec![1, 2], bytes: vec![0; 8] };
        let progress = Progress {
            tensors: vec![(slot(Role::Conditioning, None), tensor.clone()), (slot(Role::Latents, Some(1)), tensor)],
            checkpoint: Some((1, Checkpoint { step: 7, payload })),
            pictures: vec![ImageReady { index: 0, seed: 5, png: vec![9; 10], ..ImageReady::default() }],
        };
        let mut again = Progress::default();
        for (mark, bytes) in progress.parts() {
            let json = serde_json::to_string(&mark).unwrap();
            again.take(serde_json::from_str(&json).unwrap(), bytes).unwrap();
        }
        assert_eq!(again, progress);
        assert_eq!(progress.told(), "1 picture is done, denoising goes on after step 7");
        assert_eq!(Progress::default().take(Mark::Checkpoint { image: 0 }, vec![1; 40]), None, "no checkpoint");
    }
}

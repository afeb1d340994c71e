//! What stages need on a device: the model's own description, the estimator's margins and what earlier runs measured.
//!
//! Admission and dispatch ask the same estimator, so the number that a request is admitted by is the number that its
//! workers are leased.

use sd_proto::v1::{NumericPlan, Stage};

use super::dispatch::Needs;
use super::plan::{Grouping, StagePlan, worker_stage};
use super::sizes::{chunk_bound, tensor};
use crate::arena::Arena;
use crate::ids::DeviceId;
use crate::jobs::admission::{Fits, StageNeed};
use crate::jobs::request::Admitted;
use crate::models::Model;
use crate::residency::LeasePart;
use crate::residency::estimate::{Estimate, Estimator, Formula, Shape, TaskKey, TaskSize};

/// The needs of one device's stages.
#[derive(Debug)]
pub struct DeviceNeeds {
    device: DeviceId,
    budget: u64,
    estimator: Estimator,
}

/// The stage's name in estimates.
fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "none",
        Stage::Encode => "encode",
        Stage::VaeEncode => "vae encode",
        Stage::Denoise => "denoise",
        Stage::Decode => "decode",
    }
}

impl DeviceNeeds {
    /// Needs on `device`, whose leases may hold `budget` bytes together.
    pub fn new(device: DeviceId, budget: u64, estimator: Estimator) -> Self {
        Self { device, budget, estimator }
    }

    /// A stage's task as the estimator takes it. `tokens` of conditioning over both prompts, where they are known.
    fn task(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Option<TaskSize> {
        let report = &request.model.report;
        let (part, task) = report.task(stage)?;
        let sized = stage != Stage::Encode;
        let rows = if request.guided() { 2 } else { 1 };
        let shape = Shape {
            width: if sized { request.width } else { 0 },
            height: if sized { request.height } else { 0 },
            tokens: match stage {
                Stage::Encode | Stage::Denoise => {
                    tokens.unwrap_or_else(|| rows * chunk_bound(request) * report.chunk_tokens())
                }
                Stage::Unspecified | Stage::VaeEncode | Stage::Decode => 0,
            },
        };
        // A process that encodes pictures also decodes them: it comes to hold both halves of the autoencoder.
        let both = request.initial.is_some() && matches!(stage, Stage::VaeEncode | Stage::Decode);
        let NumericPlan { version, dtype, backend, batch, vae_tile, .. } = &request.plan;
        Some(TaskSize {
            key: TaskKey {
                model: report.fingerprint.clone(),
                stage: stage_name(stage),
                shape,
                plan: format!("{version} {dtype} {backend} {batch} {vae_tile}"),
            },
            weights_bytes: if both { part.weights_bytes } else { task.weights_bytes },
            formula: Formula {
                fixed_bytes: task.working_set.fixed_bytes,
                bytes_per_pixel: task.working_set.bytes_per_pixel,
                fixed_tokens: task.working_set.fixed_tokens,
                bytes_per_token: task.working_set.bytes_per_token,
            },
            mapped_bytes: mapped_bytes(request, stage),
        })
    }

    fn estimate(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Option<Estimate> {
        Some(self.estimator.estimate(&self.task(request, stage, tokens)?))
    }
}

/// Shared memory that a stage's process maps.
fn mapped_bytes(request: &Admitted, stage: Stage) -> u64 {
    let plan = StagePlan::of(request, Grouping::ByStage);
    let Some(run) = plan.runs().iter().find(|run| run.stage == stage) else { return 0 };
    let slots = run.inputs.iter().chain(&run.outputs);
    slots.map(|slot| Arena::segment_bytes(tensor(request, slot.role).capacity)).fold(0, u64::saturating_add)
}

impl Needs for DeviceNeeds {
    fn parts(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Vec<LeasePart> {
        self.estimate(request, stage, tokens).map(|estimate| estimate.parts()).unwrap_or_default()
    }

    fn measured(&self, request: &Admitted, stage: Stage, tokens: Option<u64>, peak_bytes: u64, weights_bytes: u64) {
        if let Some(mut task) = self.task(request, stage, tokens) {
            // What the process holds of weights beyond this task's is no part of the task's working set.
            task.weights_bytes = task.weights_bytes.max(weights_bytes);
            self.estimator.learn(&task, peak_bytes);
        }
    }
}

impl Fits for DeviceNeeds {
    fn needs(&self, request: &Admitted) -> Vec<StageNeed> {
        let plan = StagePlan::of(&Admitted { count: 1, ..request.clone() }, Grouping::ByStage);
        let mut needs: Vec<StageNeed> = Vec::new();
        for run in plan.runs() {
            let Some(estimate) = self.estimate(request, run.stage, None) else { continue };
            let fixed = estimate.context.saturating_add(estimate.weights);
            let need = StageNeed { stage: run.stage, fixed, working_set: estimate.working_set };
            // Both halves of the autoencoder run in one process: the larger need counts.
            match needs.iter_mut().find(|other| worker_stage(other.stage) == worker_stage(run.stage)) {
                Some(other) if other.total() < need.total() => *other = need,
                Some(_) => {}
                None => needs.push(need),
            }
        }
        needs
    }

    fn budget(&self) -> u64 {
        self.budget
    }

    fn device(&self) -> String {
        self.device.to_string()
    }

    fn numeric_plan(&self, model: &Model) -> NumericPlan {
        NumericPlan {
            version: model.report.numerics_version,
            device: self.device.to_string(),
            dtype: "f32".into(),
            backend: model.report.backend.clone(),
            batch: 1,
            vae_tile: 0,
            vae_tile_overlap: 0,
            vae_dtype: "f32".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use crate::jobs::request::{ImageFile, InitialImage};
    use crate::residency::Purpose;

    fn needs() -> DeviceNeeds {
        DeviceNeeds::new(DeviceId::cpu(), 1 << 30, Estimator::cpu())
    }

    #[test]
    fn a_larger_picture_needs_more_where_pixels_matter() {
        let (needs, small) = (needs(), fixtures::admitted());
        let large = Admitted { width: 512, height: 512, ..small.clone() };
        let of = |request: &Admitted, stage| needs.estimate(request, stage, None).unwrap().working_set;
        assert_eq!(of(&small, Stage::Encode), of(&large, Stage::Encode));
        assert!(of(&small, Stage::Denoise) < of(&large, Stage::Denoise));
        assert!(of(&small, Stage::Decode) < of(&large, Stage::Decode));
        assert_eq!(Fits::needs(&needs, &small).len(), 3, "one entry a process");
    }

    #[test]
    fn what_admission_counts_is_what_is_leased() {
        let (needs, request) = (needs(), fixtures::admitted());
        for need in Fits::needs(&needs, &request) {
            let parts = needs.parts(&request, need.stage, None);
            assert_eq!(parts.iter().map(|part| part.min).sum::<u64>(), need.total(), "{:?}", need.stage);
        }
    }

    #[test]
    fn image_to_image_counts_both_halves_of_the_autoencoder() {
        let (needs, plain) = (needs(), fixtures::admitted());
        let initial = InitialImage { image: ImageFile::new(b"x"), mask: None, strength: 0.5 };
        let from_image = Admitted { initial: Some(initial), ..plain.clone() };
        let weights = |request: &Admitted| {
            let parts = needs.parts(request, Stage::Decode, None);
            parts.iter().find(|part| part.purpose == Purpose::Weights).unwrap().min
        };
        assert!(weights(&plain) < weights(&from_image));
        assert_eq!(Fits::needs(&needs, &from_image).len(), 3, "the autoencoder is one process");
    }

    #[test]
    fn known_tokens_count_instead_of_the_bound() {
        let needs = needs();
        let request = Admitted { prompt: "word ".repeat(1000), ..fixtures::admitted() };
        let of = |tokens| needs.estimate(&request, Stage::Denoise, tokens).unwrap().working_set;
        assert!(of(Some(2 * 14 * 77)) < of(None));
    }
}

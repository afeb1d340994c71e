//! What stages need on a device: the model's own description, the estimator's margins and what earlier runs measured.
//!
//! Admission and dispatch ask the same estimator, so the number that a request is admitted by is the number that its
//! workers are leased.

mod fitting;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_proto::v1::{NumericPlan, Stage};
use sd_proto::worker::v1::ElementType;

use crate::arena::Arena;
use crate::config::Memory;
use crate::ids::DeviceId;
use crate::jobs::admission::StageNeed;
use crate::jobs::request::Admitted;
use crate::models::report::TaskReport;
use crate::residency::estimate::{Estimate, Estimator, Formula, Shape, TaskKey, TaskSize};
use crate::residency::{LeasePart, Purpose};
use crate::stages::checkpoint::SLOTS;
use crate::stages::dispatch::Needs;
use crate::stages::dryrun::{DryRunner, Question};
use crate::stages::memory::Resident;
use crate::stages::plan::{Grouping, StagePlan};
use crate::stages::sizes::{checkpoint_capacity, chunk_bound, tensor};

/// Dry runs that are remembered; the oldest models' go first when there are more.
const REMEMBERED: usize = 4096;

/// The needs of one device's stages.
pub struct DeviceNeeds {
    device: DeviceId,
    /// Bytes the device has.
    total: u64,
    /// Bytes that its leases may hold together.
    budget: u64,
    /// The same before what the daemon's own configuration keeps free.
    configured: u64,
    estimator: Estimator,
    memory: Memory,
    dry_runner: Option<Arc<dyn DryRunner>>,
    /// What dry runs found. The mutex guards look-ups and inserts only.
    dry_runs: Mutex<HashMap<TaskKey, u64>>,
}

impl std::fmt::Debug for DeviceNeeds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceNeeds")
            .field("device", &self.device)
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

/// The stage's name in estimates.
pub(super) fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "none",
        Stage::Encode => "encode",
        Stage::VaeEncode => "vae encode",
        Stage::Denoise => "denoise",
        Stage::Decode => "decode",
    }
}

/// The name of an element type in a numeric plan.
fn type_name(kind: ElementType) -> &'static str {
    match kind {
        ElementType::Unspecified | ElementType::F32 => "f32",
        ElementType::F16 => "f16",
        ElementType::Bf16 => "bf16",
        ElementType::U8 => "u8",
        ElementType::I64 => "i64",
    }
}

/// Bytes of weights that a stage's process is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Weights {
    /// Least with which it runs: the rest is streamed.
    floor: u64,
    /// Beyond which more would not help, or is not wanted.
    want: u64,
}

impl DeviceNeeds {
    /// Needs on `device`, whose leases may hold `budget` bytes together.
    pub fn new(device: DeviceId, budget: u64, estimator: Estimator) -> Self {
        let (memory, dry_runs) = (Memory::default(), Mutex::default());
        Self { device, total: budget, budget, configured: budget, estimator, memory, dry_runner: None, dry_runs }
    }

    /// The same of a device of `total` bytes, whose budget was `configured` before the daemon's own `max_vram` and
    /// `reserve_gb`.
    #[must_use]
    pub fn of_total(self, total: u64, configured: u64) -> Self {
        Self { total, configured, ..self }
    }

    /// The same under a configuration of memory.
    #[must_use]
    pub fn configured(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// The same with dry runs by `runner`.
    #[must_use]
    pub fn with_dry_runs(self, runner: Arc<dyn DryRunner>) -> Self {
        Self { dry_runner: Some(runner), ..self }
    }

    fn dry_runs(&self) -> MutexGuard<'_, HashMap<TaskKey, u64>> {
        // A map of numbers: an insert that panicked leaves it whole.
        self.dry_runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stage's task as the estimator takes it. `tokens` of conditioning over both prompts, where they are known.
    fn task(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Option<TaskSize> {
        let report = &request.model.report;
        let (part, task) = report.task(stage)?;
        let sized = stage != Stage::Encode;
        let rows = if request.guided() { 2 } else { 1 };
        let bound = || rows * chunk_bound(request) * report.chunk_tokens();
        let shape = Shape {
            width: if sized { request.width } else { 0 },
            height: if sized { request.height } else { 0 },
            tokens: match stage {
                Stage::Encode | Stage::Denoise => tokens.unwrap_or_else(bound),
                Stage::Unspecified | Stage::VaeEncode | Stage::Decode => 0,
            },
        };
        // A process that encodes pictures also decodes them: it comes to hold both halves of the autoencoder.
        let both = request.initial.is_some() && matches!(stage, Stage::VaeEncode | Stage::Decode);
        let key = TaskKey {
            model: report.fingerprint.clone(),
            stage: stage_name(stage),
            shape,
            plan: plan_key(request, stage),
        };
        let formula = formula(request, stage, task);
        Some(TaskSize {
            dry_run: self.dry_run_of(request, stage, &key, task),
            weights_bytes: if both { part.weights_bytes } else { task.weights_bytes },
            formula,
            mapped_bytes: mapped_bytes(request, stage),
            key,
        })
    }

    /// What a dry run of this task found: at this very shape, or at the bound on tokens by which it was admitted.
    fn dry_run_of(&self, request: &Admitted, stage: Stage, key: &TaskKey, task: &TaskReport) -> Option<u64> {
        if !request.memory.dry_run {
            return None;
        }
        let found = self.dry_runs();
        if let Some(bytes) = found.get(key) {
            return Some(*bytes);
        }
        let rows = if request.guided() { 2 } else { 1 };
        let bound = match stage {
            Stage::Encode | Stage::Denoise => rows * chunk_bound(request) * request.model.report.chunk_tokens(),
            Stage::Unspecified | Stage::VaeEncode | Stage::Decode => return None,
        };
        let at_bound = TaskKey { shape: Shape { tokens: bound, ..key.shape }, ..key.clone() };
        let fewer = bound.checked_sub(key.shape.tokens)?;
        found.get(&at_bound).map(|bytes| bytes.saturating_sub(fewer * task.working_set.bytes_per_token))
    }

    fn estimate(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Option<Estimate> {
        Some(self.estimator.estimate(&self.task(request, stage, tokens)?))
    }

    /// Bytes that may be leased for a request together.
    fn limit_of(&self, request: &Admitted) -> u64 {
        request.memory.bounds.limit(self.total, self.configured).min(self.budget)
    }

    /// What a stage's process is to hold of its weights, beside this estimate.
    fn weights(&self, request: &Admitted, stage: Stage, estimate: &Estimate) -> Weights {
        let all = estimate.weights;
        let Some((_, task)) = request.model.report.task(stage) else { return Weights { floor: all, want: all } };
        let memory = &request.memory;
        if !memory.streams(stage) {
            return Weights { floor: all, want: all };
        }
        let segments = if memory.prefetch { 2 } else { 1 };
        let ring = (segments * task.largest_segment_bytes).min(all);
        let limit = self.limit_of(request);
        let beside = estimate.context.saturating_add(estimate.working_set);
        let whole = beside.saturating_add(all) <= limit;
        // The room that is left beside it, but for what stays free while a model is streamed.
        let room = limit.saturating_sub(beside).saturating_sub(memory.bounds.spare(limit));
        let want = match memory.resident_of(stage) {
            Resident::Blocks(blocks) => ring.saturating_add(task.bytes_of_blocks(blocks)),
            Resident::Granted | Resident::Bytes(_) if whole => all,
            Resident::Granted => room,
            Resident::Bytes(bytes) => room.min(ring.saturating_add(bytes)),
        };
        Weights { floor: ring, want: want.clamp(ring, all) }
    }

    fn parts_of(&self, request: &Admitted, stage: Stage, estimate: &Estimate) -> Vec<LeasePart> {
        let Weights { floor, want } = self.weights(request, stage, estimate);
        vec![
            LeasePart::exactly(Purpose::Context, estimate.context),
            LeasePart { purpose: Purpose::Weights, min: floor, want },
            LeasePart::exactly(Purpose::WorkingSet, estimate.working_set),
        ]
    }

    fn need(&self, request: &Admitted, stage: Stage) -> Option<StageNeed> {
        let estimate = self.estimate(request, stage, None)?;
        let weights = self.weights(request, stage, &estimate);
        Some(StageNeed {
            stage,
            context: estimate.context,
            weights: estimate.weights,
            floor: weights.floor,
            working_set: estimate.working_set,
            source: estimate.source,
        })
    }

    /// Whether the autoencoder's stages of a request fit the device alone, by the architecture's numbers and not by what
    /// was learned: the numeric plan must not change with what has run before.
    fn vae_fits(&self, request: &Admitted) -> bool {
        let stages: &[Stage] =
            if request.initial.is_some() { &[Stage::VaeEncode, Stage::Decode] } else { &[Stage::Decode] };
        stages.iter().all(|stage| {
            let Some(task) = self.task(request, *stage, None) else { return true };
            let estimate = self.estimator.by_formula(&TaskSize { dry_run: None, ..task });
            let least = self.weights(request, *stage, &estimate).floor;
            estimate.context.saturating_add(least).saturating_add(estimate.working_set) <= self.limit_of(request)
        })
    }

    /// Asks the worker program for what every stage of a request takes at its very shape, where that is not known yet.
    async fn dry_run(&self, request: &Admitted) {
        let Some(runner) = self.dry_runner.as_ref().filter(|_| request.memory.dry_run) else { return };
        let plan = StagePlan::of(&Admitted { count: 1, ..request.clone() }, Grouping::ByStage);
        let tasks: Vec<(Stage, TaskKey)> = plan
            .runs()
            .iter()
            .filter_map(|run| Some((run.stage, self.task(request, run.stage, None)?.key)))
            .filter(|(_, key)| !self.dry_runs().contains_key(key))
            .collect();
        if tasks.is_empty() {
            return;
        }
        let question = Question::of(request, tasks.iter().map(|(stage, _)| *stage).collect());
        match runner.dry_run(&request.model.dir, &question).await {
            Ok(found) => {
                let mut known = self.dry_runs();
                if known.len() + tasks.len() > REMEMBERED {
                    known.clear();
                }
                for (stage, key) in tasks {
                    if let Some(bytes) = found.get(stage_name(stage)) {
                        known.insert(key, *bytes);
                    }
                }
            }
            // The formula is an upper bound of the same numbers.
            Err(problem) => tracing::warn!(model = request.model.name, problem, "no dry run: estimated by formula"),
        }
    }
}

/// What of a request decides a stage's memory beside its shape.
fn plan_key(request: &Admitted, stage: Stage) -> String {
    let NumericPlan { version, dtype, backend, batch, vae_tile, vae_tile_overlap, vae_dtype, device: _ } =
        &request.plan;
    let chunks = format!("{} {}", request.memory.token_chunk, request.memory.mlp_chunk);
    match stage {
        Stage::Unspecified | Stage::Encode | Stage::Denoise => format!("{version} {dtype} {backend} {batch} {chunks}"),
        Stage::VaeEncode | Stage::Decode => {
            let tiles = request.memory.vae.batch;
            format!("{version} {vae_dtype} {backend} {batch} {vae_tile} {vae_tile_overlap} {tiles} {chunks}")
        }
    }
}

/// The architecture's formula for a stage of a request; for the VAE in tiles, that of tiles.
fn formula(request: &Admitted, stage: Stage, task: &TaskReport) -> Formula {
    let working_set = &task.working_set;
    let whole = Formula {
        fixed_bytes: working_set.fixed_bytes,
        bytes_per_pixel: working_set.bytes_per_pixel,
        fixed_tokens: working_set.fixed_tokens,
        bytes_per_token: working_set.bytes_per_token,
    };
    let vae = &request.memory.vae;
    match stage {
        Stage::Unspecified | Stage::Encode | Stage::Denoise => whole,
        Stage::VaeEncode | Stage::Decode => match &working_set.tiled {
            // A picture no larger than a tile is not cut.
            Some(tiled) if vae.tile > 0 && request.width.max(request.height) > vae.tile => {
                let bytes = tiled.bytes((vae.tile, vae.overlap, vae.batch), request.width, request.height);
                Formula { fixed_bytes: working_set.fixed_bytes.saturating_add(bytes), ..Formula::default() }
            }
            Some(_) | None => whole,
        },
    }
}

/// Shared memory that a stage's process maps.
fn mapped_bytes(request: &Admitted, stage: Stage) -> u64 {
    let plan = StagePlan::of(request, Grouping::ByStage);
    let Some(run) = plan.runs().iter().find(|run| run.stage == stage) else { return 0 };
    let slots = run.inputs.iter().chain(&run.outputs);
    let checkpoints = if stage == Stage::Denoise {
        // Both slots, and the one that it may go on from.
        Arena::segment_bytes(checkpoint_capacity(request)).saturating_mul(SLOTS as u64 + 1)
    } else {
        0
    };
    slots.map(|slot| Arena::segment_bytes(tensor(request, slot.role).capacity)).fold(checkpoints, u64::saturating_add)
}

impl Needs for DeviceNeeds {
    fn parts(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Vec<LeasePart> {
        let estimate = self.estimate(request, stage, tokens);
        estimate.map(|estimate| self.parts_of(request, stage, &estimate)).unwrap_or_default()
    }

    fn measured(&self, request: &Admitted, stage: Stage, tokens: Option<u64>, peak_bytes: u64, weights_bytes: u64) {
        let Some(task) = self.task(request, stage, tokens) else { return };
        // A process that streams holds the ring beside what stays; one that holds all of this task's weights may hold more,
        // which is no part of the task's working set.
        let ring = request
            .model
            .report
            .task(stage)
            .map_or(0, |(_, report)| report.largest_segment_bytes * if request.memory.prefetch { 2 } else { 1 });
        let held = if weights_bytes < task.weights_bytes {
            weights_bytes.saturating_add(ring).min(task.weights_bytes)
        } else {
            weights_bytes
        };
        self.estimator.learn(&task, held, peak_bytes);
    }
}

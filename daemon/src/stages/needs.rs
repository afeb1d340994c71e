//! What stages need on a device: the model's own description, the estimator's margins and what earlier runs measured.
//!
//! Admission and dispatch ask the same estimator, so the number that a request is admitted by is the number that its
//! workers are leased.

use std::collections::HashMap;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_proto::v1::{MemoryRequest, NumericPlan, Stage};
use sd_proto::worker::v1::ElementType;

use super::checkpoint::SLOTS;
use super::dispatch::Needs;
use super::dryrun::{DryRunner, Found, Question};
use super::memory::{MemoryPlan, Resident, TILES};
use super::plan::{Grouping, StagePlan, worker_stage};
use super::sizes::{checkpoint_capacity, chunk_bound, tensor};
use crate::arena::Arena;
use crate::config::Memory;
use crate::ids::DeviceId;
use crate::jobs::admission::{Fits, StageNeed};
use crate::jobs::request::Admitted;
use crate::models::Model;
use crate::models::report::TaskReport;
use crate::residency::estimate::{Estimate, Estimator, Formula, Shape, TaskKey, TaskSize};
use crate::residency::{LeasePart, Purpose};

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

impl Fits for DeviceNeeds {
    fn needs(&self, request: &Admitted) -> Vec<StageNeed> {
        let plan = StagePlan::of(&Admitted { count: 1, ..request.clone() }, Grouping::ByStage);
        let mut needs: Vec<StageNeed> = Vec::new();
        for run in plan.runs() {
            let Some(need) = self.need(request, run.stage) else { continue };
            // Both halves of the autoencoder run in one process: the larger need counts.
            match needs.iter_mut().find(|other| worker_stage(other.stage) == worker_stage(run.stage)) {
                Some(other) if other.total() < need.total() => *other = need,
                Some(_) => {}
                None => needs.push(need),
            }
        }
        needs
    }

    fn limit(&self, request: &Admitted) -> u64 {
        self.limit_of(request)
    }

    fn device(&self) -> String {
        self.device.to_string()
    }

    fn plans(&self, model: &Model, asked: Option<&MemoryRequest>) -> (MemoryPlan, NumericPlan) {
        let memory = MemoryPlan::resolve(&self.memory.of(&model.name), asked);
        let plan = NumericPlan {
            version: model.report.numerics_version,
            device: self.device.to_string(),
            dtype: "f32".into(),
            backend: model.report.backend.clone(),
            batch: 1,
            vae_tile: 0,
            vae_tile_overlap: 0,
            vae_dtype: type_name(memory.vae.element_type).into(),
        };
        (memory, plan)
    }

    fn choose_tiles(&self, request: &mut Admitted) {
        let tiling = request.memory.tiling;
        let with = |request: &mut Admitted, edge| {
            let Admitted { memory, plan, width, height, .. } = request;
            // A picture that is no larger than a tile is whole.
            memory.set_tiles(plan, if edge < (*width).max(*height) { edge } else { 0 });
        };
        let named = (tiling.size > 0).then_some(tiling.size);
        match tiling.wanted {
            Some(false) => with(request, 0),
            Some(true) => match named {
                Some(edge) => with(request, edge),
                None => self.first_that_fits(request),
            },
            None => {
                with(request, 0);
                if !self.vae_fits(request) {
                    match named {
                        Some(edge) => with(request, edge),
                        None => self.first_that_fits(request),
                    }
                }
            }
        }
    }

    fn prepare<'a>(&'a self, request: &'a Admitted) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(self.dry_run(request))
    }
}

impl DeviceNeeds {
    /// The largest tiles that fit, else the smallest there are; one at a time where several do not fit.
    fn first_that_fits(&self, request: &mut Admitted) {
        let batch = request.memory.vae.batch;
        for edge in TILES {
            for batch in [batch, 1] {
                request.memory.vae.batch = batch;
                let Admitted { memory, plan, .. } = request;
                memory.set_tiles(plan, edge);
                if self.vae_fits(request) {
                    return;
                }
            }
        }
    }
}

/// Runs the worker program's dry run.
impl DryRunner for crate::workers::Workers {
    fn dry_run<'a>(&'a self, folder: &'a Path, question: &'a Question) -> Found<'a> {
        Box::pin(async move {
            let report = self.estimate(folder, &question.arguments()).await.map_err(|error| error.to_string())?;
            super::dryrun::answer(&report)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::memory::RawMemory;
    use crate::jobs::fixtures;
    use crate::jobs::request::{ImageFile, InitialImage};
    use crate::residency::estimate::Source;

    const MIB: u64 = 1 << 20;

    fn needs() -> DeviceNeeds {
        DeviceNeeds::new(DeviceId::cpu(), 1 << 30, Estimator::cpu())
    }

    /// A device of so many bytes, and a request under this table.
    fn under(budget: u64, table: &str) -> (DeviceNeeds, Admitted) {
        let daemon: RawMemory = toml::from_str(table).unwrap();
        let needs = DeviceNeeds::new(DeviceId::cpu(), budget, Estimator::cpu())
            .configured(Memory { daemon, models: std::collections::BTreeMap::new() });
        let mut request = fixtures::admitted();
        (request.memory, request.plan) = needs.plans(&request.model, None);
        (needs, request)
    }

    fn weights(needs: &DeviceNeeds, request: &Admitted, stage: Stage) -> (u64, u64) {
        let parts = needs.parts(request, stage, None);
        let part = parts.iter().find(|part| part.purpose == Purpose::Weights).unwrap();
        (part.min, part.want)
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
        for (budget, table) in
            [(1 << 30, ""), (60 * MIB, ""), (1 << 30, "dit_gpu_blocks = 2"), (1 << 30, "offload_mode = \"none\"")]
        {
            let (needs, request) = under(budget, table);
            for need in Fits::needs(&needs, &request) {
                let parts = needs.parts(&request, need.stage, None);
                assert_eq!(parts.iter().map(|part| part.min).sum::<u64>(), need.least(), "{:?}", need.stage);
                assert!(parts.iter().map(|part| part.want).sum::<u64>() <= need.total());
            }
        }
    }

    #[test]
    fn image_to_image_counts_both_halves_of_the_autoencoder() {
        let (needs, plain) = (needs(), fixtures::admitted());
        let initial = InitialImage { image: ImageFile::new(b"x"), mask: None, strength: 0.5 };
        let from_image = Admitted { initial: Some(initial), ..plain.clone() };
        let want = |request: &Admitted| weights(&needs, request, Stage::Decode).1;
        assert!(want(&plain) < want(&from_image));
        assert_eq!(Fits::needs(&needs, &from_image).len(), 3, "the autoencoder is one process");
    }

    #[test]
    fn known_tokens_count_instead_of_the_bound() {
        let needs = needs();
        let request = Admitted { prompt: "word ".repeat(1000), ..fixtures::admitted() };
        let of = |tokens| needs.estimate(&request, Stage::Denoise, tokens).unwrap().working_set;
        assert!(of(Some(2 * 14 * 77)) < of(None));
    }

    #[test]
    fn weights_are_streamed_only_where_mode_and_room_say_so() {
        let (roomy, request) = under(1 << 30, "");
        let (_, task) = request.model.report.task(Stage::Denoise).unwrap();
        let (all, ring) = (task.weights_bytes, task.largest_segment_bytes);
        assert_eq!(weights(&roomy, &request, Stage::Denoise), (ring, all), "auto may be revised down to the ring");
        for mode in ["none", "cond_only", "cond_diffusion", "aggressive"] {
            let (needs, request) = under(1 << 30, &format!("offload_mode = \"{mode}\""));
            assert_eq!(weights(&needs, &request, Stage::Denoise), (all, all), "{mode}");
        }
        let (ahead, request) = under(1 << 30, "streaming_prefetch = 1");
        assert_eq!(weights(&ahead, &request, Stage::Denoise).0, 2 * ring);
        let (tight, request) = under(60 * MIB, "");
        let (least, want) = weights(&tight, &request, Stage::Denoise);
        assert!(least == ring && ring < want && want < all, "{least} {want}");
    }

    #[test]
    fn no_preset_streams_what_its_grant_holds_whole_and_counts_of_users_do() {
        for preset in ["auto", "24gb", "16gb", "12gb", "8gb", "minimal"] {
            let (needs, request) = under(1 << 30, &format!("preset = \"{preset}\""));
            for stage in [Stage::Encode, Stage::Denoise, Stage::Decode] {
                let all = request.model.report.task(stage).unwrap().1.weights_bytes;
                assert_eq!(weights(&needs, &request, stage).1, all, "{preset} {stage:?}");
            }
        }
        let (needs, request) = under(60 * MIB, "preset = \"minimal\"");
        let ring = request.model.report.task(Stage::Denoise).unwrap().1.largest_segment_bytes;
        assert_eq!(weights(&needs, &request, Stage::Denoise), (ring, ring), "0 blocks where it does not fit whole");
        let (needs, request) = under(1 << 30, "dit_gpu_blocks = 0\nvae_resident = false");
        assert!(weights(&needs, &request, Stage::Denoise).1 <= 3 * ring);
        let (needs, request) = under(1 << 30, "dit_gpu_blocks = 100000");
        let all = request.model.report.task(Stage::Denoise).unwrap().1.weights_bytes;
        assert_eq!(weights(&needs, &request, Stage::Denoise).1, all, "clamped");
    }

    #[test]
    fn tiles_come_where_the_whole_does_not_fit_and_never_from_what_was_learned() {
        let large =
            |(needs, request): (DeviceNeeds, Admitted)| (needs, Admitted { width: 1024, height: 1024, ..request });
        let tile = |budget, table: &str| {
            let (needs, mut request) = large(under(budget, table));
            needs.choose_tiles(&mut request);
            assert_eq!(
                (request.plan.vae_tile, request.plan.vae_tile_overlap),
                (request.memory.vae.tile, request.memory.vae.overlap)
            );
            (request.plan.vae_tile, request.plan.vae_tile_overlap)
        };
        assert_eq!(tile(4 << 30, ""), (0, 0));
        let (edge, overlap) = tile(300 * MIB, "");
        assert!(edge > 0 && overlap == 0, "{edge} {overlap}");
        assert_eq!(tile(300 * MIB, "vae_tiling = false"), (0, 0));
        assert_eq!(tile(4 << 30, "vae_tiling = true").0, 512);
        assert_eq!(tile(4 << 30, "vae_tiling = true\nvae_tile_size = 320\nvae_tile_overlap = 40"), (320, 40));

        let (needs, mut request) = large(under(300 * MIB, ""));
        needs.choose_tiles(&mut request);
        let whole = Admitted { width: 1024, height: 1024, ..under(300 * MIB, "").1 };
        needs.measured(&whole, Stage::Decode, None, 1, 0);
        let before = request.plan.clone();
        needs.choose_tiles(&mut request);
        assert_eq!(request.plan, before);
    }

    /// Answers every stage with a number of its own, and counts how often it is asked.
    struct Fixed(std::sync::atomic::AtomicUsize);

    impl DryRunner for Fixed {
        fn dry_run<'a>(&'a self, _: &'a Path, question: &'a Question) -> Found<'a> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let found = question.stages.iter().map(|stage| (stage_name(*stage).to_owned(), 3 * MIB)).collect();
            Box::pin(std::future::ready(Ok(found)))
        }
    }

    #[tokio::test]
    async fn a_shape_is_run_dry_once_and_its_number_is_the_one_that_is_leased() {
        let runner = Arc::new(Fixed(std::sync::atomic::AtomicUsize::new(0)));
        let needs = needs().with_dry_runs(runner.clone());
        let request = fixtures::admitted();
        let by_formula = needs.estimate(&request, Stage::Decode, None).unwrap();
        for _ in 0..3 {
            needs.prepare(&request).await;
        }
        assert_eq!(runner.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        let dry = needs.estimate(&request, Stage::Decode, None).unwrap();
        assert!(dry.source == Source::DryRun && dry.working_set < by_formula.working_set, "{dry:?} {by_formula:?}");
        // Fewer tokens than the bound by which it was admitted take less, by the same run.
        let fewer = needs.estimate(&request, Stage::Denoise, Some(154)).unwrap();
        assert_eq!(fewer.source, Source::DryRun);
        let formula = Admitted { memory: MemoryPlan { dry_run: false, ..request.memory.clone() }, ..request.clone() };
        assert_eq!(needs.estimate(&formula, Stage::Decode, None).unwrap().source, Source::Formula);
    }
}

//! The real runner of stages: lease → worker → task → validated output.
//!
//! For one run: choose the process that is to do it (the warm one of that stage, model and device, or a new one), ask the
//! residency for everything it needs at once, start the process if it is not running, create the outputs, take the
//! device's compute token, send the task, and believe its result only after the headers in shared memory were checked.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sd_proto::segment::Header;
use sd_proto::v1::{Failure, FailureReason, ProgressPhase, Stage};
use sd_proto::worker::v1::{ElementType, NamedSegment, Task, TaskDone, TaskPhase, WorkerStage};
use tokio::time::Instant;

use super::failure::{failure, of_arena, of_refusal, of_run, of_start};
use super::operate::Pins;
use super::plan::{Role, Slot, worker_stage};
use super::runner::{Output, StageNews, StageOrder, StageReport, StageRunner, Stopped};
use super::sizes::{TensorSpec, tensor};
use super::task::work;
use crate::arena::{Arena, SegmentHandle};
use crate::ids::DeviceId;
use crate::jobs::request::{Admitted, ImageFile};
use crate::picture::Pixels;
use crate::residency::{Granted, LeasePart, LeaseVector, Refusal, Residency};
use crate::workers::{KillCause, RunError, Worker, WorkerSpec, Workers};

/// How often a run looks for another process when the one it was to use goes away before the task began.
const ATTEMPTS: usize = 4;

/// Says what a run of a stage needs on its device.
pub trait Needs: Send + Sync + 'static {
    /// Context, weights and working set, as the process holds them while it runs this stage of this request. `tokens` of
    /// conditioning over both prompts, where they are known already.
    fn parts(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Vec<LeasePart>;
    /// What a finished run measured: the highest bytes of its process, and the weights it holds.
    fn measured(&self, request: &Admitted, stage: Stage, tokens: Option<u64>, peak_bytes: u64, weights_bytes: u64);
}

/// A tensor in shared memory, checked.
#[derive(Debug, Clone)]
pub struct Tensor {
    segment: SegmentHandle,
    header: Arc<Header>,
}

impl Output for Tensor {
    fn pixels(&self) -> Result<Pixels, Failure> {
        let [1, height, width, 3] = self.header.shape[..] else {
            let message = format!("pixels have shape {:?}: this is a bug of sdd", self.header.shape);
            return Err(failure(FailureReason::Internal, Stage::Decode, message));
        };
        let rgb = self.segment.read_payload(&self.header).map_err(|error| of_arena(Stage::Decode, &error))?;
        // Admission bounds both edges far below this.
        Ok(Pixels { width: width as u32, height: height as u32, rgb })
    }
}

/// Which process: what workers of equal keys can do for each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) stage: WorkerStage,
    pub(super) dir: PathBuf,
    fingerprint: String,
}

impl Key {
    /// The kind of process that runs a stage of a request.
    pub(super) fn of(request: &Admitted, stage: WorkerStage) -> Self {
        let model = &request.model;
        Self { stage, dir: model.dir.clone(), fingerprint: model.report.fingerprint.clone() }
    }
}

/// The process of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chosen {
    /// To be started by the first run that is granted what it needs.
    New(u64),
    /// Started once. An incarnation is never started again: when its process is gone, another one is chosen.
    Started(u64),
}

impl Chosen {
    fn incarnation(self) -> u64 {
        match self {
            Self::New(incarnation) | Self::Started(incarnation) => incarnation,
        }
    }
}

/// Runs stages in worker processes on one device.
pub struct Dispatcher {
    pub(super) residency: Residency,
    pub(super) workers: Workers,
    arena: Arena,
    needs: Arc<dyn Needs>,
    device: DeviceId,
    threads: usize,
    pub(super) tasks: AtomicU64,
    pub(super) pins: Pins,
    /// The process of each kind, running or about to be started.
    chosen: Mutex<HashMap<Key, Chosen>>,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatcher").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Ends a run early.
fn failed(failure: Failure) -> Stopped {
    Stopped::Failed(failure)
}

impl Dispatcher {
    /// A runner on `device` whose workers compute with `threads` threads.
    pub fn new(
        residency: Residency,
        workers: Workers,
        arena: Arena,
        needs: Arc<dyn Needs>,
        device: DeviceId,
        threads: usize,
    ) -> Self {
        let (tasks, pins, chosen) = (AtomicU64::new(1), Pins::default(), Mutex::default());
        Self { residency, workers, arena, needs, device, threads, tasks, pins, chosen }
    }

    fn chosen(&self) -> MutexGuard<'_, HashMap<Key, Chosen>> {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that is to run a stage: the one that was chosen before, while it may still serve, else a new one.
    fn choose(&self, key: &Key) -> u64 {
        let new = || Chosen::New(self.workers.next_incarnation());
        self.chosen().entry(key.clone()).or_insert_with(new).incarnation()
    }

    /// Whether this run is the one that starts the process: nobody has started it, and it is still the chosen one.
    fn is_to_start(&self, key: &Key, incarnation: u64) -> bool {
        let mut chosen = self.chosen();
        let new = chosen.get(key) == Some(&Chosen::New(incarnation));
        if new {
            chosen.insert(key.clone(), Chosen::Started(incarnation));
        }
        new
    }

    /// This process does not serve any more.
    pub(super) fn forget(&self, key: &Key, incarnation: u64) {
        let mut chosen = self.chosen();
        if chosen.get(key).is_some_and(|chosen| chosen.incarnation() == incarnation) {
            chosen.remove(key);
        }
    }

    /// The chosen processes of the kinds that are meant, running or not.
    pub(super) fn chosen_of(&self, meant: impl Fn(&Key) -> bool) -> Vec<u64> {
        self.chosen().iter().filter(|(key, _)| meant(key)).map(|(_, chosen)| chosen.incarnation()).collect()
    }

    /// Retires processes of the same stage and folder that hold an older state of its files.
    pub(super) fn retire_outdated(&self, key: &Key) {
        let mut chosen = self.chosen();
        let outdated: Vec<Key> = chosen
            .keys()
            .filter(|k| k.stage == key.stage && k.dir == key.dir && k.fingerprint != key.fingerprint)
            .cloned()
            .collect();
        for key in outdated {
            if let Some(outdated) = chosen.remove(&key) {
                self.residency.retire(outdated.incarnation());
            }
        }
    }

    /// Waits for everything the run needs.
    pub(super) async fn lease(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        shared_memory: u64,
    ) -> Result<Granted, Stopped> {
        let stage = order.run.stage;
        for _ in 0..ATTEMPTS {
            let incarnation = self.choose(key);
            let vector = LeaseVector {
                device: self.device.clone(),
                incarnation,
                tenant: order.tenant.clone(),
                job: order.job.clone(),
                holder: format!("{} of {}", crate::workers::stage_name(key.stage), order.request.model.name),
                parts: self.needs.parts(&order.request, stage, tokens(order)),
                shared_memory,
            };
            let granted = tokio::select! {
                biased;
                () = order.stop.cancelled() => return Err(Stopped::Asked),
                granted = self.residency.request(vector) => granted,
            };
            match granted {
                Ok(granted) => {
                    self.keep_pinned(key, incarnation);
                    return Ok(granted);
                }
                Err(Refusal::HolderGone { .. }) => self.forget(key, incarnation),
                Err(refusal) => return Err(failed(of_refusal(stage, &refusal))),
            }
        }
        Err(failed(failure(
            FailureReason::WorkerDied,
            stage,
            format!("{ATTEMPTS} workers went away one after the other before this stage could use them"),
        )))
    }

    /// The granted process, started if it never was; `None` where it went away between the grant and now.
    pub(super) async fn worker(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        incarnation: u64,
    ) -> Result<Option<Worker>, Stopped> {
        if let Some(worker) = self.workers.get(incarnation).filter(Worker::is_usable) {
            return Ok(Some(worker));
        }
        if !self.is_to_start(key, incarnation) {
            return Ok(None);
        }
        let _ = order.news.try_send(StageNews::Progress { phase: ProgressPhase::Starting, done: 0, total: 1 });
        let spec = WorkerSpec {
            incarnation,
            stage: key.stage,
            model: order.request.model.name.clone(),
            model_dir: key.dir.clone(),
            device: self.device.clone(),
            threads: self.threads,
        };
        let started = tokio::select! {
            biased;
            // Dropping the start retires the process; the residency hears of its end.
            () = order.stop.cancelled() => return Err(Stopped::Asked),
            started = self.workers.start(spec) => started,
        };
        match started {
            Ok(worker) => Ok(Some(worker)),
            Err(error) => Err(failed(of_start(order.run.stage, &error))),
        }
    }
}

/// Tokens of conditioning that a run reads, over both prompts.
fn tokens(order: &StageOrder<Tensor>) -> Option<u64> {
    let conditioning = order.inputs.get(&Slot { role: Role::Conditioning, image: None })?;
    conditioning.header.shape.get(..2).map(|dims| dims.iter().product())
}

/// The daemon's own inputs of a run: image files.
fn files(request: &Admitted, stage: Stage) -> Vec<(&'static str, &ImageFile)> {
    match (stage, &request.initial) {
        (Stage::VaeEncode, Some(initial)) => {
            let mask = initial.mask.as_ref().map(|mask| ("mask", mask));
            std::iter::once(("init_image", &initial.image)).chain(mask).collect()
        }
        (Stage::Unspecified | Stage::Encode | Stage::VaeEncode | Stage::Denoise | Stage::Decode, _) => Vec::new(),
    }
}

/// The segments of one task.
struct Segments {
    inputs: Vec<NamedSegment>,
    outputs: Vec<(Slot, TensorSpec, SegmentHandle)>,
    /// Kept until the task has ended.
    _files: Vec<SegmentHandle>,
}

impl Segments {
    /// Creates the outputs, and writes the image files, out of what was promised with the grant.
    fn create(arena: &Arena, order: &StageOrder<Tensor>, granted: &mut Granted) -> Result<Self, Failure> {
        let stage = order.run.stage;
        let wrong = |error| of_arena(stage, &error);
        let mut inputs = Vec::new();
        for slot in &order.run.inputs {
            let Some(tensor) = order.inputs.get(slot) else {
                let message = format!("input {} is not there: this is a bug of sdd", slot.role.name());
                return Err(failure(FailureReason::Internal, stage, message));
            };
            let segment = tensor.segment.message(&tensor.header.shape);
            inputs.push(NamedSegment { role: slot.role.name().into(), segment: Some(segment) });
        }
        let label = |role: &str| format!("{role} of job {}", order.job);
        let mut written = Vec::new();
        for (role, file) in files(&order.request, stage) {
            let bytes = file.bytes();
            let length = bytes.len() as u64;
            let promise = &mut granted.shared_memory;
            let segment = arena
                .create_reserved(promise, ElementType::U8, length, 0, &label(role))
                .and_then(|segment| segment.write(&[length], bytes).map(|_| segment))
                .map_err(wrong)?;
            inputs.push(NamedSegment { role: role.into(), segment: Some(segment.message(&[length])) });
            written.push(segment);
        }
        let mut outputs = Vec::new();
        for slot in &order.run.outputs {
            let spec = tensor(&order.request, slot.role);
            let (promise, writer) = (&mut granted.shared_memory, granted.incarnation);
            let segment = arena
                .create_reserved(promise, spec.element_type, spec.capacity, writer, &label(slot.role.name()))
                .map_err(wrong)?;
            outputs.push((*slot, spec, segment));
        }
        Ok(Self { inputs, outputs, _files: written })
    }

    /// Shared memory that a run will take.
    fn bytes(order: &StageOrder<Tensor>) -> u64 {
        let outputs = order.run.outputs.iter().map(|slot| tensor(&order.request, slot.role).capacity);
        let files = files(&order.request, order.run.stage).into_iter().map(|(_, file)| file.bytes().len() as u64);
        outputs.chain(files).map(Arena::segment_bytes).fold(0, u64::saturating_add)
    }

    fn output_messages(&self) -> Vec<NamedSegment> {
        let named = |(slot, spec, segment): &(Slot, TensorSpec, SegmentHandle)| NamedSegment {
            role: slot.role.name().into(),
            segment: Some(segment.message(&spec.shape)),
        };
        self.outputs.iter().map(named).collect()
    }

    /// Checks what the worker says it has written. `Err` says how it lies.
    fn validate(&self, request: &Admitted, done: &TaskDone) -> Result<BTreeMap<Slot, Tensor>, String> {
        let mut checked = BTreeMap::new();
        for (slot, spec, segment) in &self.outputs {
            let role = slot.role.name();
            let claim = done
                .outputs
                .iter()
                .find(|named| named.role == role)
                .and_then(|named| named.segment.as_ref())
                .ok_or_else(|| format!("the worker reports no output {role:?}"))?;
            let header = segment.validate(claim).map_err(|error| error.to_string())?;
            check_shape(request, slot.role, spec, &header)?;
            checked.insert(*slot, Tensor { segment: segment.clone(), header: Arc::new(header) });
        }
        Ok(checked)
    }
}

/// A valid header may still describe another tensor than the stage is to write.
fn check_shape(request: &Admitted, role: Role, spec: &TensorSpec, header: &Header) -> Result<(), String> {
    let holds = match role {
        Role::Conditioning => {
            let (rows, chunk) = (if request.guided() { 2 } else { 1 }, request.model.report.chunk_tokens());
            let width = request.model.report.text.hidden_size;
            matches!(header.shape[..], [r, t, w] if r == rows && w == width && t > 0 && t.is_multiple_of(chunk))
        }
        Role::ImageLatents | Role::MaskedImageLatents | Role::LatentMask | Role::Latents | Role::Pixels => {
            header.shape == spec.shape
        }
    };
    holds.then_some(()).ok_or_else(|| {
        format!("output {:?} has shape {:?}, which is not what this stage writes", role.name(), header.shape)
    })
}

impl StageRunner for Dispatcher {
    type Output = Tensor;

    async fn run(&self, order: StageOrder<Tensor>) -> Result<StageReport<Tensor>, Stopped> {
        let (request, stage) = (order.request.clone(), order.run.stage);
        let (Some(kind), Some(work)) = (worker_stage(stage), work(&request, &order.run)) else {
            return Err(failed(failure(FailureReason::Internal, stage, "a plan has a stage without a name")));
        };
        let key = Key::of(&request, kind);
        self.retire_outdated(&key);

        let began = Instant::now();
        for _ in 0..ATTEMPTS {
            let mut granted = self.lease(&order, &key, Segments::bytes(&order)).await?;
            let incarnation = granted.incarnation;
            let _ = order.news.send(StageNews::Worker { incarnation }).await;
            let worker = match self.worker(&order, &key, incarnation).await {
                Ok(Some(worker)) => worker,
                Ok(None) => {
                    self.forget(&key, incarnation);
                    continue;
                }
                Err(stopped) => {
                    self.forget(&key, incarnation);
                    return Err(stopped);
                }
            };
            let segments = Segments::create(&self.arena, &order, &mut granted).map_err(failed)?;
            let token = tokio::select! {
                biased;
                () = order.stop.cancelled() => return Err(Stopped::Asked),
                token = self.residency.compute(&self.device, &order.job) => token,
            };
            let token = token.map_err(|refusal| failed(of_refusal(stage, &refusal)))?;
            let waited = began.elapsed();

            let task_id = self.tasks.fetch_add(1, Ordering::Relaxed);
            let task = Task {
                task_id,
                job_id: order.job.to_string(),
                inputs: segments.inputs.clone(),
                outputs: segments.output_messages(),
                work: Some(work.clone()),
                memory: Some(request.memory.task(stage)),
                checkpoints: Vec::new(),
                resume: None,
            };
            let news = order.news.clone();
            let result = worker
                .run_until(task, order.stop.cancelled(), |progress| {
                    let phase = match progress.phase() {
                        TaskPhase::Unspecified => return,
                        TaskPhase::Loading => ProgressPhase::Loading,
                        TaskPhase::Computing => ProgressPhase::Computing,
                    };
                    // Progress that nobody has read yet makes this one superfluous.
                    let (done, total) = (progress.done, progress.total);
                    let _ = news.try_send(StageNews::Progress { phase, done, total });
                })
                .await;
            drop(token);
            let done = match result {
                Ok(done) => done,
                Err(RunError::Gone) if !order.stop.is_cancelled() => {
                    self.forget(&key, incarnation);
                    continue;
                }
                Err(error) => {
                    match &error {
                        RunError::Failed { .. } => {}
                        RunError::Died(_) | RunError::Hung(_) | RunError::Protocol(_) | RunError::Gone => {
                            self.forget(&key, incarnation);
                        }
                    }
                    return Err(of_run(stage, &error, order.stop.is_cancelled()));
                }
            };
            let outputs = match segments.validate(&request, &done) {
                Ok(outputs) => outputs,
                Err(lie) => {
                    // It must not run anything again.
                    self.forget(&key, incarnation);
                    worker.kill(KillCause::Protocol(lie.clone()));
                    let message = format!("worker {incarnation} was killed: {lie}");
                    return Err(failed(failure(FailureReason::Protocol, stage, message)));
                }
            };
            self.needs.measured(&request, stage, tokens(&order), done.peak_bytes, done.weights_bytes);
            for note in done.notes {
                let _ = order.news.send(StageNews::Note(note)).await;
            }
            let (loaded, computed) =
                (Duration::from_micros(done.load_micros), Duration::from_micros(done.compute_micros));
            return Ok(StageReport { outputs, waited, loaded, computed });
        }
        let message = format!("{ATTEMPTS} workers went away one after the other before this stage's task began");
        Err(failed(failure(FailureReason::WorkerDied, stage, message)))
    }
}

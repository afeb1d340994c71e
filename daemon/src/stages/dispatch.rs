//! The real runner of stages: lease → worker → task → validated output.
//!
//! For one run: choose the process that is to do it (the warm one of that stage, model and device, or a new one), ask the
//! residency for everything it needs at once, start the process if it is not running, create the outputs, take the
//! device's compute token, send the task, and believe its result only after the headers in shared memory were checked. A run
//! whose worker does not survive it is attempted again, as far as the job's [`Survival`](super::resume::Survival) allows.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sd_proto::v1::{Decision, DecisionKind, Failure, FailureReason, ProgressPhase, Stage};
use sd_proto::worker::v1::{Task, TaskDone, TaskError, TaskPhase, TaskProgress, WorkerStage};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::checkpoint::{Checkpoint, newest};
use super::conditioning::{self, CacheConfig, Conditioning};
use super::failure::{Lost, failure, of_death, of_refusal, of_run, of_start};
use super::moves::Moves;
use super::operate::Pins;
use super::plan::{Role, Slot, worker_stage};
use super::quarantine::{Quarantine, Suspect};
use super::resume::Next;
use super::runner::{Coming, StageNews, StageOrder, StageReport, StageRunner, Stopped};
use super::segments::{self, Segments, Tensor};
use super::task::work;
use crate::arena::Arena;
use crate::ids::{DeviceId, JobId};
use crate::jobs::durable::SavedTensor;
use crate::jobs::request::Admitted;
use crate::jobs::store::duration;
use crate::journal::Journal;
use crate::residency::{Granted, LeasePart, LeaseVector, Refusal, Residency, Upcoming};
use crate::workers::{KillCause, RunError, Worker, WorkerSpec, Workers, stage_name};

/// How often a run looks for another process when the one it was to use goes away before the task began.
const ATTEMPTS: usize = 4;

/// How long a run waits for others so that it can hold all of its weights, before it starts with those for which there is room.
const ROOM_FOR_ALL: Duration = Duration::from_secs(2);

/// How long the end of a process that was killed or retired is waited for.
const REAPING: Duration = Duration::from_secs(5);

/// Says what a run of a stage needs on its device.
pub trait Needs: Send + Sync + 'static {
    /// Context, weights and working set, as the process holds them while it runs this stage of this request. `tokens` of
    /// conditioning over both prompts, where they are known already.
    fn parts(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Vec<LeasePart>;
    /// What a finished run measured: the highest bytes of its process, and the weights it holds.
    fn measured(&self, request: &Admitted, stage: Stage, tokens: Option<u64>, peak_bytes: u64, weights_bytes: u64);
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

    fn suspect<'a>(&'a self, order: &'a StageOrder<Tensor>) -> Suspect<'a> {
        let model = &order.request.model.name;
        Suspect { model, dir: &self.dir, fingerprint: &self.fingerprint, stage: self.stage }
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
    pub(super) moves: Moves,
    pub(super) journal: Journal,
    quarantine: Quarantine,
    conditioning: Conditioning,
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
        let (journal, quarantine) = (Journal::default(), Quarantine::default());
        let conditioning = Conditioning::new(arena.clone(), CacheConfig::default());
        Self {
            residency,
            workers,
            arena,
            needs,
            device,
            threads,
            tasks,
            pins,
            moves: Moves::default(),
            journal,
            quarantine,
            conditioning,
            chosen,
        }
    }

    /// The same, with its decisions written into `journal`.
    #[must_use]
    pub fn explained_in(self, journal: Journal) -> Self {
        Self { journal, ..self }
    }

    /// The same, keeping so much of what text encoders wrote.
    #[must_use]
    pub fn remembering(self, config: CacheConfig) -> Self {
        let conditioning = Conditioning::new(self.arena.clone(), config);
        Self { conditioning, ..self }
    }

    /// The stages that are not started any more.
    pub fn quarantine(&self) -> Quarantine {
        self.quarantine.clone()
    }

    /// The device of its stages.
    pub(super) fn device_of(&self) -> &DeviceId {
        &self.device
    }

    /// What a run needs on its device.
    pub(super) fn parts_of(&self, order: &StageOrder<Tensor>) -> Vec<LeasePart> {
        self.needs.parts(&order.request, order.run.stage, tokens(order))
    }

    /// Bytes that a stage's process holds when all of it is there.
    pub(super) fn whole_of(&self, request: &Admitted, stage: Stage) -> u64 {
        self.needs.parts(request, stage, None).iter().fold(0, |sum, part| sum.saturating_add(part.want))
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

    /// The request of a run as the ledger takes it.
    fn vector(&self, order: &StageOrder<Tensor>, key: &Key, incarnation: u64, shared_memory: u64) -> LeaseVector {
        LeaseVector {
            device: self.device.clone(),
            incarnation,
            tenant: order.tenant.clone(),
            job: order.job.clone(),
            holder: format!("{} of {}", stage_name(key.stage), order.request.model.name),
            parts: self.parts_of(order),
            shared_memory,
        }
    }

    /// A run that could do with fewer weights than all is granted at once what is free, and would stream the rest in every
    /// step beside processes that do nothing. So where all of them find no room, idle processes give way first, the cheapest as
    /// always; busy ones are waited for a while only.
    async fn make_room_for_all(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        shared_memory: u64,
    ) -> Result<(), Stopped> {
        if !self.parts_of(order).iter().any(|part| part.want > part.min) {
            return Ok(());
        }
        let (need, free) = self.room_for(order, key).await;
        if need <= free {
            return Ok(());
        }
        let mut vector = self.vector(order, key, self.choose(key), shared_memory);
        for part in &mut vector.parts {
            part.min = part.want;
        }
        tokio::select! {
            biased;
            () = order.stop.cancelled() => Err(Stopped::Asked),
            // What was granted so is given back at once, and found there by the request that follows.
            _ = tokio::time::timeout(ROOM_FOR_ALL, self.residency.request(vector)) => Ok(()),
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
        self.make_room_for_all(order, key, shared_memory).await?;
        let mut gone = 0;
        while gone < ATTEMPTS {
            let incarnation = self.choose(key);
            let vector = self.vector(order, key, incarnation, shared_memory);
            let span = tracing::debug_span!("lease", incarnation, device = %vector.device, holder = vector.holder);
            let granted = tokio::select! {
                biased;
                () = order.stop.cancelled() => return Err(Stopped::Asked),
                granted = self.residency.request(vector).instrument(span) => granted,
            };
            match granted {
                Ok(granted) => {
                    self.keep_while_it_runs(order, incarnation);
                    self.keep_pinned(key, incarnation);
                    return Ok(granted);
                }
                Err(Refusal::HolderGone { .. }) => {
                    gone += 1;
                    self.forget(key, incarnation);
                }
                // A job in mode none keeps its stages until it ends: then there is room.
                Err(Refusal::Pinned { .. }) if self.wait_for_unpinning(order).await => {}
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
    ) -> Result<Option<Worker>, Lost> {
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
            weights_total: order.request.model.report.stage_weights(crate::workers::stage_name(key.stage)),
        };
        let started = tokio::select! {
            biased;
            // Dropping the start retires the process; the residency hears of its end.
            () = order.stop.cancelled() => return Err(Lost::Asked),
            started = self.workers.start(spec) => started,
        };
        match started {
            Ok(worker) => Ok(Some(worker)),
            Err(error) => Err(of_start(order.run.stage, &error)),
        }
    }
}

/// Tokens of conditioning that a run reads, over both prompts.
fn tokens(order: &StageOrder<Tensor>) -> Option<u64> {
    let conditioning = order.inputs.get(&Slot { role: Role::Conditioning, image: None })?;
    conditioning.header.shape.get(..2).map(|dims| dims.iter().product())
}

/// An attempt at a run that gave no output.
struct Attempt {
    lost: Lost,
    /// The process it was lost with; 0: none.
    incarnation: u64,
    /// What the process left to go on from.
    checkpoint: Option<Checkpoint>,
    /// The checkpoint that it was to go on from is to blame.
    spoiled: bool,
}

impl From<Lost> for Attempt {
    fn from(lost: Lost) -> Self {
        Self { lost, incarnation: 0, checkpoint: None, spoiled: false }
    }
}

impl From<Failure> for Attempt {
    fn from(failure: Failure) -> Self {
        Lost::Final(failure).into()
    }
}

impl From<Stopped> for Attempt {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Asked => Lost::Asked.into(),
            Stopped::Failed(failure) => failure.into(),
        }
    }
}

impl Dispatcher {
    /// Runs a stage once, if its worker survives it. `waited` grows by what the attempt waited.
    async fn attempt(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        resume: Option<&Checkpoint>,
        waited: &mut Duration,
    ) -> Result<StageReport<Tensor>, Attempt> {
        let (request, stage) = (&order.request, order.run.stage);
        let Some(work) = work(request, &order.run) else {
            return Err(failure(FailureReason::Internal, stage, "a plan has a stage without a name").into());
        };
        let (began, before) = (Instant::now(), *waited);
        for _ in 0..ATTEMPTS {
            let shared_memory = Segments::bytes(order, resume);
            let room = self.conditioning.yield_to(shared_memory);
            let mut granted = self.lease(order, key, shared_memory).await?;
            drop(room);
            let incarnation = granted.incarnation;
            let _ = order.news.send(StageNews::Worker { incarnation }).await;
            let worker = match self.worker(order, key, incarnation).await {
                Ok(Some(worker)) => worker,
                Ok(None) => {
                    self.forget(key, incarnation);
                    continue;
                }
                Err(lost) => {
                    self.forget(key, incarnation);
                    return Err(Attempt { incarnation, ..lost.into() });
                }
            };
            let segments = Segments::create(&self.arena, order, resume, &mut granted)?;
            let token = tokio::select! {
                biased;
                () = order.stop.cancelled() => return Err(Lost::Asked.into()),
                token = self.residency.compute(&self.device, &order.job) => token,
            };
            let token = token.map_err(|refusal| of_refusal(stage, &refusal))?;
            *waited = before + began.elapsed();

            let task = Task {
                task_id: self.tasks.fetch_add(1, Ordering::Relaxed),
                job_id: order.job.to_string(),
                inputs: segments.inputs.clone(),
                outputs: segments.output_messages(),
                work: Some(work.clone()),
                memory: Some(request.memory.task(stage)),
                checkpoints: segments.checkpoint_messages(),
                resume: segments.resume.clone(),
            };
            let result = worker.run_until(task, order.stop.cancelled(), |progress| tell(order, &progress)).await;
            drop(token);
            let done = match result {
                Ok(done) => done,
                Err(RunError::Gone) if !order.stop.is_cancelled() => {
                    self.forget(key, incarnation);
                    continue;
                }
                Err(error) => return Err(self.lost(order, key, &worker, &segments, &error).await),
            };
            let outputs = match segments.validate(request, &done) {
                Ok(outputs) => outputs,
                Err(lie) => {
                    // It must not run anything again.
                    self.forget(key, incarnation);
                    worker.kill(KillCause::Protocol(lie.clone()));
                    let lost = match worker.exited_within(REAPING).await {
                        Some(report) => of_death(stage, &report),
                        None => {
                            let message = format!("worker {incarnation} was killed: {lie}");
                            Lost::Worker { failure: failure(FailureReason::Protocol, stage, message), blamed: true }
                        }
                    };
                    return Err(Attempt { incarnation, ..lost.into() });
                }
            };
            self.needs.measured(request, stage, tokens(order), done.peak_bytes, done.weights_bytes);
            let leased = granted.leases.iter().map(|lease| lease.bytes).sum();
            return Ok(report(order, outputs, done, leased).await);
        }
        let message = format!("{ATTEMPTS} workers went away one after the other before this stage's task began");
        let failure = failure(FailureReason::WorkerDied, stage, message);
        Err(Lost::Worker { failure, blamed: false }.into())
    }

    /// What becomes of a task that did not end well: the process is not used again unless it is as good as before, and what
    /// it left of its work is taken once it is reaped.
    async fn lost(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        worker: &Worker,
        segments: &Segments,
        error: &RunError,
    ) -> Attempt {
        let (incarnation, stage) = (worker.incarnation(), order.run.stage);
        let asked = order.stop.is_cancelled();
        let mut attempt = Attempt { incarnation, ..of_run(stage, error, asked).into() };
        let reaped = match error {
            RunError::Failed { error: TaskError::OutOfMemory, .. } if !asked => {
                // Its heap is as full as it can be: the next attempt gets a fresh one.
                self.forget(key, incarnation);
                worker.retire();
                worker.exited_within(REAPING).await.is_some()
            }
            RunError::Failed { error: TaskError::BadSegment | TaskError::Internal, message }
                if !asked && segments.resume.is_some() =>
            {
                let failure = failure(FailureReason::Internal, stage, message);
                attempt = Attempt { spoiled: true, ..Lost::Worker { failure, blamed: false }.into() };
                false
            }
            RunError::Failed { .. } => false,
            RunError::Died(_) | RunError::Hung(_) | RunError::Protocol(_) | RunError::Gone => {
                self.forget(key, incarnation);
                true
            }
        };
        // One that has stopped as it was asked to writes no more either.
        if reaped || (asked && matches!(error, RunError::Failed { .. })) {
            let (checkpoint, dropped) = newest(&segments.checkpoints, &order.request);
            for note in dropped {
                let _ = order.news.send(StageNews::Note(note)).await;
            }
            attempt.checkpoint = checkpoint;
        }
        attempt
    }

    /// The report of an encoding that was remembered.
    fn recall(
        &self,
        order: &StageOrder<Tensor>,
        stage: WorkerStage,
        remembered: &conditioning::Key,
    ) -> Option<StageReport<Tensor>> {
        let (slot, tensor) = (order.run.outputs.first()?, self.conditioning.get(remembered)?);
        let (key, model) = (Key::of(&order.request, stage), &order.request.model.name);
        let text = format!("the prompt's encoding was remembered: {} of {model} did not run", stage_name(stage));
        self.record(order, &key, DecisionKind::Cached, 0, text);
        let outputs = BTreeMap::from([(*slot, tensor)]);
        let mut report = StageReport::new(order, outputs, Duration::ZERO, Duration::ZERO, Duration::ZERO);
        report.timing.cached = true;
        Some(report)
    }

    /// Refuses a stage that is quarantined.
    pub(super) fn admitted(&self, order: &StageOrder<Tensor>, key: &Key) -> Result<(), Stopped> {
        let Some(refusal) = self.quarantine.refusal(key.suspect(order)) else { return Ok(()) };
        Err(failed(Failure { stage: order.run.stage as i32, ..refusal }))
    }

    /// Counts a death against its stage; the job fails at once where that was one too many.
    fn judge(&self, order: &StageOrder<Tensor>, key: &Key, incarnation: u64, lost: Lost) -> Lost {
        let Lost::Worker { failure, blamed: true } = &lost else { return lost };
        let Some(failure) = self.quarantine.died(key.suspect(order), failure, Instant::now()) else { return lost };
        self.record(order, key, DecisionKind::Quarantined, incarnation, failure.message.clone());
        Lost::Final(failure)
    }

    fn record(&self, order: &StageOrder<Tensor>, key: &Key, kind: DecisionKind, incarnation: u64, text: String) {
        self.journal.record(Decision {
            kind: kind as i32,
            device: self.device.to_string(),
            job_id: order.job.to_string(),
            incarnation,
            holder: format!("{} of {}", stage_name(key.stage), order.request.model.name),
            text,
            ..Decision::default()
        });
    }
}

/// Passes a worker's progress on. Progress that nobody has read yet makes this one superfluous.
fn tell(order: &StageOrder<Tensor>, progress: &TaskProgress) {
    let phase = match progress.phase() {
        TaskPhase::Unspecified => return,
        TaskPhase::Loading => ProgressPhase::Loading,
        TaskPhase::Computing => ProgressPhase::Computing,
    };
    let (done, total) = (progress.done, progress.total);
    let _ = order.news.try_send(StageNews::Progress { phase, done, total });
}

/// The report of a run whose outputs were found right.
async fn report(
    order: &StageOrder<Tensor>,
    outputs: BTreeMap<Slot, Tensor>,
    done: TaskDone,
    leased_bytes: u64,
) -> StageReport<Tensor> {
    for note in done.notes {
        let _ = order.news.send(StageNews::Note(note)).await;
    }
    let (loaded, computed) = (Duration::from_micros(done.load_micros), Duration::from_micros(done.compute_micros));
    let mut report = StageReport::new(order, outputs, Duration::ZERO, loaded, computed);
    if !done.degraded.is_empty() {
        let _ = order.news.send(StageNews::Note(done.degraded.clone())).await;
        report.survival.degraded(done.degraded);
    }
    report.timing.resident_segments = done.resident_segments;
    report.timing.segments = done.segments;
    report.timing.streamed_bytes = done.streamed_bytes;
    report.timing.peak_bytes = done.peak_bytes;
    report.timing.leased_bytes = leased_bytes;
    report.timing.resumed_at = done.resumed_at;
    report
}

impl StageRunner for Dispatcher {
    type Output = Tensor;

    fn restore(&self, job: &JobId, request: &Admitted, slot: Slot, saved: SavedTensor) -> Option<Tensor> {
        segments::restore(&self.arena, job, request, slot, &saved)
    }

    async fn run(&self, mut order: StageOrder<Tensor>) -> Result<StageReport<Tensor>, Stopped> {
        let stage = order.run.stage;
        let Some(kind) = worker_stage(stage) else {
            return Err(failed(failure(FailureReason::Internal, stage, "a plan has a stage without a name")));
        };
        let remembered = (stage == Stage::Encode).then(|| self.conditioning.key(&order.tenant, &order.request));
        if let Some(report) = remembered.as_ref().and_then(|key| self.recall(&order, kind, key)) {
            return Ok(report);
        }
        self.make_way(&order, &Key::of(&order.request, kind)).await;
        let (mut retries, mut waited, mut resume) = (0, Duration::ZERO, order.resume.take());
        loop {
            let key = Key::of(&order.request, kind);
            self.retire_outdated(&key);
            self.admitted(&order, &key)?;
            let attempt = match self.attempt(&order, &key, resume.as_ref(), &mut waited).await {
                Ok(mut report) => {
                    self.quarantine.survived(key.suspect(&order));
                    report.timing.retries = retries;
                    report.timing.waited = Some(duration(waited));
                    if let (Some(key), Some(written)) = (remembered, report.outputs.values().next()) {
                        self.conditioning.put(key, written.clone());
                    }
                    self.after_run(&order, &key).await;
                    return Ok(report);
                }
                Err(attempt) => attempt,
            };
            let Attempt { lost, incarnation, checkpoint, spoiled } = attempt;
            let lost = self.judge(&order, &key, incarnation, lost);
            match order.survival.lost(lost, &order.request) {
                Next::Stop => {
                    order.rescue.leave(checkpoint.or(resume));
                    return Err(Stopped::Asked);
                }
                Next::Fail(failure) => return Err(failed(failure)),
                Next::Again { request, trusted, text } => {
                    retries += 1;
                    resume = match checkpoint.filter(|_| trusted) {
                        Some(checkpoint) => Some(checkpoint),
                        None => resume.filter(|_| !spoiled),
                    };
                    let from = match &resume {
                        Some(checkpoint) => format!(", from step {} on", checkpoint.step),
                        None => String::new(),
                    };
                    let text = format!("{text}{from}");
                    tracing::warn!(job = %order.job, incarnation, retries, "{text}");
                    self.record(&order, &key, DecisionKind::Retries, incarnation, text.clone());
                    let _ = order.news.send(StageNews::Note(text)).await;
                    order.request = request.unwrap_or(order.request);
                }
            }
        }
    }

    fn coming(&self, stages: Vec<Coming>) {
        let upcoming = stages.into_iter().filter_map(|coming| {
            let Coming { job, request, stage } = coming;
            let kind = stage_name(worker_stage(stage)?);
            let needs = self.needs.parts(&request, stage, None).iter().map(|part| part.min).sum();
            let holder = format!("{kind} of {}", request.model.name);
            Some(Upcoming { device: self.device.clone(), job, holder, needs })
        });
        self.residency.set_upcoming(upcoming.collect());
    }

    fn ended(runner: &Arc<Self>, job: &JobId) {
        Self::leave(runner, job);
    }
}

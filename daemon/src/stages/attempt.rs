//! One attempt at a stage run in a worker, what is kept of one that was lost, and the loop over them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sd_proto::v1::{Decision, DecisionKind, Failure, FailureReason, ProgressPhase, Stage};
use sd_proto::worker::v1::{Task, TaskDone, TaskError, TaskPhase, TaskProgress, WorkerStage};
use tokio::time::Instant;

use super::checkpoint::{Checkpoint, newest};
use super::conditioning::{self};
use super::dispatch::{ATTEMPTS, Dispatcher, Key, REAPING, failed};
use super::failure::{Lost, failure, of_death, of_refusal, of_run};
use super::plan::{Role, Slot, worker_stage};
use super::resume::Next;
use super::runner::{Coming, StageNews, StageOrder, StageReport, StageRunner, Stopped};
use super::segments::{self, Segments, Tensor};
use super::task::work;
use crate::ids::JobId;
use crate::jobs::durable::SavedTensor;
use crate::jobs::request::Admitted;
use crate::jobs::store::duration;
use crate::residency::Upcoming;
use crate::workers::{KillCause, RunError, Worker, stage_name};

/// Tokens of conditioning that a run reads, over both prompts.
pub(super) fn tokens(order: &StageOrder<Tensor>) -> Option<u64> {
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

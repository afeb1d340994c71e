//! The one owner of all jobs: a task that takes commands, applies the state machine, and does what it says.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::v1::{Failure, FailureReason, Note, Queued, Succeeded, job_event};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument as _;

use super::driver::{self, Assignment};
use super::durable::{Keeper, TakenUp};
use super::limits::Limits;
use super::queue::Queue;
use super::request::Admitted;
use super::service::{Activity, Command, Drained, Reply, SubmitError, Taken};
use super::state::{DriverEnd, Effect, Ending, Entry, Input};
use super::store::{Record, Store, duration};
use super::viewer::new_job_id;
use super::wait::{Durations, until_start};
use crate::ids::{JobId, Tenant};
use crate::stages::plan::{Grouping, StagePlan};
use crate::stages::runner::{Coming, StageRunner};

/// Queued jobs whose stages the runner is told of: what comes later is too far off to decide who leaves now.
const LOOKED_AHEAD: usize = 8;

struct Draining {
    deadline: Instant,
    counts: Drained,
    overdue: bool,
    replies: Vec<Reply<Drained>>,
}

pub(super) struct Owner<R> {
    runner: Arc<R>,
    limits: Limits,
    store: Store,
    queue: Queue,
    durations: Durations,
    running: usize,
    entries: mpsc::Sender<(JobId, Entry)>,
    ends: mpsc::UnboundedSender<(JobId, DriverEnd)>,
    ended: mpsc::UnboundedReceiver<(JobId, DriverEnd)>,
    activity: watch::Sender<Activity>,
    draining: Option<Draining>,
    shutting_down: Vec<Reply<()>>,
    refusing: bool,
    keeper: Option<Keeper>,
    next_order: u64,
    /// Jobs whose stages the runner was told of last, and from which of their runs on.
    told: Vec<(JobId, usize)>,
}

impl<R: StageRunner> Owner<R> {
    /// An owner of no jobs. Drivers report through `entries`; `activity` is told of what is going on.
    pub(super) fn new(
        runner: Arc<R>,
        limits: Limits,
        keeper: Option<Keeper>,
        entries: mpsc::Sender<(JobId, Entry)>,
        activity: watch::Sender<Activity>,
    ) -> Self {
        let (ends, ended) = mpsc::unbounded_channel();
        Self {
            runner,
            limits,
            store: Store::default(),
            queue: Queue::default(),
            durations: Durations::default(),
            running: 0,
            entries,
            ends,
            ended,
            activity,
            draining: None,
            shutting_down: Vec::new(),
            refusing: false,
            keeper,
            next_order: 0,
            told: Vec::new(),
        }
    }

    /// Runs until every handle is gone.
    pub(super) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        mut abandoned: mpsc::UnboundedReceiver<Command>,
        mut entries: mpsc::Receiver<(JobId, Entry)>,
    ) {
        loop {
            let deadline = self.draining.as_ref().filter(|d| !d.overdue).map(|d| d.deadline);
            tokio::select! {
                biased;
                Some((job, entry)) = entries.recv() => self.apply(&job, Input::Driver(entry)),
                Some((job, end)) = self.ended.recv() => {
                    // A driver has sent all its entries when it ends; they come first.
                    while let Ok((job, entry)) = entries.try_recv() {
                        self.apply(&job, Input::Driver(entry));
                    }
                    self.apply(&job, Input::DriverEnded(end));
                }
                Some(command) = abandoned.recv() => self.command(command),
                command = commands.recv() => match command {
                    Some(command) => self.command(command),
                    None => break,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => self.drain_overdue(),
            }
            self.dispatch();
            self.tell_coming();
            self.settle();
        }
        // Nobody is left who could ask: let the drivers stop.
        self.stop_all();
    }

    /// Lets the living jobs stop: those that are recorded go on at the next start.
    fn stop_all(&mut self) {
        let living: Vec<(JobId, bool)> =
            self.store.living().map(|record| (record.id.clone(), record.recorded.is_some())).collect();
        for (job, kept) in living {
            self.apply(&job, Input::Shutdown { kept });
        }
    }

    fn command(&mut self, command: Command) {
        // A reply that nobody waits for any more is not an error.
        match command {
            Command::Submit { tenant, request, grouping, keep, reply } => {
                let submitted = self.submit(tenant, *request, grouping, keep);
                if let Err(Ok((job, ..))) = reply.send(submitted) {
                    self.apply(&job, Input::Cancel { reason: "the client went away while submitting".into() });
                }
            }
            Command::TakeUp { jobs, reply } => {
                jobs.into_iter().for_each(|job| self.take_up(job));
                let _ = reply.send(());
            }
            Command::Log { job, viewer, reply } => {
                let _ = reply.send(self.store.visible(&job, &viewer).map(|record| record.log.clone()));
            }
            Command::Get { job, viewer, reply } => {
                let found = self.store.visible(&job, &viewer).map(|record| record.to_proto(self.position(&job)));
                let _ = reply.send(found);
            }
            Command::List { viewer, active_only, limit, reply } => {
                let jobs = self
                    .store
                    .newest(&viewer)
                    .filter(|record| !active_only || !record.state.is_ended())
                    .take(limit)
                    .map(|record| record.to_proto(self.position(&record.id)))
                    .collect();
                let _ = reply.send(jobs);
            }
            Command::Cancel { job, viewer, reason, reply } => {
                let log = self.store.visible(&job, &viewer).map(|record| record.log.clone());
                if log.is_some() {
                    self.apply(&job, Input::Cancel { reason });
                }
                let _ = reply.send(log);
            }
            Command::Abandon { job, reason } => self.apply(&job, Input::Cancel { reason: reason.into() }),
            Command::Drain { grace, reply } => {
                self.refusing = true;
                let deadline = Instant::now() + grace;
                let draining = self.draining.get_or_insert_with(|| Draining {
                    deadline,
                    counts: Drained::default(),
                    overdue: false,
                    replies: Vec::new(),
                });
                // A second drain may only hurry the first.
                draining.deadline = draining.deadline.min(deadline);
                draining.replies.push(reply);
            }
            Command::Shutdown { reply } => {
                self.refusing = true;
                self.shutting_down.push(reply);
                self.stop_all();
            }
        }
    }

    fn submit(
        &mut self,
        tenant: Tenant,
        request: Admitted,
        grouping: Grouping,
        keep: bool,
    ) -> Result<Taken, SubmitError> {
        if self.refusing {
            return Err(SubmitError::Draining);
        }
        let id = new_job_id();
        let limits = &self.limits;
        self.queue.push(id.clone(), tenant.clone(), limits.queued_jobs, limits.queued_jobs_per_tenant)?;
        let plan = StagePlan::of(&request, grouping);
        let mut record = Record::new(id.clone(), tenant, request, plan);
        let keeper = self.keeper.as_ref().filter(|_| keep);
        record.recorded = keeper.map(|_| self.next_order);
        // What waits for the medium is only the client: the job may begin meanwhile.
        let recording = keeper.zip(record.durable()).map(|(keeper, job)| keeper.put(job));
        self.next_order += u64::from(recording.is_some());
        let log = record.log.clone();
        self.queued(record);
        Ok((id, log, recording))
    }

    fn take_up(&mut self, taken: TakenUp) {
        let (note, id) = (taken.note(), taken.job.id.clone());
        self.next_order = self.next_order.max(taken.job.order + 1);
        let job = &taken.job;
        match taken.outcome {
            Ok((request, grouping)) => {
                let plan = StagePlan::of(&request, grouping);
                // It was accepted: no limit of today takes that back.
                let waits = self.queue.push(id.clone(), job.tenant.clone(), usize::MAX, usize::MAX);
                debug_assert!(waits.is_ok(), "nothing is above these limits");
                self.queued(Record::new(id.clone(), job.tenant.clone(), request, plan).taken_up(job));
                self.note(&id, note);
            }
            Err(failure) => {
                self.queued(Record::lost(job));
                self.note(&id, note);
                self.apply(&id, Input::Refuse(failure));
            }
        }
    }

    fn note(&self, job: &JobId, text: String) {
        if let Some(record) = self.store.get(job) {
            record.log.append(job_event::Event::Note(Note { text }), SystemTime::now());
        }
    }

    /// Puts a job among the others; its first event says where it stands.
    fn queued(&mut self, record: Record) {
        let id = record.id.clone();
        self.store.insert(record);
        let Some(record) = self.store.get(&id) else { return };
        let queued = Queued {
            position: self.position(&id).unwrap_or(0),
            estimated_wait: self.estimated_wait(&id).map(duration),
            effective: Some(record.shown().clone()),
            plan: Some(record.numeric_plan().clone()),
        };
        tracing::info!(job = %id, tenant = %record.tenant, model = record.shown().model, position = queued.position, "job queued");
        record.log.append(job_event::Event::Queued(queued), SystemTime::now());
    }

    /// Jobs ahead of one that waits; 0 where it starts at once.
    fn position(&self, job: &JobId) -> Option<u32> {
        let ahead = self.queue.ahead_of(job)?;
        let free = self.limits.running_jobs.saturating_sub(self.running);
        Some(if ahead < free { 0 } else { (ahead + self.running) as u32 })
    }

    fn estimated_wait(&self, job: &JobId) -> Option<Duration> {
        let remaining = |record: &Record| {
            let living = record.living.as_ref()?;
            self.durations.remaining(&living.request, &living.plan, record.finished_runs())
        };
        let running: Vec<_> = self.store.living().filter(|r| r.state.is_running()).map(remaining).collect();
        let queued: Vec<_> = self
            .queue
            .iter()
            .take_while(|other| *other != job)
            .filter_map(|other| self.store.get(other))
            .map(remaining)
            .collect();
        until_start(&running, &queued, self.limits.running_jobs)
    }

    /// Tells the runner what the living jobs have not come to yet, where that has changed.
    fn tell_coming(&mut self) {
        let running = self.store.living().filter(|record| record.state.is_running());
        let mut places: Vec<(JobId, usize)> =
            running.map(|record| (record.id.clone(), record.finished_runs() + 1)).collect();
        places.extend(self.queue.iter().take(LOOKED_AHEAD).map(|job| (job.clone(), 0)));
        if places == self.told {
            return;
        }
        let mut coming: Vec<Coming> = Vec::new();
        for (job, from) in &places {
            let Some(living) = self.store.get(job).and_then(|record| record.living.as_ref()) else { continue };
            for run in living.plan.runs().iter().skip(*from) {
                // Several images in a row are one stage that comes.
                if coming.last().is_none_or(|last| last.job != *job || last.stage != run.stage) {
                    coming.push(Coming { job: job.clone(), request: living.request.clone(), stage: run.stage });
                }
            }
        }
        self.told = places;
        self.runner.coming(coming);
    }

    /// Lets a job take an input and does what follows.
    fn apply(&mut self, job: &JobId, input: Input) {
        let Some(record) = self.store.get_mut(job) else { return };
        if matches!(input, Input::Driver(Entry::Decision(_))) && !record.takes_decision() {
            return;
        }
        if let (Input::Driver(Entry::StageFinished(finished)), false) = (&input, record.state.is_ended())
            && let (Some(timing), Some(living)) = (&finished.timing, &record.living)
        {
            // A result that was remembered says nothing about how long the stage takes.
            if !timing.cached {
                let took =
                    [&timing.loaded, &timing.computed].into_iter().filter_map(|d| Duration::try_from((*d)?).ok()).sum();
                self.durations.learn(finished.stage(), &living.request, took);
            }
            record.note_stage(*timing);
        }
        let was_running = record.state.is_running();
        let (state, effects) = record.state.clone().step(input);
        record.state = state;
        self.running = self.running + usize::from(record.state.is_running()) - usize::from(was_running);
        for effect in effects {
            self.perform(job, effect);
        }
    }

    fn perform(&mut self, job: &JobId, effect: Effect) {
        let Some(record) = self.store.get_mut(job) else { return };
        match effect {
            Effect::Record(entry) => {
                record.log.append(event_of(entry), SystemTime::now());
            }
            Effect::Start => {
                record.note_start();
                if let (Some(keeper), Some(_)) = (&self.keeper, record.recorded) {
                    keeper.started(job.clone());
                }
                let Some(living) = &record.living else { return };
                let assignment = Assignment {
                    job: job.clone(),
                    tenant: record.tenant.clone(),
                    request: living.request.clone(),
                    plan: living.plan.clone(),
                    stop: living.stop.clone(),
                    handover: living.handover.clone(),
                    is_recorded: record.recorded.is_some(),
                    stop_bound: self.limits.stop,
                    entries: self.entries.clone(),
                };
                let span = tracing::info_span!("job", id = %job, tenant = %record.tenant);
                let driving = tokio::spawn(driver::drive(self.runner.clone(), assignment).instrument(span));
                let (job, ends) = (job.clone(), self.ends.clone());
                // A driver that panics has ended too.
                tokio::spawn(async move {
                    let end = driving.await.unwrap_or_else(|error| {
                        let message = format!("the job's driver broke: {error}: this is a bug of sdd");
                        let reason = FailureReason::Internal as i32;
                        DriverEnd::Failed(Failure { reason, message, ..Failure::default() })
                    });
                    let _ = ends.send((job, end));
                });
            }
            Effect::Stop => {
                if let Some(living) = &record.living {
                    living.stop.cancel();
                }
            }
            Effect::End(ending) => {
                let kept = record.recorded.is_some() && ending.is_shutdown();
                if let (Some(keeper), Some(_)) = (&self.keeper, record.recorded) {
                    // Written anew after a run: with what is done, and because the run was not broken off.
                    if kept && record.has_run() {
                        if let Some(job) = record.durable() {
                            drop(keeper.put(job));
                        }
                    } else if !kept {
                        keeper.remove(job.clone());
                    }
                }
                record.note_end();
                let event = match ending {
                    Ending::Succeeded { degraded } => {
                        job_event::Event::Succeeded(Succeeded { timings: Some(record.timings()), degraded })
                    }
                    Ending::Failed(failure) => job_event::Event::Failed(failure),
                    Ending::Cancelled(cancelled) => job_event::Event::Cancelled(cancelled),
                };
                tracing::info!(job = %job, state = record.state.to_proto().as_str_name(), "job ended");
                record.log.append(event, SystemTime::now());
                self.queue.remove(job);
                if let Some(draining) = &mut self.draining {
                    if kept {
                        draining.counts.kept += 1;
                    } else if draining.overdue {
                        draining.counts.cancelled += 1;
                    } else {
                        draining.counts.finished += 1;
                    }
                }
                self.store.ended(job, self.limits.ended_jobs, self.limits.ended_bytes);
            }
        }
    }

    fn dispatch(&mut self) {
        while self.running < self.limits.running_jobs.max(1) {
            let Some(job) = self.queue.pop() else { break };
            self.apply(&job, Input::Dispatch);
        }
    }

    fn drain_overdue(&mut self) {
        if let Some(draining) = &mut self.draining {
            draining.overdue = true;
        }
        let living: Vec<(JobId, bool)> =
            self.store.living().map(|record| (record.id.clone(), record.recorded.is_some())).collect();
        for (job, kept) in living {
            self.apply(
                &job,
                match kept {
                    true => Input::Shutdown { kept },
                    false => Input::Cancel { reason: "the daemon was drained and the job's time was up".into() },
                },
            );
        }
    }

    /// Tells those who wait for quiet, and those who watch.
    fn settle(&mut self) {
        let activity = Activity { queued: self.queue.len(), running: self.running, draining: self.refusing };
        self.activity.send_if_modified(|old| std::mem::replace(old, activity) != activity);
        if activity.is_idle() {
            if let Some(draining) = self.draining.take() {
                for reply in draining.replies {
                    let _ = reply.send(draining.counts);
                }
            }
            for reply in self.shutting_down.drain(..) {
                let _ = reply.send(());
            }
        }
    }
}

fn event_of(entry: Entry) -> job_event::Event {
    match entry {
        Entry::StageStarted(started) => job_event::Event::StageStarted(started),
        Entry::Progress(progress) => job_event::Event::Progress(progress),
        Entry::StageFinished(finished) => job_event::Event::StageFinished(finished),
        Entry::Image(image) => job_event::Event::Image(image),
        Entry::Note(note) => job_event::Event::Note(note),
        Entry::Decision(decision) => job_event::Event::Decision(*decision),
    }
}

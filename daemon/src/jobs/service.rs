//! The owner of all jobs: one task that takes commands, applies the state machine, and does what it says.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::v1::{self, Failure, FailureReason, Note, Queued, Succeeded, job_event};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument as _;

use super::decisions;
use super::driver::{self, Assignment};
use super::durable::keeper::Recorded;
use super::durable::{Keeper, TakenUp};
use super::limits::Limits;
use super::log::{EventLog, Watcher};
use super::queue::{Queue, QueueFull};
use super::request::Admitted;
use super::state::{DriverEnd, Effect, Ending, Entry, Input};
use super::store::{Record, Store, duration};
use super::viewer::{Viewer, new_job_id};
use super::wait::{Durations, until_start};
use crate::ids::{JobId, Tenant};
use crate::journal::Journal;
use crate::stages::plan::{Grouping, StagePlan};
use crate::stages::runner::{Coming, StageRunner};

/// How much is going on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// Jobs that wait.
    pub queued: usize,
    /// Jobs that run, those that are being stopped included.
    pub running: usize,
    /// New jobs are refused.
    pub draining: bool,
}

impl Activity {
    /// Whether no job lives.
    pub fn is_idle(&self) -> bool {
        self.queued == 0 && self.running == 0
    }
}

/// How a drain went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drained {
    /// Jobs that ended by themselves.
    pub finished: u32,
    /// Jobs that were cancelled at its deadline.
    pub cancelled: u32,
    /// Jobs that are recorded and go on at the daemon's next start.
    pub kept: u32,
}

/// Why a job is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error(transparent)]
    Full(#[from] QueueFull),
    /// The daemon drains or is shutting down.
    #[error("this daemon takes no more jobs: it is shutting down")]
    Draining,
    /// It is to outlive the daemon and cannot be recorded.
    #[error("{0}")]
    NotRecorded(String),
}

/// No such job, or none of this viewer's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no job {0}")]
pub struct NotFound(pub JobId);

type Reply<T> = oneshot::Sender<T>;

/// What a submission came to, and where the job is being recorded, when that will be done.
type Taken = (JobId, Arc<EventLog>, Option<oneshot::Receiver<Recorded>>);

enum Command {
    Submit {
        tenant: Tenant,
        request: Box<Admitted>,
        grouping: Grouping,
        keep: bool,
        reply: Reply<Result<Taken, SubmitError>>,
    },
    TakeUp {
        jobs: Vec<TakenUp>,
        reply: Reply<()>,
    },
    Log {
        job: JobId,
        viewer: Viewer,
        reply: Reply<Option<Arc<EventLog>>>,
    },
    Get {
        job: JobId,
        viewer: Viewer,
        reply: Reply<Option<v1::Job>>,
    },
    List {
        viewer: Viewer,
        active_only: bool,
        limit: usize,
        reply: Reply<Vec<v1::Job>>,
    },
    Cancel {
        job: JobId,
        viewer: Viewer,
        reason: String,
        reply: Reply<Option<Arc<EventLog>>>,
    },
    Abandon {
        job: JobId,
        reason: &'static str,
    },
    Drain {
        grace: Duration,
        reply: Reply<Drained>,
    },
    Shutdown {
        reply: Reply<()>,
    },
}

/// Handle to the jobs; cheap to clone.
#[derive(Debug, Clone)]
pub struct Jobs {
    commands: mpsc::Sender<Command>,
    /// Beside the commands and without bound, because it is sent from destructors.
    abandoned: mpsc::UnboundedSender<Command>,
    activity: watch::Receiver<Activity>,
    entries: mpsc::Sender<(JobId, Entry)>,
    keeper: Option<Keeper>,
}

impl Jobs {
    /// Starts the owner's task on the current runtime. It ends when the last handle is dropped. No job outlives it.
    pub fn start<R: StageRunner>(runner: Arc<R>, limits: Limits) -> Self {
        Self::start_with(runner, limits, None)
    }

    /// As [`Jobs::start`]; jobs that are to be kept are recorded by `keeper`.
    pub fn start_with<R: StageRunner>(runner: Arc<R>, limits: Limits, keeper: Option<Keeper>) -> Self {
        let (commands, receiver) = mpsc::channel(64);
        let (abandoned, abandoned_receiver) = mpsc::unbounded_channel();
        let (activity, activity_receiver) = watch::channel(Activity::default());
        let (entries, entries_receiver) = mpsc::channel(64);
        let (ends, ends_receiver) = mpsc::unbounded_channel();
        let owner = Owner {
            runner,
            limits,
            store: Store::default(),
            queue: Queue::default(),
            durations: Durations::default(),
            running: 0,
            entries: entries.clone(),
            ends,
            activity,
            draining: None,
            shutting_down: Vec::new(),
            refusing: false,
            keeper: keeper.clone(),
            next_order: 0,
            told: Vec::new(),
        };
        tokio::spawn(owner.run(receiver, abandoned_receiver, entries_receiver, ends_receiver));
        Self { commands, abandoned, activity: activity_receiver, entries, keeper }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Takes a job. Its first event is there when this returns.
    ///
    /// # Errors
    /// The queue is full, or the daemon drains.
    pub async fn submit(
        &self,
        tenant: Tenant,
        request: Admitted,
        grouping: Grouping,
    ) -> Result<(JobId, Watcher), SubmitError> {
        self.submit_as(tenant, request, grouping, false).await
    }

    /// Takes a job that outlives the daemon, where it has a store: then the job is recorded when this returns.
    ///
    /// # Errors
    /// As [`Jobs::submit`]; [`SubmitError::NotRecorded`] where the store cannot take it, and then it does not run either.
    pub async fn submit_kept(
        &self,
        tenant: Tenant,
        request: Admitted,
        grouping: Grouping,
    ) -> Result<(JobId, Watcher), SubmitError> {
        self.submit_as(tenant, request, grouping, true).await
    }

    async fn submit_as(
        &self,
        tenant: Tenant,
        request: Admitted,
        grouping: Grouping,
        keep: bool,
    ) -> Result<(JobId, Watcher), SubmitError> {
        let request = Box::new(request);
        let (job, log, recording) = self
            .ask(|reply| Command::Submit { tenant, request, grouping, keep, reply })
            .await
            .unwrap_or(Err(SubmitError::Draining))?;
        if let Some(recording) = recording {
            let recorded = recording.await.unwrap_or_else(|_| Err("the store of jobs has ended".into()));
            if let Err(problem) = recorded {
                self.abandon(job, "it could not be recorded, and was refused");
                return Err(SubmitError::NotRecorded(problem));
            }
        }
        Ok((job, Watcher::new(log, 0)))
    }

    /// Takes jobs that were recorded before the daemon's restart, in this order and under their ids, whatever the limits say
    /// about new ones. Those that cannot go on end at once. Their first events are there when this returns.
    pub async fn take_up(&self, jobs: Vec<TakenUp>) {
        let _ = self.ask(|reply| Command::TakeUp { jobs, reply }).await;
    }

    /// A reader of a job's events after `after`.
    ///
    /// # Errors
    /// No such job for this viewer.
    pub async fn watch(&self, job: JobId, viewer: Viewer, after: u64) -> Result<Watcher, NotFound> {
        Ok(Watcher::new(self.log(job, viewer).await?, after))
    }

    /// Makes what is decided from now on about a job an event of that job.
    pub fn follow(&self, journal: &Journal) {
        let (_, news) = journal.follow();
        tokio::spawn(decisions::feed(news, self.entries.clone()));
    }

    /// The events of a job.
    ///
    /// # Errors
    /// No such job for this viewer.
    pub async fn log(&self, job: JobId, viewer: Viewer) -> Result<Arc<EventLog>, NotFound> {
        let log = self.ask(|reply| Command::Log { job: job.clone(), viewer, reply }).await.flatten();
        log.ok_or(NotFound(job))
    }

    /// A job.
    ///
    /// # Errors
    /// No such job for this viewer.
    pub async fn get(&self, job: JobId, viewer: Viewer) -> Result<v1::Job, NotFound> {
        self.ask(|reply| Command::Get { job: job.clone(), viewer, reply }).await.flatten().ok_or(NotFound(job))
    }

    /// A viewer's jobs, newest first.
    pub async fn list(&self, viewer: Viewer, active_only: bool, limit: usize) -> Vec<v1::Job> {
        self.ask(|reply| Command::List { viewer, active_only, limit, reply }).await.unwrap_or_default()
    }

    /// Cancels a job and waits for its terminal event, whatever it is.
    ///
    /// # Errors
    /// No such job for this viewer.
    pub async fn cancel(&self, job: JobId, viewer: Viewer, reason: String) -> Result<v1::Job, NotFound> {
        let command = |reply| Command::Cancel { job: job.clone(), viewer: viewer.clone(), reason, reply };
        let log = self.ask(command).await.flatten().ok_or_else(|| NotFound(job.clone()))?;
        log.ended().await;
        self.get(job, viewer).await
    }

    /// Cancels a job without waiting, from wherever: its client has gone.
    pub fn abandon(&self, job: JobId, reason: &'static str) {
        let _ = self.abandoned.send(Command::Abandon { job, reason });
    }

    /// Refuses new jobs from now on, waits up to `grace` for those that live, then cancels them, or keeps those that are
    /// recorded for the daemon's next start, and waits for their ends.
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.ask(|reply| Command::Drain { grace, reply }).await.unwrap_or_default()
    }

    /// Refuses new jobs, stops all that live, and returns when each has its terminal event and the records are as they are to
    /// be found by the next start.
    pub async fn shutdown(&self) {
        let _ = self.ask(|reply| Command::Shutdown { reply }).await;
        if let Some(keeper) = &self.keeper {
            keeper.flush().await;
        }
    }

    /// How much is going on, to be watched.
    pub fn activity(&self) -> watch::Receiver<Activity> {
        self.activity.clone()
    }
}

/// Queued jobs whose stages the runner is told of: what comes later is too far off to decide who leaves now.
const LOOKED_AHEAD: usize = 8;

struct Draining {
    deadline: Instant,
    counts: Drained,
    overdue: bool,
    replies: Vec<Reply<Drained>>,
}

struct Owner<R> {
    runner: Arc<R>,
    limits: Limits,
    store: Store,
    queue: Queue,
    durations: Durations,
    running: usize,
    entries: mpsc::Sender<(JobId, Entry)>,
    ends: mpsc::UnboundedSender<(JobId, DriverEnd)>,
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
    async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        mut abandoned: mpsc::UnboundedReceiver<Command>,
        mut entries: mpsc::Receiver<(JobId, Entry)>,
        mut ends: mpsc::UnboundedReceiver<(JobId, DriverEnd)>,
    ) {
        loop {
            let deadline = self.draining.as_ref().filter(|d| !d.overdue).map(|d| d.deadline);
            tokio::select! {
                biased;
                Some((job, entry)) = entries.recv() => self.apply(&job, Input::Driver(entry)),
                Some((job, end)) = ends.recv() => {
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

//! The handle to the jobs, and what it asks of their one owner.

use std::sync::Arc;
use std::time::Duration;

use sd_proto::v1::{self};
use tokio::sync::{mpsc, oneshot, watch};

use super::decisions;
use super::durable::keeper::Recorded;
use super::durable::{Keeper, TakenUp};
use super::limits::Limits;
use super::log::{EventLog, Watcher};
use super::owner::Owner;
use super::queue::QueueFull;
use super::request::Admitted;
use super::state::Entry;
use super::viewer::Viewer;
use crate::ids::{JobId, Tenant};
use crate::journal::Journal;
use crate::stages::plan::Grouping;
use crate::stages::runner::StageRunner;

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

pub(super) type Reply<T> = oneshot::Sender<T>;

/// What a submission came to, and where the job is being recorded, when that will be done.
pub(super) type Taken = (JobId, Arc<EventLog>, Option<oneshot::Receiver<Recorded>>);

pub(super) enum Command {
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
        let owner = Owner::new(runner, limits, keeper.clone(), entries.clone(), activity);
        tokio::spawn(owner.run(receiver, abandoned_receiver, entries_receiver));
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

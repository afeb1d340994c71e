//! What the rest of the daemon holds of a worker.

use std::sync::Arc;
use std::time::Duration;

use sd_proto::worker::v1::{Task, TaskDone, TaskError, TaskProgress, ToWorker};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::exit::{ExitReport, KillCause};
use super::spec::WorkerSpec;
use crate::ids::JobId;

/// Progress messages that may wait for a slow listener; more are dropped.
const PROGRESS_QUEUE: usize = 256;

/// Why a task did not end well.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RunError {
    /// The worker said so; it lives and can run other tasks.
    #[error("{message}")]
    Failed {
        /// What kind of failure; `Cancelled` where it was asked to stop.
        error: TaskError,
        /// For people.
        message: String,
    },
    /// The worker died while the task ran.
    #[error("{0}")]
    Died(Arc<ExitReport>),
    /// The worker was killed because one of its clocks ran out while the task ran.
    #[error("{0}")]
    Hung(Arc<ExitReport>),
    /// The worker was killed because it broke the protocol while the task ran.
    #[error("{0}")]
    Protocol(Arc<ExitReport>),
    /// The worker was retired or died before the task reached it, as far as anybody can tell: another worker can run it.
    #[error("the worker went away before the task began")]
    Gone,
}

/// Where a worker stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerPhase {
    /// Spawned; its hello has not come.
    Starting,
    /// Attached, without a task.
    Idle,
    /// Runs a task.
    Busy {
        /// For this job.
        job: JobId,
        /// The task.
        task: u64,
    },
    /// Retired or signalled; its end is awaited.
    Stopping,
}

/// A worker as lists show it.
#[derive(Debug, Clone)]
pub struct WorkerView {
    /// What it is.
    pub spec: WorkerSpec,
    /// Its process.
    pub pid: u32,
    /// Where it stands.
    pub phase: WorkerPhase,
    /// What it last said that it holds on its device, in bytes.
    pub device_bytes: u64,
    /// Weights that it held when its last task was done, in bytes.
    pub weights_bytes: u64,
    /// When it was spawned.
    pub started: Instant,
}

/// What a handle asks of the supervisor.
#[derive(Debug)]
pub(super) enum Command {
    Run { task: Box<Task>, progress: mpsc::Sender<TaskProgress>, reply: oneshot::Sender<Result<TaskDone, RunError>> },
    Cancel { task: u64 },
    Send(Box<ToWorker>),
    Retire,
    Kill(KillCause),
}

/// A living worker, or one that has just died. Cheap to clone; the worker does not end with its handles.
#[derive(Debug, Clone)]
pub struct Worker {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) view: watch::Receiver<WorkerView>,
    pub(super) exit: watch::Receiver<Option<Arc<ExitReport>>>,
}

impl Worker {
    /// Its incarnation.
    pub fn incarnation(&self) -> u64 {
        self.view.borrow().spec.incarnation
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.view.borrow().pid
    }

    /// What it is and where it stands.
    pub fn view(&self) -> WorkerView {
        self.view.borrow().clone()
    }

    /// Whether it has not been reaped and is not about to end.
    pub fn is_usable(&self) -> bool {
        self.exit.borrow().is_none() && self.view.borrow().phase != WorkerPhase::Stopping
    }

    /// Runs one task. Tasks of one worker run one after another, in the order of the calls. Dropping the future cancels
    /// the task; where its end matters (it holds a working set), use [`run_until`](Self::run_until).
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn run(&self, task: Task, on_progress: impl FnMut(TaskProgress) + Send) -> Result<TaskDone, RunError> {
        self.run_until(task, std::future::pending(), on_progress).await
    }

    /// Runs one task, and asks the worker to stop it when `cancelled` completes. Returns only when the worker no longer
    /// works on it: with `Failed` and `Cancelled` where it stopped, with its result where it was faster, and as
    /// [`RunError::Died`] where it had to be killed because it did not stop in time.
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn run_until(
        &self,
        task: Task,
        cancelled: impl Future<Output = ()> + Send,
        mut on_progress: impl FnMut(TaskProgress) + Send,
    ) -> Result<TaskDone, RunError> {
        let id = task.task_id;
        let (progress_sender, mut progress) = mpsc::channel(PROGRESS_QUEUE);
        let (reply, mut answer) = oneshot::channel();
        let run = Command::Run { task: Box::new(task), progress: progress_sender, reply };
        self.commands.send(run).map_err(|_| RunError::Gone)?;
        let mut guard = CancelOnDrop { worker: self, task: id, armed: true };
        tokio::pin!(cancelled);
        let mut asked = false;
        let result = loop {
            tokio::select! {
                biased;
                Some(step) = progress.recv() => on_progress(step),
                result = &mut answer => break result.unwrap_or(Err(RunError::Gone)),
                () = &mut cancelled, if !asked => {
                    asked = true;
                    let _ = self.commands.send(Command::Cancel { task: id });
                }
            }
        };
        guard.armed = false;
        while let Ok(step) = progress.try_recv() {
            on_progress(step);
        }
        result
    }

    /// Queues a message for the worker. Lost where the worker is not attached (any more).
    pub fn send(&self, message: ToWorker) {
        let _ = self.commands.send(Command::Send(Box::new(message)));
    }

    /// Asks the worker to free its memory and exit once its current task has ended; kills it where it does not in time.
    pub fn retire(&self) {
        let _ = self.commands.send(Command::Retire);
    }

    /// Kills the worker's process group. The first cause given is the one that is reported.
    pub fn kill(&self, cause: KillCause) {
        let _ = self.commands.send(Command::Kill(cause));
    }

    /// Waits until the worker is reaped.
    pub async fn exited(&self) -> Arc<ExitReport> {
        let mut exit = self.exit.clone();
        loop {
            if let Some(report) = exit.borrow_and_update().clone() {
                return report;
            }
            if exit.changed().await.is_err() {
                // The supervisor is gone without a report: only at the end of the runtime.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Like [`exited`](Self::exited), for at most `patience`.
    pub async fn exited_within(&self, patience: Duration) -> Option<Arc<ExitReport>> {
        tokio::time::timeout(patience, self.exited()).await.ok()
    }
}

struct CancelOnDrop<'a> {
    worker: &'a Worker,
    task: u64,
    armed: bool,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            let _ = self.worker.commands.send(Command::Cancel { task: self.task });
        }
    }
}

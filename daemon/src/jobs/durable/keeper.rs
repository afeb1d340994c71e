//! The owner of the store while the daemon runs: one task that does one thing after the other, each on a thread that may block.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::{DurableJob, Store};
use crate::ids::JobId;

/// What recording a job came to; the error is for people.
pub type Recorded = Result<(), String>;

enum Command {
    Put { job: Box<DurableJob>, reply: oneshot::Sender<Recorded> },
    Started(JobId),
    Remove(JobId),
    Flush(oneshot::Sender<()>),
}

/// Handle to the owner; cheap to clone. What is sent through it is done in that order.
#[derive(Debug, Clone)]
pub struct Keeper {
    // Without bound, because the owner of the jobs sends and does not wait; the queue's limits bound what can be under way.
    commands: mpsc::UnboundedSender<Command>,
}

impl Keeper {
    /// Starts the task on the current runtime. It ends when the last handle is dropped.
    pub fn start(store: Arc<dyn Store>) -> Self {
        let (commands, receiver) = mpsc::unbounded_channel();
        tokio::spawn(keep(store, receiver));
        Self { commands }
    }

    /// Records a job. The answer comes when it is on the medium.
    pub fn put(&self, job: DurableJob) -> oneshot::Receiver<Recorded> {
        let (reply, recorded) = oneshot::channel();
        let _ = self.commands.send(Command::Put { job: Box::new(job), reply });
        recorded
    }

    /// Notes that a job begins to run.
    pub fn started(&self, job: JobId) {
        let _ = self.commands.send(Command::Started(job));
    }

    /// Forgets a job.
    pub fn remove(&self, job: JobId) {
        let _ = self.commands.send(Command::Remove(job));
    }

    /// Returns when everything that was sent before is done.
    pub async fn flush(&self) {
        let (reply, done) = oneshot::channel();
        let _ = self.commands.send(Command::Flush(reply));
        let _ = done.await;
    }
}

async fn keep(store: Arc<dyn Store>, mut commands: mpsc::UnboundedReceiver<Command>) {
    while let Some(command) = commands.recv().await {
        let store = store.clone();
        let working = tokio::task::spawn_blocking(move || work(&*store, command));
        if let Err(error) = working.await {
            tracing::error!(%error, "the store of jobs broke: this is a bug of sdd");
        }
    }
}

fn work(store: &dyn Store, command: Command) {
    // An answer that nobody waits for any more is not an error.
    match command {
        Command::Put { job, reply } => {
            let recorded = store.put(&job).map_err(|error| error.to_string());
            if let Err(problem) = &recorded {
                tracing::warn!(job = %job.id, problem, "a job is not recorded");
            }
            let _ = reply.send(recorded);
        }
        Command::Started(job) => store.note_start(&job),
        Command::Remove(job) => {
            if let Err(error) = store.remove(&job) {
                tracing::warn!(%error, "the job will be made again at the next start");
            }
        }
        Command::Flush(reply) => {
            let _ = reply.send(());
        }
    }
}

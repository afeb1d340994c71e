//! The durable queue: accepted jobs are recorded on disk, so that a daemon's end, whatever its cause, does not lose them.
//!
//! * [`record`]: a job as it is recorded, and the format.
//! * [`disk`]: the store, a folder with a file a job; behind the trait [`Store`].
//! * [`progress`]: what a job has done when its daemon ends in order.
//! * [`keeper`]: the one owner of the store while the daemon runs.
//! * [`takeup`]: at the daemon's start, from a record back to a job.
//!
//! What is recorded are jobs that run whether anybody watches or not: those that were submitted, and generations that are to
//! be kept. A generation whose client cancels it by leaving is not: with the daemon its call breaks, and so its client has
//! left. A record is there before the client hears that its job is accepted, and goes after the job's terminal event. A job
//! that has one terminal event in each life of the daemon ends for good with the first that is not a shutdown. If the daemon is
//! killed between a job's end and the removal of its record, the job is made again: at least once, never lost.

pub mod disk;
pub mod keeper;
pub mod progress;
pub mod record;
pub mod takeup;

use crate::ids::JobId;

pub use disk::DiskStore;
pub use keeper::Keeper;
pub use progress::{Handover, Progress, Rescue, SavedTensor};
pub use record::{DurableJob, ModelMark, RecordError};
pub use takeup::{TakenUp, take_up};

/// Why a store does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder cannot be used.
    #[error(
        "cannot use the folder {folder} for accepted jobs: {source}: set state_dir to a folder that can be written"
    )]
    Folder {
        /// Which.
        folder: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// Another daemon uses the folder.
    #[error("another daemon records its jobs in {0}: give each its own state_dir")]
    Held(String),
    /// A job cannot be written.
    #[error("job {job} cannot be recorded in {folder}: {source}: make room there, or set durable = false")]
    Write {
        /// Which job.
        job: JobId,
        /// Where.
        folder: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A record cannot be removed.
    #[error("the record of job {job} cannot be removed from {folder}: {source}")]
    Remove {
        /// Which job.
        job: JobId,
        /// Where.
        folder: String,
        /// What the system says.
        source: std::io::Error,
    },
}

/// A record that cannot be used, and was moved aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged {
    /// Its name.
    pub name: String,
    /// What is wrong with it.
    pub problem: String,
}

/// What a store holds.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Jobs in the order in which they were accepted.
    pub jobs: Vec<DurableJob>,
    /// What could not be read.
    pub damaged: Vec<Damaged>,
}

/// Keeps records of jobs. Calls block.
pub trait Store: Send + Sync + 'static {
    /// Records a job, whole or not at all: on the medium when this returns. Replaces an older record of the job.
    ///
    /// # Errors
    /// [`StoreError::Write`].
    fn put(&self, job: &DurableJob) -> Result<(), StoreError>;

    /// Forgets a job; one that is not there is no error.
    ///
    /// # Errors
    /// [`StoreError::Remove`].
    fn remove(&self, job: &JobId) -> Result<(), StoreError>;

    /// Notes that a job begins to run. How often it did without an end in order is [`DurableJob::broken_runs`] after the
    /// next load. Not worth an error: the note only bounds how often a job that kills the daemon is tried.
    fn note_start(&self, job: &JobId);

    /// Everything recorded.
    ///
    /// # Errors
    /// [`StoreError::Folder`].
    fn load(&self) -> Result<Loaded, StoreError>;
}

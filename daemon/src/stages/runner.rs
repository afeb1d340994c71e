//! The trait between a job and what runs its stages.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sd_proto::v1::{Failure, ProgressPhase, Stage, StageTiming};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::checkpoint::Checkpoint;
use super::plan::{Slot, StageRun};
use super::resume::Survival;
use crate::ids::{JobId, Tenant};
use crate::jobs::durable::{Rescue, SavedTensor};
use crate::jobs::request::Admitted;
use crate::jobs::store::duration;
use crate::picture::Pixels;

/// A tensor that a stage wrote: kept for as long as a later stage, or a retry of it, may read it.
pub trait Output: Clone + Send + Sync + 'static {
    /// The tensor as pixels; blocking: copies the payload.
    ///
    /// # Errors
    /// It is no picture, or not what its header says.
    fn pixels(&self) -> Result<Pixels, Failure>;

    /// The tensor for the next daemon; `None` where it cannot be had. Blocking: copies the payload.
    fn save(&self) -> Option<SavedTensor> {
        None
    }
}

/// One stage run to be done.
#[derive(Debug)]
pub struct StageOrder<O> {
    /// For which job.
    pub job: JobId,
    /// Whose.
    pub tenant: Tenant,
    /// The request, as it is run now.
    pub request: Arc<Admitted>,
    /// What the job has survived so far.
    pub survival: Survival,
    /// The run.
    pub run: StageRun,
    /// What earlier runs wrote and this one reads.
    pub inputs: BTreeMap<Slot, O>,
    /// The checkpoint of an earlier daemon to go on from.
    pub resume: Option<Checkpoint>,
    /// Where the newest checkpoint is put when the job is to stop.
    pub rescue: Rescue,
    /// Fires when the job is to stop.
    pub stop: CancellationToken,
    /// What happens meanwhile. Lossy where it is progress: a full channel drops it.
    pub news: mpsc::Sender<StageNews>,
}

/// What a runner tells about a run under way.
#[derive(Debug, Clone, PartialEq)]
pub enum StageNews {
    /// A worker has been chosen.
    Worker {
        /// Its incarnation.
        incarnation: u64,
    },
    /// It goes on.
    Progress {
        /// What is being done.
        phase: ProgressPhase,
        /// Bytes, steps or blocks done.
        done: u64,
        /// Of how many.
        total: u64,
    },
    /// Worth knowing for people.
    Note(String),
}

/// A finished run.
#[derive(Debug, Clone)]
pub struct StageReport<O> {
    /// What it wrote, validated.
    pub outputs: BTreeMap<Slot, O>,
    /// How long it waited, loaded and computed, and what it cost. Stage, image and the whole time are the job's to fill in.
    pub timing: StageTiming,
    /// The request as it was run in the end: later runs go on so.
    pub request: Arc<Admitted>,
    /// What the job has survived by now.
    pub survival: Survival,
}

impl<O> StageReport<O> {
    /// The report of an order that went as it was given: `waited` for lease and process, `loaded` and `computed` as the worker
    /// measured.
    pub fn new(
        order: &StageOrder<O>,
        outputs: BTreeMap<Slot, O>,
        waited: Duration,
        loaded: Duration,
        computed: Duration,
    ) -> Self {
        let [waited, loaded, computed] = [waited, loaded, computed].map(|time| Some(duration(time)));
        let timing = StageTiming { waited, loaded, computed, ..StageTiming::default() };
        Self { outputs, timing, request: order.request.clone(), survival: order.survival.clone() }
    }
}

/// Why a run has no output.
#[derive(Debug, Clone, PartialEq)]
pub enum Stopped {
    /// It was told to stop, and has stopped.
    Asked,
    /// It failed.
    Failed(Failure),
}

/// A stage that a job has not come to yet.
#[derive(Debug, Clone)]
pub struct Coming {
    /// Of which job.
    pub job: JobId,
    /// Its request.
    pub request: Arc<Admitted>,
    /// The stage.
    pub stage: Stage,
}

/// Runs stages.
pub trait StageRunner: Send + Sync + 'static {
    /// A tensor that a stage wrote.
    type Output: Output;

    /// Brings back what a stage of an earlier daemon wrote into `slot`; `None` where there is no room for it, or it is not what
    /// that stage would write for this request: then the stage runs again. Blocking.
    fn restore(&self, job: &JobId, request: &Admitted, slot: Slot, saved: SavedTensor) -> Option<Self::Output> {
        let _ = (job, request, slot, saved);
        None
    }

    /// Runs one stage to its validated output. Returns soon after `order.stop` has fired; dropping the future stops the
    /// run too, but then nobody learns when.
    fn run(
        &self,
        order: StageOrder<Self::Output>,
    ) -> impl Future<Output = Result<StageReport<Self::Output>, Stopped>> + Send;

    /// What running and queued jobs have not come to yet, the next stage first; replaces what was said before. Returns at once.
    fn coming(&self, _stages: Vec<Coming>) {}

    /// A job has ended, however; it will give no more orders. Returns at once.
    fn ended(_runner: &Arc<Self>, _job: &JobId) {}
}

//! Stages: what a job runs, and how one run of a stage is brought to a worker and back.
//!
//! * [`plan`]: the stage runs of a request and what each hands to which.
//! * [`runner`]: the trait between jobs and what runs their stages; tests put a fake behind it.
//! * [`sizes`]: how large each tensor can be.
//! * [`task`]: a stage run as the task that a worker is sent.
//! * [`failure`]: what went wrong, in the words of the public interface.
//! * [`memory`]: how a job uses memory.
//! * `moves`: who leaves the device before or after a stage, by the job's mode.
//! * [`dryrun`]: what the worker program says that stages take, without running them.
//! * [`operate`]: what operators do while jobs run; [`keep_alive`]: what idleness does.
//! * [`dispatch`]: the real runner: lease → worker → task → validated output; [`segments`]: what the task reads and writes.
//! * [`conditioning`]: what the text encoder wrote before, kept.
//! * [`resume`]: whether a lost run is run again; [`checkpoint`]: from where; [`quarantine`]: and when no more.

mod attempt;
pub mod checkpoint;
pub mod conditioning;
pub mod dispatch;
pub mod dryrun;
pub mod failure;
pub mod keep_alive;
pub mod memory;
mod moves;
pub mod needs;
pub mod operate;
pub mod plan;
pub mod quarantine;
pub mod resume;
pub mod runner;
pub mod segments;
pub mod sizes;
pub mod task;

pub use conditioning::{CacheConfig, Conditioning};
pub use dispatch::{Dispatcher, Needs};
pub use memory::MemoryPlan;
pub use needs::DeviceNeeds;
pub use plan::{Role, Slot, StagePlan, StageRun};
pub use quarantine::Quarantine;
pub use runner::{Output, StageOrder, StageReport, StageRunner, Stopped};
pub use segments::Tensor;

//! Jobs: what clients asked for, from admission to exactly one terminal event.
//!
//! * [`request`], [`admission`]: a request is checked in full and completed before it becomes a job.
//! * [`state`]: the pure state machine of one job.
//! * [`log`]: a job's events, kept for those who watch late.
//! * [`queue`], [`wait`]: who is next, and how long it takes until then.
//! * [`service`]: the one owner of all jobs; [`Jobs`] is its handle.
//! * [`durable`]: accepted jobs on disk, so that they outlive the daemon.
//! * [`driver`]: runs one job's stages in order; `decisions`: what was decided about memory becomes its job's events.

pub mod admission;
mod decisions;
pub mod driver;
pub mod durable;
#[cfg(test)]
pub(crate) mod fixtures;
pub mod limits;
pub mod log;
mod owner;
pub mod queue;
pub mod request;
pub mod service;
pub mod state;
pub mod store;
#[cfg(test)]
mod tests;
pub mod viewer;
pub mod wait;

pub use admission::{Admission, AdmissionError, Fits};
pub use limits::Limits;
pub use log::{EventLog, Watcher};
pub use request::Admitted;
pub use service::{Activity, Drained, Jobs, NotFound, SubmitError};
pub use viewer::Viewer;

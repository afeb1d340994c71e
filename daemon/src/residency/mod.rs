//! Leases of device memory: who may hold how many bytes, and when bytes count as free again.
//!
//! * [`Residency`]: the handle that jobs and workers use; one owner task behind it holds one [`Ledger`] per device.
//! * [`Ledger`]: the pure state machine, `(state, event, now) -> effects`.
//! * [`policy`]: what to take back when somebody needs room.
//! * [`invariants`]: what must hold after every event (R1 to R8), checked by tests and by debug builds.
//! * [`device`]: how bytes are measured, and what a device has.
//! * [`estimate`]: how many bytes a stage task will need.
//! * [`peaks`]: what stage tasks were measured to need, kept over restarts.
//!
//! A stage task in short: [`Residency::request`] a vector for an incarnation (new or warm) and wait for [`Granted`]; start the
//! process if it is new; take the [`ComputeToken`]; run; drop the token, then [`Granted`]. The process stays warm with all
//! its leases until somebody needs the bytes.

pub mod device;
mod effects;
pub mod estimate;
mod handle;
pub mod invariants;
mod lease;
mod ledger;
pub mod peaks;
pub mod policy;
mod readings;
mod service;
mod view;

pub use self::device::{Budget, DeviceConfig, DeviceProbe, DeviceReading, ForeignProcess, ProbeError, Processes};
pub use self::handle::{Afterwards, ComputeToken, Granted, Holders, Released, Residency};
pub use self::lease::{
    Bytes, GrantedLease, Incarnation, LeaseId, LeaseKill, LeasePart, LeaseVector, Proof, Purpose, Refusal, RequestId,
};
pub use self::ledger::{Decision, DecisionKind, Effect, Event, Ledger, Rules, Upcoming};
pub use self::view::{DeviceSnapshot, HolderView, LeaseView, LifeView, WaiterView};

//! What the residency shows of itself: plain data for lists and for people.

use std::time::{Duration, SystemTime};

use sd_proto::v1;

use super::device::ForeignProcess;
use super::lease::{Incarnation, LeaseId, Purpose};
use crate::ids::{DeviceId, JobId};

/// One device as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Its id.
    pub device: DeviceId,
    /// For people.
    pub name: String,
    /// Bytes it has.
    pub total: u64,
    /// Bytes that leases may hold together at most.
    pub budget: u64,
    /// Bytes that leases may hold together now: the budget, or less while others use the device.
    pub capacity: u64,
    /// Bytes charged to leases, unproven ones included.
    pub leased: u64,
    /// Bytes of `leased` that were given back or whose process died, and whose release is not proven yet.
    pub unproven: u64,
    /// Bytes that processes hold beyond their leases; charged as well.
    pub overdraft: u64,
    /// Why the device is degraded, if it is.
    pub degraded: Option<String>,
    /// Given to other programs until then: nothing is granted.
    pub held_until: Option<SystemTime>,
    /// Processes on the device that are not this daemon's, largest first; empty where it lists none.
    pub foreign: Vec<ForeignProcess>,
    /// Every lease.
    pub leases: Vec<LeaseView>,
    /// Every process that holds leases.
    pub holders: Vec<HolderView>,
    /// Who waits for bytes, first come first.
    pub waiters: Vec<WaiterView>,
    /// The job that has the compute token.
    pub computing: Option<JobId>,
}

/// One lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseView {
    /// Its number.
    pub id: LeaseId,
    /// Whose.
    pub incarnation: Incarnation,
    /// What for.
    pub purpose: Purpose,
    /// Bytes charged.
    pub bytes: u64,
    /// Granted, revoked or unproven.
    pub state: v1::LeaseState,
    /// Since it was first granted.
    pub age: Duration,
    /// The job that it serves now.
    pub job: Option<JobId>,
    /// For people: "diffusion of default".
    pub holder: String,
}

/// Where a holder's life stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LifeView {
    /// Granted; its process is not running yet.
    Granted,
    /// Running.
    Alive,
    /// Asked to exit.
    Retiring,
    /// Killed or dead, not reaped yet.
    Dying,
    /// Reaped; the device still shows its bytes.
    Reaped,
}

/// One process that holds leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderView {
    /// Which.
    pub incarnation: Incarnation,
    /// For people: "diffusion of default".
    pub title: String,
    /// Where its life stands.
    pub life: LifeView,
    /// Bytes of all its leases.
    pub leased: u64,
    /// What it said last that it holds on the device.
    pub measured: u64,
    /// Somebody keeps it from being taken off for others.
    pub pinned: bool,
    /// The job it works for.
    pub job: Option<JobId>,
    /// Since its last task ended.
    pub idle: Option<Duration>,
}

/// One request that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaiterView {
    /// For which process.
    pub incarnation: Incarnation,
    /// For people.
    pub title: String,
    /// Whose job.
    pub job: JobId,
    /// Bytes it needs beyond what its process holds.
    pub need: u64,
    /// How long it has waited.
    pub waited: Duration,
    /// How often another was granted before it.
    pub overtaken: u32,
}

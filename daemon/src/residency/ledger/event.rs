//! What a ledger hears and what it wants done.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::handle::Afterwards;
use super::super::lease::{
    GrantedLease, Incarnation, LeaseId, LeaseKill, LeaseVector, Proof, Purpose, Refusal, RequestId,
};
use super::decision::Decision;
use super::upcoming::Upcoming;
use crate::ids::{JobId, Tenant};

/// What happens to a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A task asks for what it needs.
    Request {
        /// The request.
        id: RequestId,
        /// What it needs.
        vector: LeaseVector,
    },
    /// A request that is not granted yet is no longer wanted.
    Withdraw {
        /// Which.
        id: RequestId,
    },
    /// A granted request's task has ended.
    Release {
        /// Which.
        id: RequestId,
        /// What becomes of the process.
        afterwards: Afterwards,
    },
    /// A process was started.
    Spawned {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process has done its handshake.
    Attached {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process is dead or about to be, and not reaped.
    Lost {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process is reaped.
    Reaped {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process lives, and says what it holds.
    Pulse {
        /// Which.
        incarnation: Incarnation,
        /// Bytes by its own measure.
        bytes: u64,
    },
    /// The device says what a process holds; answers [`Effect::Measure`].
    Measured {
        /// Which.
        incarnation: Incarnation,
        /// Its bytes; `None`: the device shows no such process.
        bytes: Option<u64>,
    },
    /// The device does not show what a process holds, only what is free; answers [`Effect::Measure`].
    Seen {
        /// Which process was asked for.
        incarnation: Incarnation,
        /// Bytes that nobody holds.
        free: u64,
    },
    /// A device that does not show what processes hold has so many bytes free.
    Free {
        /// Bytes that nobody holds.
        bytes: u64,
    },
    /// A process says that it holds no more than `bytes` of a lease.
    Returned {
        /// Which process.
        incarnation: Incarnation,
        /// Which lease.
        lease: LeaseId,
        /// What it keeps.
        bytes: u64,
    },
    /// A process asks for more while it works; answered at once.
    Extend {
        /// Which process.
        incarnation: Incarnation,
        /// Its own number of the request.
        request_id: u64,
        /// What for.
        purpose: Purpose,
        /// Least bytes beyond what it holds.
        min: u64,
        /// Most.
        want: u64,
    },
    /// Somebody wants a process gone as soon as it is idle.
    Retire {
        /// Which.
        incarnation: Incarnation,
    },
    /// Somebody wants a process to give back and stay, as soon as it is idle.
    GiveBack {
        /// Which.
        incarnation: Incarnation,
        /// Its weights too, or its working set alone.
        weights: bool,
    },
    /// Somebody keeps a process from being taken off for others, or ends that.
    Pin {
        /// Which.
        incarnation: Incarnation,
        /// Kept.
        pinned: bool,
    },
    /// The device is to be free for other programs: every process leaves it, busy ones when their tasks end.
    Hold {
        /// How long nothing is granted; `None`: until somebody asks for it.
        time: Option<Duration>,
    },
    /// The device is this daemon's again.
    Unhold,
    /// What queued jobs will need, in their order.
    Upcoming {
        /// The next stage first.
        stages: Vec<Upcoming>,
    },
    /// How much of the device each tenant is to have, in parts; those not named: one part.
    Shares {
        /// Parts.
        weights: BTreeMap<Tenant, u32>,
    },
    /// The longest time that a process was seen to take from one boundary, at which it can give back, to the next.
    BlockTime {
        /// Which.
        incarnation: Incarnation,
        /// So long.
        time: Duration,
    },
    /// A job wants to compute.
    TokenRequest {
        /// The request.
        id: RequestId,
        /// Whose.
        job: JobId,
    },
    /// A job has computed, or no longer wants to.
    TokenEnded {
        /// Which request.
        id: RequestId,
    },
    /// A job that computes has come to a step boundary and may be interrupted. Answered by [`Effect::TokenGranted`]: at once, or
    /// when those have computed who were due.
    TokenOffered {
        /// Which request.
        id: RequestId,
    },
    /// The device has this much for leases now.
    Capacity {
        /// Bytes.
        bytes: u64,
    },
    /// The device is gone.
    DeviceLost {
        /// What it says.
        why: String,
    },
    /// The device answers; only new where it was gone.
    DeviceFound,
    /// Time has passed, or shared memory has become free.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Answer a request: granted. Its shared memory has been taken from the pool.
    Granted {
        /// Which.
        id: RequestId,
        /// For which process.
        incarnation: Incarnation,
        /// Every lease of the process.
        leases: Vec<GrantedLease>,
        /// How long it waited.
        waited: Duration,
        /// Bytes taken from the pool of shared memory.
        shared_memory: u64,
    },
    /// Answer a request: refused.
    Refused {
        /// Which.
        id: RequestId,
        /// Why.
        refusal: Refusal,
    },
    /// Tell a process what it may hold.
    Grant {
        /// Which.
        incarnation: Incarnation,
        /// The lease as it is now.
        lease: GrantedLease,
        /// The process's own request that this answers; 0: none.
        request_id: u64,
    },
    /// Tell a process to give back.
    Revise {
        /// Which.
        incarnation: Incarnation,
        /// Which lease.
        lease: LeaseId,
        /// What it may keep.
        to: u64,
        /// Within.
        deadline: Duration,
    },
    /// Ask a process to free everything and exit.
    Retire {
        /// Which.
        incarnation: Incarnation,
    },
    /// Kill a process.
    Kill {
        /// Which.
        incarnation: Incarnation,
        /// Why.
        cause: LeaseKill,
    },
    /// A release is proven: so many bytes of a lease are free.
    Proven {
        /// Which process.
        incarnation: Incarnation,
        /// Which lease.
        lease: LeaseId,
        /// Bytes freed.
        bytes: u64,
        /// How.
        proof: Proof,
    },
    /// Measure a process and come back with [`Event::Measured`] or [`Event::Seen`]. Where it cannot be measured, nothing: the
    /// ledger asks again.
    Measure {
        /// Which.
        incarnation: Incarnation,
    },
    /// Answer a request for the compute token: it is yours.
    TokenGranted {
        /// Which.
        id: RequestId,
    },
    /// Tell people.
    Decided(Decision),
}

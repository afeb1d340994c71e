//! What the residency wants of processes, recorded.

use std::sync::Mutex;
use std::time::Duration;

use sdd::residency::{GrantedLease, Holders, Incarnation, LeaseId, LeaseKill, Proof, Purpose};

/// Something that was wanted of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Grant(Incarnation, Purpose, u64),
    Revise(Incarnation, LeaseId, u64),
    Proof(Incarnation, u64, Proof),
    Retire(Incarnation),
    Kill(Incarnation, LeaseKill),
}

/// All calls in order.
#[derive(Default)]
pub(crate) struct Calls(Mutex<Vec<Call>>);

impl Calls {
    /// What was wanted since this was asked last.
    pub(crate) fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    fn record(&self, call: Call) {
        self.0.lock().unwrap().push(call);
    }
}

impl Holders for Calls {
    fn grant(&self, incarnation: Incarnation, lease: GrantedLease, _: u64, _: Duration) {
        self.record(Call::Grant(incarnation, lease.purpose, lease.bytes));
    }
    fn revise(&self, incarnation: Incarnation, lease: LeaseId, to: u64, _: Duration) {
        self.record(Call::Revise(incarnation, lease, to));
    }
    fn proof(&self, incarnation: Incarnation, _: LeaseId, bytes: u64, proof: Proof) {
        self.record(Call::Proof(incarnation, bytes, proof));
    }
    fn retire(&self, incarnation: Incarnation) {
        self.record(Call::Retire(incarnation));
    }
    fn kill(&self, incarnation: Incarnation, cause: LeaseKill) {
        self.record(Call::Kill(incarnation, cause));
    }
}

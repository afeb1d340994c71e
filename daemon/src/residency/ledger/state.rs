//! What the ledger knows: holders, leases, waiters.

use std::time::Duration;

use super::super::lease::{GrantedLease, Incarnation, LeaseId, LeaseVector, Purpose, RequestId};
use crate::clock::Moment;
use crate::ids::{JobId, Tenant};

/// Where a holder's life stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::residency) enum Life {
    /// Granted to, but no process was started: its leases vanish with its claim.
    Granted,
    /// A process was started, and only proof frees its leases.
    Alive {
        /// Its handshake is done: it can hear.
        attached: bool,
        /// It is taken for dead when it has not pulsed by then.
        term_end: Moment,
    },
    /// Asked to exit.
    Retiring {
        /// Killed when it has not been reaped by then.
        deadline: Moment,
    },
    /// Killed or dead, not reaped.
    Dying {
        /// Since when.
        since: Moment,
    },
    /// Reaped, on a device where that alone proves nothing.
    Reaped {
        /// Since when.
        since: Moment,
        /// When it is measured next.
        measure: Measure,
    },
}

/// When something is measured next, at growing intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::residency) struct Measure {
    pub(in crate::residency) at: Moment,
    interval: Duration,
}

impl Measure {
    const FIRST: Duration = Duration::from_millis(5);
    const LONGEST: Duration = Duration::from_millis(320);

    /// The first measurement is made by the caller now; this is when to repeat it.
    pub(in crate::residency) fn after_first(now: Moment) -> Self {
        Self { at: now + Self::FIRST, interval: Self::FIRST }
    }

    /// To be repeated at the longest interval from now on.
    pub(in crate::residency) fn seldom(now: Moment) -> Self {
        Self { at: now + Self::LONGEST, interval: Self::LONGEST }
    }

    /// A measurement is made now; this is when to repeat it.
    pub(in crate::residency) fn next(self, now: Moment) -> Self {
        let interval = (self.interval * 2).min(Self::LONGEST);
        Self { at: now + interval, interval }
    }
}

/// The task that a holder works for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::residency) struct Claim {
    pub(in crate::residency) request: RequestId,
    pub(in crate::residency) job: JobId,
    pub(in crate::residency) tenant: Tenant,
}

/// What was asked of a process for the time when it is idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::residency) enum Asked {
    /// Nothing.
    Nothing,
    /// Its working set.
    WorkingSet,
    /// Its weights too: only its context stays.
    Park,
    /// Everything: it exits.
    Retire,
}

/// A process, running or to be started, that holds leases.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::residency) struct Holder {
    pub(in crate::residency) title: String,
    pub(in crate::residency) life: Life,
    pub(in crate::residency) claim: Option<Claim>,
    /// When its last task ended; without meaning while claimed.
    pub(in crate::residency) idle_since: Moment,
    /// What it gives back as soon as it is idle.
    pub(in crate::residency) asked: Asked,
    /// Not to be taken off for others.
    pub(in crate::residency) pinned: bool,
    /// The longest it was seen to take from one boundary, at which it can give back, to the next.
    pub(in crate::residency) block_time: Duration,
    /// Bytes of the device that were free when its release began, where that is all the device shows.
    pub(in crate::residency) free_before: Option<u64>,
    /// What it said or was measured last to hold.
    pub(in crate::residency) measured: u64,
    /// Bytes beyond its leases and the tolerance, by `measured`; charged.
    pub(in crate::residency) overdraft: u64,
    /// Killed if it still has an overdraft then.
    pub(in crate::residency) overdraft_until: Option<Moment>,
}

impl Holder {
    /// Whether it may be given a task and more bytes.
    pub(in crate::residency) fn usable(&self) -> bool {
        matches!(self.life, Life::Granted | Life::Alive { .. }) && self.asked != Asked::Retire
    }

    /// Whether bytes may be taken from it for others: running and without a task.
    pub(in crate::residency) fn idle(&self) -> bool {
        matches!(self.life, Life::Alive { .. }) && self.claim.is_none()
    }

    /// Whether messages reach it.
    pub(in crate::residency) fn attached(&self) -> bool {
        matches!(self.life, Life::Alive { attached: true, .. } | Life::Retiring { .. })
    }
}

/// Where a lease stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::residency) enum LeaseState {
    /// Held.
    Granted,
    /// To be given back down to `to` by the deadline. Still charged in full.
    Revoked {
        /// What remains.
        to: u64,
        /// The holder is killed past it.
        deadline: Moment,
    },
    /// Said to be given back down to `to`, or its holder is dead (`to` is 0): charged in full until proven.
    Unproven {
        /// What remains once proven.
        to: u64,
        /// Since when.
        since: Moment,
        /// When a living holder is measured next.
        measure: Measure,
    },
}

/// Bytes of one purpose that one process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::residency) struct Lease {
    pub(in crate::residency) id: LeaseId,
    pub(in crate::residency) incarnation: Incarnation,
    pub(in crate::residency) purpose: Purpose,
    /// Charged.
    pub(in crate::residency) bytes: u64,
    /// What a revision must leave while the holder is busy.
    pub(in crate::residency) floor: u64,
    /// What its task could use.
    pub(in crate::residency) want: u64,
    pub(in crate::residency) state: LeaseState,
    pub(in crate::residency) since: Moment,
}

impl Lease {
    /// Bytes that remain once what is under way has been proven.
    pub(in crate::residency) fn remains(&self) -> u64 {
        match self.state {
            LeaseState::Granted => self.bytes,
            LeaseState::Revoked { to, .. } | LeaseState::Unproven { to, .. } => to,
        }
    }

    pub(in crate::residency) fn granted(&self) -> GrantedLease {
        GrantedLease { id: self.id, purpose: self.purpose, bytes: self.bytes }
    }
}

/// A request that is not granted yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::residency) struct Waiter {
    pub(in crate::residency) id: RequestId,
    pub(in crate::residency) vector: LeaseVector,
    pub(in crate::residency) since: Moment,
    /// People were told that it waits for its process.
    pub(in crate::residency) told: bool,
    /// Since it lacked nothing but bytes, for the first time.
    pub(in crate::residency) blocked_since: Option<Moment>,
    /// Requests behind it that were granted while it lacked bytes.
    pub(in crate::residency) overtaken: u32,
}

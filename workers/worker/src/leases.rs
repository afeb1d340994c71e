//! The leases that this worker holds, as the daemon granted them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sd_proto::worker::v1::{LeaseGrant, LeasePurpose, LeaseReturned};

/// One lease: bytes for a purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lease {
    purpose: LeasePurpose,
    bytes: u64,
}

/// A lease of which memory is to be given back, or was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Revision {
    /// Which lease.
    pub(crate) lease_id: u64,
    /// Down to these bytes.
    pub(crate) bytes: u64,
}

/// What the leases allow of weights, as the model thread sees it: the link sets it, the model thread reads it between two
/// segments, so that a lease may shrink and grow in the middle of a run.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    weights: AtomicU64,
    changed: AtomicBool,
    revisions: Mutex<Vec<Revision>>,
}

impl Allowance {
    /// Bytes of weights that this process may hold.
    pub(crate) fn weights(&self) -> u64 {
        self.weights.load(Ordering::Acquire)
    }

    /// Whether it has changed since this was asked last; what is to be given back then waits in [`Self::revisions`].
    pub(crate) fn has_changed(&self) -> bool {
        // Reading first keeps the line shared: this is asked at every segment.
        self.changed.load(Ordering::Acquire) && self.changed.swap(false, Ordering::AcqRel)
    }

    /// Takes what is to be given back, oldest first.
    pub(crate) fn revisions(&self) -> Vec<Revision> {
        std::mem::take(&mut *self.revisions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn set(&self, weights: u64, revision: Option<Revision>) {
        self.weights.store(weights, Ordering::Release);
        self.revisions.lock().unwrap_or_else(PoisonError::into_inner).extend(revision);
        self.changed.store(true, Ordering::Release);
    }
}

/// All leases of this process, by id.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    held: BTreeMap<u64, Lease>,
    allowance: Arc<Allowance>,
}

impl Leases {
    /// Notes a grant; a second grant of the same lease replaces its bytes.
    pub(crate) fn granted(&mut self, grant: &LeaseGrant) {
        self.held.insert(grant.lease_id, Lease { purpose: grant.purpose(), bytes: grant.bytes });
        if grant.purpose() == LeasePurpose::Weights {
            self.allowance.set(self.weights(), None);
        }
    }

    /// What the model thread may hold.
    pub(crate) fn allowance(&self) -> Arc<Allowance> {
        self.allowance.clone()
    }

    fn weights(&self) -> u64 {
        let weights = self.held.values().filter(|lease| lease.purpose == LeasePurpose::Weights);
        weights.map(|lease| lease.bytes).fold(0, u64::saturating_add)
    }

    /// Lowers a weights lease to `to` bytes, at once as far as new memory goes; what is held beyond it the model thread gives
    /// back, after which [`Self::give_back`] says so.
    pub(crate) fn revise_weights(&mut self, lease_id: u64, to: u64) {
        if let Some(lease) = self.held.get_mut(&lease_id) {
            lease.bytes = lease.bytes.min(to);
            let revision = Revision { lease_id, bytes: lease.bytes };
            self.allowance.set(self.weights(), Some(revision));
        }
    }

    /// The lease's purpose, if it is held.
    pub(crate) fn purpose(&self, lease_id: u64) -> Option<LeasePurpose> {
        self.held.get(&lease_id).map(|lease| lease.purpose)
    }

    /// Bytes granted in all.
    pub(crate) fn total(&self) -> u64 {
        self.held.values().map(|lease| lease.bytes).sum()
    }

    /// Shrinks a lease and returns the message that says so; a lease at zero bytes is held no more.
    pub(crate) fn give_back(&mut self, lease_id: u64, to: u64) -> Option<LeaseReturned> {
        let lease = self.held.get_mut(&lease_id)?;
        lease.bytes = lease.bytes.min(to);
        let bytes = lease.bytes;
        if bytes == 0 {
            self.held.remove(&lease_id);
        }
        Some(LeaseReturned { lease_id, bytes })
    }

    /// Gives everything back.
    pub(crate) fn give_back_all(&mut self) -> Vec<LeaseReturned> {
        self.allowance.set(0, None);
        std::mem::take(&mut self.held).into_keys().map(|lease_id| LeaseReturned { lease_id, bytes: 0 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant_of(lease_id: u64, purpose: LeasePurpose, bytes: u64) -> LeaseGrant {
        LeaseGrant { lease_id, purpose: purpose as i32, bytes, ..LeaseGrant::default() }
    }

    fn grant(lease_id: u64, bytes: u64) -> LeaseGrant {
        grant_of(lease_id, LeasePurpose::WorkingSet, bytes)
    }

    #[test]
    fn the_model_thread_sees_what_is_left_of_weights_at_once() {
        let mut leases = Leases::default();
        let allowance = leases.allowance();
        leases.granted(&grant(1, 100));
        assert!(!allowance.has_changed() && allowance.weights() == 0, "scratch memory is no weight");
        leases.granted(&grant_of(2, LeasePurpose::Weights, 80));
        assert!(allowance.has_changed() && allowance.weights() == 80);
        assert!(!allowance.has_changed());
        leases.revise_weights(2, 30);
        leases.revise_weights(2, 50);
        assert!(allowance.has_changed() && allowance.weights() == 30, "a revision never raises");
        assert_eq!(allowance.revisions(), [Revision { lease_id: 2, bytes: 30 }; 2]);
        leases.granted(&grant_of(2, LeasePurpose::Weights, 90));
        assert!(allowance.has_changed() && allowance.weights() == 90 && allowance.revisions().is_empty());
        leases.revise_weights(2, 0);
        assert_eq!(leases.give_back(2, 0), Some(LeaseReturned { lease_id: 2, bytes: 0 }));
        assert_eq!((leases.purpose(2), allowance.weights()), (None, 0));
    }

    #[test]
    fn a_lease_only_shrinks_by_giving_back() {
        let mut leases = Leases::default();
        leases.granted(&grant(1, 100));
        leases.granted(&grant(2, 50));
        assert_eq!(leases.total(), 150);
        assert_eq!(leases.give_back(1, 40), Some(LeaseReturned { lease_id: 1, bytes: 40 }));
        assert_eq!(leases.give_back(1, 60), Some(LeaseReturned { lease_id: 1, bytes: 40 }), "never grows");
        assert_eq!(leases.give_back(9, 0), None);
        assert_eq!(leases.purpose(2), Some(LeasePurpose::WorkingSet));
        assert_eq!(leases.give_back_all().len(), 2);
        assert_eq!(leases.total(), 0);
    }
}

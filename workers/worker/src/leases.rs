//! The leases that this worker holds, as the daemon granted them.

use std::collections::BTreeMap;

use sd_proto::worker::v1::{LeaseGrant, LeasePurpose, LeaseReturned};

/// One lease: bytes for a purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lease {
    purpose: LeasePurpose,
    bytes: u64,
}

/// All leases of this process, by id.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    held: BTreeMap<u64, Lease>,
}

impl Leases {
    /// Notes a grant; a second grant of the same lease replaces its bytes.
    pub(crate) fn granted(&mut self, grant: &LeaseGrant) {
        self.held.insert(grant.lease_id, Lease { purpose: grant.purpose(), bytes: grant.bytes });
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
        std::mem::take(&mut self.held).into_keys().map(|lease_id| LeaseReturned { lease_id, bytes: 0 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(lease_id: u64, bytes: u64) -> LeaseGrant {
        LeaseGrant { lease_id, purpose: LeasePurpose::WorkingSet as i32, bytes, ..LeaseGrant::default() }
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

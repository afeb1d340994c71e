//! What queued jobs will need: read by the policy, and by what is given away as luxury.

use super::super::lease::Incarnation;
use super::Ledger;
use super::state::Holder;
use crate::ids::{DeviceId, JobId};

/// A stage that a queued or running job has not come to yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Upcoming {
    /// Where it will run.
    pub device: DeviceId,
    /// Of which job.
    pub job: JobId,
    /// The process that it will use, by the words of [`LeaseVector::holder`](super::super::LeaseVector::holder): "vae of default".
    pub holder: String,
    /// Least bytes that this process will hold for it, context included.
    pub needs: u64,
}

impl Ledger {
    /// How many stages come before the next one that this process serves; `None` where no queued job names it.
    pub(super) fn next_use(&self, holder: &Holder) -> Option<usize> {
        self.upcoming.iter().position(|stage| stage.holder == holder.title)
    }

    /// Bytes that the next queued stage will need beyond what its process holds, for the sake of `asking`: stages of the
    /// asker's own job come after what it asks for, and can have its bytes then; what already waits in the ledger is
    /// counted there.
    pub(super) fn reserved(&self, asking: Option<&JobId>) -> u64 {
        let open = |job: &JobId| {
            Some(job) != asking
                && !self.waiters.iter().any(|waiter| waiter.vector.job == *job)
                && !self.holders.values().any(|holder| holder.claim.as_ref().is_some_and(|claim| claim.job == *job))
        };
        let Some(next) = self.upcoming.iter().find(|stage| open(&stage.job)) else { return 0 };
        let serves = |(_, holder): &(&Incarnation, &Holder)| holder.title == next.holder && holder.usable();
        let held = self
            .holders
            .iter()
            .find(serves)
            .map_or(0, |(&incarnation, _)| self.leases_of(incarnation).map(|lease| lease.bytes).sum());
        next.needs.saturating_sub(held)
    }
}

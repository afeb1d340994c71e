//! Releases on a device that shows no process's bytes: inferred from the device's free bytes.
//!
//! A release is taken for proven when the free bytes have risen by its amount since the last reading before it. What is proven this way
//! counts for one process alone: what others wait for must be risen on top of it. Where somebody else takes what became free before
//! it was seen, there is no proof: the bytes stay charged.

use super::super::lease::{Incarnation, Proof};
use super::state::{LeaseState, Life};
use super::{Ledger, Turn};

impl Ledger {
    /// So many bytes of the device are free, by a reading of its own.
    pub(super) fn free_bytes(&mut self, free: u64) {
        self.free = Some(free);
    }

    /// The release of a process begins: what is free now is what must rise.
    pub(super) fn begin_release(&mut self, incarnation: Incarnation) {
        let free = self.free;
        if let Some(holder) = self.holders.get_mut(&incarnation) {
            holder.free_before = holder.free_before.or(free);
        }
    }

    /// Free bytes that prove what this process says it gave back, or that a reaped one held; `None` where nothing is known of before.
    pub(in crate::residency) fn free_that_proves(&self, incarnation: Incarnation) -> Option<u64> {
        let before = self.holders.get(&incarnation)?.free_before?;
        let given = self.leases_of(incarnation).map(|lease| match lease.state {
            LeaseState::Unproven { to, .. } => lease.bytes - to,
            LeaseState::Granted | LeaseState::Revoked { .. } => 0,
        });
        Some(before.saturating_add(given.sum::<u64>()).saturating_sub(self.rules.tolerance))
    }

    /// The device was asked for a process and shows only that so many bytes are free.
    pub(super) fn seen(&mut self, incarnation: Incarnation, free: u64, turn: &mut Turn<'_>) {
        self.free = Some(free);
        let Some(holder) = self.holders.get(&incarnation) else { return };
        if self.free_that_proves(incarnation).is_none_or(|needed| free < needed) {
            return;
        }
        let before = self.leased();
        match holder.life {
            Life::Reaped { .. } => self.vanish(incarnation, Proof::Inferred, turn),
            Life::Alive { .. } | Life::Retiring { .. } => {
                self.prove_returns(incarnation, Proof::Inferred, turn);
                self.follow_what_was_asked(incarnation, turn);
            }
            Life::Granted | Life::Dying { .. } => return,
        }
        let freed = before - self.leased();
        for (_, holder) in self.holders.iter_mut().filter(|(other, _)| **other != incarnation) {
            holder.free_before = holder.free_before.map(|before| before.saturating_add(freed));
        }
        let settled = self.leases_of(incarnation).all(|lease| lease.state == LeaseState::Granted);
        if settled && let Some(holder) = self.holders.get_mut(&incarnation) {
            holder.free_before = None;
        }
    }
}

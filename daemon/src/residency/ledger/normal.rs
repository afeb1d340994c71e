//! A ledger whose history does not matter: what it does from here on depends on how long ago things were, not on when.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::lease::LeaseId;
use super::Ledger;
use super::state::{LeaseState, Life, Measure};
use crate::clock::Moment;

impl Ledger {
    /// The time that it is for a ledger in its normal form.
    pub const NORMAL: Moment = Duration::from_secs(3600);

    /// The same ledger with its times moved so that `now` becomes [`Ledger::NORMAL`], for an exhaustive search: two histories that lead
    /// to equal forms have the same future. What is longer past than `past` is that long past; leases are numbered by process and
    /// purpose; nobody is idle for longer than others; what is measured again is measured at the longest interval.
    #[must_use]
    pub fn normal(mut self, now: Moment, past: Duration) -> Self {
        let moved = |moment: Moment| (Self::NORMAL + moment).saturating_sub(now).max(Self::NORMAL - past);
        let measured = Measure::seldom(Self::NORMAL);
        self.growth = self.growth.map(|(bytes, since)| (bytes, moved(since)));
        if let Some(hold) = &mut self.held {
            hold.until = moved(hold.until);
        }
        self.token.shift(moved);
        for holder in self.holders.values_mut() {
            holder.idle_since = Self::NORMAL;
            holder.overdraft_until = holder.overdraft_until.map(moved);
            match &mut holder.life {
                Life::Granted => {}
                Life::Alive { term_end: moment, .. }
                | Life::Retiring { deadline: moment }
                | Life::Dying { since: moment } => {
                    *moment = moved(*moment);
                }
                Life::Reaped { since, measure } => {
                    *since = moved(*since);
                    *measure = measured;
                }
            }
        }
        for waiter in &mut self.waiters {
            waiter.since = Self::NORMAL;
            waiter.blocked_since = waiter.blocked_since.map(moved);
        }
        let mut order: Vec<_> = std::mem::take(&mut self.leases).into_values().collect();
        order.sort_by_key(|lease| (lease.incarnation, lease.purpose));
        self.next_lease = order.len() as u64 + 1;
        self.leases = BTreeMap::new();
        for (lease, number) in order.into_iter().zip(1..) {
            let state = match lease.state {
                LeaseState::Granted => LeaseState::Granted,
                LeaseState::Revoked { to, deadline } => LeaseState::Revoked { to, deadline: moved(deadline) },
                LeaseState::Unproven { to, since, .. } => {
                    LeaseState::Unproven { to, since: moved(since), measure: measured }
                }
            };
            let id = LeaseId(number);
            self.leases.insert(id, super::Lease { id, state, since: Self::NORMAL, ..lease });
        }
        self
    }
}

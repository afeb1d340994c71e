//! How much of a device each tenant has had, by its parts.
//!
//! What is counted is the time for which a tenant's jobs have had the compute token. Who has had least by its parts comes first;
//! among the tasks of one tenant, who came first. A tenant that comes back after a pause starts level with those who stayed: what
//! nobody used is not saved up.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::Tenant;

/// Time that a tenant has had, divided by its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(in crate::residency) struct Used(u64);

/// The accounts of all tenants.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(in crate::residency) struct Shares {
    parts: BTreeMap<Tenant, u32>,
    used: BTreeMap<Tenant, Used>,
}

/// So that small times over many parts do not round to nothing.
const SCALE: u64 = 1024;

impl Shares {
    pub(super) fn set(&mut self, parts: BTreeMap<Tenant, u32>) {
        self.parts = parts;
    }

    fn parts(&self, tenant: &Tenant) -> u64 {
        self.parts.get(tenant).map_or(1, |parts| u64::from(*parts).max(1))
    }

    /// What a tenant has had.
    pub(super) fn used(&self, tenant: &Tenant) -> Used {
        self.used.get(tenant).copied().unwrap_or_default()
    }

    /// Tasks of a tenant that run now, by its parts: for comparison with other tenants'.
    pub(super) fn load(&self, tenant: &Tenant, running: usize) -> u64 {
        (running as u64).saturating_mul(SCALE) / self.parts(tenant)
    }

    /// A tenant has computed.
    pub(super) fn charge(&mut self, tenant: &Tenant, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let more = micros.saturating_mul(SCALE) / self.parts(tenant);
        let used = self.used.entry(tenant.clone()).or_default();
        *used = Used(used.0.saturating_add(more));
    }

    /// A tenant that had nothing to do asks again, while the `others` are active.
    pub(super) fn joins<'a>(&mut self, tenant: &Tenant, others: impl Iterator<Item = &'a Tenant>) {
        match others.filter(|other| *other != tenant).map(|other| self.used(other)).min() {
            // Nobody to be compared with: all accounts start anew.
            None => self.used.clear(),
            Some(least) if least > self.used(tenant) => {
                self.used.insert(tenant.clone(), least);
            }
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_more_parts_has_had_less_after_the_same_time() {
        let (a, b) = (Tenant::from("a"), Tenant::from("b"));
        let mut shares = Shares::default();
        shares.set([(a.clone(), 3)].into());
        shares.charge(&a, Duration::from_secs(3));
        shares.charge(&b, Duration::from_secs(1));
        assert_eq!(shares.used(&a), shares.used(&b));
        shares.charge(&a, Duration::from_secs(1));
        assert!(shares.used(&a) > shares.used(&b));
        assert_eq!(shares.load(&a, 3), shares.load(&b, 1));
    }

    #[test]
    fn a_pause_saves_nothing_up() {
        let (a, b) = (Tenant::from("a"), Tenant::from("b"));
        let mut shares = Shares::default();
        shares.charge(&a, Duration::from_secs(100));
        shares.joins(&b, [&a].into_iter());
        assert_eq!(shares.used(&b), shares.used(&a), "the newcomer does not have the next hundred seconds alone");
        shares.charge(&b, Duration::from_secs(1));
        shares.joins(&a, std::iter::empty());
        assert_eq!(shares, Shares::default(), "alone, nobody's account matters");
    }
}

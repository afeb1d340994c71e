//! The ledger as others see it.

use sd_proto::v1;

use super::super::view::{DeviceSnapshot, HolderView, LeaseView, LifeView, WaiterView};
use super::Ledger;
use super::state::{Lease, LeaseState, Life};
use crate::clock::Moment;

impl Ledger {
    /// Everything as it stands at `now`; `name` and `total` are the device's.
    pub fn snapshot(&self, name: &str, total: u64, now: Moment) -> DeviceSnapshot {
        let unproven = |lease: &&Lease| matches!(lease.state, LeaseState::Unproven { .. });
        DeviceSnapshot {
            device: self.device.clone(),
            name: name.into(),
            total,
            budget: self.budget,
            capacity: self.capacity,
            leased: self.leased(),
            unproven: self.leases.values().filter(unproven).map(|lease| lease.bytes - lease.remains()).sum(),
            overdraft: self.holders.values().map(|holder| holder.overdraft).sum(),
            degraded: self.degraded.clone(),
            held_until: None,
            foreign: Vec::new(),
            leases: self.leases.values().map(|lease| self.lease_view(lease, now)).collect(),
            holders: self.holder_views(now),
            waiters: self.waiter_views(now),
            computing: self.token.job().cloned(),
        }
    }

    fn lease_view(&self, lease: &Lease, now: Moment) -> LeaseView {
        LeaseView {
            id: lease.id,
            incarnation: lease.incarnation,
            purpose: lease.purpose,
            bytes: lease.bytes,
            state: match lease.state {
                LeaseState::Granted => v1::LeaseState::Granted,
                LeaseState::Revoked { .. } => v1::LeaseState::Revoked,
                LeaseState::Unproven { .. } => v1::LeaseState::Unproven,
            },
            age: now.saturating_sub(lease.since),
            job: self.job_of(lease.incarnation),
            holder: self.title(lease.incarnation),
        }
    }

    fn holder_views(&self, now: Moment) -> Vec<HolderView> {
        let view = |(&incarnation, holder): (&u64, &super::Holder)| HolderView {
            incarnation,
            title: holder.title.clone(),
            life: match holder.life {
                Life::Granted => LifeView::Granted,
                Life::Alive { .. } => LifeView::Alive,
                Life::Retiring { .. } => LifeView::Retiring,
                Life::Dying { .. } => LifeView::Dying,
                Life::Reaped { .. } => LifeView::Reaped,
            },
            leased: self.leases_of(incarnation).map(|lease| lease.bytes).sum(),
            measured: holder.measured,
            pinned: holder.pinned,
            job: holder.claim.as_ref().map(|claim| claim.job.clone()),
            idle: holder.claim.is_none().then(|| now.saturating_sub(holder.idle_since)),
        };
        self.holders.iter().map(view).collect()
    }

    fn waiter_views(&self, now: Moment) -> Vec<WaiterView> {
        let view = |waiter: &super::Waiter| WaiterView {
            incarnation: waiter.vector.incarnation,
            title: waiter.vector.holder.clone(),
            job: waiter.vector.job.clone(),
            need: self.need(&waiter.vector),
            waited: now.saturating_sub(waiter.since),
            overtaken: waiter.overtaken,
        };
        self.waiters.iter().map(view).collect()
    }
}

//! The ledger, and three that are broken on purpose.

use std::time::Duration;

use sdd::arena::SharedPool;
use sdd::ids::DeviceId;
use sdd::residency::{Effect, Event, Incarnation, LeaseId, Ledger, Rules};

use super::WORLD;
use crate::ledger_support::rules;

/// What the world drives.
pub(crate) trait Machine {
    fn new(reaping_proves: bool) -> Self;
    fn ledger(&self) -> &Ledger;
    fn step(&mut self, event: Event, now: Duration, pool: &mut SharedPool) -> Vec<Effect>;

    fn capacity(&self) -> u64 {
        self.ledger().snapshot("", 0, Duration::ZERO).capacity
    }

    fn charged(&self) -> u64 {
        self.ledger().charged()
    }

    fn next_wake(&self) -> Option<Duration> {
        self.ledger().next_wake()
    }

    /// What each lease still has once what is said to be given back is.
    fn remains(&self) -> Vec<(Incarnation, LeaseId, u64)> {
        let unproven = sd_proto::v1::LeaseState::Unproven;
        let leases = self.ledger().snapshot("", 0, Duration::ZERO).leases;
        let remains = |state| if state == unproven { 0 } else { u64::MAX };
        leases.into_iter().map(|lease| (lease.incarnation, lease.id, remains(lease.state))).collect()
    }

    fn describe(&self, now: Duration) -> String {
        format!("{:#?}", self.ledger().snapshot("", 0, now))
    }

    fn is_clean(&self, now: Duration) -> Result<(), String> {
        let view = self.ledger().snapshot("", 0, now);
        let clean = view.leases.is_empty()
            && view.holders.is_empty()
            && view.waiters.is_empty()
            && view.computing.is_none()
            && view.degraded.is_none()
            && view.capacity == WORLD;
        if clean { Ok(()) } else { Err(format!("something is left: {view:#?}")) }
    }
}

fn ledger(budget: u64, reaping_proves: bool) -> Ledger {
    let rules = Rules { reaping_proves, weights_move: true, ..rules() };
    Ledger::new(DeviceId::cpu(), budget, rules, 1)
}

/// The real ledger.
pub(crate) struct Honest(Ledger);

impl Machine for Honest {
    fn new(reaping_proves: bool) -> Self {
        Self(ledger(WORLD, reaping_proves))
    }

    fn ledger(&self) -> &Ledger {
        &self.0
    }

    fn step(&mut self, event: Event, now: Duration, pool: &mut SharedPool) -> Vec<Effect> {
        self.0.step(event, now, pool)
    }
}

/// Grants before proof: what a process says it gave back counts as measured.
pub(crate) struct WordProves(Ledger);

impl Machine for WordProves {
    fn new(reaping_proves: bool) -> Self {
        Self(ledger(WORLD, reaping_proves))
    }

    fn ledger(&self) -> &Ledger {
        &self.0
    }

    fn step(&mut self, event: Event, now: Duration, pool: &mut SharedPool) -> Vec<Effect> {
        let believed = match event {
            Event::Returned { incarnation, .. } => Some(incarnation),
            _ => None,
        };
        let mut effects = self.0.step(event, now, pool);
        if let Some(incarnation) = believed {
            effects.extend(self.0.step(Event::Measured { incarnation, bytes: Some(0) }, now, pool));
        }
        effects
    }
}

/// Grants when a process is killed, before it is reaped.
pub(crate) struct KillProves(Ledger);

impl Machine for KillProves {
    fn new(reaping_proves: bool) -> Self {
        Self(ledger(WORLD, reaping_proves))
    }

    fn ledger(&self) -> &Ledger {
        &self.0
    }

    fn step(&mut self, event: Event, now: Duration, pool: &mut SharedPool) -> Vec<Effect> {
        let mut effects = self.0.step(event, now, pool);
        let killed: Vec<Incarnation> = effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Kill { incarnation, .. } => Some(*incarnation),
                _ => None,
            })
            .collect();
        for incarnation in killed {
            effects.extend(self.0.step(Event::Reaped { incarnation }, now, pool));
        }
        effects
    }
}

/// Has a tenth more to give than there is.
pub(crate) struct Oversells(Ledger);

impl Machine for Oversells {
    fn new(reaping_proves: bool) -> Self {
        Self(ledger(WORLD + WORLD / 10, reaping_proves))
    }

    fn ledger(&self) -> &Ledger {
        &self.0
    }

    fn step(&mut self, event: Event, now: Duration, pool: &mut SharedPool) -> Vec<Effect> {
        self.0.step(event, now, pool)
    }
}

//! A ledger on a bench: events in, effects out, time by hand.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod calls;

use std::time::Duration;

use sdd::arena::SharedPool;
use sdd::ids::{DeviceId, JobId, Tenant};
use sdd::residency::{
    Afterwards, Decision, DecisionKind, DeviceSnapshot, Effect, Event, GrantedLease, Incarnation, LeaseId, LeasePart,
    LeaseVector, Ledger, Purpose, Refusal, RequestId, Rules,
};

/// Rules with round numbers and no tolerance, so that tests count exact bytes; weights go with their process, where a test does not
/// say otherwise.
pub(crate) fn rules() -> Rules {
    Rules { tolerance: 0, bytes_per_second: u64::MAX, weights_move: false, ..Rules::default() }
}

/// A vector of context, weights and working set; parts of 0 bytes are left out.
pub(crate) fn vector(incarnation: Incarnation, context: u64, weights: u64, working_set: u64) -> LeaseVector {
    let parts = [(Purpose::Context, context), (Purpose::Weights, weights), (Purpose::WorkingSet, working_set)];
    LeaseVector {
        device: DeviceId::cpu(),
        incarnation,
        tenant: Tenant::from("uid:1"),
        job: JobId::from(format!("job{incarnation}")),
        holder: format!("stage {incarnation}"),
        parts: parts.into_iter().filter(|(_, b)| *b > 0).map(|(p, b)| LeasePart::exactly(p, b)).collect(),
        shared_memory: 0,
    }
}

/// The bench.
pub(crate) struct Bench {
    pub(crate) ledger: Ledger,
    pub(crate) pool: SharedPool,
    pub(crate) now: Duration,
    next: u64,
}

impl Bench {
    pub(crate) fn new(budget: u64) -> Self {
        Self::with(budget, rules())
    }

    pub(crate) fn with(budget: u64, rules: Rules) -> Self {
        let ledger = Ledger::new(DeviceId::cpu(), budget, rules, 1);
        Self { ledger, pool: SharedPool::new(1000), now: Duration::ZERO, next: 1 }
    }

    pub(crate) fn step(&mut self, event: Event) -> Vec<Effect> {
        self.ledger.step(event, self.now, &mut self.pool)
    }

    /// Lets time pass, with a tick whenever the ledger wants one. Returns all effects.
    pub(crate) fn pass(&mut self, time: Duration) -> Vec<Effect> {
        let end = self.now + time;
        let mut effects = Vec::new();
        while let Some(wake) = self.ledger.next_wake().filter(|wake| *wake <= end) {
            self.now = self.now.max(wake);
            effects.extend(self.step(Event::Tick));
            assert!(self.ledger.next_wake() != Some(wake), "a wake at {wake:?} that changes nothing");
        }
        self.now = end;
        effects
    }

    pub(crate) fn ask(&mut self, vector: LeaseVector) -> (RequestId, Vec<Effect>) {
        let id = RequestId(self.next);
        self.next += 1;
        (id, self.step(Event::Request { id, vector }))
    }

    /// Asks, and expects the grant at once.
    pub(crate) fn granted(&mut self, vector: LeaseVector) -> (RequestId, Vec<GrantedLease>) {
        let (id, effects) = self.ask(vector);
        let leases = grants(&effects).into_iter().find(|(granted, _)| *granted == id).map(|(_, leases)| leases);
        (id, leases.unwrap_or_else(|| panic!("not granted: {effects:#?}")))
    }

    /// Asks, and expects to wait.
    pub(crate) fn waits(&mut self, vector: LeaseVector) -> RequestId {
        let (id, effects) = self.ask(vector);
        assert!(grants(&effects).is_empty() && refusals(&effects).is_empty(), "{effects:#?}");
        id
    }

    /// Asks, and expects a refusal.
    pub(crate) fn refused(&mut self, vector: LeaseVector) -> Refusal {
        let (id, effects) = self.ask(vector);
        match refusals(&effects).as_slice() {
            [(refused, refusal)] if *refused == id => refusal.clone(),
            _ => panic!("not refused: {effects:#?}"),
        }
    }

    pub(crate) fn release(&mut self, id: RequestId) -> Vec<Effect> {
        self.step(Event::Release { id, afterwards: Afterwards::Keep })
    }

    /// A process that runs and listens.
    pub(crate) fn start(&mut self, incarnation: Incarnation) {
        self.step(Event::Spawned { incarnation });
        self.step(Event::Attached { incarnation });
    }

    /// An idle process that holds all this.
    pub(crate) fn warm(&mut self, incarnation: Incarnation, context: u64, weights: u64, working_set: u64) {
        let (id, _) = self.granted(vector(incarnation, context, weights, working_set));
        self.start(incarnation);
        self.release(id);
    }

    pub(crate) fn view(&self) -> DeviceSnapshot {
        self.ledger.snapshot("test", 0, self.now)
    }

    pub(crate) fn lease(&self, incarnation: Incarnation, purpose: Purpose) -> Option<LeaseId> {
        let leases = self.view().leases;
        leases.iter().find(|lease| lease.incarnation == incarnation && lease.purpose == purpose).map(|lease| lease.id)
    }
}

pub(crate) fn grants(effects: &[Effect]) -> Vec<(RequestId, Vec<GrantedLease>)> {
    let granted = effects.iter().filter_map(|effect| match effect {
        Effect::Granted { id, leases, .. } => Some((*id, leases.clone())),
        _ => None,
    });
    granted.collect()
}

pub(crate) fn granted_ids(effects: &[Effect]) -> Vec<RequestId> {
    grants(effects).into_iter().map(|(id, _)| id).collect()
}

pub(crate) fn refusals(effects: &[Effect]) -> Vec<(RequestId, Refusal)> {
    let refused = effects.iter().filter_map(|effect| match effect {
        Effect::Refused { id, refusal } => Some((*id, refusal.clone())),
        _ => None,
    });
    refused.collect()
}

pub(crate) fn retired(effects: &[Effect]) -> Vec<Incarnation> {
    let retired = effects.iter().filter_map(|effect| match effect {
        Effect::Retire { incarnation } => Some(*incarnation),
        _ => None,
    });
    retired.collect()
}

pub(crate) fn killed(effects: &[Effect]) -> Vec<Incarnation> {
    let killed = effects.iter().filter_map(|effect| match effect {
        Effect::Kill { incarnation, .. } => Some(*incarnation),
        _ => None,
    });
    killed.collect()
}

pub(crate) fn revised(effects: &[Effect]) -> Vec<(Incarnation, LeaseId, u64)> {
    let revised = effects.iter().filter_map(|effect| match effect {
        Effect::Revise { incarnation, lease, to, .. } => Some((*incarnation, *lease, *to)),
        _ => None,
    });
    revised.collect()
}

pub(crate) fn measures(effects: &[Effect]) -> Vec<Incarnation> {
    let measured = effects.iter().filter_map(|effect| match effect {
        Effect::Measure { incarnation } => Some(*incarnation),
        _ => None,
    });
    measured.collect()
}

pub(crate) fn proven(effects: &[Effect]) -> u64 {
    let bytes = effects.iter().map(|effect| match effect {
        Effect::Proven { bytes, .. } => *bytes,
        _ => 0,
    });
    bytes.sum()
}

pub(crate) fn decisions(effects: &[Effect]) -> Vec<Decision> {
    let decided = effects.iter().filter_map(|effect| match effect {
        Effect::Decided(decision) => Some(decision.clone()),
        _ => None,
    });
    decided.collect()
}

pub(crate) fn has_decision(effects: &[Effect], wanted: impl Fn(&DecisionKind) -> bool) -> bool {
    decisions(effects).iter().any(|decision| wanted(&decision.kind))
}

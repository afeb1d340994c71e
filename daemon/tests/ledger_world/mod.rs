//! A physical world around a ledger: what is really so, and what the ledger's effects do to it. Apart from that: the ledgers that it
//! drives (`machine`), operations (`ops`), what they do (`acts`), and how it ends (`settle`).

mod acts;
mod machine;
mod ops;
mod settle;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use sdd::arena::SharedPool;
use sdd::residency::{Effect, Event, Incarnation, LeaseId, Purpose, RequestId};

pub(crate) use machine::{Honest, KillProves, Machine, Oversells, WordProves};
pub(crate) use ops::{Op, ops};

/// Bytes that the world has.
pub(crate) const WORLD: u64 = 1000;
/// Bytes of shared memory that the world has.
const SHARED: u64 = 500;

/// What a process has been told to do and has not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    GiveBack { lease: LeaseId, to: u64 },
    Exit,
}

/// A process as it really is.
#[derive(Debug, Default)]
struct Process {
    /// Really held, by lease. A process takes all it is granted, at once.
    held: BTreeMap<LeaseId, (Purpose, u64)>,
    attached: bool,
    /// Pulses stop when it hangs.
    hung: bool,
    orders: Vec<Order>,
    /// It has exited or was killed; what it held is still held until it is reaped.
    dead: bool,
}

/// Everything.
pub(crate) struct World<M> {
    machine: M,
    pool: SharedPool,
    now: Duration,
    /// Running and dead processes that are not reaped.
    processes: BTreeMap<Incarnation, Process>,
    /// Every incarnation that ever ran; none runs twice.
    spawned: BTreeSet<Incarnation>,
    /// Killed, and not yet dead.
    condemned: BTreeSet<Incarnation>,
    /// Reaped, but the device still shows their bytes.
    ghosts: BTreeMap<Incarnation, u64>,
    measures: Vec<Incarnation>,
    waiting: BTreeMap<RequestId, Incarnation>,
    claims: BTreeMap<RequestId, (Incarnation, Vec<sdd::residency::GrantedLease>, u64)>,
    /// Shared memory of outputs that outlive their tasks.
    outputs: Vec<u64>,
    tokens: Vec<RequestId>,
    computing: Option<RequestId>,
    reaping_proves: bool,
    next: u64,
    /// What has happened so far.
    pub(crate) seen: Seen,
}

/// How much of each kind has happened.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) events: usize,
    pub(crate) grants: usize,
    pub(crate) waited: usize,
    pub(crate) refusals: usize,
    pub(crate) revisions: usize,
    pub(crate) retirements: usize,
    pub(crate) kills: usize,
    pub(crate) proofs: usize,
}

impl Seen {
    pub(crate) fn add(&mut self, more: &Self) {
        self.events += more.events;
        self.grants += more.grants;
        self.waited += more.waited;
        self.refusals += more.refusals;
        self.revisions += more.revisions;
        self.retirements += more.retirements;
        self.kills += more.kills;
        self.proofs += more.proofs;
    }
}

impl<M: Machine> World<M> {
    pub(crate) fn new(reaping_proves: bool) -> Self {
        Self {
            machine: M::new(reaping_proves),
            pool: SharedPool::new(SHARED),
            now: Duration::ZERO,
            processes: BTreeMap::new(),
            spawned: BTreeSet::new(),
            condemned: BTreeSet::new(),
            ghosts: BTreeMap::new(),
            measures: Vec::new(),
            waiting: BTreeMap::new(),
            claims: BTreeMap::new(),
            outputs: Vec::new(),
            tokens: Vec::new(),
            computing: None,
            reaping_proves,
            next: 1,
            seen: Seen::default(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn really_held(&self) -> u64 {
        let by_processes: u64 = self.processes.values().flat_map(|p| p.held.values()).map(|(_, bytes)| bytes).sum();
        // Grants that no process has taken yet are as good as taken.
        let promised: u64 = self
            .claims
            .values()
            .filter(|(incarnation, _, _)| !self.spawned.contains(incarnation))
            .flat_map(|(_, leases, _)| leases)
            .map(|lease| lease.bytes)
            .sum();
        by_processes + promised + self.ghosts.values().sum::<u64>()
    }

    /// One event, its effects upon the world, and what must hold afterwards.
    fn event(&mut self, event: Event) -> Result<(), String> {
        self.seen.events += 1;
        let after = event.clone();
        let (before, capacity) = (self.really_held(), self.machine.capacity());
        let effects = self.machine.step(event, self.now, &mut self.pool);
        effects.into_iter().try_for_each(|effect| self.take_effect(effect))?;
        let held = self.really_held();
        // A capacity that shrinks below what is held breaks nothing; a grant then would.
        let most = self.machine.capacity().max(capacity).min(WORLD);
        if held > before && held > most {
            return Err(format!("{held} bytes are really held of {most} after {after:?}"));
        }
        Ok(())
    }

    fn take_effect(&mut self, effect: Effect) -> Result<(), String> {
        match effect {
            Effect::Granted { id, incarnation, leases, shared_memory, waited } => {
                self.seen.grants += 1;
                self.seen.waited += usize::from(!waited.is_zero());
                if self.waiting.remove(&id) != Some(incarnation) {
                    return Err(format!("{id:?} was granted and did not wait"));
                }
                self.hold(incarnation, &leases);
                self.claims.insert(id, (incarnation, leases, shared_memory));
            }
            Effect::Refused { id, refusal } => {
                self.seen.refusals += 1;
                if self.waiting.remove(&id).is_none() {
                    return Err(format!("{id:?} was refused ({refusal}) and did not wait"));
                }
            }
            Effect::Grant { incarnation, lease, .. } => {
                if lease.bytes > 0 {
                    self.hold(incarnation, &[lease]);
                }
            }
            Effect::Revise { incarnation, lease, to, .. } => {
                self.seen.revisions += 1;
                self.order(incarnation, Order::GiveBack { lease, to });
            }
            Effect::Retire { incarnation } => {
                self.seen.retirements += 1;
                self.order(incarnation, Order::Exit);
            }
            Effect::Kill { incarnation, .. } => {
                self.seen.kills += 1;
                if self.processes.contains_key(&incarnation) {
                    self.condemned.insert(incarnation);
                }
            }
            Effect::Measure { incarnation } => self.measures.push(incarnation),
            Effect::TokenGranted { id } => {
                if self.computing.replace(id).is_some() {
                    return Err(format!("{id:?} got the token while another computes"));
                }
                self.tokens.retain(|waiting| *waiting != id);
            }
            Effect::Proven { .. } => self.seen.proofs += 1,
            Effect::Decided(_) => {}
        }
        Ok(())
    }

    fn hold(&mut self, incarnation: Incarnation, leases: &[sdd::residency::GrantedLease]) {
        if let Some(process) = self.processes.get_mut(&incarnation).filter(|process| !process.dead) {
            for lease in leases {
                let held = process.held.entry(lease.id).or_insert((lease.purpose, 0));
                held.1 = held.1.max(lease.bytes);
            }
        }
    }

    fn order(&mut self, incarnation: Incarnation, order: Order) {
        if let Some(process) = self.processes.get_mut(&incarnation) {
            process.orders.push(order);
        }
    }
}

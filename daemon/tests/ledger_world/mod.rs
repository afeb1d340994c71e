//! A physical world around a ledger.

mod machine;
mod ops;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use sdd::arena::SharedPool;
use sdd::ids::DeviceId;
use sdd::residency::{Afterwards, Effect, Event, Incarnation, LeaseId, Purpose, RequestId, Upcoming};

pub(crate) use machine::{Honest, KillProves, Machine, Oversells, WordProves};
pub(crate) use ops::{Op, ops};

use crate::ledger_support::vector;

/// Bytes that the world has.
pub(crate) const WORLD: u64 = 1000;
const TENANTS: [&str; 3] = ["a", "b", "c"];
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

fn pick<K: Copy, V>(map: &BTreeMap<K, V>, at: usize) -> Option<K> {
    (!map.is_empty()).then(|| *map.keys().nth(at % map.len()).expect("within the length"))
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

    /// One operation.
    pub(crate) fn act(&mut self, op: Op) -> Result<(), String> {
        match op {
            Op::Request { new, at, context, weights, luxury, working_set, shared_memory } => {
                let known = if new { None } else { pick(&self.processes, at) };
                let incarnation = known.unwrap_or_else(|| self.number());
                let mut vector = vector(incarnation, context, weights, working_set);
                vector.shared_memory = shared_memory;
                for part in vector.parts.iter_mut().filter(|part| part.purpose == Purpose::Weights) {
                    part.want += luxury;
                }
                // Three tenants.
                vector.tenant = TENANTS[incarnation as usize % 3].into();
                let id = RequestId(self.number());
                self.waiting.insert(id, incarnation);
                self.event(Event::Request { id, vector })
            }
            Op::Withdraw { at } => match pick(&self.waiting, at) {
                Some(id) => {
                    self.waiting.remove(&id);
                    self.event(Event::Withdraw { id })
                }
                None => Ok(()),
            },
            Op::Release { at, afterwards } => match pick(&self.claims, at) {
                Some(id) => self.release(id, afterwards),
                None => Ok(()),
            },
            Op::Spawn { at } => {
                let planned = |(incarnation, _, _): &&(Incarnation, _, _)| !self.spawned.contains(incarnation);
                let planned: Vec<Incarnation> = self.claims.values().filter(planned).map(|claim| claim.0).collect();
                match planned.get(at % planned.len().max(1)) {
                    Some(&incarnation) => self.spawn(incarnation),
                    None => Ok(()),
                }
            }
            Op::Attach { at } => match self.living(at, |process| !process.attached) {
                Some(incarnation) => self.attach(incarnation),
                None => Ok(()),
            },
            Op::Obey { at } => match self.living(at, |process| !process.orders.is_empty() && process.attached) {
                Some(incarnation) => self.obey(incarnation, true),
                None => Ok(()),
            },
            Op::Lie { at } => match self.living(at, |process| !process.orders.is_empty() && process.attached) {
                Some(incarnation) => self.obey(incarnation, false),
                None => Ok(()),
            },
            Op::Hang { at } => {
                if let Some(process) = pick(&self.processes, at).and_then(|at| self.processes.get_mut(&at)) {
                    process.hung = true;
                }
                Ok(())
            }
            Op::Exaggerate { at, more } => match self.living(at, |process| process.attached) {
                Some(incarnation) => {
                    let bytes = self.held_by(incarnation) + more;
                    self.event(Event::Pulse { incarnation, bytes })
                }
                None => Ok(()),
            },
            Op::Die { at } => {
                if let Some(process) = pick(&self.processes, at).and_then(|at| self.processes.get_mut(&at)) {
                    process.dead = true;
                }
                Ok(())
            }
            Op::Lose { at } => match pick(&self.processes, at) {
                Some(incarnation) => {
                    self.processes.entry(incarnation).or_default().dead = true;
                    self.event(Event::Lost { incarnation })
                }
                None => Ok(()),
            },
            Op::Execute { at } => {
                let condemned = self.condemned.iter().nth(at % self.condemned.len().max(1)).copied();
                if let Some(process) = condemned.and_then(|at| self.processes.get_mut(&at)) {
                    process.dead = true;
                }
                Ok(())
            }
            Op::Reap { at } => {
                let dead: Vec<_> = self.processes.iter().filter(|(_, p)| p.dead).map(|(at, _)| *at).collect();
                match dead.get(at % dead.len().max(1)) {
                    Some(&incarnation) => self.reap(incarnation),
                    None => Ok(()),
                }
            }
            Op::Fade { at } => {
                if let Some(ghost) = pick(&self.ghosts, at) {
                    self.ghosts.remove(&ghost);
                }
                Ok(())
            }
            Op::Measure { answer } => match self.measures.pop() {
                Some(incarnation) if answer => self.measure(incarnation),
                Some(_) | None => Ok(()),
            },
            Op::Extend { at, min, want } => match pick(&self.claims, at).map(|id| self.claims[&id].0) {
                Some(incarnation) => {
                    let (request_id, purpose, want) = (1, Purpose::WorkingSet, min + want);
                    self.event(Event::Extend { incarnation, request_id, purpose, min, want })
                }
                None => Ok(()),
            },
            Op::Retire { at } => match pick(&self.processes, at) {
                Some(incarnation) => self.event(Event::Retire { incarnation }),
                None => Ok(()),
            },
            Op::GiveBack { at, weights } => match pick(&self.processes, at) {
                Some(incarnation) => self.event(Event::GiveBack { incarnation, weights }),
                None => Ok(()),
            },
            Op::Pin { at, pinned } => match pick(&self.processes, at) {
                Some(incarnation) => self.event(Event::Pin { incarnation, pinned }),
                None => Ok(()),
            },
            Op::Hold { millis } => self.event(Event::Hold { time: millis.map(Duration::from_millis) }),
            Op::Unhold => self.event(Event::Unhold),
            Op::Upcoming { titles, needs } => {
                let stage = |title: usize| Upcoming {
                    device: DeviceId::cpu(),
                    job: "queued".into(),
                    holder: format!("stage {title}"),
                    needs,
                };
                self.event(Event::Upcoming { stages: titles.map(stage).into() })
            }
            Op::Shares { parts } => {
                let weights = TENANTS.iter().zip(parts).map(|(tenant, parts)| ((*tenant).into(), parts)).collect();
                self.event(Event::Shares { weights })
            }
            Op::BlockTime { at, millis } => match pick(&self.processes, at) {
                Some(incarnation) => self.event(Event::BlockTime { incarnation, time: Duration::from_millis(millis) }),
                None => Ok(()),
            },
            Op::Offer => match self.computing.take() {
                Some(id) => {
                    self.tokens.push(id);
                    self.event(Event::TokenOffered { id })
                }
                None => Ok(()),
            },
            Op::Token => {
                let id = RequestId(self.number());
                self.tokens.push(id);
                self.event(Event::TokenRequest { id, job: "j".into() })
            }
            Op::TokenEnd { waiting } => match if waiting { self.tokens.pop() } else { self.computing.take() } {
                Some(id) => self.event(Event::TokenEnded { id }),
                None => Ok(()),
            },
            Op::Capacity { bytes } => self.event(Event::Capacity { bytes }),
            Op::FreeOutput => match self.outputs.pop() {
                Some(bytes) => {
                    self.pool.give_back(bytes);
                    self.event(Event::Tick)
                }
                None => Ok(()),
            },
            Op::Pass { millis } => self.pass(Duration::from_millis(millis)),
        }
    }

    fn living(&self, at: usize, wanted: impl Fn(&Process) -> bool) -> Option<Incarnation> {
        let living: Vec<_> = self.processes.iter().filter(|(_, p)| !p.dead && wanted(p)).map(|(at, _)| *at).collect();
        living.get(at % living.len().max(1)).copied()
    }

    fn held_by(&self, incarnation: Incarnation) -> u64 {
        self.processes.get(&incarnation).map_or(0, |process| process.held.values().map(|(_, bytes)| bytes).sum())
    }

    fn release(&mut self, id: RequestId, afterwards: Afterwards) -> Result<(), String> {
        if let Some((_, _, shared_memory)) = self.claims.remove(&id) {
            // Half of it becomes outputs that live on, the rest goes back.
            self.outputs.push(shared_memory / 2);
            self.pool.give_back(shared_memory - shared_memory / 2);
        }
        self.event(Event::Release { id, afterwards })
    }

    fn spawn(&mut self, incarnation: Incarnation) -> Result<(), String> {
        let leases = self.claims.values().find(|claim| claim.0 == incarnation).map(|claim| claim.1.clone());
        self.processes.insert(incarnation, Process::default());
        self.spawned.insert(incarnation);
        self.hold(incarnation, &leases.unwrap_or_default());
        self.event(Event::Spawned { incarnation })
    }

    fn attach(&mut self, incarnation: Incarnation) -> Result<(), String> {
        self.processes.entry(incarnation).or_default().attached = true;
        self.event(Event::Attached { incarnation })
    }

    /// Does the first order, or only says so.
    fn obey(&mut self, incarnation: Incarnation, honest: bool) -> Result<(), String> {
        let process = self.processes.entry(incarnation).or_default();
        match process.orders.remove(0) {
            Order::GiveBack { lease, to } => {
                if honest && let Some((_, bytes)) = process.held.get_mut(&lease) {
                    *bytes = to.min(*bytes);
                }
                self.event(Event::Returned { incarnation, lease, bytes: to })
            }
            Order::Exit => {
                let held: Vec<LeaseId> = process.held.keys().copied().collect();
                if honest {
                    process.held.retain(|_, (purpose, _)| *purpose == Purpose::Context);
                    process.dead = true;
                }
                held.into_iter().try_for_each(|lease| self.event(Event::Returned { incarnation, lease, bytes: 0 }))
            }
        }
    }

    fn reap(&mut self, incarnation: Incarnation) -> Result<(), String> {
        let bytes = self.held_by(incarnation);
        self.processes.remove(&incarnation);
        self.condemned.remove(&incarnation);
        if !self.reaping_proves {
            self.ghosts.insert(incarnation, bytes);
        }
        self.event(Event::Reaped { incarnation })
    }

    fn measure(&mut self, incarnation: Incarnation) -> Result<(), String> {
        let bytes = match (self.processes.contains_key(&incarnation), self.ghosts.get(&incarnation)) {
            (true, _) => Some(self.held_by(incarnation)),
            (false, ghost) => ghost.copied(),
        };
        self.event(Event::Measured { incarnation, bytes })
    }

    /// Time passes: the ledger is woken when it asked for it, and processes that do not hang pulse.
    fn pass(&mut self, time: Duration) -> Result<(), String> {
        let end = self.now + time;
        let mut vain = 0;
        loop {
            let pulse = self.now + Duration::from_secs(2);
            let wake = self.machine.next_wake().unwrap_or(end).max(self.now);
            let next = wake.min(pulse).min(end);
            vain = if next == self.now { vain + 1 } else { 0 };
            if vain > 50 {
                return Err(format!("the ledger wants to be woken at {wake:?} again and again"));
            }
            self.now = next;
            let beating: Vec<Incarnation> =
                self.processes.iter().filter(|(_, p)| p.attached && !p.hung && !p.dead).map(|(at, _)| *at).collect();
            for incarnation in beating {
                let bytes = self.held_by(incarnation);
                self.event(Event::Pulse { incarnation, bytes })?;
            }
            self.event(Event::Tick)?;
            if self.now >= end && self.machine.next_wake().is_none_or(|wake| wake > end) {
                return Ok(());
            }
        }
    }

    /// Everybody behaves: tasks end, orders are followed, the dead are reaped. Then every request must be answered, and when
    /// all processes have gone, every byte is free.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        self.event(Event::Unhold)?;
        for round in 0..400 {
            // Capacity is read often, and grows to the least that was read while it lasted.
            self.event(Event::Capacity { bytes: WORLD })?;
            for id in self.claims.keys().copied().collect::<Vec<_>>() {
                self.release(id, Afterwards::Keep)?;
            }
            while let Some(bytes) = self.outputs.pop() {
                self.pool.give_back(bytes);
            }
            self.behave()?;
            self.pass(Duration::from_millis(500))?;
            if self.waiting.is_empty() && self.claims.is_empty() && round > 6 {
                return self.finish();
            }
        }
        Err(format!("requests are never answered: {:?}\n{}", self.waiting, self.machine.describe(self.now)))
    }

    fn behave(&mut self) -> Result<(), String> {
        for incarnation in self.processes.keys().copied().collect::<Vec<_>>() {
            let condemned = self.condemned.contains(&incarnation);
            let Some(process) = self.processes.get_mut(&incarnation) else { continue };
            process.hung = false;
            if process.dead || condemned {
                self.reap(incarnation)?;
                continue;
            }
            if !process.attached {
                self.attach(incarnation)?;
            }
            while self.processes.get(&incarnation).is_some_and(|p| !p.orders.is_empty() && !p.dead) {
                self.obey(incarnation, true)?;
            }
        }
        // Those who lied have lost what they hid by now.
        for (incarnation, lease, bytes) in self.machine.remains() {
            if let Some(held) = self.processes.get_mut(&incarnation).and_then(|p| p.held.get_mut(&lease)) {
                held.1 = bytes.min(held.1);
            }
        }
        self.ghosts.clear();
        while let Some(incarnation) = self.measures.pop() {
            self.measure(incarnation)?;
        }
        while let Some(id) = self.computing.take() {
            self.event(Event::TokenEnded { id })?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        for _ in 0..40 {
            for incarnation in self.processes.keys().copied().collect::<Vec<_>>() {
                self.event(Event::Retire { incarnation })?;
            }
            self.behave()?;
            self.pass(Duration::from_millis(500))?;
            if self.processes.is_empty() && self.tokens.is_empty() && self.machine.is_clean(self.now).is_ok() {
                break;
            }
        }
        if !self.tokens.is_empty() {
            return Err(format!("requests for the token are never answered: {:?}", self.tokens));
        }
        if self.machine.charged() != 0 || self.pool.used() != 0 || !self.processes.is_empty() {
            let (charged, shared) = (self.machine.charged(), self.pool.used());
            let state = self.machine.describe(self.now);
            return Err(format!("{charged} bytes and {shared} of shared memory are left when all is over\n{state}"));
        }
        self.machine.is_clean(self.now)
    }
}

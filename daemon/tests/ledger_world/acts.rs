//! What each operation does to the world, and what the ledger hears of it: processes start, obey, lie, hang, die and are reaped, and
//! time passes.

use std::collections::BTreeMap;
use std::time::Duration;

use sdd::ids::DeviceId;
use sdd::residency::{Afterwards, Event, Incarnation, LeaseId, Purpose, RequestId, Upcoming};

use super::{Machine, Op, Order, Process, World};
use crate::ledger_support::vector;

const TENANTS: [&str; 3] = ["a", "b", "c"];

fn pick<K: Copy, V>(map: &BTreeMap<K, V>, at: usize) -> Option<K> {
    (!map.is_empty()).then(|| *map.keys().nth(at % map.len()).expect("within the length"))
}

impl<M: Machine> World<M> {
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

    pub(super) fn release(&mut self, id: RequestId, afterwards: Afterwards) -> Result<(), String> {
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

    pub(super) fn attach(&mut self, incarnation: Incarnation) -> Result<(), String> {
        self.processes.entry(incarnation).or_default().attached = true;
        self.event(Event::Attached { incarnation })
    }

    /// Does the first order, or only says so.
    pub(super) fn obey(&mut self, incarnation: Incarnation, honest: bool) -> Result<(), String> {
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

    pub(super) fn reap(&mut self, incarnation: Incarnation) -> Result<(), String> {
        let bytes = self.held_by(incarnation);
        self.processes.remove(&incarnation);
        self.condemned.remove(&incarnation);
        if !self.reaping_proves {
            self.ghosts.insert(incarnation, bytes);
        }
        self.event(Event::Reaped { incarnation })
    }

    pub(super) fn measure(&mut self, incarnation: Incarnation) -> Result<(), String> {
        let bytes = match (self.processes.contains_key(&incarnation), self.ghosts.get(&incarnation)) {
            (true, _) => Some(self.held_by(incarnation)),
            (false, ghost) => ghost.copied(),
        };
        self.event(Event::Measured { incarnation, bytes })
    }

    /// Time passes: the ledger is woken when it asked for it, and processes that do not hang pulse.
    pub(super) fn pass(&mut self, time: Duration) -> Result<(), String> {
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
}

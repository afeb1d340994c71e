//! One action of the search: what it does to the ledger and to what the workers really hold.

use std::sync::Arc;
use std::time::Duration;

use sd_proto::v1;
use sdd::arena::SharedPool;
use sdd::residency::{Afterwards, Effect, Event, GrantedLease, Incarnation, LeaseId};

use super::{
    Action, DEVICE, Ghost, Mutant, Order, PAST, PLACES, PURPOSES, Place, Process, SHARED, SIZES, State, UNIT,
    incarnation, place, purpose, request, vector,
};

/// One action that is being done.
pub(super) struct Turn {
    pub(super) state: State,
    pub(super) mutant: Mutant,
    pub(super) now: Duration,
    /// Ledgers that are no longer in their normal form.
    pub(super) touched: [bool; 2],
}

impl Turn {
    pub(super) fn normal(mut self) -> State {
        for device in 0..2 {
            if self.touched[device] {
                let ledger = Arc::unwrap_or_clone(self.state.ledgers[device].clone());
                self.state.ledgers[device] = Arc::new(ledger.normal(self.now, PAST));
            }
        }
        self.state
    }

    fn place(&mut self, at: usize) -> &mut Place {
        Arc::make_mut(&mut self.state.places[at])
    }

    fn life(&self, at: usize) -> Incarnation {
        incarnation(at, self.state.places[at].lives)
    }

    fn process(&mut self, at: usize) -> Option<&mut Process> {
        self.place(at).process.as_mut()
    }

    /// What is really held on a device, and promised to processes that are not started.
    fn held(&self, device: usize) -> u64 {
        let of = |place: &Arc<Place>| {
            let process = place.process.as_ref().map_or(0, |process| process.held.iter().sum());
            let ghosts: u64 = place.ghosts.iter().map(|ghost| ghost.bytes).sum();
            process + place.promised.iter().sum::<u64>() + ghosts
        };
        (0..PLACES).filter(|at| DEVICE[*at] == device).map(|at| of(&self.state.places[at])).sum()
    }

    pub(super) fn act(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Request { at } => {
                let place = self.place(at);
                if place.lives == 0 || place.over {
                    place.lives += 1;
                    place.over = false;
                }
                place.requests += 1;
                place.waiting = true;
                let id = request(at, place.requests);
                let vector = vector(at, self.life(at));
                self.event(DEVICE[at], Event::Request { id, vector })
            }
            Action::Withdraw { at } => {
                self.place(at).waiting = false;
                let id = request(at, self.state.places[at].requests);
                self.event(DEVICE[at], Event::Withdraw { id })
            }
            Action::Release { at, afterwards } => {
                let place = self.place(at);
                place.claimed = false;
                // Never started: its life ends with its claim.
                place.over |= place.process.is_none();
                place.promised = [0; 3];
                let id = request(at, self.state.places[at].requests);
                self.state.shared -= 1;
                self.event(DEVICE[at], Event::Release { id, afterwards })?;
                // What became free may be waited for on the other device.
                self.event(1 - DEVICE[at], Event::Tick)
            }
            Action::Spawn { at } => {
                let place = self.place(at);
                let held = std::mem::take(&mut place.promised);
                place.process = Some(Process { held, ..Process::default() });
                self.event(DEVICE[at], Event::Spawned { incarnation: self.life(at) })
            }
            Action::Attach { at } => {
                self.process(at).expect("a process").attached = true;
                self.event(DEVICE[at], Event::Attached { incarnation: self.life(at) })
            }
            Action::Obey { at } => self.obey(at, true),
            Action::Lie { at } => {
                self.state.faults += 1;
                self.obey(at, false)
            }
            Action::Hang { at } => {
                self.state.faults += 1;
                self.process(at).expect("a process").hung = true;
                Ok(())
            }
            Action::Crash { at } => {
                self.state.faults += 1;
                self.process(at).expect("a process").dead = true;
                Ok(())
            }
            Action::Lose { at } => {
                self.state.faults += 1;
                self.process(at).expect("a process").dead = true;
                self.event(DEVICE[at], Event::Lost { incarnation: self.life(at) })
            }
            Action::Die { at } => {
                self.process(at).expect("a process").dead = true;
                Ok(())
            }
            Action::Reap { at } => {
                let place = self.place(at);
                let process = place.process.take().expect("a process");
                (place.over, place.measure) = (true, false);
                if DEVICE[at] == 1 {
                    let (life, bytes) = (place.lives, process.held.iter().sum());
                    place.ghosts.push(Ghost { life, bytes, measure: false });
                }
                self.event(DEVICE[at], Event::Reaped { incarnation: self.life(at) })
            }
            Action::Fade { at, ghost } => {
                self.place(at).ghosts[ghost].bytes = 0;
                Ok(())
            }
            Action::Answer { at } => {
                let place = self.place(at);
                place.measure = false;
                let bytes = place.process.as_ref().map(|process| process.held.iter().sum());
                self.event(DEVICE[at], Event::Measured { incarnation: self.life(at), bytes })
            }
            Action::AnswerOfGhost { at, ghost } => {
                let of = self.place(at).ghosts[ghost].clone();
                let bytes = (of.bytes > 0).then_some(of.bytes);
                match bytes {
                    Some(_) => self.place(at).ghosts[ghost].measure = false,
                    None => drop(self.place(at).ghosts.remove(ghost)),
                }
                self.event(DEVICE[at], Event::Measured { incarnation: incarnation(at, of.life), bytes })
            }
            Action::Park { at } => {
                self.event(DEVICE[at], Event::GiveBack { incarnation: self.life(at), weights: true })
            }
            Action::Retire { at } => self.event(DEVICE[at], Event::Retire { incarnation: self.life(at) }),
            Action::Capacity { device, bytes } => {
                self.state.faults += u8::from(bytes < SIZES[device]);
                self.state.capacity[device] = bytes;
                if self.mutant == Mutant::GrantsBelowCapacity {
                    return Ok(());
                }
                self.event(device, Event::Capacity { bytes })
            }
            Action::Pass => {
                self.now += UNIT;
                for (at, device) in DEVICE.into_iter().enumerate() {
                    let process = self.state.places[at].process.as_ref();
                    if process.is_some_and(|process| process.attached && !process.hung && !process.dead) {
                        let bytes = process.map_or(0, |process| process.held.iter().sum());
                        self.event(device, Event::Pulse { incarnation: self.life(at), bytes })?;
                    }
                }
                for (device, bytes) in SIZES.into_iter().enumerate() {
                    if self.state.capacity[device] == bytes && self.mutant != Mutant::GrantsBelowCapacity {
                        self.event(device, Event::Capacity { bytes })?;
                    }
                    self.event(device, Event::Tick)?;
                }
                Ok(())
            }
        }
    }

    fn obey(&mut self, at: usize, honest: bool) -> Result<(), String> {
        let incarnation = self.life(at);
        let process = self.process(at).expect("a process");
        match process.orders.remove(0) {
            Order::GiveBack { purpose, to } => {
                if honest {
                    process.held[purpose] = process.held[purpose].min(to);
                }
                self.say_returned(at, incarnation, purpose, to)
            }
            Order::Exit => {
                if honest {
                    process.held = [process.held[0], 0, 0];
                    process.dead = true;
                }
                (0..3).try_for_each(|purpose| self.say_returned(at, incarnation, purpose, 0))
            }
        }
    }

    fn say_returned(&mut self, at: usize, incarnation: Incarnation, of: usize, bytes: u64) -> Result<(), String> {
        match self.lease(DEVICE[at], incarnation, of) {
            Some(lease) => self.event(DEVICE[at], Event::Returned { incarnation, lease, bytes }),
            None => Ok(()),
        }
    }

    fn lease(&self, device: usize, incarnation: Incarnation, of: usize) -> Option<LeaseId> {
        let leases = self.state.ledgers[device].snapshot("", 0, self.now).leases;
        leases.iter().find(|l| l.incarnation == incarnation && l.purpose == PURPOSES[of]).map(|lease| lease.id)
    }

    /// One event of one ledger, its effects, and what must hold afterwards.
    fn event(&mut self, device: usize, event: Event) -> Result<(), String> {
        let before = self.held(device);
        self.step(device, event.clone())?;
        let beyond = match (self.mutant, &event) {
            (Mutant::WordProves, Event::Returned { incarnation, .. }) => {
                Some(Event::Measured { incarnation: *incarnation, bytes: Some(0) })
            }
            (Mutant::LossProves, Event::Lost { incarnation }) => Some(Event::Reaped { incarnation: *incarnation }),
            _ => None,
        };
        if let Some(beyond) = beyond {
            self.step(device, beyond)?;
        }
        let held = self.held(device);
        // A capacity that shrinks below what is held breaks nothing; a grant then would.
        if held > before && held > self.state.capacity[device] {
            return Err(format!("{held} bytes are really held of {} after {event:?}", self.state.capacity[device]));
        }
        Ok(())
    }

    fn step(&mut self, device: usize, event: Event) -> Result<(), String> {
        self.touched[device] = true;
        let mut pool = SharedPool::new(SHARED);
        assert!(pool.take(self.state.shared), "no more is taken than there is");
        let effects = Arc::make_mut(&mut self.state.ledgers[device]).step(event, self.now, &mut pool);
        self.state.shared = pool.used();
        let names: Vec<(LeaseId, usize)> = if effects.iter().any(|e| matches!(e, Effect::Revise { .. })) {
            let leases = self.state.ledgers[device].snapshot("", 0, self.now).leases;
            leases.iter().map(|lease| (lease.id, purpose(lease.purpose))).collect()
        } else {
            Vec::new()
        };
        effects.into_iter().try_for_each(|effect| self.take_effect(device, effect, &names))
    }

    fn take_effect(&mut self, device: usize, effect: Effect, names: &[(LeaseId, usize)]) -> Result<(), String> {
        match effect {
            Effect::Granted { incarnation, leases, .. } => {
                let (at, _) = place(incarnation);
                let place = self.place(at);
                if !std::mem::take(&mut place.waiting) || incarnation != self.life(at) {
                    return Err(format!("{incarnation} was granted what nobody waits for"));
                }
                self.place(at).claimed = true;
                leases.iter().for_each(|lease| self.hold(at, lease));
            }
            Effect::Refused { id, refusal } => {
                let at = (id.0 / 10 - 1) as usize;
                let place = self.place(at);
                if !std::mem::take(&mut place.waiting) {
                    return Err(format!("{id:?} was refused ({refusal}) and did not wait"));
                }
                // Its process goes or is gone: the next request is for another one.
                place.over |= place.process.is_none();
            }
            Effect::Grant { incarnation, lease, .. } => {
                let (at, life) = place(incarnation);
                if lease.bytes > 0 && life == self.state.places[at].lives {
                    self.hold(at, &lease);
                }
            }
            Effect::Revise { incarnation, lease, to, .. } => {
                let of = names.iter().find(|(id, _)| *id == lease).map(|(_, purpose)| *purpose);
                let forgets = self.mutant == Mutant::ForgetsRevisions;
                if let Some(purpose) = of.filter(|_| !forgets) {
                    self.order(incarnation, Order::GiveBack { purpose, to });
                }
                if forgets && let Some(lease) = of {
                    // It believes that it is done.
                    let (at, _) = place(incarnation);
                    self.say_returned(at, incarnation, lease, to)?;
                    self.step(device, Event::Measured { incarnation, bytes: Some(0) })?;
                }
            }
            Effect::Retire { incarnation } => self.order(incarnation, Order::Exit),
            Effect::Kill { incarnation, .. } => {
                let (at, life) = place(incarnation);
                if life == self.state.places[at].lives
                    && let Some(process) = self.process(at)
                {
                    process.condemned = true;
                }
                if self.mutant == Mutant::KillProves {
                    self.step(device, Event::Reaped { incarnation })?;
                }
            }
            Effect::Measure { incarnation } => {
                let (at, life) = place(incarnation);
                let place = self.place(at);
                if let Some(ghost) = place.ghosts.iter_mut().find(|ghost| ghost.life == life) {
                    ghost.measure = true;
                } else if life == place.lives && place.process.is_some() {
                    place.measure = true;
                }
            }
            Effect::Proven { .. } | Effect::TokenGranted { .. } | Effect::Decided(_) => {}
        }
        Ok(())
    }

    fn hold(&mut self, at: usize, lease: &GrantedLease) {
        let of = purpose(lease.purpose);
        let place = self.place(at);
        match &mut place.process {
            Some(process) if !process.dead => process.held[of] = process.held[of].max(lease.bytes),
            Some(_) => {}
            None if !place.over => place.promised[of] = place.promised[of].max(lease.bytes),
            None => {}
        }
    }

    fn order(&mut self, incarnation: Incarnation, order: Order) {
        let (at, life) = place(incarnation);
        if life == self.state.places[at].lives
            && let Some(process) = self.process(at)
        {
            process.orders.push(order);
        }
    }

    /// What a place does when everybody behaves: its task ends, its orders are followed, the dead are reaped.
    pub(super) fn behave(&mut self, at: usize, leave: bool) -> Result<(), String> {
        if self.state.places[at].claimed {
            self.act(Action::Release { at, afterwards: Afterwards::Keep })?;
        }
        if self.process(at).is_some_and(|process| process.dead || process.condemned) {
            self.act(Action::Reap { at })?;
        }
        if let Some(process) = self.process(at) {
            process.hung = false;
            if !process.attached {
                self.act(Action::Attach { at })?;
            }
        }
        while self.process(at).is_some_and(|process| !process.orders.is_empty() && !process.dead) {
            self.obey(at, true)?;
        }
        self.come_clean(at);
        self.place(at).ghosts.iter_mut().for_each(|ghost| ghost.bytes = 0);
        while let Some(ghost) = self.state.places[at].ghosts.iter().position(|ghost| ghost.measure) {
            self.act(Action::AnswerOfGhost { at, ghost })?;
        }
        if self.state.places[at].measure {
            self.act(Action::Answer { at })?;
        }
        if leave && self.process(at).is_some_and(|process| !process.dead) {
            self.act(Action::Retire { at })?;
        }
        Ok(())
    }

    /// A process that lied has lost what it hid by now.
    fn come_clean(&mut self, at: usize) {
        let (device, incarnation) = (DEVICE[at], self.life(at));
        let leases = self.state.ledgers[device].snapshot("", 0, self.now).leases;
        let Some(process) = self.process(at) else { return };
        for (held, purpose) in process.held.iter_mut().zip(PURPOSES) {
            let lease = leases.iter().find(|l| l.incarnation == incarnation && l.purpose == purpose);
            let said = lease.is_none_or(|lease| lease.state == v1::LeaseState::Unproven);
            if said {
                *held = 0;
            }
        }
    }
}

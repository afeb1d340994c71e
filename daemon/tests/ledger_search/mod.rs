//! A state of the search: two ledgers, three places for workers, and what the workers really hold.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sd_proto::v1;
use sdd::arena::SharedPool;
use sdd::ids::{DeviceId, JobId, Tenant};
use sdd::residency::{
    Afterwards, Effect, Event, GrantedLease, Incarnation, LeaseId, LeasePart, LeaseVector, Ledger, Purpose, RequestId,
    Rules,
};

/// Time passes in units: every deadline of the search is a number of them.
pub(crate) const UNIT: Duration = Duration::from_millis(320);
/// What is longer ago makes no difference to any rule.
const PAST: Duration = Duration::from_millis(320 * 6);
/// Bytes of each device, and of shared memory.
const SIZES: [u64; 2] = [10, 7];
const SHARED: u64 = 2;
/// Places for workers, and where each works: two share the first device.
const PLACES: usize = 3;
const DEVICE: [usize; PLACES] = [0, 0, 1];
/// What a worker asks for: context, weights at least and at most, working set.
const NEEDS: [(u64, u64, u64, u64); PLACES] = [(1, 3, 6, 2), (1, 4, 4, 3), (1, 3, 5, 2)];
/// Requests of one place on one path, and lives of its worker.
const REQUESTS: u8 = 2;
const LIVES: u8 = 2;

const PURPOSES: [Purpose; 3] = [Purpose::Context, Purpose::Weights, Purpose::WorkingSet];

/// How a ledger is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// It is not.
    None,
    /// What a process says counts as measured: grants before proof.
    WordProves,
    /// A kill counts as the end of the process.
    KillProves,
    /// A broken link does: a dead holder's leases are forgotten.
    LossProves,
    /// It has more to give than there is.
    Oversells,
    /// It does not hear that the device has become smaller.
    GrantsBelowCapacity,
    /// It asks for bytes and never tells the process.
    ForgetsRevisions,
}

/// What can happen; `at` is a place for a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Request {
        at: usize,
    },
    Withdraw {
        at: usize,
    },
    Release {
        at: usize,
        afterwards: Afterwards,
    },
    Spawn {
        at: usize,
    },
    Attach {
        at: usize,
    },
    /// Does what it was told first.
    Obey {
        at: usize,
    },
    /// Only says so.
    Lie {
        at: usize,
    },
    /// Stops pulsing.
    Hang {
        at: usize,
    },
    /// Dies unnoticed; or its link breaks.
    Crash {
        at: usize,
    },
    Lose {
        at: usize,
    },
    /// A kill takes effect.
    Die {
        at: usize,
    },
    Reap {
        at: usize,
    },
    /// The device no longer shows a reaped process.
    Fade {
        at: usize,
        ghost: usize,
    },
    /// A measurement is answered at last.
    Answer {
        at: usize,
    },
    AnswerOfGhost {
        at: usize,
        ghost: usize,
    },
    Park {
        at: usize,
    },
    Retire {
        at: usize,
    },
    Capacity {
        device: usize,
        bytes: u64,
    },
    Pass,
}

/// An order that a process has not followed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Order {
    GiveBack { purpose: usize, to: u64 },
    Exit,
}

/// A process as it really is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Process {
    /// By purpose; it takes all that it is granted at once.
    held: [u64; 3],
    attached: bool,
    hung: bool,
    dead: bool,
    condemned: bool,
    orders: Vec<Order>,
}

/// A reaped process on a device that must be asked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Ghost {
    life: u8,
    bytes: u64,
    measure: bool,
}

/// One place: at most one worker at a time, and one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Place {
    /// Lives begun.
    lives: u8,
    requests: u8,
    waiting: bool,
    /// Granted, and not released.
    claimed: bool,
    /// Promised to a process that was not started yet.
    promised: [u64; 3],
    process: Option<Process>,
    /// A measurement is asked for.
    measure: bool,
    /// Reaped processes whose bytes the device still shows, or was not asked for yet.
    ghosts: Vec<Ghost>,
    /// This life is over: the next request is for another one.
    over: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    ledgers: [Arc<Ledger>; 2],
    places: [Arc<Place>; PLACES],
    /// Bytes that each device has for leases now.
    capacity: [u64; 2],
    shared: u64,
    faults: u8,
}

/// Ledgers that many states have in common, kept once.
#[derive(Default)]
pub(crate) struct Shared {
    ledgers: HashSet<Arc<Ledger>>,
    places: HashSet<Arc<Place>>,
}

fn shared<T: Eq + std::hash::Hash>(known: &mut HashSet<Arc<T>>, one: Arc<T>) -> Arc<T> {
    match known.get(&one) {
        Some(known) => known.clone(),
        None => {
            known.insert(one.clone());
            one
        }
    }
}

fn rules(device: usize) -> Rules {
    Rules {
        term: 3 * UNIT,
        start_term: 3 * UNIT,
        revise_time: UNIT,
        bytes_per_second: u64::MAX,
        retire_time: UNIT,
        proof_time: 3 * UNIT,
        patience: UNIT,
        tolerance: 0,
        // One device of each kind.
        reaping_proves: device == 0,
        overtake_limit: 2,
        overtake_time: 4 * UNIT,
        growth_time: UNIT,
        enforce: true,
        weights_move: true,
    }
}

fn incarnation(at: usize, life: u8) -> Incarnation {
    10 * (at as u64 + 1) + u64::from(life)
}

fn place(incarnation: Incarnation) -> (usize, u8) {
    ((incarnation / 10 - 1) as usize, (incarnation % 10) as u8)
}

fn request(at: usize, number: u8) -> RequestId {
    RequestId(10 * (at as u64 + 1) + u64::from(number))
}

fn purpose(purpose: Purpose) -> usize {
    match purpose {
        Purpose::Context => 0,
        Purpose::Weights => 1,
        Purpose::WorkingSet => 2,
    }
}

impl State {
    pub(crate) fn first(mutant: Mutant) -> Self {
        let more = if mutant == Mutant::Oversells { 2 } else { 0 };
        let ledger = |device: usize| {
            Arc::new(Ledger::new(DeviceId::from(["a", "b"][device]), SIZES[device] + more, rules(device), 1))
        };
        Self { ledgers: [ledger(0), ledger(1)], places: Default::default(), capacity: SIZES, shared: 0, faults: 0 }
    }

    /// The same state, in the memory of earlier ones.
    pub(crate) fn sharing(self, with: &mut Shared) -> Self {
        let ledgers = self.ledgers.map(|ledger| shared(&mut with.ledgers, ledger));
        let places = self.places.map(|place| shared(&mut with.places, place));
        Self { ledgers, places, ..self }
    }

    /// All that can happen now.
    pub(crate) fn actions(&self, faults: u8) -> Vec<Action> {
        let mut actions = vec![Action::Pass];
        for (at, place) in self.places.iter().enumerate() {
            let idle = !place.waiting && !place.claimed;
            if idle && place.requests < REQUESTS && (!place.over || place.lives < LIVES) {
                actions.push(Action::Request { at });
            }
            if place.waiting {
                actions.push(Action::Withdraw { at });
            }
            if place.claimed {
                for afterwards in [Afterwards::Keep, Afterwards::Park] {
                    actions.push(Action::Release { at, afterwards });
                }
            }
            if place.claimed && place.process.is_none() && !place.over {
                actions.push(Action::Spawn { at });
            }
            if place.measure {
                actions.push(Action::Answer { at });
            }
            for (ghost, of) in place.ghosts.iter().enumerate() {
                if of.bytes > 0 {
                    actions.push(Action::Fade { at, ghost });
                }
                if of.measure {
                    actions.push(Action::AnswerOfGhost { at, ghost });
                }
            }
            let Some(process) = &place.process else { continue };
            if process.dead {
                actions.push(Action::Reap { at });
                continue;
            }
            if process.condemned {
                actions.push(Action::Die { at });
            }
            if !process.attached {
                actions.push(Action::Attach { at });
            } else if !process.orders.is_empty() {
                actions.push(Action::Obey { at });
            }
            if idle && process.attached && process.orders.is_empty() {
                actions.extend([Action::Park { at }, Action::Retire { at }]);
            }
            if self.faults < faults {
                actions.extend([Action::Crash { at }, Action::Lose { at }]);
                if !process.hung {
                    actions.push(Action::Hang { at });
                }
                if process.attached && !process.orders.is_empty() {
                    actions.push(Action::Lie { at });
                }
            }
        }
        if self.faults < faults {
            actions.push(Action::Capacity { device: 0, bytes: SIZES[0] - 3 });
        }
        if self.capacity[0] < SIZES[0] {
            actions.push(Action::Capacity { device: 0, bytes: SIZES[0] });
        }
        actions
    }

    /// The state after an action. `Err`: something is really wrong.
    pub(crate) fn after(&self, action: Action, mutant: Mutant) -> Result<Self, String> {
        let mut turn = Turn { state: self.clone(), mutant, now: Ledger::NORMAL, touched: [false; 2] };
        turn.act(action)?;
        Ok(turn.normal())
    }

    /// From here on everybody behaves: every request is answered, and when all have left, nothing is charged.
    pub(crate) fn settles(&self, mutant: Mutant) -> Result<(), String> {
        let mut turn = Turn { state: self.clone(), mutant, now: Ledger::NORMAL, touched: [true; 2] };
        for round in 0..40 {
            for at in 0..PLACES {
                turn.behave(at, round >= 20)?;
            }
            for (device, bytes) in SIZES.into_iter().enumerate() {
                turn.act(Action::Capacity { device, bytes })?;
            }
            turn.act(Action::Pass)?;
        }
        let left = |(at, place): (usize, &Arc<Place>)| {
            let clean = !place.waiting && !place.claimed && place.process.is_none();
            (!clean).then(|| format!("place {at} was never answered or never left"))
        };
        if let Some(left) = turn.state.places.iter().enumerate().find_map(left) {
            return Err(format!("{left}: {:#?}", turn.state));
        }
        let charged: Vec<u64> = turn.state.ledgers.iter().map(|ledger| ledger.charged()).collect();
        if charged != [0, 0] || turn.state.shared != 0 {
            return Err(format!("{charged:?} are charged, not answered by any process: {:#?}", turn.state));
        }
        Ok(())
    }
}

/// One action that is being done.
struct Turn {
    state: State,
    mutant: Mutant,
    now: Duration,
    /// Ledgers that are no longer in their normal form.
    touched: [bool; 2],
}

impl Turn {
    fn normal(mut self) -> State {
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

    fn act(&mut self, action: Action) -> Result<(), String> {
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
    fn behave(&mut self, at: usize, leave: bool) -> Result<(), String> {
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
        for (of, purpose) in PURPOSES.into_iter().enumerate() {
            let lease = leases.iter().find(|l| l.incarnation == incarnation && l.purpose == purpose);
            let said = lease.is_none_or(|lease| lease.state == v1::LeaseState::Unproven);
            if said {
                process.held[of] = 0;
            }
        }
    }
}

fn vector(at: usize, incarnation: Incarnation) -> LeaseVector {
    let (context, weights, want, working_set) = NEEDS[at];
    LeaseVector {
        device: DeviceId::from(["a", "b"][DEVICE[at]]),
        incarnation,
        tenant: Tenant::from("t"),
        job: JobId::from(["x", "y", "z"][at]),
        holder: String::new(),
        parts: vec![
            LeasePart::exactly(Purpose::Context, context),
            LeasePart { purpose: Purpose::Weights, min: weights, want },
            LeasePart::exactly(Purpose::WorkingSet, working_set),
        ],
        shared_memory: 1,
    }
}

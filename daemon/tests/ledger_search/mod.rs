//! A state of the search: two ledgers, three places for workers, and what the workers really hold.

mod turn;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sdd::ids::{DeviceId, JobId, Tenant};
use sdd::residency::{Afterwards, Incarnation, LeasePart, LeaseVector, Ledger, Purpose, RequestId, Rules};

use turn::Turn;

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

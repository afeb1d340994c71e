//! The ledger of one device: a pure state machine.
//!
//! [`Ledger::step`] takes an event and the time and returns effects. It does no I/O and has no clock; who calls it carries
//! the effects out and comes back at [`Ledger::next_wake`] with [`Event::Tick`].
//!
//! * Bytes are **charged** from the grant until the release is *proven*: the process is reaped, or the device shows that it
//!   holds no more than what remains of its leases. What a process says proves nothing.
//! * Requests are vectors, granted all or nothing, first come first served. One that lacks bytes may be overtaken by
//!   those that fit, at most [`Rules::overtake_limit`] times or for [`Rules::overtake_time`]; then nothing is granted
//!   behind it. While bytes are being taken back for it, nothing that needs bytes is granted behind it.
//! * Bytes are taken from idle processes only ([`super::policy`] chooses), and from busy ones only what was granted
//!   beyond their floor. Past a deadline the process is killed.
//! * A process keeps its leases when its task ends. The next task of the same process finds them and is granted
//!   without a message being exchanged.

mod decision;
mod ended;
mod giveback;
mod grant;
mod show;
pub(super) mod state;
mod take;
mod token;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub use self::decision::{Decision, DecisionKind};
use self::ended::Ended;
use self::state::{Holder, Lease, LeaseState, Life, Waiter};
use self::token::Token;
use super::handle::Afterwards;
use super::invariants;
use super::lease::{GrantedLease, Incarnation, LeaseId, LeaseKill, LeaseVector, Proof, Purpose, Refusal, RequestId};
use crate::arena::SharedPool;
use crate::clock::Moment;
use crate::ids::{DeviceId, JobId};

/// Deadlines and bounds of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// A process that has not pulsed for so long is taken for dead and killed. The supervisor's own clock is shorter
    /// and knows more; this one holds even if that fails.
    pub term: Duration,
    /// The same until a started process has done its handshake.
    pub start_term: Duration,
    /// Time to give bytes back, before the time that moving them takes.
    pub revise_time: Duration,
    /// Bytes a second at which they move or are freed.
    pub bytes_per_second: u64,
    /// Time to exit after being asked to.
    pub retire_time: Duration,
    /// A release that is not proven for so long makes the device degraded.
    pub proof_time: Duration,
    /// A living process whose release is not proven for so long is not waited for: while it is idle and somebody needs the
    /// bytes, it is retired, for its end is sure to be proven.
    pub patience: Duration,
    /// How much more than its leases a process may hold, by the device's measure.
    pub tolerance: u64,
    /// Whether a reaped process proves that its bytes are free. True where the kernel frees them (CPU device); false where a
    /// driver does, and the device must be asked.
    pub reaping_proves: bool,
    /// How often a request that lacks bytes may be overtaken.
    pub overtake_limit: u32,
    /// How long a request that lacks bytes may be overtaken.
    pub overtake_time: Duration,
    /// Capacity grows only when more has been there for so long.
    pub growth_time: Duration,
    /// Whether a process that holds more than its leases and the tolerance is asked to give it back and then killed. The
    /// overdraft is charged and reported in any case.
    pub enforce: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            term: Duration::from_secs(6),
            start_term: Duration::from_secs(60),
            revise_time: Duration::from_secs(2),
            bytes_per_second: 1 << 30,
            retire_time: Duration::from_secs(3),
            proof_time: Duration::from_secs(10),
            patience: Duration::from_millis(100),
            tolerance: 32 << 20,
            reaping_proves: true,
            overtake_limit: 8,
            overtake_time: Duration::from_secs(30),
            growth_time: Duration::from_secs(2),
            enforce: false,
        }
    }
}

/// What happens to a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A task asks for what it needs.
    Request {
        /// The request.
        id: RequestId,
        /// What it needs.
        vector: LeaseVector,
    },
    /// A request that is not granted yet is no longer wanted.
    Withdraw {
        /// Which.
        id: RequestId,
    },
    /// A granted request's task has ended.
    Release {
        /// Which.
        id: RequestId,
        /// What becomes of the process.
        afterwards: Afterwards,
    },
    /// A process was started.
    Spawned {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process has done its handshake.
    Attached {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process is dead or about to be, and not reaped.
    Lost {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process is reaped.
    Reaped {
        /// Which.
        incarnation: Incarnation,
    },
    /// A process lives, and says what it holds.
    Pulse {
        /// Which.
        incarnation: Incarnation,
        /// Bytes by its own measure.
        bytes: u64,
    },
    /// The device says what a process holds; answers [`Effect::Measure`].
    Measured {
        /// Which.
        incarnation: Incarnation,
        /// Its bytes; `None`: the device shows no such process.
        bytes: Option<u64>,
    },
    /// A process says that it holds no more than `bytes` of a lease.
    Returned {
        /// Which process.
        incarnation: Incarnation,
        /// Which lease.
        lease: LeaseId,
        /// What it keeps.
        bytes: u64,
    },
    /// A process asks for more while it works; answered at once.
    Extend {
        /// Which process.
        incarnation: Incarnation,
        /// Its own number of the request.
        request_id: u64,
        /// What for.
        purpose: Purpose,
        /// Least bytes beyond what it holds.
        min: u64,
        /// Most.
        want: u64,
    },
    /// Somebody wants a process gone as soon as it is idle.
    Retire {
        /// Which.
        incarnation: Incarnation,
    },
    /// A job wants to compute.
    TokenRequest {
        /// The request.
        id: RequestId,
        /// Whose.
        job: JobId,
    },
    /// A job has computed, or no longer wants to.
    TokenEnded {
        /// Which request.
        id: RequestId,
    },
    /// The device has this much for leases now.
    Capacity {
        /// Bytes.
        bytes: u64,
    },
    /// Time has passed, or shared memory has become free.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Answer a request: granted. Its shared memory has been taken from the pool.
    Granted {
        /// Which.
        id: RequestId,
        /// For which process.
        incarnation: Incarnation,
        /// Every lease of the process.
        leases: Vec<GrantedLease>,
        /// How long it waited.
        waited: Duration,
        /// Bytes taken from the pool of shared memory.
        shared_memory: u64,
    },
    /// Answer a request: refused.
    Refused {
        /// Which.
        id: RequestId,
        /// Why.
        refusal: Refusal,
    },
    /// Tell a process what it may hold.
    Grant {
        /// Which.
        incarnation: Incarnation,
        /// The lease as it is now.
        lease: GrantedLease,
        /// The process's own request that this answers; 0: none.
        request_id: u64,
    },
    /// Tell a process to give back.
    Revise {
        /// Which.
        incarnation: Incarnation,
        /// Which lease.
        lease: LeaseId,
        /// What it may keep.
        to: u64,
        /// Within.
        deadline: Duration,
    },
    /// Ask a process to free everything and exit.
    Retire {
        /// Which.
        incarnation: Incarnation,
    },
    /// Kill a process.
    Kill {
        /// Which.
        incarnation: Incarnation,
        /// Why.
        cause: LeaseKill,
    },
    /// A release is proven: so many bytes of a lease are free.
    Proven {
        /// Which process.
        incarnation: Incarnation,
        /// Which lease.
        lease: LeaseId,
        /// Bytes freed.
        bytes: u64,
        /// How.
        proof: Proof,
    },
    /// Measure a process and come back with [`Event::Measured`]. Where it cannot be measured, nothing: the
    /// ledger asks again.
    Measure {
        /// Which.
        incarnation: Incarnation,
    },
    /// Answer a request for the compute token: it is yours.
    TokenGranted {
        /// Which.
        id: RequestId,
    },
    /// Tell people.
    Decided(Decision),
}

/// The ledger of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    pub(super) device: DeviceId,
    pub(super) rules: Rules,
    /// Bytes that leases may ever hold together.
    pub(super) budget: u64,
    /// Bytes that leases may hold together now.
    pub(super) capacity: u64,
    /// More capacity than now, and since when.
    pub(super) growth: Option<(u64, Moment)>,
    pub(super) holders: BTreeMap<Incarnation, Holder>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) waiters: VecDeque<Waiter>,
    pub(super) token: Token,
    pub(super) degraded: Option<String>,
    /// Processes that are gone for ever.
    pub(super) ended: Ended,
    next_lease: u64,
}

/// What a step writes to: its effects, and the pool of shared memory.
pub(super) struct Turn<'a> {
    now: Moment,
    shared: &'a mut SharedPool,
    effects: Vec<Effect>,
}

impl Ledger {
    /// An empty ledger of a device with `budget` bytes. `first_lease` is the number of its first lease: ledgers of
    /// one daemon take disjoint ranges.
    pub fn new(device: DeviceId, budget: u64, rules: Rules, first_lease: u64) -> Self {
        Self {
            device,
            rules,
            budget,
            capacity: budget,
            growth: None,
            holders: BTreeMap::new(),
            leases: BTreeMap::new(),
            waiters: VecDeque::new(),
            token: Token::default(),
            degraded: None,
            ended: Ended::default(),
            next_lease: first_lease,
        }
    }

    /// One step: takes an event at a time that never goes back, returns what is to be done, in order. `shared` is the pool
    /// that vectors' shared memory is taken from.
    ///
    /// # Panics
    /// In debug builds, when an invariant does not hold afterwards: a bug here.
    pub fn step(&mut self, event: Event, now: Moment, shared: &mut SharedPool) -> Vec<Effect> {
        let before = cfg!(debug_assertions).then(|| (self.clone(), event.clone()));
        let mut turn = Turn { now, shared, effects: Vec::new() };
        self.apply(event, &mut turn);
        self.pump(&mut turn);
        let effects = turn.effects;
        if let Some((before, event)) = before {
            let checked =
                invariants::check(self, now).and_then(|()| invariants::check_step(&before, &event, self, &effects));
            if let Err(violation) = checked {
                panic!("ledger of {}: {violation}\nevent: {event:?}\nbefore: {before:#?}", self.device);
            }
        }
        effects
    }

    fn apply(&mut self, event: Event, turn: &mut Turn<'_>) {
        match event {
            Event::Request { id, vector } => self.request(id, vector, turn),
            Event::Withdraw { id } => self.waiters.retain(|waiter| waiter.id != id),
            Event::Release { id, afterwards } => self.release(id, afterwards, turn),
            Event::Spawned { incarnation } => self.spawned(incarnation, turn),
            Event::Attached { incarnation } => self.attached(incarnation, turn),
            Event::Lost { incarnation } => self.lost(incarnation, turn),
            Event::Reaped { incarnation } => self.reaped(incarnation, turn),
            Event::Pulse { incarnation, bytes } => self.pulse(incarnation, bytes, turn),
            Event::Measured { incarnation, bytes } => self.measured(incarnation, bytes, turn),
            Event::Returned { incarnation, lease, bytes } => self.returned(incarnation, lease, bytes, turn),
            Event::Extend { incarnation, request_id, purpose, min, want } => {
                self.extend(incarnation, request_id, purpose, min, want, turn);
            }
            Event::Retire { incarnation } => self.retire_when_idle(incarnation, turn),
            Event::TokenRequest { id, job } => self.token.request(id, job, &mut turn.effects),
            Event::TokenEnded { id } => self.token.ended(id, &mut turn.effects),
            Event::Capacity { bytes } => self.capacity_changed(bytes, turn),
            Event::Tick => {}
        }
        self.expire(turn);
    }

    /// Bytes that are charged: every lease until its release is proven, and overdrafts.
    pub fn charged(&self) -> u64 {
        self.leased() + self.holders.values().map(|holder| holder.overdraft).sum::<u64>()
    }

    /// Bytes of all leases, unproven ones included.
    pub fn leased(&self) -> u64 {
        self.leases.values().map(|lease| lease.bytes).sum()
    }

    /// Bytes that can be granted now.
    pub fn available(&self) -> u64 {
        self.capacity.saturating_sub(self.charged())
    }

    /// Bytes that are on their way back: revoked or unproven.
    pub fn incoming(&self) -> u64 {
        self.leases.values().map(|lease| lease.bytes - lease.remains()).sum::<u64>() + self.ending_overdrafts()
    }

    /// Overdrafts of processes that are ending.
    pub(super) fn ending_overdrafts(&self) -> u64 {
        let ending = |holder: &&Holder| match holder.life {
            Life::Retiring { .. } | Life::Dying { .. } | Life::Reaped { .. } => true,
            Life::Granted | Life::Alive { .. } => false,
        };
        self.holders.values().filter(ending).map(|holder| holder.overdraft).sum()
    }

    /// Whether a process holds leases or a request waits for it.
    pub fn knows(&self, incarnation: Incarnation) -> bool {
        self.holders.contains_key(&incarnation) || self.waiters.iter().any(|w| w.vector.incarnation == incarnation)
    }

    /// When to come back with [`Event::Tick`] at the latest; `None`: not before another event.
    pub fn next_wake(&self) -> Option<Moment> {
        let lives = self.holders.values().flat_map(|holder| {
            let life = match holder.life {
                Life::Granted => None,
                Life::Alive { term_end, .. } => Some(term_end),
                Life::Retiring { deadline } => Some(deadline),
                Life::Dying { since } => self.degrades_at(since),
                Life::Reaped { since, measure } => {
                    Some(self.degrades_at(since).map_or(measure.at, |at| at.min(measure.at)))
                }
            };
            [life, holder.overdraft_until]
        });
        let leases = self.leases.values().map(|lease| match lease.state {
            LeaseState::Granted => None,
            LeaseState::Revoked { deadline, .. } => Some(deadline),
            LeaseState::Unproven { since, measure, .. } => {
                // Bytes of a dead process are proven by its reaping, not by measuring its lease.
                let alive = self.holders.get(&lease.incarnation).is_some_and(Holder::attached);
                let measured = alive.then_some(measure.at);
                self.degrades_at(since).into_iter().chain(measured).min()
            }
        });
        // A request's barrier takes rights away from others and grants none, so no turn is due for it.
        let growth = [self.growth.map(|(_, since)| since + self.rules.growth_time)];
        lives.chain(leases).chain(growth).flatten().min()
    }

    /// When the device will be degraded for something unproven since then; `None` once it is.
    fn degrades_at(&self, since: Moment) -> Option<Moment> {
        self.degraded.is_none().then_some(since + self.rules.proof_time)
    }

    pub(super) fn leases_of(&self, incarnation: Incarnation) -> impl Iterator<Item = &Lease> {
        self.leases.values().filter(move |lease| lease.incarnation == incarnation)
    }

    pub(super) fn lease_for(&self, incarnation: Incarnation, purpose: Purpose) -> Option<&Lease> {
        self.leases_of(incarnation).find(|lease| lease.purpose == purpose)
    }

    fn title(&self, incarnation: Incarnation) -> String {
        self.holders.get(&incarnation).map(|holder| holder.title.clone()).unwrap_or_default()
    }

    fn job_of(&self, incarnation: Incarnation) -> Option<JobId> {
        Some(self.holders.get(&incarnation)?.claim.as_ref()?.job.clone())
    }

    fn decide(
        &self,
        turn: &mut Turn<'_>,
        job: Option<JobId>,
        about: Option<(Incarnation, String)>,
        kind: DecisionKind,
    ) {
        let (incarnation, title) = match about {
            Some((incarnation, title)) => (Some(incarnation), title),
            None => (None, String::new()),
        };
        let decision = Decision { at: turn.now, device: self.device.clone(), job, incarnation, title, kind };
        turn.effects.push(Effect::Decided(decision));
    }
}

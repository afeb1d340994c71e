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
mod event;
mod giveback;
mod grant;
mod infer;
mod lost;
mod normal;
mod operate;
mod rules;
mod share;
mod show;
pub(super) mod state;
mod take;
mod token;
mod upcoming;

use std::collections::{BTreeMap, VecDeque};

pub use self::decision::{Decision, DecisionKind};
use self::ended::Ended;
pub use self::event::{Effect, Event};
use self::operate::Hold;
pub use self::rules::Rules;
use self::share::Shares;
use self::state::{Asked, Holder, Lease, LeaseState, Life, Waiter};
use self::token::Token;
pub use self::upcoming::Upcoming;
use super::invariants;
use super::lease::{Incarnation, LeaseId, Purpose};
use crate::arena::SharedPool;
use crate::clock::Moment;
use crate::ids::{DeviceId, JobId, Tenant};

/// The ledger of one device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
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
    pub(super) shares: Shares,
    /// What queued jobs will need, the next first.
    pub(super) upcoming: Vec<Upcoming>,
    /// Given to other programs.
    pub(super) held: Option<Hold>,
    /// Bytes of the device that were free at the last reading, where that is all it shows.
    pub(super) free: Option<u64>,
    pub(super) degraded: Option<String>,
    /// Why the device is gone, if it is.
    pub(super) lost: Option<String>,
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
            shares: Shares::default(),
            upcoming: Vec::new(),
            held: None,
            free: None,
            degraded: None,
            lost: None,
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
            Event::Seen { incarnation, free } => self.seen(incarnation, free, turn),
            Event::Free { bytes } => self.free_bytes(bytes),
            Event::Returned { incarnation, lease, bytes } => self.returned(incarnation, lease, bytes, turn),
            Event::Extend { incarnation, request_id, purpose, min, want } => {
                self.extend(incarnation, request_id, purpose, min, want, turn);
            }
            Event::Retire { incarnation } => self.ask(incarnation, Asked::Retire, turn),
            Event::GiveBack { incarnation, weights } => {
                self.ask(incarnation, if weights { Asked::Park } else { Asked::WorkingSet }, turn);
            }
            Event::Pin { incarnation, pinned } => self.pin(incarnation, pinned),
            Event::Hold { time } => self.hold(time, turn),
            Event::Unhold => self.unhold(turn),
            Event::Upcoming { stages } => self.upcoming = stages,
            Event::Shares { weights } => self.shares.set(weights),
            Event::BlockTime { incarnation, time } => {
                if let Some(holder) = self.holders.get_mut(&incarnation) {
                    holder.block_time = holder.block_time.max(time);
                }
            }
            Event::TokenRequest { id, job } => {
                let tenant = self.tenant_of(&job);
                self.token.request(id, job, tenant);
            }
            Event::TokenEnded { id } => self.token.ended(id, turn.now, &mut self.shares),
            Event::TokenOffered { id } => self.token.offered(id, turn.now, &mut self.shares, &mut turn.effects),
            Event::Capacity { bytes } => self.capacity_changed(bytes, turn),
            Event::DeviceLost { why } => self.device_lost(why, turn),
            Event::DeviceFound => self.device_found(turn),
            Event::Tick => {}
        }
        self.token.pass(turn.now, &self.shares, self.rules.overtake_limit, &mut turn.effects);
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

    /// Whether a request waits.
    pub fn waits(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Whether nobody holds anything.
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// Whether less may be leased now than by the budget.
    pub fn is_short(&self) -> bool {
        self.capacity < self.budget
    }

    /// What all processes said or were measured last to hold.
    pub fn said(&self) -> u64 {
        self.holders.values().map(|holder| holder.measured).sum()
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
        let held = [self.held.map(|hold| hold.until)];
        lives.chain(leases).chain(growth).chain(held).flatten().min()
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

    /// Whose job this is; nobody's where it has no task here.
    fn tenant_of(&self, job: &JobId) -> Tenant {
        let claims = self.holders.values().filter_map(|holder| holder.claim.as_ref());
        claims.filter(|claim| claim.job == *job).map(|claim| claim.tenant.clone()).next().unwrap_or_else(|| "".into())
    }

    fn decide(
        &self,
        turn: &mut Turn<'_>,
        job: Option<JobId>,
        about: Option<(Incarnation, String)>,
        kind: DecisionKind,
    ) {
        self.decide_about(turn, job, about, None, kind);
    }

    fn decide_about(
        &self,
        turn: &mut Turn<'_>,
        job: Option<JobId>,
        about: Option<(Incarnation, String)>,
        lease: Option<LeaseId>,
        kind: DecisionKind,
    ) {
        let (incarnation, title) = match about {
            Some((incarnation, title)) => (Some(incarnation), title),
            None => (None, String::new()),
        };
        let decision = Decision { at: turn.now, device: self.device.clone(), job, incarnation, title, lease, kind };
        turn.effects.push(Effect::Decided(decision));
    }
}

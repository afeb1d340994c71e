//! Requests: refused up front, granted in order, or waiting.

use std::collections::{BTreeMap, BTreeSet};

use super::super::lease::{
    Bytes, GrantedLease, Incarnation, LeaseId, LeasePart, LeaseVector, Purpose, Refusal, RequestId,
};
use super::state::{Asked, Claim, Holder, Lease, LeaseState, Life, Waiter};
use super::{DecisionKind, Effect, Ledger, Turn};
use crate::clock::Moment;
use crate::ids::{JobId, Tenant};

/// Luxury is handed on in parts of at least one this-many-th of what a task could use.
const LEAST_PART: u64 = 16;

/// What may still be granted behind a request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// Whatever fits.
    Anything,
    /// What needs no bytes: others are on their way back for the one that waits.
    NoBytes,
    /// Nothing: it has been overtaken enough.
    Nothing,
}

impl Ledger {
    pub(super) fn request(&mut self, id: RequestId, vector: LeaseVector, turn: &mut Turn<'_>) {
        if let Some(refusal) = self.refusal(&vector, turn.shared.limit()) {
            return self.refuse(id, &vector, refusal, turn);
        }
        let claims = self.holders.values().filter_map(|holder| holder.claim.as_ref());
        let active = claims.map(|claim| &claim.tenant).chain(self.waiters.iter().map(|waiter| &waiter.vector.tenant));
        let active: BTreeSet<_> = active.cloned().collect();
        if !active.contains(&vector.tenant) {
            self.shares.joins(&vector.tenant, active.iter());
        }
        let (told, blocked_since, overtaken) = (false, None, 0);
        self.waiters.push_back(Waiter { id, vector, since: turn.now, told, blocked_since, overtaken });
    }

    pub(super) fn refuse(&mut self, id: RequestId, vector: &LeaseVector, refusal: Refusal, turn: &mut Turn<'_>) {
        let about = Some((vector.incarnation, vector.holder.clone()));
        self.decide(turn, Some(vector.job.clone()), about, DecisionKind::Refused(refusal.clone()));
        turn.effects.push(Effect::Refused { id, refusal });
    }

    /// Why a request can never be granted.
    fn refusal(&self, vector: &LeaseVector, shared_limit: u64) -> Option<Refusal> {
        let holder = vector.holder.clone();
        if self.ended.contains(vector.incarnation) {
            return Some(Refusal::HolderGone { incarnation: vector.incarnation, holder });
        }
        if let Some(refusal) = self.refusal_of_the_lost(vector) {
            return Some(refusal);
        }
        let malformed = |what: String| Some(Refusal::Malformed { holder: holder.clone(), what });
        let mut named: BTreeMap<Purpose, LeasePart> = BTreeMap::new();
        for part in &vector.parts {
            if part.want < part.min {
                return malformed(format!("{} wants {} and needs {}", part.purpose, part.want, part.min));
            }
            if named.insert(part.purpose, *part).is_some() {
                return malformed(format!("{} stands twice", part.purpose));
            }
        }
        // What the process holds for other purposes stays with it and counts as well.
        let kept = self.leases_of(vector.incarnation).filter(|lease| !named.contains_key(&lease.purpose));
        let mut parts: Vec<(Purpose, u64)> = kept.map(|lease| (lease.purpose, lease.bytes)).collect();
        parts.extend(named.values().map(|part| (part.purpose, part.min)));
        let need = parts.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        if need > self.budget {
            let breakdown: Vec<String> = parts.iter().map(|(p, bytes)| format!("{p} {}", Bytes(*bytes))).collect();
            return Some(Refusal::DoesNotFit {
                device: self.device.clone(),
                holder,
                need,
                limit: self.budget,
                breakdown: breakdown.join(", "),
            });
        }
        let (kept, pinned) = self.pinned_beside(vector);
        if need > self.budget - kept.min(self.budget) {
            let (device, limit, pinned) = (self.device.clone(), self.budget, pinned.join(", "));
            return Some(Refusal::Pinned { device, holder, need, kept, limit, pinned });
        }
        if vector.shared_memory > shared_limit {
            return Some(Refusal::SharedMemory { holder, need: vector.shared_memory, limit: shared_limit });
        }
        None
    }

    /// Bytes that a request needs beyond what its process holds.
    pub(in crate::residency) fn need(&self, vector: &LeaseVector) -> u64 {
        let lacks = |part: &LeasePart| {
            part.min.saturating_sub(self.lease_for(vector.incarnation, part.purpose).map_or(0, |lease| lease.bytes))
        };
        vector.parts.iter().map(lacks).fold(0, u64::saturating_add)
    }

    /// Whether nothing but bytes keeps a process from a new task: it works for none, and no revision is under way.
    pub(in crate::residency) fn ready(&self, incarnation: Incarnation) -> bool {
        self.holders.get(&incarnation).is_none_or(|holder| {
            holder.claim.is_none() && self.leases_of(incarnation).all(|lease| lease.state == LeaseState::Granted)
        })
    }

    /// Whether a request has been overtaken as often or for as long as may be.
    pub(in crate::residency) fn at_bound(&self, waiter: &Waiter, now: Moment) -> bool {
        waiter.overtaken >= self.rules.overtake_limit
            || waiter.blocked_since.is_some_and(|since| now >= since + self.rules.overtake_time)
    }

    /// Grants what can be granted, in order, and has bytes taken back for what cannot. Ends every turn.
    pub(super) fn pump(&mut self, turn: &mut Turn<'_>) {
        self.refuse_for_the_gone(turn);
        self.refuse_for_the_lost(turn);
        self.refuse_beside_the_pinned(turn);
        if self.charged() > self.capacity {
            return self.take_back_for_capacity(turn);
        }
        if let Some(time) = self.held_for(turn.now) {
            for at in 0..self.waiters.len() {
                if !std::mem::replace(&mut self.waiters[at].told, true) {
                    self.say_waiting(at, DecisionKind::WaitsForDevice { time }, turn);
                }
            }
            return;
        }
        while let Some((at, passed)) = self.next_to_grant(turn) {
            // Whoever lacks bytes and came before, in time or in turn, has been overtaken.
            for (other, waiter) in self.waiters.iter_mut().enumerate() {
                if passed.contains(&waiter.id) || (other < at && waiter.blocked_since.is_some()) {
                    waiter.overtaken += 1;
                }
            }
            self.grant(at, turn);
        }
        self.give_luxury(turn);
    }

    /// Places of the waiting requests in the order in which they are served: those that have been overtaken enough as they came;
    /// then by tenants, who runs least and has had least by its parts first; then as they came.
    fn order(&self, now: Moment) -> Vec<usize> {
        let claims = self.holders.values().filter_map(|holder| holder.claim.as_ref());
        let mut running: BTreeMap<&Tenant, usize> = BTreeMap::new();
        claims.for_each(|claim| *running.entry(&claim.tenant).or_default() += 1);
        let rank = |&at: &usize| {
            let tenant = &self.waiters[at].vector.tenant;
            let first = self.at_bound(&self.waiters[at], now);
            let load = self.shares.load(tenant, running.get(tenant).copied().unwrap_or(0));
            (!first, (!first).then(|| (load, self.shares.used(tenant))), at)
        };
        let mut order: Vec<usize> = (0..self.waiters.len()).collect();
        order.sort_by_key(rank);
        order
    }

    /// The next request that can be granted, and those before it in turn that lack bytes. Has bytes taken back for the latter.
    fn next_to_grant(&mut self, turn: &mut Turn<'_>) -> Option<(usize, Vec<RequestId>)> {
        let mut behind = Behind::Anything;
        let mut named = BTreeSet::new();
        let mut lacking = Vec::new();
        for at in self.order(turn.now) {
            let waiter = &self.waiters[at];
            let (id, incarnation, shared_memory) = (waiter.id, waiter.vector.incarnation, waiter.vector.shared_memory);
            let at_bound = self.at_bound(waiter, turn.now);
            if !named.insert(incarnation) || !self.ready(incarnation) {
                if !std::mem::replace(&mut self.waiters[at].told, true) {
                    self.say_waiting(at, DecisionKind::WaitsForProcess, turn);
                }
                if at_bound {
                    behind = Behind::Nothing;
                }
                continue;
            }
            let need = self.need(&waiter.vector);
            let fits = need <= self.available() && shared_memory <= turn.shared.free();
            let allowed = match behind {
                Behind::Anything => true,
                Behind::NoBytes => need == 0,
                Behind::Nothing => false,
            };
            if fits && allowed {
                return Some((at, lacking));
            }
            if !fits {
                lacking.push(id);
                self.lacks(at, need, turn);
                if behind == Behind::Anything && need > self.available() && self.take_back_for(at, need, turn) {
                    behind = Behind::NoBytes;
                }
                if self.at_bound(&self.waiters[at], turn.now) {
                    behind = Behind::Nothing;
                }
            }
        }
        None
    }

    /// Refuses requests for processes that are gone or going.
    fn refuse_for_the_gone(&mut self, turn: &mut Turn<'_>) {
        let gone = |ledger: &Self, waiter: &Waiter| match ledger.holders.get(&waiter.vector.incarnation) {
            Some(holder) => !holder.usable(),
            None => ledger.ended.contains(waiter.vector.incarnation),
        };
        while let Some(at) = self.waiters.iter().position(|waiter| gone(self, waiter)) {
            let Some(Waiter { id, vector, .. }) = self.waiters.remove(at) else { return };
            let refusal = Refusal::HolderGone { incarnation: vector.incarnation, holder: vector.holder.clone() };
            self.refuse(id, &vector, refusal, turn);
        }
    }

    /// Refuses requests that cannot be granted any more, because somebody has pinned what they would need.
    fn refuse_beside_the_pinned(&mut self, turn: &mut Turn<'_>) {
        if !self.holders.values().any(|holder| holder.pinned) {
            return;
        }
        let limit = turn.shared.limit();
        let mut at = 0;
        while at < self.waiters.len() {
            match self.refusal(&self.waiters[at].vector, limit) {
                Some(refusal @ Refusal::Pinned { .. }) => {
                    if let Some(Waiter { id, vector, .. }) = self.waiters.remove(at) {
                        self.refuse(id, &vector, refusal, turn);
                    }
                }
                Some(_) | None => at += 1,
            }
        }
    }

    /// Notes that a request lacks nothing but bytes, and says so once.
    fn lacks(&mut self, at: usize, need: u64, turn: &mut Turn<'_>) {
        if self.waiters[at].blocked_since.is_some() {
            return;
        }
        self.waiters[at].blocked_since = Some(turn.now);
        let kind = if need > self.available() {
            let busy = self.holders.values().filter(|holder| holder.claim.is_some()).map(|h| h.title.clone());
            DecisionKind::WaitsForBytes { need, available: self.available(), busy: busy.collect() }
        } else {
            let need = self.waiters[at].vector.shared_memory;
            DecisionKind::WaitsForSharedMemory { need, available: turn.shared.free() }
        };
        self.say_waiting(at, kind, turn);
    }

    fn say_waiting(&self, at: usize, kind: DecisionKind, turn: &mut Turn<'_>) {
        let vector = &self.waiters[at].vector;
        let about = Some((vector.incarnation, vector.holder.clone()));
        self.decide(turn, Some(vector.job.clone()), about, kind);
    }

    /// Bytes that may go to luxury: free, and needed neither by a request that waits nor by the next stage in the queue.
    fn luxury(&self, job: Option<&JobId>) -> u64 {
        let needed = self.waiters.iter().map(|waiter| self.need(&waiter.vector)).fold(0, u64::saturating_add);
        self.available().saturating_sub(needed).saturating_sub(self.reserved(job))
    }

    /// Gives bytes that nobody needs to busy processes that could use them.
    fn give_luxury(&mut self, turn: &mut Turn<'_>) {
        if !self.rules.weights_move || !self.waiters.is_empty() {
            return;
        }
        for incarnation in self.holders.keys().copied().collect::<Vec<_>>() {
            let Some(holder) = self.holders.get(&incarnation).filter(|h| h.attached() && h.usable()) else { continue };
            let Some(job) = holder.claim.as_ref().map(|claim| claim.job.clone()) else { continue };
            let Some(lease) = self.lease_for(incarnation, Purpose::Weights).copied() else { continue };
            let lacks = lease.want.saturating_sub(lease.bytes);
            let more = lacks.min(self.luxury(Some(&job)));
            // Not in crumbs: each grant is a message, and a block takes more than a crumb.
            if lease.state != LeaseState::Granted || more == 0 || (more < lacks && more < lease.want / LEAST_PART) {
                continue;
            }
            let (purpose, bytes) = (Purpose::Weights, lease.bytes + more);
            self.grow(incarnation, purpose, bytes, turn.now);
            let about = Some((incarnation, self.title(incarnation)));
            let kind = DecisionKind::Granted { bytes: more, waited: std::time::Duration::ZERO };
            self.decide_about(turn, Some(job), about, Some(lease.id), kind);
            let lease = GrantedLease { id: lease.id, purpose, bytes };
            turn.effects.push(Effect::Grant { incarnation, lease, request_id: 0 });
        }
    }

    /// Grants the request at `at`, whose need fits.
    fn grant(&mut self, at: usize, turn: &mut Turn<'_>) {
        let Some(Waiter { id, vector, since, .. }) = self.waiters.remove(at) else { return };
        let taken = turn.shared.take(vector.shared_memory);
        debug_assert!(taken, "the caller has checked that the shared memory is free");
        let claim = Some(Claim { request: id, job: vector.job.clone(), tenant: vector.tenant.clone() });
        let holder = self.holders.entry(vector.incarnation).or_insert_with(|| Holder {
            title: vector.holder.clone(),
            life: Life::Granted,
            claim: None,
            idle_since: turn.now,
            asked: Asked::Nothing,
            pinned: false,
            block_time: std::time::Duration::ZERO,
            free_before: None,
            measured: 0,
            overdraft: 0,
            overdraft_until: None,
        });
        holder.claim = claim;
        let attached = holder.attached();
        let before = self.leased();
        for part in &vector.parts {
            self.grow(vector.incarnation, part.purpose, part.min, turn.now);
        }
        // Luxury after all needs, so that one part's luxury never takes another's need.
        for part in &vector.parts {
            let held = self.lease_for(vector.incarnation, part.purpose).map_or(0, |lease| lease.bytes);
            let target = part.want.min(held.saturating_add(self.luxury(Some(&vector.job))));
            let id = self.grow(vector.incarnation, part.purpose, target, turn.now);
            if let Some(lease) = id.and_then(|id| self.leases.get_mut(&id)) {
                lease.floor = if part.want > part.min { part.min } else { lease.bytes };
                lease.want = part.want.max(lease.bytes);
            }
        }
        let leases: Vec<GrantedLease> = self.leases_of(vector.incarnation).map(Lease::granted).collect();
        if attached && self.leased() > before {
            for lease in &leases {
                turn.effects.push(Effect::Grant { incarnation: vector.incarnation, lease: *lease, request_id: 0 });
            }
        }
        let waited = turn.now.saturating_sub(since);
        let kind = DecisionKind::Granted { bytes: self.leased() - before, waited };
        self.decide(turn, Some(vector.job), Some((vector.incarnation, vector.holder)), kind);
        let (incarnation, shared_memory) = (vector.incarnation, vector.shared_memory);
        turn.effects.push(Effect::Granted { id, incarnation, leases, waited, shared_memory });
    }

    /// Makes a process hold at least `bytes` for a purpose; `None` where that is nothing.
    fn grow(&mut self, incarnation: Incarnation, purpose: Purpose, bytes: u64, now: Moment) -> Option<LeaseId> {
        if let Some(id) = self.lease_for(incarnation, purpose).map(|lease| lease.id) {
            let lease = self.leases.get_mut(&id)?;
            lease.bytes = lease.bytes.max(bytes);
            return Some(id);
        }
        if bytes == 0 {
            return None;
        }
        let id = LeaseId(self.next_lease);
        self.next_lease += 1;
        let state = LeaseState::Granted;
        self.leases.insert(id, Lease { id, incarnation, purpose, bytes, floor: bytes, want: bytes, state, since: now });
        Some(id)
    }

    /// A busy process asks for more. Answered at once: what it waited for might wait for it.
    pub(super) fn extend(
        &mut self,
        incarnation: Incarnation,
        request_id: u64,
        purpose: Purpose,
        min: u64,
        want: u64,
        turn: &mut Turn<'_>,
    ) {
        let busy = self.holders.get(&incarnation).is_some_and(|h| h.attached() && h.usable() && h.claim.is_some());
        let lease = self.lease_for(incarnation, purpose).copied();
        let settled = lease.is_none_or(|lease| lease.state == LeaseState::Granted);
        let held = lease.map_or(0, |lease| lease.bytes);
        let job = self.job_of(incarnation);
        let held_back = self.held.is_some();
        let turn_of_others = self.waiters.iter().any(|waiter| self.at_bound(waiter, turn.now));
        let mut answer = lease.map(|lease| lease.granted());
        if busy
            && settled
            && !held_back
            && !turn_of_others
            && min <= self.available()
            && self.charged() <= self.capacity
        {
            let more = min.max(want.min(self.luxury(job.as_ref())));
            let id = self.grow(incarnation, purpose, held.saturating_add(more), turn.now);
            answer = id.and_then(|id| self.leases.get_mut(&id)).map(|lease| {
                lease.floor = lease.floor.max(held.saturating_add(min));
                lease.want = lease.want.max(lease.bytes);
                lease.granted()
            });
            for waiter in self.waiters.iter_mut().filter(|waiter| waiter.blocked_since.is_some()) {
                waiter.overtaken += 1;
            }
            let about = Some((incarnation, self.title(incarnation)));
            let kind = DecisionKind::Granted { bytes: more, waited: std::time::Duration::ZERO };
            self.decide(turn, job, about, kind);
        }
        if self.holders.get(&incarnation).is_some_and(Holder::attached) {
            let none = GrantedLease { id: LeaseId(0), purpose, bytes: 0 };
            turn.effects.push(Effect::Grant { incarnation, lease: answer.unwrap_or(none), request_id });
        }
    }
}

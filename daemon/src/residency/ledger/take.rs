//! Taking bytes back: from whom, how far, by when.

use std::time::Duration;

use super::super::lease::{Incarnation, LeaseId, LeaseKill, LeaseVector, Purpose};
use super::super::policy::{self, Offer, Rung, Worth};
use super::state::{Holder, Lease, LeaseState, Life, Measure};
use super::{DecisionKind, Effect, Ledger, Turn};
use crate::clock::Moment;
use crate::ids::JobId;

/// An offer, and the leases that it shrinks with what remains of each.
struct Candidate {
    offer: Offer,
    shrinks: Vec<(LeaseId, u64)>,
    /// A lease of weights among them, of which less may be taken, and its bytes.
    elastic: Option<LeaseId>,
}

/// A revision that could be made.
struct Shrink {
    lease: LeaseId,
    purpose: Purpose,
    to: u64,
    frees: u64,
}

impl Ledger {
    /// What could be taken back now; for the sake of `wanted_by`, whose own process is not retired for itself.
    fn candidates(&self, now: Moment, wanted_by: Option<&LeaseVector>) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (&incarnation, holder) in &self.holders {
            let settled = self.leases_of(incarnation).all(|lease| lease.state == LeaseState::Granted);
            let exhausted = self.leases_of(incarnation).any(|lease| self.past_patience(lease, now));
            if !(settled || exhausted) || !matches!(holder.life, Life::Alive { .. }) {
                continue;
            }
            let own = wanted_by.filter(|vector| vector.incarnation == incarnation);
            let worth = Worth {
                idle: now.saturating_sub(holder.idle_since),
                wanted: holder.claim.is_some() || self.waiters.iter().any(|w| w.vector.incarnation == incarnation),
                next_use: self.next_use(holder),
            };
            // A pin holds against other requests, not against a device that has become smaller.
            let pinned = holder.pinned && wanted_by.is_some() && own.is_none();
            if holder.attached() && settled {
                let shrinks = self.shrinks(incarnation, holder, own, pinned);
                candidates.extend(shrinking(incarnation, holder, Rung::Shrink, shrinks, worth));
                if holder.idle() && own.is_none() && self.rules.weights_move && !pinned {
                    let all = self.leases_of(incarnation).filter(|lease| lease.purpose != Purpose::Context);
                    let all = all.map(|lease| Shrink::of(lease, 0)).collect();
                    candidates.extend(shrinking(incarnation, holder, Rung::Park, all, worth));
                }
            }
            if holder.idle() && own.is_none() && !pinned {
                let bytes_of = |purpose| self.lease_for(incarnation, purpose).map_or(0, |lease| lease.bytes);
                let cost = policy::retire_cost(bytes_of(Purpose::Weights), bytes_of(Purpose::WorkingSet), worth);
                let frees = self.leases_of(incarnation).map(|lease| lease.bytes).sum::<u64>() + holder.overdraft;
                candidates.push(Candidate {
                    offer: Offer { incarnation, rung: Rung::Retire, frees, least: frees, cost },
                    shrinks: Vec::new(),
                    elastic: None,
                });
            }
        }
        candidates
    }

    /// What a process could give back and go on as it is: idle, its working set; busy, what it has beyond its floor; for its own
    /// next task, what that does not need.
    fn shrinks(
        &self,
        incarnation: Incarnation,
        holder: &Holder,
        own: Option<&LeaseVector>,
        pinned: bool,
    ) -> Vec<Shrink> {
        let keeps = |lease: &Lease| {
            let least = match (own, holder.claim.is_some(), lease.purpose) {
                (_, _, Purpose::Context) => lease.bytes,
                // What the request needs of its own process, and what it does not speak of.
                (Some(vector), _, Purpose::Weights | Purpose::WorkingSet) => {
                    let part = vector.parts.iter().find(|part| part.purpose == lease.purpose);
                    part.map_or(lease.bytes, |part| part.min)
                }
                (None, true, Purpose::Weights | Purpose::WorkingSet) => lease.floor,
                (None, false, Purpose::Weights) if pinned || self.rules.weights_move => lease.bytes,
                (None, false, Purpose::Weights) => lease.floor,
                (None, false, Purpose::WorkingSet) => 0,
            };
            match lease.purpose {
                // Where weights go with the process only, what was granted as a floor stays.
                Purpose::Weights if !self.rules.weights_move => least.max(lease.floor).min(lease.bytes),
                Purpose::Context | Purpose::Weights | Purpose::WorkingSet => least.min(lease.bytes),
            }
        };
        self.leases_of(incarnation).map(|lease| Shrink::of(lease, keeps(lease))).collect()
    }

    /// Bytes on their way back that can be counted on: not those whose release is overdue.
    fn expected(&self, now: Moment) -> u64 {
        let counted = self.leases.values().filter(|lease| match lease.state {
            LeaseState::Granted | LeaseState::Revoked { .. } => true,
            LeaseState::Unproven { since, .. } => {
                now < since + self.rules.proof_time && !self.past_patience(lease, now)
            }
        });
        counted.map(|lease| lease.bytes - lease.remains()).sum::<u64>() + self.ending_overdrafts()
    }

    /// Whether a living process said so long ago that it gave this lease back that it is no longer believed.
    fn past_patience(&self, lease: &Lease, now: Moment) -> bool {
        let alive =
            self.holders.get(&lease.incarnation).is_some_and(|holder| matches!(holder.life, Life::Alive { .. }));
        match lease.state {
            LeaseState::Unproven { since, .. } => alive && now >= since + self.rules.patience,
            LeaseState::Granted | LeaseState::Revoked { .. } => false,
        }
    }

    /// Has bytes taken back for the request at `at`, which lacks some. False where that cannot help: too much is held by
    /// busy processes.
    pub(super) fn take_back_for(&mut self, at: usize, need: u64, turn: &mut Turn<'_>) -> bool {
        let short = need.saturating_sub(self.available()).saturating_sub(self.expected(turn.now));
        if short == 0 {
            return true;
        }
        let vector = &self.waiters[at].vector;
        let candidates = self.candidates(turn.now, Some(vector));
        let offers: Vec<Offer> = candidates.iter().map(|candidate| candidate.offer).collect();
        let Some(chosen) = policy::choose(&offers, short) else { return false };
        let (job, wanted_by) = (vector.job.clone(), vector.holder.clone());
        for taken in chosen {
            self.take(&candidates[taken.offer], taken.bytes, Some(&job), &wanted_by, turn);
        }
        true
    }

    /// Has bytes taken back because the capacity is below what is charged.
    pub(super) fn take_back_for_capacity(&mut self, turn: &mut Turn<'_>) {
        let over = self.charged().saturating_sub(self.capacity).saturating_sub(self.expected(turn.now));
        if over == 0 {
            return;
        }
        let candidates = self.candidates(turn.now, None);
        let offers: Vec<Offer> = candidates.iter().map(|candidate| candidate.offer).collect();
        let chosen = policy::choose(&offers, over).unwrap_or_else(|| {
            // All that is idle goes where that is not enough, and all luxury: the busy ones follow when their tasks end.
            let goes = |offer: &Offer| match offer.rung {
                Rung::Retire => true,
                Rung::Shrink => self.holders.get(&offer.incarnation).is_some_and(|holder| holder.claim.is_some()),
                Rung::Park => false,
            };
            let all = offers.iter().enumerate().filter(|(_, offer)| goes(offer));
            all.map(|(at, offer)| policy::Taken { offer: at, bytes: offer.frees }).collect()
        });
        for taken in chosen {
            self.take(&candidates[taken.offer], taken.bytes, None, "the device's other users", turn);
        }
    }

    fn take(&mut self, candidate: &Candidate, bytes: u64, job: Option<&JobId>, wanted_by: &str, turn: &mut Turn<'_>) {
        let Offer { incarnation, rung, frees, .. } = candidate.offer;
        let kept = frees.saturating_sub(bytes);
        // Weights of which some stay are not parked.
        let rung = if rung == Rung::Park && kept > 0 { Rung::Shrink } else { rung };
        let kind = DecisionKind::TakesBack { rung, bytes: frees - kept, wanted_by: wanted_by.into() };
        let lease = match candidate.shrinks.as_slice() {
            [(lease, _)] => Some(*lease),
            _ => None,
        };
        self.decide_about(turn, job.cloned(), Some((incarnation, self.title(incarnation))), lease, kind);
        match rung {
            Rung::Shrink | Rung::Park => {
                for &(lease, to) in &candidate.shrinks {
                    let to = if candidate.elastic == Some(lease) { to + kept } else { to };
                    self.revise(lease, to, turn);
                }
            }
            Rung::Retire => self.start_retiring(incarnation, turn),
        }
    }

    /// Time that a process has to give `bytes` back.
    fn time_for(&self, base: Duration, bytes: u64) -> Duration {
        base + Duration::from_secs_f64(bytes as f64 / self.rules.bytes_per_second.max(1) as f64)
    }

    /// Time until a process comes to a boundary at which it can give back.
    pub(super) fn revise_time(&self, incarnation: Incarnation) -> Duration {
        /// Blocks that one may take longer than the longest so far.
        const BLOCKS: u32 = 4;
        let learned = self.holders.get(&incarnation).filter(|holder| holder.claim.is_some());
        let learned = learned.map_or(Duration::ZERO, |holder| holder.block_time * BLOCKS);
        self.rules.revise_time.max(learned)
    }

    /// Asks for a lease to be given back down to `to`.
    pub(super) fn revise(&mut self, id: LeaseId, to: u64, turn: &mut Turn<'_>) {
        let Some(lease) = self.leases.get(&id).copied() else { return };
        if lease.state != LeaseState::Granted || lease.bytes <= to {
            return;
        }
        self.begin_release(lease.incarnation);
        let within = self.time_for(self.revise_time(lease.incarnation), lease.bytes - to);
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.state = LeaseState::Revoked { to, deadline: turn.now + within };
        }
        turn.effects.push(Effect::Revise { incarnation: lease.incarnation, lease: id, to, deadline: within });
    }

    /// Asks an idle process to free everything and exit.
    pub(super) fn start_retiring(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        self.begin_release(incarnation);
        let bytes = self.leases_of(incarnation).map(|lease| lease.bytes).sum();
        let deadline = turn.now + self.time_for(self.rules.retire_time, bytes);
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        holder.life = Life::Retiring { deadline };
        for lease in self.leases.values_mut().filter(|lease| lease.incarnation == incarnation) {
            lease.state = LeaseState::Revoked { to: 0, deadline };
        }
        turn.effects.push(Effect::Retire { incarnation });
    }

    /// Kills a process: its leases stay charged until it is reaped.
    pub(super) fn kill(&mut self, incarnation: Incarnation, cause: LeaseKill, turn: &mut Turn<'_>) {
        let about = Some((incarnation, self.title(incarnation)));
        self.decide(turn, self.job_of(incarnation), about, DecisionKind::Killed(cause));
        turn.effects.push(Effect::Kill { incarnation, cause });
        self.mark_dead(incarnation, Life::Dying { since: turn.now }, turn.now);
    }

    /// A process is dead or as good as: all it holds is unproven.
    pub(super) fn mark_dead(&mut self, incarnation: Incarnation, life: Life, now: Moment) {
        self.begin_release(incarnation);
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        holder.life = life;
        holder.overdraft_until = None;
        for lease in self.leases.values_mut().filter(|lease| lease.incarnation == incarnation) {
            let since = match lease.state {
                LeaseState::Unproven { since, .. } => since,
                LeaseState::Granted | LeaseState::Revoked { .. } => now,
            };
            lease.state = LeaseState::Unproven { to: 0, since, measure: Measure::after_first(now) };
        }
    }
}

impl Shrink {
    fn of(lease: &Lease, to: u64) -> Self {
        Self { lease: lease.id, purpose: lease.purpose, to, frees: lease.bytes - to }
    }
}

/// The offer of a process that gives these leases back and stays; `None` where that frees nothing.
fn shrinking(
    incarnation: Incarnation,
    holder: &Holder,
    rung: Rung,
    mut shrinks: Vec<Shrink>,
    worth: Worth,
) -> Option<Candidate> {
    shrinks.retain(|shrink| shrink.frees > 0);
    let of = |purpose| shrinks.iter().filter(move |shrink| shrink.purpose == purpose);
    let weights: u64 = of(Purpose::Weights).map(|shrink| shrink.frees).sum();
    let working_set: u64 = of(Purpose::WorkingSet).map(|shrink| shrink.frees).sum();
    // Without weights parking is shrinking, which is offered as well.
    if weights + working_set == 0 || (rung == Rung::Park && weights == 0) {
        return None;
    }
    let cost = if holder.claim.is_some() {
        policy::luxury_cost(weights) + policy::shrink_cost(working_set, worth)
    } else {
        policy::park_cost(weights, working_set, worth)
    };
    let elastic = of(Purpose::Weights).map(|shrink| shrink.lease).next();
    let least = if elastic.is_some() { working_set } else { weights + working_set };
    let offer = Offer { incarnation, rung, frees: weights + working_set, least, cost };
    Some(Candidate { offer, shrinks: shrinks.iter().map(|shrink| (shrink.lease, shrink.to)).collect(), elastic })
}

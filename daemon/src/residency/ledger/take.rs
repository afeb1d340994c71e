//! Taking bytes back: from whom, how far, by when.

use super::super::lease::{Incarnation, LeaseId, LeaseKill, LeaseVector, Purpose};
use super::super::policy::{self, Offer, Rung, Worth};
use super::state::{Lease, LeaseState, Life, Measure};
use super::{DecisionKind, Effect, Ledger, Turn};
use crate::clock::Moment;
use crate::ids::JobId;

/// An offer, and the leases that it shrinks with what remains of each.
struct Candidate {
    offer: Offer,
    shrinks: Vec<(LeaseId, u64)>,
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
            let keeps = |lease: &Lease| {
                let least = match (own, holder.claim.is_some()) {
                    // What the request needs of its own process, and what it does not speak of.
                    (Some(vector), _) => {
                        let part = vector.parts.iter().find(|part| part.purpose == lease.purpose);
                        part.map_or(lease.bytes, |part| part.min)
                    }
                    (None, true) => lease.floor,
                    (None, false) => 0,
                };
                match lease.purpose {
                    // What was granted as a floor goes with the process only.
                    Purpose::Context | Purpose::Weights => least.max(lease.floor).min(lease.bytes),
                    Purpose::WorkingSet => least.min(lease.bytes),
                }
            };
            let worth = Worth {
                idle: now.saturating_sub(holder.idle_since),
                wanted: holder.claim.is_some() || self.waiters.iter().any(|w| w.vector.incarnation == incarnation),
            };
            if holder.attached() && settled {
                let shrinkable = self.leases_of(incarnation).filter(|lease| lease.purpose != Purpose::Context);
                let shrinks: Vec<(LeaseId, u64, u64)> = shrinkable
                    .map(|lease| (lease.id, keeps(lease), lease.bytes - keeps(lease)))
                    .filter(|(_, _, frees)| *frees > 0)
                    .collect();
                let frees = shrinks.iter().map(|(_, _, frees)| frees).sum();
                if frees > 0 {
                    let cost = policy::shrink_cost(frees, worth);
                    let offer = Offer { incarnation, rung: Rung::Shrink, frees, cost };
                    candidates
                        .push(Candidate { offer, shrinks: shrinks.iter().map(|(id, to, _)| (*id, *to)).collect() });
                }
            }
            if holder.idle() && own.is_none() {
                let bytes_of = |purpose| self.lease_for(incarnation, purpose).map_or(0, |lease| lease.bytes);
                let cost = policy::retire_cost(bytes_of(Purpose::Weights), bytes_of(Purpose::WorkingSet), worth);
                let frees = self.leases_of(incarnation).map(|lease| lease.bytes).sum::<u64>() + holder.overdraft;
                candidates.push(Candidate {
                    offer: Offer { incarnation, rung: Rung::Retire, frees, cost },
                    shrinks: Vec::new(),
                });
            }
        }
        candidates
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
        for index in chosen {
            self.take(&candidates[index], Some(&job), &wanted_by, turn);
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
        // All that is idle goes where that is not enough: the busy ones follow when their tasks end.
        let all = || (0..offers.len()).filter(|&i| offers[i].rung == Rung::Retire).collect();
        for index in policy::choose(&offers, over).unwrap_or_else(all) {
            self.take(&candidates[index], None, "the device's other users", turn);
        }
    }

    fn take(&mut self, candidate: &Candidate, job: Option<&JobId>, wanted_by: &str, turn: &mut Turn<'_>) {
        let Offer { incarnation, rung, frees, .. } = candidate.offer;
        let kind = DecisionKind::TakesBack { rung, bytes: frees, wanted_by: wanted_by.into() };
        self.decide(turn, job.cloned(), Some((incarnation, self.title(incarnation))), kind);
        match rung {
            Rung::Shrink => candidate.shrinks.iter().for_each(|(lease, to)| self.revise(*lease, *to, turn)),
            Rung::Retire => self.start_retiring(incarnation, turn),
        }
    }

    /// Time that a process has to give `bytes` back.
    fn time_for(&self, base: std::time::Duration, bytes: u64) -> std::time::Duration {
        base + std::time::Duration::from_secs_f64(bytes as f64 / self.rules.bytes_per_second.max(1) as f64)
    }

    /// Asks for a lease to be given back down to `to`.
    pub(super) fn revise(&mut self, id: LeaseId, to: u64, turn: &mut Turn<'_>) {
        let Some(lease) = self.leases.get(&id).copied() else { return };
        if lease.state != LeaseState::Granted || lease.bytes <= to {
            return;
        }
        let within = self.time_for(self.rules.revise_time, lease.bytes - to);
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.state = LeaseState::Revoked { to, deadline: turn.now + within };
        }
        turn.effects.push(Effect::Revise { incarnation: lease.incarnation, lease: id, to, deadline: within });
    }

    /// Asks an idle process to free everything and exit.
    pub(super) fn start_retiring(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
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

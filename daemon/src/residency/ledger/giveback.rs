//! Lives of processes, and how their bytes come back: said, proven, overdue.

use super::super::handle::Afterwards;
use super::super::lease::{Bytes, Incarnation, LeaseId, LeaseKill, Proof, Purpose, RequestId};
use super::state::{Asked, Lease, LeaseState, Life, Measure};
use super::{DecisionKind, Effect, Ledger, Turn};

impl Ledger {
    /// A task has ended: its process is idle, with all its leases.
    pub(super) fn release(&mut self, id: RequestId, afterwards: Afterwards, turn: &mut Turn<'_>) {
        let claimed = |holder: &super::Holder| holder.claim.as_ref().is_some_and(|claim| claim.request == id);
        let Some((&incarnation, holder)) = self.holders.iter_mut().find(|(_, holder)| claimed(holder)) else { return };
        holder.claim = None;
        holder.idle_since = turn.now;
        match holder.life {
            // No process was ever started: nothing holds these bytes.
            Life::Granted => self.vanish(incarnation, Proof::Reaped, turn),
            Life::Alive { .. } => {
                let asked = match afterwards {
                    Afterwards::Keep => Asked::Nothing,
                    Afterwards::ReturnWorkingSet => Asked::WorkingSet,
                    Afterwards::Park => Asked::Park,
                    Afterwards::Retire => Asked::Retire,
                };
                self.ask(incarnation, asked, turn);
            }
            Life::Retiring { .. } | Life::Dying { .. } | Life::Reaped { .. } => {}
        }
    }

    pub(super) fn spawned(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        let term_end = turn.now + self.rules.start_term;
        match self.holders.get_mut(&incarnation) {
            Some(holder) if holder.life == Life::Granted => holder.life = Life::Alive { attached: false, term_end },
            Some(_) => {}
            // Its request was withdrawn while it was being started.
            None => turn.effects.push(Effect::Kill { incarnation, cause: LeaseKill::NoLease }),
        }
    }

    pub(super) fn attached(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        let term_end = turn.now + self.rules.term;
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        match holder.life {
            Life::Granted | Life::Alive { .. } => {
                holder.life = Life::Alive { attached: true, term_end };
                let leases: Vec<_> = self.leases_of(incarnation).map(Lease::granted).collect();
                let grants = leases.into_iter().map(|lease| Effect::Grant { incarnation, lease, request_id: 0 });
                turn.effects.extend(grants);
                self.follow_what_was_asked(incarnation, turn);
            }
            // The first one found nobody to hear it.
            Life::Retiring { .. } => turn.effects.push(Effect::Retire { incarnation }),
            Life::Dying { .. } | Life::Reaped { .. } => {}
        }
    }

    pub(super) fn lost(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        let Some(holder) = self.holders.get(&incarnation) else { return };
        match holder.life {
            Life::Granted | Life::Alive { .. } | Life::Retiring { .. } => {
                self.mark_dead(incarnation, Life::Dying { since: turn.now }, turn.now);
            }
            Life::Dying { .. } | Life::Reaped { .. } => {}
        }
    }

    pub(super) fn reaped(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        if !self.holders.contains_key(&incarnation) {
            return;
        }
        if self.rules.reaping_proves {
            return self.vanish(incarnation, Proof::Reaped, turn);
        }
        let life = Life::Reaped { since: turn.now, measure: Measure::after_first(turn.now) };
        self.mark_dead(incarnation, life, turn.now);
        turn.effects.push(Effect::Measure { incarnation });
    }

    /// What a process says of itself renews its term and shows an overdraft; it proves nothing.
    pub(super) fn pulse(&mut self, incarnation: Incarnation, bytes: u64, turn: &mut Turn<'_>) {
        let new_end = turn.now + self.rules.term;
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        match &mut holder.life {
            Life::Alive { attached, term_end } => {
                if *attached {
                    *term_end = new_end;
                }
            }
            Life::Retiring { .. } => {}
            Life::Granted | Life::Dying { .. } | Life::Reaped { .. } => return,
        }
        self.note_measure(incarnation, bytes, turn);
    }

    /// Compares what a process holds with what it may, and charges the rest.
    fn note_measure(&mut self, incarnation: Incarnation, bytes: u64, turn: &mut Turn<'_>) {
        let leased: u64 = self.leases_of(incarnation).map(|lease| lease.bytes).sum();
        let over = bytes.saturating_sub(leased.saturating_add(self.rules.tolerance));
        let until = turn.now + self.revise_time(incarnation);
        let enforce = self.rules.enforce;
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        let first = holder.overdraft == 0 && over > 0;
        holder.measured = bytes;
        holder.overdraft = over;
        if over == 0 {
            holder.overdraft_until = None;
        }
        if !first {
            return;
        }
        let living = matches!(holder.life, Life::Alive { attached: true, .. });
        if enforce && living {
            holder.overdraft_until = Some(until);
        }
        let about = Some((incarnation, holder.title.clone()));
        self.decide(turn, self.job_of(incarnation), about, DecisionKind::Overdraft { measured: bytes, leased });
        if enforce && living {
            // Asked to come back to what it has; killed when it does not.
            let lease = self.lease_for(incarnation, Purpose::WorkingSet).or_else(|| self.leases_of(incarnation).next());
            if let Some(lease) = lease.copied() {
                let (to, deadline) = (lease.remains(), self.revise_time(incarnation));
                turn.effects.push(Effect::Revise { incarnation, lease: lease.id, to, deadline });
            }
        }
    }

    /// A process says that it gave back. It is measured at once, and again until its release is proven.
    pub(super) fn returned(&mut self, incarnation: Incarnation, id: LeaseId, bytes: u64, turn: &mut Turn<'_>) {
        let alive = self.holders.get(&incarnation).is_some_and(super::Holder::attached);
        let Some(lease) = self.leases.get_mut(&id).filter(|lease| lease.incarnation == incarnation) else { return };
        // A context ends with its process; nothing that is said shortens it.
        if !alive || lease.purpose == Purpose::Context {
            return;
        }
        let since = match lease.state {
            LeaseState::Granted if bytes < lease.bytes => turn.now,
            LeaseState::Revoked { to, .. } if bytes <= to => turn.now,
            LeaseState::Unproven { to, since, .. } if bytes < to => since,
            LeaseState::Granted | LeaseState::Revoked { .. } | LeaseState::Unproven { .. } => return,
        };
        lease.state = LeaseState::Unproven { to: bytes, since, measure: Measure::after_first(turn.now) };
        turn.effects.push(Effect::Measure { incarnation });
    }

    /// The device says what a process holds: the only proof there is for a living one.
    pub(super) fn measured(&mut self, incarnation: Incarnation, bytes: Option<u64>, turn: &mut Turn<'_>) {
        let Some(holder) = self.holders.get(&incarnation) else { return };
        match (holder.life, bytes) {
            (Life::Reaped { .. }, None) => self.vanish(incarnation, Proof::Measured, turn),
            (Life::Alive { .. } | Life::Retiring { .. }, Some(bytes)) => {
                if bytes <= self.allowed(incarnation).saturating_add(self.rules.tolerance) {
                    self.prove_returns(incarnation, Proof::Measured, turn);
                    self.follow_what_was_asked(incarnation, turn);
                }
                self.note_measure(incarnation, bytes, turn);
            }
            // A living process that the device does not show is about to be reaped. The rest says nothing new.
            (Life::Alive { .. } | Life::Retiring { .. }, None)
            | (Life::Granted | Life::Dying { .. }, _)
            | (Life::Reaped { .. }, Some(_)) => {}
        }
    }

    /// Bytes that a process may hold if all that it says it gave back is true.
    pub(in crate::residency) fn allowed(&self, incarnation: Incarnation) -> u64 {
        let bytes = self.leases_of(incarnation).map(|lease| match lease.state {
            LeaseState::Granted | LeaseState::Revoked { .. } => lease.bytes,
            LeaseState::Unproven { to, .. } => to,
        });
        bytes.sum()
    }

    pub(super) fn prove_returns(&mut self, incarnation: Incarnation, proof: Proof, turn: &mut Turn<'_>) {
        let busy = self.holders.get(&incarnation).is_some_and(|holder| holder.claim.is_some());
        let retiring = match self.holders.get(&incarnation).map(|holder| holder.life) {
            Some(Life::Retiring { deadline }) => Some(deadline),
            _ => None,
        };
        let unproven = self.leases_of(incarnation).filter_map(|lease| match lease.state {
            LeaseState::Unproven { to, since, .. } => Some((lease.id, to, since)),
            LeaseState::Granted | LeaseState::Revoked { .. } => None,
        });
        for (id, to, since) in unproven.collect::<Vec<_>>() {
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            let freed = lease.bytes - to;
            lease.bytes = to;
            lease.floor = lease.floor.min(to);
            lease.want = if busy { lease.want } else { to };
            lease.state = match retiring {
                Some(deadline) => LeaseState::Revoked { to: 0, deadline },
                None => LeaseState::Granted,
            };
            if to == 0 {
                self.leases.remove(&id);
            }
            self.proven(incarnation, id, freed, proof, since, turn);
        }
    }

    /// A process holds nothing any more: it and its leases end.
    pub(super) fn vanish(&mut self, incarnation: Incarnation, proof: Proof, turn: &mut Turn<'_>) {
        let ended: Vec<Lease> = self.leases_of(incarnation).copied().collect();
        for lease in ended {
            let since = match lease.state {
                LeaseState::Unproven { since, .. } => since,
                LeaseState::Granted | LeaseState::Revoked { .. } => turn.now,
            };
            self.leases.remove(&lease.id);
            self.proven(incarnation, lease.id, lease.bytes, proof, since, turn);
        }
        self.holders.remove(&incarnation);
        self.ended.insert(incarnation);
    }

    fn proven(
        &self,
        incarnation: Incarnation,
        lease: LeaseId,
        bytes: u64,
        proof: Proof,
        since: crate::clock::Moment,
        turn: &mut Turn<'_>,
    ) {
        let kind = DecisionKind::Proven { bytes, proof, after: turn.now.saturating_sub(since) };
        let about = Some((incarnation, self.title(incarnation)));
        self.decide_about(turn, self.job_of(incarnation), about, Some(lease), kind);
        turn.effects.push(Effect::Proven { incarnation, lease, bytes, proof });
    }

    /// A smaller capacity counts at once, a larger one when it has lasted.
    pub(super) fn capacity_changed(&mut self, bytes: u64, turn: &mut Turn<'_>) {
        let bytes = bytes.min(self.budget);
        if bytes > self.capacity {
            let (least, since) = self.growth.map_or((bytes, turn.now), |(more, since)| (more.min(bytes), since));
            self.growth = Some((least, since));
            return;
        }
        self.growth = None;
        if bytes < self.capacity {
            let from = std::mem::replace(&mut self.capacity, bytes);
            self.decide(turn, None, None, DecisionKind::Capacity { from, to: bytes });
        }
    }

    /// Everything whose time has come.
    pub(super) fn expire(&mut self, turn: &mut Turn<'_>) {
        if self.held.is_some_and(|hold| turn.now >= hold.until) {
            self.unhold(turn);
        }
        if let Some((bytes, since)) = self.growth
            && turn.now >= since + self.rules.growth_time
        {
            self.growth = None;
            let from = std::mem::replace(&mut self.capacity, bytes);
            self.decide(turn, None, None, DecisionKind::Capacity { from, to: bytes });
        }
        for incarnation in self.holders.keys().copied().collect::<Vec<_>>() {
            if let Some(cause) = self.overdue(incarnation, turn) {
                self.kill(incarnation, cause, turn);
            }
            self.measure_again(incarnation, turn);
        }
        self.judge_degradation(turn);
    }

    /// Why a process must be killed now.
    fn overdue(&self, incarnation: Incarnation, turn: &Turn<'_>) -> Option<LeaseKill> {
        let holder = self.holders.get(&incarnation)?;
        match holder.life {
            Life::Alive { attached, term_end } if turn.now >= term_end => {
                return Some(LeaseKill::TermExpired(if attached { self.rules.term } else { self.rules.start_term }));
            }
            Life::Retiring { deadline } if turn.now >= deadline => {
                return Some(LeaseKill::RetireOverdue(self.rules.retire_time));
            }
            Life::Alive { .. } | Life::Retiring { .. } => {}
            Life::Granted | Life::Dying { .. } | Life::Reaped { .. } => return None,
        }
        if holder.overdraft_until.is_some_and(|until| turn.now >= until) {
            let leased = self.leases_of(incarnation).map(|lease| lease.bytes).sum();
            return Some(LeaseKill::OverLease { measured: holder.measured, leased });
        }
        let late = |lease: &Lease| match lease.state {
            LeaseState::Revoked { deadline, .. } => turn.now >= deadline,
            LeaseState::Granted | LeaseState::Unproven { .. } => false,
        };
        self.leases_of(incarnation).any(late).then_some(LeaseKill::RevisionOverdue(self.revise_time(incarnation)))
    }

    fn measure_again(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        let mut due = false;
        if let Life::Reaped { measure, .. } = &mut holder.life
            && turn.now >= measure.at
        {
            *measure = measure.next(turn.now);
            due = true;
        }
        if holder.attached() {
            for lease in self.leases.values_mut().filter(|lease| lease.incarnation == incarnation) {
                if let LeaseState::Unproven { measure, .. } = &mut lease.state
                    && turn.now >= measure.at
                {
                    *measure = measure.next(turn.now);
                    due = true;
                }
            }
        }
        if due {
            turn.effects.push(Effect::Measure { incarnation });
        }
    }

    fn judge_degradation(&mut self, turn: &mut Turn<'_>) {
        let overdue = self.leases.values().filter_map(|lease| match lease.state {
            LeaseState::Unproven { since, .. } if turn.now >= since + self.rules.proof_time => Some((*lease, since)),
            LeaseState::Granted | LeaseState::Revoked { .. } | LeaseState::Unproven { .. } => None,
        });
        let overdue: Vec<_> = overdue.collect();
        match (overdue.first(), &self.degraded) {
            (Some((lease, since)), None) => {
                let incarnation = lease.incarnation;
                let bytes = overdue.iter().map(|(lease, _)| lease.bytes - lease.remains()).sum();
                let title = self.title(incarnation);
                let since = turn.now.saturating_sub(*since);
                self.degraded = Some(format!("the release of {} by {title} is not proven", Bytes(bytes)));
                self.decide(turn, None, Some((incarnation, title)), DecisionKind::Degraded { bytes, since });
            }
            (None, Some(_)) => {
                self.degraded = None;
                self.decide(turn, None, None, DecisionKind::Recovered);
            }
            (Some(_), Some(_)) | (None, None) => {}
        }
    }
}

//! What operators and stages ask of processes and of the device: shrink, park, retire, pin, hold.

use std::time::Duration;

use super::super::lease::{Incarnation, LeaseVector, Purpose};
use super::state::{Asked, Holder, LeaseState, Life};
use super::{DecisionKind, Ledger, Turn};
use crate::clock::Moment;

/// A device that is given to other programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::residency) struct Hold {
    /// Until then.
    pub(in crate::residency) until: Moment,
}

impl Ledger {
    /// Asks a process to give back as soon as it is idle. What it has beyond the floor of a running task it gives at once.
    pub(super) fn ask(&mut self, incarnation: Incarnation, asked: Asked, turn: &mut Turn<'_>) {
        let Some(holder) = self.holders.get_mut(&incarnation) else { return };
        // Where weights go with the process only, parking is retiring.
        let asked = if asked == Asked::Park && !self.rules.weights_move { Asked::Retire } else { asked };
        holder.asked = holder.asked.max(asked);
        if holder.claim.is_some() {
            self.shrink_to_floor(incarnation, turn);
        }
        self.follow_what_was_asked(incarnation, turn);
    }

    /// Has an idle process do what was asked of it, as far as nothing else is under way.
    pub(super) fn follow_what_was_asked(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        let Some(holder) = self.holders.get(&incarnation).filter(|holder| holder.idle()) else { return };
        match holder.asked {
            Asked::Nothing => return,
            Asked::Retire => return self.start_retiring(incarnation, turn),
            // It cannot hear yet: it will do it when it can.
            Asked::WorkingSet | Asked::Park if !holder.attached() => return,
            Asked::WorkingSet | Asked::Park => {}
        }
        let park = holder.asked == Asked::Park;
        let goes = |purpose| match purpose {
            Purpose::Context => false,
            Purpose::Weights => park,
            Purpose::WorkingSet => true,
        };
        let given: Vec<_> = self.leases_of(incarnation).filter(|lease| goes(lease.purpose)).copied().collect();
        // A revision that is under way comes first.
        if given.iter().any(|lease| lease.state != LeaseState::Granted) {
            return;
        }
        if let Some(holder) = self.holders.get_mut(&incarnation) {
            holder.asked = Asked::Nothing;
        }
        for lease in given {
            self.revise(lease.id, 0, turn);
        }
    }

    /// Takes what a busy process has beyond its floor.
    fn shrink_to_floor(&mut self, incarnation: Incarnation, turn: &mut Turn<'_>) {
        if !self.rules.weights_move || !self.holders.get(&incarnation).is_some_and(Holder::attached) {
            return;
        }
        let weights = self.lease_for(incarnation, Purpose::Weights).map(|lease| (lease.id, lease.floor));
        if let Some((id, floor)) = weights {
            self.revise(id, floor, turn);
        }
    }

    pub(super) fn pin(&mut self, incarnation: Incarnation, pinned: bool) {
        if let Some(holder) = self.holders.get_mut(&incarnation) {
            holder.pinned = pinned;
        }
    }

    /// What pinned processes keep from everybody else, and who they are.
    pub(super) fn pinned_beside(&self, vector: &LeaseVector) -> (u64, Vec<String>) {
        let pinned = |(incarnation, holder): &(&Incarnation, &Holder)| {
            let alive = match holder.life {
                Life::Granted | Life::Alive { .. } => true,
                Life::Retiring { .. } | Life::Dying { .. } | Life::Reaped { .. } => false,
            };
            holder.pinned && alive && **incarnation != vector.incarnation
        };
        let kept = |incarnation| {
            let stays = self.leases_of(incarnation).filter(|lease| lease.purpose != Purpose::WorkingSet);
            stays.map(|lease| lease.bytes).sum::<u64>()
        };
        let mut all = (0, Vec::new());
        for (&incarnation, holder) in self.holders.iter().filter(pinned) {
            all.0 += kept(incarnation);
            all.1.push(holder.title.clone());
        }
        all
    }

    /// Every process leaves the device, busy ones when their tasks end; with a time, nothing is granted until it is over.
    pub(super) fn hold(&mut self, time: Option<Duration>, turn: &mut Turn<'_>) {
        self.held = time.map(|time| Hold { until: turn.now + time });
        self.decide(turn, None, None, DecisionKind::Held { time });
        for incarnation in self.holders.keys().copied().collect::<Vec<_>>() {
            self.ask(incarnation, Asked::Retire, turn);
        }
    }

    pub(super) fn unhold(&mut self, turn: &mut Turn<'_>) {
        if self.held.take().is_some() {
            self.decide(turn, None, None, DecisionKind::Unheld);
        }
    }

    /// How much longer nothing is granted; `None`: the device is not held.
    pub fn held_for(&self, now: Moment) -> Option<Duration> {
        self.held.map(|hold| hold.until.saturating_sub(now))
    }

    /// Whether a process has given back all that was asked of it, and the release is proven.
    pub fn settled(&self, incarnation: Incarnation) -> bool {
        let Some(holder) = self.holders.get(&incarnation) else { return true };
        let stays = match holder.life {
            Life::Granted | Life::Alive { .. } => holder.asked == Asked::Nothing,
            Life::Retiring { .. } | Life::Dying { .. } | Life::Reaped { .. } => false,
        };
        stays && self.leases_of(incarnation).all(|lease| lease.state == LeaseState::Granted)
    }

    /// Processes that hold leases.
    pub fn incarnations(&self) -> impl Iterator<Item = Incarnation> {
        self.holders.keys().copied()
    }
}

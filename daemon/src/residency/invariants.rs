//! What must hold of a ledger after every event, as pure functions: the property tests and debug builds check them.
//!
//! The ids are those of the design. R8 is the arena's: its segments' numbers, in the order in which they were handed out.

use std::collections::{BTreeMap, BTreeSet};

use super::lease::{Incarnation, LeaseId, Proof};
use super::ledger::state::{Lease, LeaseState, Life};
use super::ledger::{Effect, Event, Ledger};
use crate::clock::Moment;

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{id} is broken: {what}")]
pub struct Violation {
    /// R1 to R8.
    pub id: &'static str,
    /// How.
    pub what: String,
}

fn broken<T>(id: &'static str, what: String) -> Result<T, Violation> {
    Err(Violation { id, what })
}

/// Checks a ledger as it stands after a step at `now`.
///
/// # Errors
/// The first invariant that does not hold.
pub fn check(ledger: &Ledger, now: Moment) -> Result<(), Violation> {
    capacity_is_pursued(ledger, now)?;
    deadlines_are_kept(ledger, now)?;
    leases_have_holders(ledger)?;
    nothing_outlives_its_job(ledger)?;
    if let Some(waiter) = ledger.waiters.iter().find(|waiter| waiter.overtaken > ledger.rules.overtake_limit) {
        return broken("R6", format!("request {:?} was overtaken {} times", waiter.id, waiter.overtaken));
    }
    let passed_over = ledger.token.most_overtaken();
    if passed_over > ledger.rules.overtake_limit {
        return broken("R6", format!("somebody who waits for the compute token was passed over {passed_over} times"));
    }
    Ok(())
}

/// R8: no segment is used again, whoever may still have it mapped: each has a number that no earlier one had.
///
/// # Errors
/// A number that is not larger than the one before.
pub fn segments_are_new(numbers: &[u64]) -> Result<(), Violation> {
    match numbers.windows(2).find(|pair| pair[1] <= pair[0]) {
        Some(pair) => broken("R8", format!("segment {} was handed out after {}", pair[1], pair[0])),
        None => Ok(()),
    }
}

/// R1, second half: while more is charged than there is, all that is idle is giving back.
fn capacity_is_pursued(ledger: &Ledger, now: Moment) -> Result<(), Violation> {
    if ledger.capacity > ledger.budget {
        return broken("R1", format!("capacity {} exceeds the budget {}", ledger.capacity, ledger.budget));
    }
    let over = ledger.charged().saturating_sub(ledger.capacity);
    let overdue = |lease: &&Lease| match lease.state {
        LeaseState::Unproven { since, .. } => now >= since + ledger.rules.proof_time,
        LeaseState::Granted | LeaseState::Revoked { .. } => false,
    };
    let lost: u64 = ledger.leases.values().filter(overdue).map(|lease| lease.bytes - lease.remains()).sum();
    if over <= ledger.incoming() - lost {
        return Ok(());
    }
    let untouched = ledger.holders.iter().find(|(incarnation, holder)| {
        holder.idle() && ledger.leases_of(**incarnation).all(|lease| lease.state == LeaseState::Granted)
    });
    match untouched {
        Some((incarnation, _)) => broken(
            "R1",
            format!("{over} bytes are charged beyond the capacity and idle {incarnation} keeps its leases"),
        ),
        None => Ok(()),
    }
}

/// R3: every revision, every retirement and every term ends by its time.
fn deadlines_are_kept(ledger: &Ledger, now: Moment) -> Result<(), Violation> {
    for (incarnation, holder) in &ledger.holders {
        let late = match holder.life {
            Life::Alive { term_end, .. } => now >= term_end,
            Life::Retiring { deadline } => now >= deadline,
            Life::Granted | Life::Dying { .. } | Life::Reaped { .. } => false,
        };
        if late {
            return broken("R3", format!("{incarnation} lives past its time: {:?} at {now:?}", holder.life));
        }
        if matches!(holder.life, Life::Alive { .. }) && holder.overdraft_until.is_some_and(|until| now >= until) {
            return broken(
                "R3",
                format!("{incarnation} was to come back to its leases by {:?}", holder.overdraft_until),
            );
        }
    }
    for lease in ledger.leases.values() {
        if let LeaseState::Revoked { deadline, .. } = lease.state
            && now >= deadline
        {
            return broken("R3", format!("lease {} was to be given back by {deadline:?}, it is {now:?}", lease.id));
        }
    }
    Ok(())
}

/// R4 and R5: every lease belongs to one holder, which has not ended; a dead one's are all unproven; one of each purpose a
/// process.
fn leases_have_holders(ledger: &Ledger) -> Result<(), Violation> {
    if let Some(incarnation) = ledger.holders.keys().find(|incarnation| ledger.ended.contains(**incarnation)) {
        return broken("R4", format!("{incarnation} has ended and holds leases again"));
    }
    let mut purposes = BTreeSet::new();
    for (id, lease) in &ledger.leases {
        let Some(holder) = ledger.holders.get(&lease.incarnation) else {
            return broken("R4", format!("lease {id} belongs to {}, which holds nothing", lease.incarnation));
        };
        if *id != lease.id || lease.remains() > lease.bytes {
            return broken("R4", format!("lease {id} contradicts itself: {lease:?}"));
        }
        let dead = matches!(holder.life, Life::Dying { .. } | Life::Reaped { .. });
        if dead && !matches!(lease.state, LeaseState::Unproven { to: 0, .. }) {
            return broken("R4", format!("lease {id} of the dead {} is not unproven: {lease:?}", lease.incarnation));
        }
        if !purposes.insert((lease.incarnation, lease.purpose)) {
            return broken("R5", format!("{} is charged twice for {}", lease.incarnation, lease.purpose));
        }
    }
    Ok(())
}

/// R7: what was granted for a task and never became a process ends with the task; one process works for one task; nobody
/// waits for a token that nobody holds.
fn nothing_outlives_its_job(ledger: &Ledger) -> Result<(), Violation> {
    let mut requests = BTreeSet::new();
    for (incarnation, holder) in &ledger.holders {
        match &holder.claim {
            None if holder.life == Life::Granted => {
                return broken("R7", format!("{incarnation} has neither process nor task, and keeps leases"));
            }
            Some(claim) if !requests.insert(claim.request) => {
                return broken("R7", format!("request {:?} has two processes", claim.request));
            }
            Some(_) | None => {}
        }
    }
    for waiter in &ledger.waiters {
        if !requests.insert(waiter.id) {
            return broken("R7", format!("request {:?} waits although it was granted, or twice", waiter.id));
        }
    }
    if ledger.token.stuck() {
        return broken("R7", "somebody waits for the compute token and nobody has it".into());
    }
    Ok(())
}

/// Checks one step: from `before`, `event` led to `after` with `effects`.
///
/// # Errors
/// The first invariant that does not hold.
pub fn check_step(before: &Ledger, event: &Event, after: &Ledger, effects: &[Effect]) -> Result<(), Violation> {
    let proofs = proofs_have_grounds(before, event, effects)?;
    bytes_are_conserved(before, after, &proofs)?;
    nothing_is_granted_on_a_held_device(before, after, effects)?;
    bounds_hold(before, after, effects)
}

/// R1 of a device that is given to other programs: its capacity is none, for whatever is asked.
fn nothing_is_granted_on_a_held_device(before: &Ledger, after: &Ledger, effects: &[Effect]) -> Result<(), Violation> {
    let granted = effects.iter().find(|effect| matches!(effect, Effect::Granted { .. }));
    match granted {
        Some(granted) if before.held.is_some() && after.held.is_some() => {
            broken("R1", format!("{granted:?} while the device is given to other programs"))
        }
        Some(_) | None => Ok(()),
    }
}

/// R2, first half: what counts as proof. Returns the bytes proven of each lease.
fn proofs_have_grounds(
    before: &Ledger,
    event: &Event,
    effects: &[Effect],
) -> Result<BTreeMap<LeaseId, u64>, Violation> {
    let mut proofs: BTreeMap<LeaseId, u64> = BTreeMap::new();
    for effect in effects {
        let Effect::Proven { incarnation, lease, bytes, proof } = effect else { continue };
        if !has_grounds(before, event, *incarnation, *proof) {
            return broken("R2", format!("lease {lease} of {incarnation} was freed ({proof}) by {event:?}"));
        }
        *proofs.entry(*lease).or_default() += bytes;
    }
    Ok(proofs)
}

fn has_grounds(before: &Ledger, event: &Event, incarnation: Incarnation, proof: Proof) -> bool {
    let Some(holder) = before.holders.get(&incarnation) else { return false };
    match (proof, event) {
        (Proof::Reaped, Event::Reaped { incarnation: reaped }) => *reaped == incarnation && before.rules.reaping_proves,
        // Granted to a process that was never started.
        (Proof::Reaped, Event::Release { .. }) => holder.life == Life::Granted,
        (Proof::Measured, Event::Measured { incarnation: measured, bytes: Some(bytes) }) => {
            *measured == incarnation
                && *bytes <= before.allowed(incarnation).saturating_add(before.rules.tolerance)
                && matches!(holder.life, Life::Alive { .. } | Life::Retiring { .. })
        }
        (Proof::Measured, Event::Measured { incarnation: measured, bytes: None }) => {
            *measured == incarnation && matches!(holder.life, Life::Reaped { .. })
        }
        (Proof::Inferred, Event::Seen { incarnation: seen, free }) => {
            *seen == incarnation
                && before.free_that_proves(incarnation).is_some_and(|needed| *free >= needed)
                && matches!(holder.life, Life::Alive { .. } | Life::Retiring { .. } | Life::Reaped { .. })
        }
        (Proof::Reaped | Proof::Measured | Proof::Inferred, _) => false,
    }
}

/// R1 and R2: a lease shrinks by exactly what was proven, and grows only within the capacity.
fn bytes_are_conserved(before: &Ledger, after: &Ledger, proofs: &BTreeMap<LeaseId, u64>) -> Result<(), Violation> {
    let ids: BTreeSet<LeaseId> = before.leases.keys().chain(after.leases.keys()).copied().collect();
    let bytes = |ledger: &Ledger, id: &LeaseId| ledger.leases.get(id).map_or(0, |lease| lease.bytes);
    let mut grown = 0u64;
    for id in &ids {
        let (old, new) = (bytes(before, id), bytes(after, id));
        let proven = proofs.get(id).copied().unwrap_or(0);
        let Some(left) = old.checked_sub(proven) else {
            return broken("R2", format!("lease {id} had {old} bytes, and {proven} were proven"));
        };
        if new < left {
            return broken("R2", format!("lease {id} went from {old} to {new} bytes with {proven} proven"));
        }
        grown += new - left;
    }
    if grown > 0 && after.charged() > after.capacity {
        let (charged, capacity) = (after.charged(), after.capacity);
        return broken("R1", format!("{grown} bytes were granted, and {charged} are charged of {capacity}"));
    }
    Ok(())
}

/// R6: nothing is granted behind a request that has been overtaken enough.
fn bounds_hold(before: &Ledger, after: &Ledger, effects: &[Effect]) -> Result<(), Violation> {
    let waits = |id| after.waiters.iter().any(|waiter| waiter.id == id);
    let bound =
        before.waiters.iter().position(|waiter| waiter.overtaken >= before.rules.overtake_limit && waits(waiter.id));
    let Some(first) = bound else { return Ok(()) };
    for effect in effects {
        if let Effect::Granted { id, .. } = effect
            && !before.waiters.iter().take(first).any(|waiter| waiter.id == *id)
        {
            return broken("R6", format!("{id:?} was granted behind {:?}", before.waiters[first].id));
        }
    }
    Ok(())
}

//! Lives of processes: how their bytes come back, and what happens when they do not.

use std::time::Duration;

use super::ledger_support::*;
use super::*;
use sdd::residency::{Afterwards, DecisionKind, Effect, Event, LeaseKill, Proof, Purpose, Rules, invariants};

#[test]
fn a_dead_process_is_charged_until_it_is_reaped() {
    let mut bench = Bench::new(100);
    bench.granted(vector(1, 10, 50, 30));
    bench.start(1);
    let second = bench.waits(vector(2, 10, 60, 0));
    let effects = bench.step(Event::Lost { incarnation: 1 });
    assert_eq!((proven(&effects), bench.view().unproven), (0, 90));
    let effects = bench.step(Event::Reaped { incarnation: 1 });
    assert_eq!((proven(&effects), granted_ids(&effects)), (90, vec![second]));
    assert!(effects.iter().any(|e| matches!(e, Effect::Proven { proof: Proof::Reaped, .. })));
}

#[test]
fn where_reaping_proves_nothing_the_device_is_asked_until_it_shows_no_process() {
    let mut bench = Bench::with(100, Rules { reaping_proves: false, ..rules() });
    bench.warm(1, 10, 50, 30);
    let effects = bench.step(Event::Reaped { incarnation: 1 });
    assert_eq!((proven(&effects), measures(&effects)), (0, vec![1]));
    bench.step(Event::Measured { incarnation: 1, bytes: Some(50) });
    assert_eq!(bench.ledger.charged(), 90);
    assert!(measures(&bench.pass(SECOND)).len() > 3, "asked again");
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: None });
    assert_eq!((proven(&effects), bench.ledger.charged()), (90, 0));
}

#[test]
fn a_revision_that_is_not_answered_kills_and_a_kill_frees_nothing() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    let second = bench.waits(vector(2, 10, 10, 10));
    // Its pulses go on: only the revision is late.
    let before = bench.pass(rules().revise_time - Duration::from_millis(1));
    assert_eq!(killed(&before), NONE);
    bench.step(Event::Pulse { incarnation: 1, bytes: 90 });
    let effects = bench.pass(Duration::from_millis(1));
    assert_eq!((killed(&effects), proven(&effects), granted_ids(&effects)), (vec![1], 0, vec![]));
    assert_eq!(bench.ledger.charged(), 90);
    assert_eq!(granted_ids(&bench.step(Event::Reaped { incarnation: 1 })), [second]);
}

#[test]
fn a_retirement_that_is_not_followed_kills() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    assert_eq!(retired(&bench.step(Event::Retire { incarnation: 1 })), [1]);
    let effects = bench.pass(rules().retire_time);
    let cause = effects.iter().find_map(|e| match e {
        Effect::Kill { cause, .. } => Some(*cause),
        _ => None,
    });
    assert_eq!(cause, Some(LeaseKill::RetireOverdue(rules().retire_time)));
}

#[test]
fn a_busy_process_retires_when_its_task_has_ended() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 10, 10, 10));
    bench.start(1);
    assert_eq!(retired(&bench.step(Event::Retire { incarnation: 1 })), NONE);
    assert_eq!(retired(&bench.release(first)), [1]);
}

#[test]
fn a_term_that_no_pulse_renews_expires() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 10, 10);
    for _ in 0..5 {
        assert_eq!(killed(&bench.pass(rules().term - SECOND)), NONE);
        bench.step(Event::Pulse { incarnation: 1, bytes: 30 });
    }
    let effects = bench.pass(rules().term);
    assert_eq!(killed(&effects), [1]);
    assert_eq!(bench.ledger.charged(), 30, "dead is not proven");
    // One that never finished its handshake has longer, but not for ever; pulses do not count before it.
    bench.granted(vector(2, 10, 10, 10));
    bench.step(Event::Spawned { incarnation: 2 });
    bench.step(Event::Pulse { incarnation: 2, bytes: 0 });
    assert_eq!(killed(&bench.pass(rules().start_term - SECOND)), NONE);
    assert_eq!(killed(&bench.pass(SECOND)), [2]);
}

#[test]
fn a_process_whose_request_was_withdrawn_while_it_started_is_killed() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 10, 10, 10));
    bench.release(first);
    assert_eq!(bench.ledger.charged(), 0);
    let effects = bench.step(Event::Spawned { incarnation: 1 });
    assert_eq!(effects, [Effect::Kill { incarnation: 1, cause: LeaseKill::NoLease }]);
}

#[test]
fn a_started_process_is_told_its_leases_when_it_can_hear() {
    let mut bench = Bench::new(100);
    bench.granted(vector(1, 10, 20, 30));
    assert_eq!(bench.step(Event::Spawned { incarnation: 1 }), []);
    let effects = bench.step(Event::Attached { incarnation: 1 });
    let bytes = effects.iter().map(|e| match e {
        Effect::Grant { lease, .. } => lease.bytes,
        other => panic!("{other:?}"),
    });
    assert_eq!(bytes.sum::<u64>(), 60);
}

#[test]
fn an_unproven_release_degrades_the_device_and_stays_charged() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    let (id, _) = bench.granted(vector(1, 10, 50, 30));
    bench.step(Event::Release { id, afterwards: Afterwards::ReturnWorkingSet });
    let lease = bench.lease(1, Purpose::WorkingSet).unwrap();
    bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    let mut effects = Vec::new();
    for _ in 0..11 {
        bench.step(Event::Pulse { incarnation: 1, bytes: 90 });
        for incarnation in measures(&bench.pass(SECOND)) {
            effects.extend(bench.step(Event::Measured { incarnation, bytes: Some(90) }));
        }
    }
    assert_eq!((proven(&effects), bench.ledger.charged()), (0, 90));
    let why = bench.view().degraded.expect("the device is degraded");
    assert_eq!(why, "the release of 30 B by stage 1 is not proven");
    // It comes late, and all is well again.
    bench.step(Event::Measured { incarnation: 1, bytes: Some(60) });
    assert_eq!((bench.ledger.charged(), bench.view().degraded), (60, None));
}

#[test]
fn an_idle_process_whose_release_is_not_proven_is_retired_when_somebody_waits() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    let second = bench.waits(vector(2, 10, 10, 10));
    let lease = bench.lease(1, Purpose::WorkingSet).unwrap();
    bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    bench.step(Event::Measured { incarnation: 1, bytes: Some(90) });
    let effects = bench.pass(rules().patience - Duration::from_millis(1));
    assert_eq!((retired(&effects), measures(&effects).is_empty()), (vec![], false));
    let effects = bench.pass(SECOND);
    assert_eq!((retired(&effects), bench.ledger.charged()), (vec![1], 90));
    assert_eq!(granted_ids(&bench.step(Event::Reaped { incarnation: 1 })), [second]);
}

#[test]
fn a_process_that_cannot_be_killed_does_not_stop_others_from_being_asked() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 0);
    bench.warm(2, 10, 30, 0);
    let third = bench.waits(vector(3, 10, 30, 0));
    // One of the two is asked, killed, and never reaped.
    let effects = bench.pass(rules().retire_time);
    let [stuck] = killed(&effects)[..] else { panic!("{effects:#?}") };
    let other = 3 - stuck;
    bench.step(Event::Pulse { incarnation: other, bytes: 40 });
    let mut effects = Vec::new();
    for _ in 0..10 {
        effects.extend(bench.pass(SECOND));
        effects.extend(bench.step(Event::Pulse { incarnation: other, bytes: 40 }));
    }
    assert!(bench.view().degraded.is_some());
    assert_eq!(retired(&effects), [other]);
    assert_eq!(granted_ids(&bench.step(Event::Reaped { incarnation: other })), [third]);
}

#[test]
fn an_overdraft_is_charged_reported_and_killed_where_that_is_asked_for() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 20);
    let effects = bench.step(Event::Pulse { incarnation: 1, bytes: 85 });
    assert!(has_decision(&effects, |d| *d == DecisionKind::Overdraft { measured: 85, leased: 60 }));
    assert_eq!((bench.ledger.charged(), bench.view().overdraft, bench.ledger.available()), (85, 25, 15));
    bench.step(Event::Pulse { incarnation: 1, bytes: 60 });
    assert_eq!((bench.ledger.charged(), killed(&bench.pass(rules().revise_time))), (60, vec![]), "it came back");
    let mut bench = Bench::with(100, Rules { enforce: false, ..rules() });
    bench.warm(1, 10, 30, 20);
    bench.step(Event::Pulse { incarnation: 1, bytes: 85 });
    assert_eq!(killed(&bench.pass(rules().revise_time)), NONE);

    let mut bench = Bench::with(100, Rules { enforce: true, ..rules() });
    bench.warm(1, 10, 30, 20);
    let effects = bench.step(Event::Pulse { incarnation: 1, bytes: 85 });
    assert_eq!(revised(&effects), [(1, bench.lease(1, Purpose::WorkingSet).unwrap(), 20)]);
    let effects = bench.pass(rules().revise_time);
    assert!(
        effects.contains(&Effect::Kill { incarnation: 1, cause: LeaseKill::OverLease { measured: 85, leased: 60 } })
    );

    let mut bench = Bench::with(100, Rules { enforce: true, tolerance: 25, ..rules() });
    bench.warm(1, 10, 30, 20);
    bench.step(Event::Pulse { incarnation: 1, bytes: 85 });
    assert_eq!(
        (bench.ledger.charged(), killed(&bench.pass(rules().revise_time)).len()),
        (60, 0),
        "within the tolerance"
    );
}

#[test]
fn the_invariants_notice_a_grant_before_proof() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    bench.waits(vector(2, 10, 10, 10));
    let lease = bench.lease(1, Purpose::WorkingSet).unwrap();
    bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    let before = bench.ledger.clone();
    let honest = Event::Measured { incarnation: 1, bytes: Some(60) };
    let effects = bench.step(honest.clone());
    assert_eq!(invariants::check_step(&before, &honest, &bench.ledger, &effects), Ok(()));
    // The same step on the mere word of the process, on a measure that shows too much, and without the proof.
    let word = Event::Returned { incarnation: 1, lease, bytes: 0 };
    let too_much = Event::Measured { incarnation: 1, bytes: Some(61) };
    for event in [word, too_much] {
        let violation = invariants::check_step(&before, &event, &bench.ledger, &effects).unwrap_err();
        assert_eq!(violation.id, "R2", "{violation}");
    }
    let silent: Vec<Effect> = effects.into_iter().filter(|e| !matches!(e, Effect::Proven { .. })).collect();
    assert_eq!(invariants::check_step(&before, &honest, &bench.ledger, &silent).unwrap_err().id, "R2");
}

#[test]
fn a_slow_block_has_time_to_end() {
    let mut bench = Bench::with(100, moving());
    bench.granted(elastic(1, 20, 80));
    bench.start(1);
    bench.step(Event::BlockTime { incarnation: 1, time: 3 * SECOND });
    bench.step(Event::BlockTime { incarnation: 1, time: SECOND });
    bench.waits(vector(2, 40, 0, 0));
    assert_eq!(killed(&bench.pass(5 * SECOND)), NONE);
    bench.step(Event::Pulse { incarnation: 1, bytes: 100 });
    assert_eq!(killed(&bench.pass(5 * SECOND)), NONE);
    bench.step(Event::Pulse { incarnation: 1, bytes: 100 });
    assert_eq!(killed(&bench.pass(2 * SECOND)), [1], "four blocks");
}

#[test]
fn where_no_process_is_shown_a_release_is_inferred_from_the_free_bytes() {
    let mut bench = Bench::with(100, Rules { reaping_proves: false, ..rules() });
    bench.warm(1, 10, 30, 0);
    bench.warm(2, 10, 30, 0);
    bench.step(Event::Free { bytes: 500 });
    bench.step(Event::Reaped { incarnation: 1 });
    bench.step(Event::Reaped { incarnation: 2 });
    assert_eq!(proven(&bench.step(Event::Seen { incarnation: 1, free: 539 })), 0, "a byte is missing");
    let effects = bench.step(Event::Seen { incarnation: 1, free: 540 });
    assert!(effects.iter().any(|e| matches!(e, Effect::Proven { proof: Proof::Inferred, .. })));
    assert_eq!(proven(&bench.step(Event::Seen { incarnation: 2, free: 540 })), 0, "these bytes were the other's");
    assert_eq!(proven(&bench.step(Event::Seen { incarnation: 2, free: 580 })), 40);
    assert_eq!(bench.ledger.charged(), 0);
    // Without a reading from before nothing is proven.
    let mut bench = Bench::with(100, Rules { reaping_proves: false, ..rules() });
    bench.warm(1, 10, 30, 0);
    bench.step(Event::Reaped { incarnation: 1 });
    assert_eq!(proven(&bench.step(Event::Seen { incarnation: 1, free: 1000 })), 0);
}

//! Every rule of the ledger, one test each.

mod ledger_support;

use std::time::Duration;

use ledger_support::*;
use sdd::ids::JobId;
use sdd::residency::{
    Afterwards, DecisionKind, Effect, Event, LeaseKill, LeasePart, LifeView, Proof, Purpose, Refusal, RequestId, Rules,
    Upcoming, invariants, policy::Rung,
};

const SECOND: Duration = Duration::from_secs(1);
const NONE: [u64; 0] = [];

fn elastic(incarnation: u64, min: u64, want: u64) -> sdd::residency::LeaseVector {
    let mut vector = vector(incarnation, 10, 0, 10);
    vector.parts.push(LeasePart { purpose: Purpose::Weights, min, want });
    vector
}

#[test]
fn a_vector_is_granted_whole_or_not_at_all() {
    let mut bench = Bench::new(100);
    let (first, leases) = bench.granted(vector(1, 10, 30, 20));
    assert_eq!(leases.iter().map(|lease| lease.bytes).collect::<Vec<_>>(), [10, 30, 20]);
    // 40 are free, and each part alone would fit.
    let second = bench.waits(vector(2, 10, 20, 20));
    assert_eq!(bench.ledger.charged(), 60, "nothing is held by who waits");
    // Its process was never started: the bytes are free with the claim.
    assert_eq!(granted_ids(&bench.release(first)), [second]);
}

#[test]
fn what_can_never_fit_is_refused_at_once_with_the_numbers() {
    let mut bench = Bench::new(100);
    match bench.refused(vector(1, 10, 60, 31)) {
        Refusal::DoesNotFit { need: 101, limit: 100, breakdown, .. } => {
            assert_eq!(breakdown, "context 10 B, weights 60 B, working set 31 B");
        }
        other => panic!("{other}"),
    }
    let huge = bench.refused(vector(1, u64::MAX, u64::MAX, 1));
    assert!(matches!(huge, Refusal::DoesNotFit { need: u64::MAX, .. }), "no overflow: {huge}");
    let mut shared = vector(1, 1, 1, 1);
    shared.shared_memory = 1001;
    assert!(matches!(bench.refused(shared), Refusal::SharedMemory { need: 1001, limit: 1000, .. }));
    assert!(matches!(bench.refused(elastic(1, 20, 10)), Refusal::Malformed { .. }));
    let mut twice = vector(1, 1, 1, 0);
    twice.parts.push(LeasePart::exactly(Purpose::Weights, 2));
    assert!(matches!(bench.refused(twice), Refusal::Malformed { .. }));
}

#[test]
fn what_a_process_holds_for_other_purposes_counts_against_the_limit() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 60, 0);
    bench.granted(vector(1, 0, 0, 30));
    let refusal = bench.refused(vector(1, 0, 0, 31));
    assert!(matches!(refusal, Refusal::DoesNotFit { need: 101, .. }), "{refusal}");
}

#[test]
fn a_warm_process_of_the_same_size_is_granted_without_a_message() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 20);
    let (_, effects) = bench.ask(vector(1, 10, 30, 20));
    assert_eq!(granted_ids(&effects).len(), 1);
    let messages = effects.iter().filter(|e| !matches!(e, Effect::Granted { .. } | Effect::Decided(_))).count();
    assert_eq!(messages, 0, "{effects:#?}");
    assert_eq!(bench.ledger.charged(), 60);
}

#[test]
fn a_warm_process_is_told_when_it_may_hold_more() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 20);
    let (_, effects) = bench.ask(vector(1, 10, 30, 50));
    let told = effects.iter().position(|e| matches!(e, Effect::Grant { lease, .. } if lease.bytes == 50));
    let answered = effects.iter().position(|e| matches!(e, Effect::Granted { .. }));
    assert!(told.is_some() && told < answered, "the process hears before the task can be sent: {effects:#?}");
    // The context was not charged again, and the working set grew by the difference.
    assert_eq!(bench.ledger.charged(), 90);
}

#[test]
fn a_process_works_for_one_task_at_a_time() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 10, 10);
    let (first, _) = bench.granted(vector(1, 10, 10, 10));
    let second = bench.waits(vector(1, 10, 10, 10));
    let third = bench.waits(vector(1, 10, 10, 10));
    assert_eq!(granted_ids(&bench.release(first)), [second]);
    assert_eq!(granted_ids(&bench.release(second)), [third]);
    assert_eq!(granted_ids(&bench.release(second)).len(), 0, "a claim ends once");
}

#[test]
fn an_idle_process_gives_its_working_set_before_it_goes() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    let (_, effects) = bench.ask(vector(2, 10, 10, 10));
    let lease = bench.lease(1, Purpose::WorkingSet).unwrap();
    assert_eq!((revised(&effects), retired(&effects)), (vec![(1, lease, 0)], vec![]));
    assert!(granted_ids(&effects).is_empty());
    assert!(has_decision(&effects, |d| matches!(d, DecisionKind::TakesBack { bytes: 30, .. })));

    let effects = bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    assert_eq!((measures(&effects), proven(&effects)), (vec![1], 0), "what it says proves nothing");
    assert_eq!(bench.ledger.charged(), 90);
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: Some(61) });
    assert!(granted_ids(&effects).is_empty(), "it still holds a byte too much");
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: Some(60) });
    assert_eq!((proven(&effects), granted_ids(&effects).len()), (30, 1), "granted in the turn of the proof");
    assert_eq!(bench.ledger.charged(), 90);
}

#[test]
fn an_idle_process_retires_when_its_working_set_is_not_enough() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 30);
    let (second, effects) = bench.ask(vector(2, 10, 60, 10));
    assert_eq!(retired(&effects), [1]);
    assert_eq!(bench.view().holders[0].life, LifeView::Retiring);
    // It says that it freed everything but its context, and the device shows it: the waiter need not wait for the exit.
    for purpose in [Purpose::Weights, Purpose::WorkingSet, Purpose::Context] {
        let lease = bench.lease(1, purpose).unwrap();
        bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    }
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: Some(10) });
    assert_eq!((proven(&effects), granted_ids(&effects)), (80, vec![second]));
    assert!(bench.lease(1, Purpose::Context).is_some(), "a context ends with its process only");
    assert_eq!(proven(&bench.step(Event::Reaped { incarnation: 1 })), 10);
    assert_eq!(bench.ledger.charged(), 80);
}

#[test]
fn busy_processes_are_never_touched() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 10, 50, 30));
    bench.start(1);
    let (second, effects) = bench.ask(vector(2, 10, 10, 10));
    assert_eq!((retired(&effects), revised(&effects), killed(&effects)), (vec![], vec![], vec![]));
    assert!(has_decision(&effects, |d| matches!(d, DecisionKind::WaitsForBytes { need: 30, available: 10, busy }
        if *busy == ["stage 1"])));
    // Idle, it is shrunk in the same turn.
    let effects = bench.release(first);
    assert_eq!(revised(&effects).len(), 1);
    bench.step(Event::Withdraw { id: second });
}

#[test]
fn nothing_is_retired_in_vain() {
    let mut bench = Bench::new(100);
    bench.granted(vector(1, 10, 50, 0));
    bench.start(1);
    bench.warm(2, 10, 10, 0);
    let (_, effects) = bench.ask(vector(3, 50, 0, 0));
    assert_eq!(retired(&effects), NONE, "with the idle one gone 40 of the 50 would be free");
}

#[test]
fn luxury_is_taken_from_the_busy_down_to_their_floor() {
    let mut bench = Bench::new(100);
    let (_, leases) = bench.granted(elastic(1, 20, 500));
    assert_eq!(leases.iter().map(|lease| lease.bytes).sum::<u64>(), 100, "all that nobody needs");
    bench.start(1);
    let (second, effects) = bench.ask(vector(2, 10, 10, 10));
    let lease = bench.lease(1, Purpose::Weights).unwrap();
    assert_eq!(revised(&effects), [(1, lease, 50)], "no more than is needed");
    bench.step(Event::Returned { incarnation: 1, lease, bytes: 50 });
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: Some(70) });
    assert_eq!(granted_ids(&effects), [second]);
}

#[test]
fn a_busy_process_keeps_its_floor() {
    let mut bench = Bench::new(100);
    bench.granted(elastic(1, 20, 500));
    bench.start(1);
    let (_, effects) = bench.ask(vector(2, 61, 0, 0));
    assert_eq!((revised(&effects), retired(&effects)), (vec![], vec![]), "sixty are above the floor");
    let (_, effects) = bench.ask(vector(3, 60, 0, 0));
    assert_eq!(revised(&effects), [(1, bench.lease(1, Purpose::Weights).unwrap(), 20)]);
}

#[test]
fn luxury_leaves_what_waiting_requests_need() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 80, 0, 0));
    let second = bench.waits(elastic(2, 40, 100));
    let third = bench.waits(vector(3, 30, 0, 0));
    let effects = bench.release(first);
    assert_eq!(granted_ids(&effects), [second, third]);
    let of_second = grants(&effects)[0].1.iter().map(|lease| lease.bytes).sum::<u64>();
    assert_eq!(of_second, 70);
}

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
fn requests_for_a_process_that_goes_are_refused_so_that_a_new_one_is_asked_for() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 10, 50, 30));
    bench.start(1);
    bench.waits(vector(1, 10, 50, 30));
    let effects = bench.step(Event::Reaped { incarnation: 1 });
    assert!(matches!(refusals(&effects)[..], [(_, Refusal::HolderGone { incarnation: 1, .. })]));
    bench.release(first);
    bench.warm(2, 10, 10, 10);
    bench.step(Event::Retire { incarnation: 2 });
    assert!(matches!(bench.refused(vector(2, 10, 10, 10)), Refusal::HolderGone { incarnation: 2, .. }));
}

#[test]
fn an_incarnation_that_has_ended_is_never_granted_again() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 10, 10);
    bench.step(Event::Reaped { incarnation: 1 });
    assert!(matches!(bench.refused(vector(1, 10, 10, 10)), Refusal::HolderGone { incarnation: 1, .. }));
    // One whose task was withdrawn before its process started has ended as well: the start may still show up.
    let (second, _) = bench.granted(vector(2, 10, 10, 10));
    let third = bench.waits(vector(2, 10, 10, 10));
    let effects = bench.release(second);
    assert!(matches!(refusals(&effects)[..], [(id, Refusal::HolderGone { incarnation: 2, .. })] if id == third));
    assert_eq!(killed(&bench.step(Event::Spawned { incarnation: 2 })), [2]);
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
fn a_waiter_is_overtaken_eight_times_and_no_more() {
    let mut bench = Bench::new(100);
    bench.granted(vector(1, 60, 0, 0));
    let large = bench.waits(vector(2, 50, 0, 0));
    for n in 0..8 {
        let (small, _) = bench.granted(vector(10 + n, 10, 0, 0));
        bench.release(small);
    }
    let ninth = bench.waits(vector(30, 10, 0, 0));
    assert_eq!(bench.view().waiters[0].overtaken, 8);
    let effects = bench.step(Event::Withdraw { id: large });
    assert_eq!(granted_ids(&effects), [ninth]);
}

#[test]
fn a_waiter_is_overtaken_for_thirty_seconds_and_no_longer() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 60, 0, 0));
    let large = bench.waits(vector(2, 50, 0, 0));
    bench.pass(rules().overtake_time - SECOND);
    bench.granted(vector(3, 10, 0, 0));
    bench.pass(SECOND);
    let late = bench.waits(vector(4, 10, 0, 0));
    assert_eq!(granted_ids(&bench.release(first)), [large, late], "in order");
}

#[test]
fn what_is_taken_back_for_one_is_not_given_to_another() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 70, 0);
    bench.warm(2, 10, 0, 0);
    let large = bench.waits(vector(3, 90, 0, 0));
    // Ten bytes are free, and would fit: but they are being collected.
    let small = bench.waits(vector(4, 10, 0, 0));
    let effects = bench.step(Event::Reaped { incarnation: 1 });
    assert_eq!(granted_ids(&effects), [large]);
    // What needs no byte passes meanwhile.
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 70, 0);
    bench.warm(2, 10, 0, 0);
    bench.waits(vector(3, 60, 0, 0));
    bench.granted(vector(2, 10, 0, 0));
    let _ = small;
}

#[test]
fn a_waiting_request_protects_its_process() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 0);
    bench.warm(2, 10, 30, 0);
    bench.pass(SECOND);
    // Both are equally idle, but one is about to be used again by a request that lacks shared memory.
    let mut wanted = vector(1, 10, 30, 0);
    wanted.shared_memory = 600;
    assert!(bench.pool.take(500));
    bench.waits(wanted);
    let (_, effects) = bench.ask(vector(3, 10, 30, 0));
    assert_eq!(retired(&effects), [2]);
}

#[test]
fn a_process_gives_up_its_own_surplus_for_its_next_task() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 10, 70);
    let id = bench.waits(vector(1, 10, 40, 20));
    let lease = bench.lease(1, Purpose::WorkingSet).unwrap();
    assert_eq!(bench.view().leases.iter().filter(|l| l.state == sd_proto::v1::LeaseState::Revoked).count(), 1);
    bench.step(Event::Returned { incarnation: 1, lease, bytes: 20 });
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: Some(40) });
    assert_eq!(granted_ids(&effects), [id]);
}

#[test]
fn shared_memory_is_granted_with_the_rest_or_not_at_all() {
    let mut bench = Bench::new(100);
    let mut first = vector(1, 10, 0, 0);
    first.shared_memory = 700;
    bench.granted(first);
    let mut second = vector(2, 10, 0, 0);
    second.shared_memory = 400;
    let (id, effects) = bench.ask(second);
    assert!(has_decision(&effects, |d| *d == DecisionKind::WaitsForSharedMemory { need: 400, available: 300 }));
    assert_eq!((bench.ledger.charged(), bench.pool.used()), (10, 700));
    bench.pool.give_back(700);
    assert_eq!(granted_ids(&bench.step(Event::Tick)), [id]);
    assert_eq!(bench.pool.used(), 400);
}

#[test]
fn afterwards_is_as_the_task_says() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 20);
    let (first, _) = bench.granted(vector(1, 10, 30, 20));
    let effects = bench.step(Event::Release { id: first, afterwards: Afterwards::ReturnWorkingSet });
    assert_eq!(revised(&effects), [(1, bench.lease(1, Purpose::WorkingSet).unwrap(), 0)]);
    // A request waits until the revision has ended one way or the other.
    let second = bench.waits(vector(1, 10, 30, 20));
    let lease = bench.lease(1, Purpose::WorkingSet).unwrap();
    bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    let effects = bench.step(Event::Measured { incarnation: 1, bytes: Some(40) });
    assert_eq!(granted_ids(&effects), [second]);
    let effects = bench.step(Event::Release { id: second, afterwards: Afterwards::Retire });
    assert_eq!(retired(&effects), [1]);
}

#[test]
fn a_busy_process_that_asks_for_more_is_answered_at_once() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 10, 30, 20));
    bench.start(1);
    let answer = |effects: &[Effect]| {
        let found = effects.iter().find_map(|e| match e {
            Effect::Grant { lease, request_id: 7, .. } => Some(lease.bytes),
            _ => None,
        });
        found.expect("answered")
    };
    let extend = |min, want| Event::Extend { incarnation: 1, request_id: 7, purpose: Purpose::WorkingSet, min, want };
    assert_eq!(answer(&bench.step(extend(10, 20))), 40);
    assert_eq!(answer(&bench.step(extend(21, 21))), 40, "no more than is free");
    assert_eq!(bench.ledger.charged(), 80);
    bench.release(first);
    assert_eq!(answer(&bench.step(extend(1, 1))), 40, "an idle process has no reason");
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
fn capacity_shrinks_at_once_and_grows_when_it_has_lasted() {
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 50, 0);
    let effects = bench.step(Event::Capacity { bytes: 50 });
    assert_eq!((retired(&effects), bench.view().capacity), (vec![1], 50));
    bench.step(Event::Reaped { incarnation: 1 });
    let large = bench.waits(vector(2, 60, 0, 0));
    bench.step(Event::Capacity { bytes: 100 });
    assert_eq!(bench.view().capacity, 50);
    // It falls back in between, a little: only what lasted counts.
    bench.pass(SECOND);
    bench.step(Event::Capacity { bytes: 80 });
    assert_eq!(granted_ids(&bench.pass(SECOND)), [large]);
    assert_eq!(bench.view().capacity, 80);
    bench.step(Event::Capacity { bytes: 500 });
    bench.pass(rules().growth_time);
    assert_eq!(bench.view().capacity, 100, "never beyond the budget");
}

#[test]
fn below_capacity_nothing_is_granted() {
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 60, 0, 0));
    bench.start(1);
    bench.warm(2, 10, 0, 0);
    bench.step(Event::Capacity { bytes: 50 });
    let second = bench.waits(vector(3, 1, 0, 0));
    let effects = bench.release(first);
    assert_eq!(retired(&effects), [1]);
    bench.step(Event::Reaped { incarnation: 2 });
    assert_eq!(granted_ids(&bench.step(Event::Reaped { incarnation: 1 })), [second]);
}

#[test]
fn the_compute_token_passes_in_order() {
    let mut bench = Bench::new(100);
    let ask = |n: u64| Event::TokenRequest { id: RequestId(n), job: JobId::from(format!("job{n}")) };
    assert_eq!(bench.step(ask(1)), [Effect::TokenGranted { id: RequestId(1) }]);
    assert_eq!(bench.step(ask(2)), []);
    assert_eq!(bench.view().computing, Some(JobId::from("job1")));
    assert_eq!(bench.step(Event::TokenEnded { id: RequestId(1) }), [Effect::TokenGranted { id: RequestId(2) }]);
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

/// Rules of a device where weights move.
fn moving() -> Rules {
    Rules { weights_move: true, ..rules() }
}

#[test]
fn an_idle_process_parks_before_it_retires_and_gives_no_more_than_is_needed() {
    let mut bench = Bench::with(100, moving());
    bench.warm(1, 10, 50, 30);
    let weights = bench.lease(1, Purpose::Weights).unwrap();
    let working_set = bench.lease(1, Purpose::WorkingSet).unwrap();
    // Ten are free and its working set has thirty: five of its weights must go as well.
    let (second, effects) = bench.ask(vector(2, 10, 25, 10));
    assert_eq!((revised(&effects), retired(&effects)), (vec![(1, weights, 45), (1, working_set, 0)], vec![]));
    assert!(has_decision(&effects, |d| matches!(d, DecisionKind::TakesBack { rung: Rung::Shrink, bytes: 35, .. })));
    bench.step(Event::Returned { incarnation: 1, lease: weights, bytes: 45 });
    bench.step(Event::Returned { incarnation: 1, lease: working_set, bytes: 0 });
    assert_eq!(granted_ids(&bench.step(Event::Measured { incarnation: 1, bytes: Some(55) })), [second]);
    // All of its weights: it parks, and its context stays.
    let (third, effects) = bench.ask(vector(3, 10, 35, 0));
    assert_eq!((revised(&effects), retired(&effects)), (vec![(1, weights, 0)], vec![]));
    assert!(has_decision(&effects, |d| matches!(d, DecisionKind::TakesBack { rung: Rung::Park, bytes: 45, .. })));
    bench.step(Event::Returned { incarnation: 1, lease: weights, bytes: 0 });
    assert_eq!(granted_ids(&bench.step(Event::Measured { incarnation: 1, bytes: Some(10) })), [third]);
    assert_eq!((bench.ledger.charged(), bench.view().holders[0].life), (100, LifeView::Alive));
    // Its context goes with the process only.
    let (_, effects) = bench.ask(vector(4, 10, 0, 0));
    assert_eq!(retired(&effects), [1]);
}

#[test]
fn a_stage_that_asks_to_park_keeps_its_context_alone() {
    let mut bench = Bench::with(100, moving());
    let (first, _) = bench.granted(vector(1, 10, 30, 20));
    bench.start(1);
    let effects = bench.step(Event::Release { id: first, afterwards: Afterwards::Park });
    assert_eq!((revised(&effects).len(), retired(&effects)), (2, vec![]));
    assert!(!bench.ledger.settled(1));
    for purpose in [Purpose::Weights, Purpose::WorkingSet] {
        let lease = bench.lease(1, purpose).unwrap();
        bench.step(Event::Returned { incarnation: 1, lease, bytes: 0 });
    }
    bench.step(Event::Measured { incarnation: 1, bytes: Some(10) });
    assert_eq!((bench.ledger.charged(), bench.ledger.settled(1)), (10, true));
    // Its next task takes the weights again.
    let (_, effects) = bench.ask(vector(1, 10, 30, 20));
    assert_eq!((granted_ids(&effects).len(), bench.ledger.charged()), (1, 60));
    // Where weights cannot leave alone, the process leaves.
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 10, 30, 20));
    bench.start(1);
    assert_eq!(retired(&bench.step(Event::Release { id: first, afterwards: Afterwards::Park })), [1]);
}

#[test]
fn a_busy_process_gets_back_what_was_taken_when_nobody_needs_it() {
    let mut bench = Bench::with(100, moving());
    bench.granted(elastic(1, 20, 80));
    bench.start(1);
    let weights = bench.lease(1, Purpose::Weights).unwrap();
    let second = bench.waits(vector(2, 40, 0, 0));
    bench.step(Event::Returned { incarnation: 1, lease: weights, bytes: 40 });
    assert_eq!(granted_ids(&bench.step(Event::Measured { incarnation: 1, bytes: Some(60) })), [second]);
    let effects = bench.release(second);
    let more = effects.iter().find_map(|e| match e {
        Effect::Grant { incarnation: 1, lease, .. } => Some(lease.bytes),
        _ => None,
    });
    assert_eq!(more, Some(80), "{effects:#?}");
}

#[test]
fn the_queue_decides_who_goes_and_what_is_luxury() {
    let upcoming = |holder: &str, needs| Upcoming {
        device: sdd::ids::DeviceId::cpu(),
        job: JobId::from("queued"),
        holder: holder.into(),
        needs,
    };
    let mut bench = Bench::new(100);
    bench.warm(1, 10, 30, 0);
    bench.pass(SECOND);
    bench.warm(2, 10, 30, 0);
    // The one that was used last would be kept, but the queue needs the other one first.
    bench.step(Event::Upcoming {
        stages: vec![upcoming("stage 1", 40), upcoming("stage 9", 1), upcoming("stage 2", 40)],
    });
    let (_, effects) = bench.ask(vector(3, 10, 20, 0));
    assert_eq!(retired(&effects), [2]);
    let mut bench = Bench::new(100);
    bench.step(Event::Upcoming { stages: vec![upcoming("stage 9", 35)] });
    let (_, leases) = bench.granted(elastic(1, 20, 500));
    assert_eq!(leases.iter().map(|lease| lease.bytes).sum::<u64>(), 65, "the next stage's bytes are no luxury");
    // What comes later in the same job cannot need them before.
    let mut bench = Bench::new(100);
    let own = Upcoming { job: JobId::from("job1"), ..upcoming("stage 9", 35) };
    bench.step(Event::Upcoming { stages: vec![own] });
    let (_, leases) = bench.granted(elastic(1, 20, 500));
    assert_eq!(leases.iter().map(|lease| lease.bytes).sum::<u64>(), 100);
}

#[test]
fn a_pinned_process_is_not_taken_for_others_but_for_a_smaller_device_and_by_name() {
    let mut bench = Bench::with(100, moving());
    bench.warm(1, 10, 30, 20);
    bench.warm(2, 10, 20, 0);
    bench.step(Event::Pin { incarnation: 1, pinned: true });
    let working_set = bench.lease(1, Purpose::WorkingSet).unwrap();
    let (_, effects) = bench.ask(vector(3, 10, 50, 0));
    assert_eq!((revised(&effects), retired(&effects)), (vec![(1, working_set, 0)], vec![2]), "its scratch is not kept");
    let refusal = bench.refused(vector(4, 10, 51, 0));
    assert!(matches!(refusal, Refusal::Pinned { need: 61, kept: 40, limit: 100, .. }), "{refusal}");
    assert!(bench.view().holders[0].pinned);

    let mut bench = Bench::with(100, moving());
    bench.warm(1, 10, 50, 0);
    bench.step(Event::Pin { incarnation: 1, pinned: true });
    let effects = bench.step(Event::Capacity { bytes: 30 });
    assert_eq!(revised(&effects).len(), 1, "a smaller device is not to be pinned");

    let mut bench = Bench::with(100, moving());
    bench.warm(1, 10, 50, 0);
    bench.step(Event::Pin { incarnation: 1, pinned: true });
    assert_eq!(retired(&bench.step(Event::Retire { incarnation: 1 })), [1]);
    // Who waits when a pin is set would wait for ever.
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(vector(1, 60, 0, 0));
    bench.start(1);
    let second = bench.waits(vector(2, 50, 0, 0));
    let effects = bench.step(Event::Pin { incarnation: 1, pinned: true });
    assert!(matches!(refusals(&effects)[..], [(id, Refusal::Pinned { .. })] if id == second), "{effects:#?}");
    bench.release(first);
}

#[test]
fn a_device_that_is_held_grants_nothing_and_is_left_by_all() {
    let mut bench = Bench::with(100, moving());
    bench.warm(1, 10, 20, 0);
    let (busy, _) = bench.granted(elastic(2, 20, 40));
    bench.start(2);
    let weights = bench.lease(2, Purpose::Weights).unwrap();
    let effects = bench.step(Event::Hold { time: Some(60 * SECOND) });
    assert_eq!((retired(&effects), revised(&effects)), (vec![1], vec![(2, weights, 20)]));
    assert!(has_decision(&effects, |d| *d == DecisionKind::Held { time: Some(60 * SECOND) }));
    bench.step(Event::Reaped { incarnation: 1 });
    let waiting = bench.waits(vector(3, 10, 0, 0));
    bench.step(Event::Returned { incarnation: 2, lease: weights, bytes: 20 });
    bench.step(Event::Measured { incarnation: 2, bytes: Some(40) });
    assert_eq!(retired(&bench.release(busy)), [2], "when its task has ended");
    bench.step(Event::Reaped { incarnation: 2 });
    assert_eq!((bench.ledger.charged(), bench.ledger.held_for(bench.now)), (0, Some(60 * SECOND)));
    assert_eq!(granted_ids(&bench.pass(60 * SECOND)), [waiting]);
    // Ended before its time; and without a time nothing is held at all.
    bench.step(Event::Hold { time: Some(SECOND) });
    let fourth = bench.waits(vector(4, 10, 0, 0));
    assert_eq!(granted_ids(&bench.step(Event::Unhold)), [fourth]);
    bench.step(Event::Hold { time: None });
    bench.granted(vector(5, 10, 0, 0));
}

#[test]
fn tenants_take_turns_and_nobody_is_overtaken_without_end() {
    let of = |incarnation: u64, tenant: &str| sdd::residency::LeaseVector {
        tenant: tenant.into(),
        ..vector(incarnation, 60, 0, 0)
    };
    let mut bench = Bench::new(100);
    let (first, _) = bench.granted(of(1, "many"));
    let [second, third] = [2, 3].map(|incarnation| bench.waits(of(incarnation, "many")));
    let few = bench.waits(of(10, "few"));
    // A running task computes, and so has had something of the device.
    bench.step(Event::TokenRequest { id: RequestId(100), job: "job1".into() });
    bench.now += SECOND;
    bench.step(Event::TokenEnded { id: RequestId(100) });
    assert_eq!(granted_ids(&bench.release(first)), [few], "its tenant has nothing yet");
    assert_eq!(granted_ids(&bench.release(few)), [second], "first come, first served within a tenant");
    assert_eq!(granted_ids(&bench.release(second)), [third]);

    // A tenant that has something running stands back behind one that has not; it is still served.
    let mut bench = Bench::new(100);
    let (mut running, _) = bench.granted(of(1, "light"));
    bench.granted(sdd::residency::LeaseVector { tenant: "heavy".into(), ..vector(3, 10, 0, 0) });
    let heavy = bench.waits(of(2, "heavy"));
    for round in 0.. {
        let light = bench.waits(of(10 + round, "light"));
        let granted = granted_ids(&bench.release(running));
        if granted == [heavy] {
            assert_eq!(round, 8);
            break;
        }
        assert_eq!(granted, [light]);
        running = light;
    }
}

#[test]
fn shares_weigh_tenants() {
    let of = |incarnation: u64, tenant: &str| sdd::residency::LeaseVector {
        tenant: tenant.into(),
        ..vector(incarnation, 30, 0, 0)
    };
    let mut bench = Bench::new(100);
    bench.step(Event::Shares { weights: [("a".into(), 2)].into() });
    let (first, _) = bench.granted(of(1, "a"));
    bench.granted(of(2, "a"));
    bench.granted(of(3, "b"));
    bench.waits(of(4, "b"));
    let next = bench.waits(of(5, "a"));
    assert_eq!(granted_ids(&bench.release(first)), [next], "two of the one weigh as much as one of the other");
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

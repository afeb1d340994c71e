//! Requests: granted whole or not at all, refused with numbers, in order, by shares.

use super::ledger_support::*;
use super::*;
use sdd::ids::JobId;
use sdd::residency::{DecisionKind, Effect, Event, LeasePart, Purpose, Refusal, RequestId};

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
fn the_compute_token_passes_in_order() {
    let mut bench = Bench::new(100);
    let ask = |n: u64| Event::TokenRequest { id: RequestId(n), job: JobId::from(format!("job{n}")) };
    assert_eq!(bench.step(ask(1)), [Effect::TokenGranted { id: RequestId(1) }]);
    assert_eq!(bench.step(ask(2)), []);
    assert_eq!(bench.view().computing, Some(JobId::from("job1")));
    assert_eq!(bench.step(Event::TokenEnded { id: RequestId(1) }), [Effect::TokenGranted { id: RequestId(2) }]);
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

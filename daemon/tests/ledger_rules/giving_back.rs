//! Taking back: from whom, by which rung, how far.

use super::ledger_support::*;
use super::*;
use sdd::ids::JobId;
use sdd::residency::{Afterwards, DecisionKind, Effect, Event, LifeView, Purpose, Upcoming, policy::Rung};

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

//! What is larger than a request: capacity, pins, holds.

use super::ledger_support::*;
use super::*;
use sdd::residency::{DecisionKind, Event, Purpose, Refusal};

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

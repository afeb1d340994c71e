//! Random histories against a physical world that the ledger cannot see: processes that obey, lie, hang, die and are
//! reaped late. What they really hold never exceeds the capacity when bytes are granted; every request is answered
//! once; when everybody behaves again, everybody is served and every byte comes back.
//!
//! The same world catches broken ledgers: one that believes a process's word, one that takes a kill for a release, and one
//! that sells more than there is.

mod ledger_support;
mod ledger_world;

use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ledger_world::{Honest, KillProves, Machine, Op, Oversells, Seen, WordProves, World, ops};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

/// Any operation can follow any other: one that finds nothing to act on does nothing. Which rules the device has
/// is drawn first.
struct Histories;

impl ReferenceStateMachine for Histories {
    type State = bool;
    type Transition = Op;

    fn init_state() -> BoxedStrategy<bool> {
        any::<bool>().boxed()
    }

    fn transitions(_: &bool) -> BoxedStrategy<Op> {
        ops().boxed()
    }

    fn apply(state: bool, _: &Op) -> bool {
        state
    }
}

struct LedgerInItsWorld;

impl StateMachineTest for LedgerInItsWorld {
    type SystemUnderTest = World<Honest>;
    type Reference = Histories;

    fn init_test(reaping_proves: &bool) -> World<Honest> {
        World::new(*reaping_proves)
    }

    fn apply(mut world: World<Honest>, _: &bool, op: Op) -> World<Honest> {
        if let Err(broken) = world.act(op) {
            panic!("{broken}");
        }
        world
    }

    fn teardown(mut world: World<Honest>, _: bool) {
        if let Err(broken) = world.settle() {
            panic!("{broken}");
        }
    }
}

// Long histories: 60 of 150 to 350 operations, and more events, since time passes with ticks and pulses.
prop_state_machine! {
    #![proptest_config(Config { cases: 60, failure_persistence: None, ..Config::default() })]

    #[test]
    fn every_history_keeps_the_invariants(sequential 150..350 => LedgerInItsWorld);
}

/// Runs random histories on a machine until one breaks, at most `histories` of `operations` each; says what broke, or what
/// happened in them.
fn hunt<M: Machine>(seed: u8, histories: usize, operations: Range<usize>) -> Result<Seen, String> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = proptest::collection::vec(ops(), operations);
    let mut total = Seen::default();
    for number in 0..histories {
        let history = strategy.new_tree(&mut runner).expect("the strategy rejects nothing").current();
        let world = RefCell::new(World::<M>::new(number % 4 != 3));
        // A broken ledger may also trip over the invariants that debug builds check inside.
        let run = catch_unwind(AssertUnwindSafe(|| {
            let mut world = world.borrow_mut();
            history.into_iter().try_for_each(|op| world.act(op))?;
            world.settle()
        }));
        match run {
            Ok(Ok(())) => total.add(&world.borrow().seen),
            Ok(Err(broken)) => return Err(broken),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                return Err(text.unwrap_or_else(|| "a panic without a text".into()));
            }
        }
    }
    Ok(total)
}

#[test]
fn ten_thousand_random_sequences_break_nothing() {
    let parts = std::thread::scope(|scope| {
        let threads = [7, 8].map(|seed| scope.spawn(move || hunt::<Honest>(seed, 5000, 15..45)));
        threads.map(|thread| thread.join().expect("a hunt does not panic"))
    });
    let mut seen = Seen::default();
    for part in parts {
        seen.add(&part.unwrap_or_else(|broken| panic!("{broken}")));
    }
    assert!(seen.events >= 300_000, "{seen:?}");
    // The histories get somewhere: each kind of thing happens often.
    let often = [seen.grants, seen.waited, seen.refusals, seen.revisions, seen.retirements, seen.kills, seen.proofs];
    assert!(often.iter().all(|count| *count >= 300), "{seen:?}");
}

#[test]
fn a_ledger_that_believes_a_process_is_caught() {
    let broken = hunt::<WordProves>(7, 64, 150..350).expect_err("granting before proof must be noticed");
    assert!(broken.contains("really held"), "{broken}");
}

#[test]
fn a_ledger_that_takes_a_kill_for_a_release_is_caught() {
    let broken =
        hunt::<KillProves>(7, 64, 150..350).expect_err("granting before the process is reaped must be noticed");
    assert!(broken.contains("really held"), "{broken}");
}

#[test]
fn a_ledger_that_sells_more_than_there_is_is_caught() {
    let broken = hunt::<Oversells>(7, 64, 150..350).expect_err("granting beyond the capacity must be noticed");
    assert!(broken.contains("really held"), "{broken}");
}

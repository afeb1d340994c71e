//! Random histories against a physical world that the ledger cannot see: processes that obey, lie, hang, die and are
//! reaped late. What they really hold never exceeds the capacity when bytes are granted; every request is answered
//! once; when everybody behaves again, everybody is served and every byte comes back.
//!
//! The same world catches broken ledgers: one that believes a process's word, one that takes a kill for a release, and one
//! that sells more than there is.

mod ledger_support;
mod ledger_world;

use std::cell::RefCell;
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

// 200 histories of 150 to 350 operations are some 50,000 operations, and more events, since time passes with ticks and pulses.
prop_state_machine! {
    #![proptest_config(Config { cases: 200, failure_persistence: None, ..Config::default() })]

    #[test]
    fn every_history_keeps_the_invariants(sequential 150..350 => LedgerInItsWorld);
}

/// Runs random histories on a machine until one breaks, at most `histories`; says what broke and how many ran.
fn hunt<M: Machine>(histories: usize) -> Result<Seen, String> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let strategy = proptest::collection::vec(ops(), 150..350);
    let mut total = Seen::default();
    for _ in 0..histories {
        let history = strategy.new_tree(&mut runner).expect("the strategy rejects nothing").current();
        let world = RefCell::new(World::<M>::new(true));
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
fn ten_thousand_events_of_the_real_ledger_break_nothing() {
    let seen = hunt::<Honest>(300).unwrap_or_else(|broken| panic!("{broken}"));
    assert!(seen.events >= 10_000, "{seen:?}");
    // The histories get somewhere: each kind of thing happens often.
    let often = [seen.grants, seen.waited, seen.refusals, seen.revisions, seen.retirements, seen.kills, seen.proofs];
    assert!(often.iter().all(|count| *count >= 300), "{seen:?}");
}

#[test]
fn a_ledger_that_believes_a_process_is_caught() {
    let broken = hunt::<WordProves>(64).expect_err("granting before proof must be noticed");
    assert!(broken.contains("really held"), "{broken}");
}

#[test]
fn a_ledger_that_takes_a_kill_for_a_release_is_caught() {
    let broken = hunt::<KillProves>(64).expect_err("granting before the process is reaped must be noticed");
    assert!(broken.contains("really held"), "{broken}");
}

#[test]
fn a_ledger_that_sells_more_than_there_is_is_caught() {
    let broken = hunt::<Oversells>(64).expect_err("granting beyond the capacity must be noticed");
    assert!(broken.contains("really held"), "{broken}");
}

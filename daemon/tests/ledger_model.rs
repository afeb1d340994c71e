//! The ledger, searched exhaustively: two devices, three workers, and everything that can happen to them in any order, breadth
//! first, until no new state is found within the bound. After each event the invariants hold (debug builds check them inside the
//! ledger), and no grant lets more be really held than a device has. From a sample of the states everybody behaves, and then
//! every request is answered and every byte comes back.
//!
//! A state is what the ledgers know and what is really so, with times relative to now; two histories that lead to equal states
//! count once. The same search catches ledgers that are broken on purpose.

mod ledger_search;

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ledger_search::{Action, Mutant, Shared, State};

/// What a search has done.
#[derive(Debug)]
struct Found {
    states: usize,
    transitions: usize,
    depth: usize,
    settled: usize,
    /// Nothing is left: every state within the bound on faults and requests was seen.
    complete: bool,
}

/// How far a search goes.
#[derive(Debug, Clone, Copy)]
struct Bound {
    /// It ends when so many states are known.
    states: usize,
    /// Faults on one path.
    faults: u8,
    /// One in so many states is led to its end.
    settle: u64,
}

fn hash(state: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// What one worker of the search brings back from its part of a level.
#[derive(Default)]
struct Part {
    next: HashMap<u64, State>,
    transitions: usize,
    settled: usize,
}

fn expand(states: &[State], known: &HashSet<u64>, mutant: Mutant, bound: Bound) -> Result<Part, String> {
    let mut part = Part::default();
    for state in states {
        for action in state.actions(bound.faults) {
            let told = |broken: String| format!("{broken}\nby {action:?} in {state:#?}");
            // A broken ledger may also trip over the invariants that debug builds check inside.
            let stepped = catch_unwind(AssertUnwindSafe(|| state.after(action, mutant)));
            let after = match stepped {
                Ok(after) => after.map_err(told)?,
                Err(panic) => return Err(told(panic.downcast_ref::<String>().cloned().unwrap_or_default())),
            };
            part.transitions += 1;
            let hash = hash(&after);
            if known.contains(&hash) || part.next.contains_key(&hash) {
                continue;
            }
            if hash.is_multiple_of(bound.settle) {
                after.settles(mutant).map_err(|broken| format!("{broken}\nafter {action:?} in {state:#?}"))?;
                part.settled += 1;
            }
            part.next.insert(hash, after);
        }
    }
    Ok(part)
}

/// Breadth first, each level by two threads.
fn search(mutant: Mutant, bound: Bound) -> Result<Found, String> {
    let first = State::first(mutant);
    let mut known: HashSet<u64> = [hash(&first)].into();
    let mut level = vec![first];
    let mut found = Found { states: 1, transitions: 0, depth: 0, settled: 0, complete: false };
    let mut shared = Shared::default();
    while !level.is_empty() && known.len() < bound.states {
        let mut next = Vec::new();
        for states in level.chunks(4096) {
            let (left, right) = states.split_at(states.len() / 2);
            let parts = std::thread::scope(|scope| {
                let left = scope.spawn(|| expand(left, &known, mutant, bound));
                let right = expand(right, &known, mutant, bound);
                [left.join().expect("expansions do not panic"), right]
            });
            for part in parts {
                let part = part?;
                found.transitions += part.transitions;
                found.settled += part.settled;
                let new = part.next.into_iter().filter(|(hash, _)| known.insert(*hash));
                next.extend(new.map(|(_, state)| state.sharing(&mut shared)));
            }
            if known.len() >= bound.states {
                break;
            }
        }
        found.depth += 1;
        level = next;
    }
    (found.states, found.complete) = (known.len(), level.is_empty());
    Ok(found)
}

#[test]
fn no_state_that_can_be_reached_breaks_an_invariant() {
    let began = Instant::now();
    let bound = Bound { states: 200_000, faults: 2, settle: 997 };
    let found = search(Mutant::None, bound).unwrap_or_else(|broken| panic!("{broken}"));
    println!("{found:?} within {bound:?} in {:.1?}", began.elapsed());
    assert!(found.complete || found.states >= bound.states, "{found:?}");
    assert!(found.states >= 200_000 && found.depth >= 8 && found.settled >= 200, "{found:?}");
}

/// What a broken ledger is found out by, within a small part of what the real one stands.
fn caught(mutant: Mutant) -> String {
    let bound = Bound { states: 60_000, faults: 2, settle: 997 };
    match search(mutant, bound) {
        Err(broken) => broken,
        Ok(found) => panic!("{mutant:?} is not noticed in {found:?}"),
    }
}

#[test]
fn ledgers_that_are_broken_on_purpose_are_caught() {
    for mutant in [
        Mutant::WordProves,
        Mutant::KillProves,
        Mutant::LossProves,
        Mutant::Oversells,
        Mutant::GrantsBelowCapacity,
        Mutant::ForgetsRevisions,
    ] {
        let broken = caught(mutant);
        let first = broken.lines().next().unwrap_or_default();
        println!("{mutant:?}: {first}");
        assert!(
            ["really held", "R1", "R2", "R3", "R4", "answered"].iter().any(|word| broken.contains(word)),
            "{broken}"
        );
    }
}

#[test]
fn a_state_is_the_same_however_late_it_is_reached() {
    let first = State::first(Mutant::None);
    let once = first.after(Action::Pass, Mutant::None).unwrap();
    let twice = once.after(Action::Pass, Mutant::None).unwrap();
    assert_eq!(hash(&once), hash(&twice), "an empty ledger does not age");
    let request = first.actions(0).into_iter().find(|action| matches!(action, Action::Request { .. })).unwrap();
    let asked = first.after(request, Mutant::None).unwrap();
    assert_ne!(hash(&first), hash(&asked));
    assert!(Duration::ZERO < ledger_search::UNIT);
}

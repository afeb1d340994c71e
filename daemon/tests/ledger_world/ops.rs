//! What can happen in the world. Numbers select among what there is at the moment.

use proptest::prelude::*;
use sdd::residency::Afterwards;

use super::WORLD;

/// One operation.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Request {
        new: bool,
        at: usize,
        context: u64,
        weights: u64,
        luxury: u64,
        working_set: u64,
        shared_memory: u64,
    },
    Withdraw {
        at: usize,
    },
    Release {
        at: usize,
        afterwards: Afterwards,
    },
    Spawn {
        at: usize,
    },
    Attach {
        at: usize,
    },
    /// A process does what it was told.
    Obey {
        at: usize,
    },
    /// A process says it did.
    Lie {
        at: usize,
    },
    /// A process stops pulsing.
    Hang {
        at: usize,
    },
    /// A process says that it holds more than it does.
    Exaggerate {
        at: usize,
        more: u64,
    },
    /// A process dies by itself, unnoticed.
    Die {
        at: usize,
    },
    /// A process's link breaks.
    Lose {
        at: usize,
    },
    /// A kill takes effect.
    Execute {
        at: usize,
    },
    Reap {
        at: usize,
    },
    /// The device no longer shows a reaped process.
    Fade {
        at: usize,
    },
    /// A measurement is answered, or fails.
    Measure {
        answer: bool,
    },
    Extend {
        at: usize,
        min: u64,
        want: u64,
    },
    Retire {
        at: usize,
    },
    /// An operator wants a process to shrink or to park.
    GiveBack {
        at: usize,
        weights: bool,
    },
    Pin {
        at: usize,
        pinned: bool,
    },
    Hold {
        millis: Option<u64>,
    },
    Unhold,
    /// What the queue says: it names processes by their titles.
    Upcoming {
        titles: [usize; 3],
        needs: u64,
    },
    Shares {
        parts: [u32; 3],
    },
    BlockTime {
        at: usize,
        millis: u64,
    },
    Token,
    /// Who computes comes to a step boundary.
    Offer,
    TokenEnd {
        waiting: bool,
    },
    Capacity {
        bytes: u64,
    },
    FreeOutput,
    Pass {
        millis: u64,
    },
}

fn afterwards() -> impl Strategy<Value = Afterwards> {
    prop_oneof![
        6 => Just(Afterwards::Keep),
        1 => Just(Afterwards::ReturnWorkingSet),
        1 => Just(Afterwards::Park),
        1 => Just(Afterwards::Retire),
    ]
}

/// What concerns the device as a whole.
fn operators() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => proptest::option::of(1u64..5000).prop_map(|millis| Op::Hold { millis }),
        2 => Just(Op::Unhold),
        3 => ([0usize..16, 0usize..16, 0usize..16], 0u64..500).prop_map(|(titles, needs)| Op::Upcoming { titles, needs }),
        1 => [1u32..5, 1u32..5, 1u32..5].prop_map(|parts| Op::Shares { parts }),
        1 => (0usize..16, 0u64..2000).prop_map(|(at, millis)| Op::BlockTime { at, millis }),
    ]
}

/// Any operation, the ordinary ones more often, so that histories get somewhere.
pub(crate) fn ops() -> impl Strategy<Value = Op> {
    let at = || 0usize..16;
    let sizes = (10u64..60, 0u64..400, prop_oneof![2 => Just(0u64), 1 => 1u64..600], 0u64..400);
    let shared = prop_oneof![2 => Just(0u64), 1 => 1u64..300];
    let request = (any::<bool>(), at(), sizes, shared).prop_map(|(new, at, sizes, shared_memory)| {
        let (context, weights, luxury, working_set) = sizes;
        Op::Request { new, at, context, weights, luxury, working_set, shared_memory }
    });
    prop_oneof![
        10 => request,
        1 => at().prop_map(|at| Op::Withdraw { at }),
        9 => (at(), afterwards()).prop_map(|(at, afterwards)| Op::Release { at, afterwards }),
        9 => at().prop_map(|at| Op::Spawn { at }),
        9 => at().prop_map(|at| Op::Attach { at }),
        9 => at().prop_map(|at| Op::Obey { at }),
        2 => at().prop_map(|at| Op::Lie { at }),
        1 => at().prop_map(|at| Op::Hang { at }),
        1 => (at(), 0u64..200).prop_map(|(at, more)| Op::Exaggerate { at, more }),
        2 => at().prop_map(|at| Op::Die { at }),
        1 => at().prop_map(|at| Op::Lose { at }),
        4 => at().prop_map(|at| Op::Execute { at }),
        5 => at().prop_map(|at| Op::Reap { at }),
        3 => at().prop_map(|at| Op::Fade { at }),
        9 => prop_oneof![4 => Just(true), 1 => Just(false)].prop_map(|answer| Op::Measure { answer }),
        2 => (at(), 1u64..100, 0u64..100).prop_map(|(at, min, want)| Op::Extend { at, min, want }),
        1 => at().prop_map(|at| Op::Retire { at }),
        1 => (at(), any::<bool>()).prop_map(|(at, weights)| Op::GiveBack { at, weights }),
        1 => (at(), any::<bool>()).prop_map(|(at, pinned)| Op::Pin { at, pinned }),
        1 => operators(),
        2 => Just(Op::Token),
        1 => Just(Op::Offer),
        2 => any::<bool>().prop_map(|waiting| Op::TokenEnd { waiting }),
        1 => (WORLD / 2..=WORLD).prop_map(|bytes| Op::Capacity { bytes }),
        4 => Just(Op::FreeOutput),
        6 => (1u64..3000).prop_map(|millis| Op::Pass { millis }),
    ]
}

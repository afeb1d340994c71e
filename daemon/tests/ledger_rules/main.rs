//! Every rule of the ledger, one test each.

#[path = "../ledger_support/mod.rs"]
mod ledger_support;

mod devices;
mod giving_back;
mod lives;
mod requests;

use std::time::Duration;

use ledger_support::*;
use sdd::residency::{LeasePart, Purpose, Rules};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const NONE: [u64; 0] = [];

pub(crate) fn elastic(incarnation: u64, min: u64, want: u64) -> sdd::residency::LeaseVector {
    let mut vector = vector(incarnation, 10, 0, 10);
    vector.parts.push(LeasePart { purpose: Purpose::Weights, min, want });
    vector
}

/// Rules of a device where weights move.
pub(crate) fn moving() -> Rules {
    Rules { weights_move: true, ..rules() }
}

//! The owner task: what callers see, with time that stands still and processes that are played.

#[path = "../ledger_support/mod.rs"]
mod ledger_support;

mod decisions;
mod devices;
mod lives;
mod played;
mod requests;

use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

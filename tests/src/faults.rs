//! Moments at which something goes wrong.

use std::time::Duration;

use crate::process::{Process, eventually};
use crate::random::Random;
use crate::sandbox::Sandbox;

/// The worker of a stage, once there is one; `None` after `limit`.
pub fn worker_of(sandbox: &Sandbox, stage: &str, limit: Duration) -> Option<Process> {
    eventually(limit, || {
        sandbox.processes_of("sd-worker").into_iter().find(|worker| worker.argument("--stage") == Some(stage))
    })
}

/// Waits until the worker of a stage has started, then for a random moment of its life.
///
/// # Panics
/// None starts.
pub fn worker_at_random_moment(sandbox: &Sandbox, stage: &str, random: &mut Random) -> Process {
    let worker = worker_of(sandbox, stage, Duration::from_secs(30));
    let worker = worker.unwrap_or_else(|| panic!("no {stage} worker started"));
    std::thread::sleep(Duration::from_micros(random.below(400_000)));
    worker
}

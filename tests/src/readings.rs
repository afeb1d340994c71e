//! What a sandbox's workers hold, read from `/proc` by a thread of its own: a view that is not the daemon's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::sandbox::Sandbox;

/// Time between two readings; a process is found, and its bytes read, in some hundred microseconds.
const INTERVAL: Duration = Duration::from_millis(5);

/// Reads until it is dropped.
#[derive(Debug)]
pub struct Readings {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    count: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// Bytes that all workers of a sandbox hold together now, as the CPU device charges them.
pub fn together(sandbox: &Sandbox) -> u64 {
    sandbox.processes_of("sd-worker").iter().filter_map(crate::process::Process::resident).sum()
}

/// Bytes that the workers of one stage hold now.
pub fn of_stage(sandbox: &Sandbox, stage: &str) -> u64 {
    let workers = sandbox.processes_of("sd-worker");
    let ours = workers.iter().filter(|worker| worker.argument("--stage") == Some(stage));
    ours.filter_map(crate::process::Process::resident).sum()
}

impl Readings {
    /// Starts reading the workers of a sandbox.
    pub fn start(sandbox: Arc<Sandbox>) -> Self {
        let (stop, peak, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default(), Arc::default());
        let thread = std::thread::spawn({
            let (stop, peak, count) = (Arc::clone(&stop), Arc::clone(&peak), Arc::<AtomicU64>::clone(&count));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    peak.fetch_max(together(&sandbox), Ordering::Relaxed);
                    count.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(INTERVAL);
                }
            }
        });
        Self { stop, peak, count, thread: Some(thread) }
    }

    /// The most that was held together at any reading, and how many readings there were.
    pub fn peak(&self) -> (u64, u64) {
        (self.peak.load(Ordering::Relaxed), self.count.load(Ordering::Relaxed))
    }
}

impl Drop for Readings {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

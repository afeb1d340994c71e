//! The one pool that every operation runs on.

use std::sync::{Arc, RwLock};

use candle_core::{Error, Result};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

static POOL: RwLock<Option<Arc<ThreadPool>>> = RwLock::new(None);

fn build(n: usize) -> Result<Arc<ThreadPool>> {
    ThreadPoolBuilder::new()
        .num_threads(n)
        .thread_name(|i| format!("ops-{i}"))
        .build()
        .map(Arc::new)
        .map_err(|e| Error::Msg(format!("cannot start {n} threads for ops: {e}; lower the thread count")))
}

fn pool() -> Result<Arc<ThreadPool>> {
    if let Some(pool) = POOL.read().unwrap_or_else(|e| e.into_inner()).as_ref() {
        return Ok(pool.clone());
    }
    let mut slot = POOL.write().unwrap_or_else(|e| e.into_inner());
    if let Some(pool) = slot.as_ref() {
        return Ok(pool.clone());
    }
    let pool = build(std::thread::available_parallelism().map_or(1, |n| n.get()))?;
    *slot = Some(pool.clone());
    Ok(pool)
}

/// Sets how many threads operations use from now on; calls in progress finish on the threads they have.
///
/// The default is the available parallelism. Results do not depend on it. Waiting threads sleep.
///
/// # Errors
/// If `n` is zero or the threads cannot be started.
pub fn set_threads(n: usize) -> Result<()> {
    if n == 0 {
        return Err(Error::Msg("ops need at least 1 thread, got 0".into()));
    }
    let pool = build(n)?;
    *POOL.write().unwrap_or_else(|e| e.into_inner()) = Some(pool);
    Ok(())
}

/// How many threads operations use here: those of the pool that the caller runs on, else of the one set last.
///
/// # Errors
/// If the pool cannot be started.
pub fn threads() -> Result<usize> {
    match rayon::current_thread_index() {
        Some(_) => Ok(rayon::current_num_threads()),
        None => Ok(pool()?.current_num_threads()),
    }
}

/// Runs `f` on a thread of the pool. Operations called in `f` start at once, without waking the pool first: run a whole
/// stage this way, it saves some microseconds per operation. Do not block on I/O in `f`.
///
/// # Errors
/// If the pool cannot be started.
pub fn install<R: Send>(f: impl FnOnce() -> R + Send) -> Result<R> {
    match rayon::current_thread_index() {
        Some(_) => Ok(f()),
        None => Ok(pool()?.install(f)),
    }
}

/// Below this much work, in units of about a nanosecond, waking another thread costs more than it saves.
const WORTH_WAKING: usize = 20_000;

/// Runs `f(0) .. f(n − 1)`, in any order and on any threads. `cost` is the whole work's rough time on one thread in
/// nanoseconds.
pub(super) fn parallel(n: usize, cost: usize, f: impl Fn(usize) + Sync + Send) -> Result<()> {
    if n <= 1 || cost < WORTH_WAKING || threads()? == 1 {
        (0..n).for_each(f);
        return Ok(());
    }
    install(|| (0..n).into_par_iter().with_max_len(1).for_each(f))
}

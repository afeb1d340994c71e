//! A model's weights in memory: what of them is bound, within which limit.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::bindings::{Bindings, ParameterSource};
use super::declare::{Declarations, Role};
use super::executor::ExecutorError;
use super::plan::{self, Plan, Policy};
use super::ring::{Ring, Shelf};

/// Said after each segment that is bound while a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadEvent<'a> {
    /// The segment.
    pub name: &'a str,
    /// Bytes bound so far.
    pub done: u64,
    /// Bytes that will be bound.
    pub total: u64,
}

/// What a run moved, or several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// Segments whose parameters were resident; of several runs, in the last one.
    pub resident: usize,
    /// Segments whose parameters were brought in for this run.
    pub streamed: usize,
    /// Bytes brought in for this run.
    pub streamed_bytes: u64,
}

/// The weights of one model: segments that stay bound, and a ring through which the others pass, together never more than
/// the limit. The limit may be set from any thread at any time; it is obeyed at the next segment of a run, or at once by
/// [`Self::settle`]. Everything else belongs to the thread that runs the model.
pub struct Residency {
    shelf: Shelf,
    sizes: Vec<(Role, u64)>,
    limit: AtomicU64,
    state: Mutex<State>,
}

struct State {
    bound: Vec<Option<Arc<Bindings>>>,
    policy: Policy,
    plan: Plan,
    /// What `plan` was made for.
    planned: Option<(u64, Policy)>,
    ring: Ring,
    /// Whether a segment runs: its parameters are in use, whatever the limit.
    running: bool,
    /// Runs that are known to follow the present one.
    passes: usize,
    totals: RunStats,
}

/// A segment's parameters while it runs.
pub(super) struct Held {
    pub(super) bindings: Arc<Bindings>,
    /// What it has reserved of the ring; 0: it is resident.
    pub(super) passing: u64,
}

impl std::fmt::Debug for Residency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.shelf.segments.iter().map(Declarations::name).collect();
        f.debug_struct("Residency").field("segments", &names).field("bytes", &self.resident_bytes()).finish()
    }
}

impl Residency {
    /// Of a model whose segments declare these, nothing of it bound and a limit of zero.
    pub(super) fn new(segments: Arc<[Declarations]>, source: Arc<dyn ParameterSource>) -> Self {
        let sizes: Vec<_> = segments.iter().map(|d| (d.role(), d.bound_bytes())).collect();
        let state = State {
            bound: vec![None; sizes.len()],
            policy: Policy::default(),
            plan: Plan::default(),
            planned: None,
            ring: Ring::default(),
            running: false,
            passes: 0,
            totals: RunStats::default(),
        };
        Self { shelf: Shelf { segments, source }, sizes, limit: AtomicU64::new(0), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it is held is one of binding, before which nothing was changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all segments when resident.
    pub fn total_bytes(&self) -> u64 {
        self.sizes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The least limit under which the model runs: the largest segment has to pass.
    pub fn floor_bytes(&self) -> u64 {
        plan::floor(&self.sizes)
    }

    /// Bytes of the segments that are resident now.
    pub fn resident_bytes(&self) -> u64 {
        self.state().bound.iter().flatten().map(|bindings| bindings.bytes()).sum()
    }

    /// Bytes of the segments that are passing through now: the running one and those read ahead.
    pub fn passing_bytes(&self) -> u64 {
        self.state().ring.used()
    }

    /// Names and bytes of all segments, in the order in which they run.
    pub fn segments(&self) -> Vec<(String, u64)> {
        self.shelf.segments.iter().zip(&self.sizes).map(|(d, (_, bytes))| (d.name().to_owned(), *bytes)).collect()
    }

    /// Sets how many bytes may be bound, resident and passing ones together. A run gives back what is above it at its
    /// next segment, and keeps what it brings in from then on as far as a higher one allows.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// The limit as it was set last.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets how the limit is used.
    pub fn set_policy(&self, policy: Policy) {
        self.state().policy = policy;
    }

    /// Says how many runs are to come: reading ahead then goes on from the end of one to the start of the next, and
    /// never beyond the last.
    pub fn expect(&self, passes: usize) {
        self.state().passes = passes;
    }

    /// Obeys limit and policy now: drops what is above them. Between two parts of one segment that cannot be: its parameters
    /// are in use, and the next segment will obey.
    pub fn settle(&self) {
        let mut state = self.state();
        if !state.running {
            self.settle_state(&mut state);
        }
    }

    /// Whether a segment runs now.
    pub fn is_running(&self) -> bool {
        self.state().running
    }

    fn settle_state(&self, state: &mut State) {
        let (limit, policy) = (self.limit(), state.policy);
        if state.planned == Some((limit, policy)) {
            return;
        }
        let plan = Plan::of(&self.sizes, limit, policy);
        let mut dropped = false;
        for (slot, _) in state.bound.iter_mut().zip(&plan.keep).filter(|(_, keep)| !**keep) {
            dropped |= slot.take().is_some();
        }
        // What was read ahead assumed that what is dropped now stays; and a smaller ring may not hold it.
        if dropped || state.ring.used() > plan.ring || !plan.ahead {
            let wasted = state.ring.clear();
            state.totals.streamed_bytes += wasted;
        }
        state.plan = plan;
        state.planned = Some((limit, policy));
    }

    /// Binds what the limit allows and is not bound yet. `progress` is told after each segment and may stop it; what is
    /// bound by then stays bound.
    ///
    /// # Errors
    /// If weights do not fit or `progress` stops it.
    pub fn load(&self, progress: &mut dyn FnMut(&LoadEvent<'_>) -> ControlFlow<()>) -> Result<(), ExecutorError> {
        let mut done = 0;
        for (index, declarations) in self.shelf.segments.iter().enumerate() {
            let total = {
                // Not held while progress is told: whoever listens may set another limit, and have it obeyed.
                let mut state = self.state();
                self.settle_state(&mut state);
                if !state.plan.keep[index] {
                    continue;
                }
                done += self.sizes[index].1;
                if state.bound[index].is_some() {
                    continue;
                }
                state.bound[index] = Some(Arc::new(self.shelf.bind(index, state.policy.storage)?));
                let kept = self.sizes.iter().zip(&state.plan.keep).filter(|(_, keep)| **keep);
                kept.map(|((_, bytes), _)| bytes).sum()
            };
            let name = declarations.name();
            if progress(&LoadEvent { name, done, total }).is_break() {
                return Err(ExecutorError::Cancelled { segment: name.into() });
            }
        }
        Ok(())
    }

    /// Drops all parameters.
    pub fn unload(&self) {
        self.set_limit(0);
        self.settle();
        self.rest();
    }

    /// After the last run for now: nothing passes any more, and the thread that reads ahead ends.
    pub fn rest(&self) {
        let mut state = self.state();
        state.passes = 0;
        state.totals.streamed_bytes += state.ring.end();
    }

    /// What all runs moved since this was asked last.
    pub fn take_totals(&self) -> RunStats {
        std::mem::take(&mut self.state().totals)
    }

    /// Whether a segment is resident.
    pub(super) fn is_resident(&self, index: usize) -> bool {
        self.state().bound[index].is_some()
    }

    /// A run begins.
    pub(super) fn begin(&self) {
        let mut state = self.state();
        state.passes = state.passes.saturating_sub(1);
        self.settle_state(&mut state);
        self.look_ahead(&mut state, None);
    }

    /// The parameters of a segment that is about to run.
    pub(super) fn take(&self, index: usize) -> Result<Held, ExecutorError> {
        let mut state = self.state();
        self.settle_state(&mut state);
        if let Some(bindings) = state.bound[index].clone() {
            state.running = true;
            return Ok(Held { bindings, passing: 0 });
        }
        let bytes = self.sizes[index].1;
        let bindings = match state.ring.take(index) {
            Some(bindings) => bindings?,
            None => {
                state.totals.streamed_bytes += state.ring.clear();
                let bindings = self.shelf.bind(index, state.policy.storage)?;
                state.ring.reserve(bytes);
                bindings
            }
        };
        let bindings = Arc::new(bindings);
        if state.plan.keep[index] {
            state.bound[index] = Some(bindings.clone());
        }
        state.running = true;
        self.look_ahead(&mut state, Some(index));
        Ok(Held { bindings, passing: bytes })
    }

    /// A segment has run.
    pub(super) fn release(&self, index: usize, held: Held) {
        let Held { bindings, passing } = held;
        drop(bindings);
        let mut state = self.state();
        state.running = false;
        if passing > 0 {
            state.ring.release(passing);
            self.look_ahead(&mut state, Some(index));
        }
    }

    /// A run has ended, and moved this.
    pub(super) fn finish(&self, stats: RunStats) {
        let totals = &mut self.state().totals;
        totals.resident = stats.resident;
        totals.streamed += stats.streamed;
        totals.streamed_bytes += stats.streamed_bytes;
    }

    /// Asks for the segments that will run after `now` and are not bound, as far as the ring holds them, through the ends
    /// of runs as long as others are known to follow.
    fn look_ahead(&self, state: &mut State, now: Option<usize>) {
        if !state.plan.ahead {
            return;
        }
        let count = self.sizes.len();
        let unbound = (now.map_or(0, |now| now + 1)..count * (state.passes + 1))
            .map(|at| at % count)
            .filter(|&index| state.bound[index].is_none());
        // Those that were asked for are the first of them.
        let next: Vec<usize> = unbound.skip(state.ring.pending()).take(count).collect();
        for index in next {
            let bytes = self.sizes[index].1;
            if state.ring.used() + bytes > state.plan.ring {
                break;
            }
            state.ring.ask(&self.shelf, index, bytes, state.policy.storage);
        }
    }
}

/// Divides one limit among models that share a process: the first, which is about to run, gets all that it can use, the
/// others in their order what is left. Obeyed at once by those, so that the first finds their room; it obeys at its own
/// next segment or load.
pub fn share(limit: u64, models: &[Arc<Residency>]) {
    let Some((first, others)) = models.split_first() else { return };
    first.set_limit(limit);
    let mut left = limit.saturating_sub(first.total_bytes());
    for other in others {
        other.set_limit(left);
        other.settle();
        left = left.saturating_sub(other.total_bytes());
    }
}

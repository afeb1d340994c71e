//! The one way in which a model runs.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use super::bindings::{Bindings, ParameterSource};
use super::declare::Role;
use super::segment::{Observer, Segment, SegmentEvent};
use crate::formats::WeightsError;

/// Why a model was not loaded or did not finish a run.
#[derive(Debug, Error)]
pub enum ExecutorError {
    /// The weights do not fit.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A computation failed.
    #[error("computation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The observer stopped it.
    #[error("cancelled at segment {segment}")]
    Cancelled {
        /// The segment that was not run or loaded.
        segment: String,
    },
}

/// Said after each segment is bound while a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadEvent<'a> {
    /// The segment.
    pub name: &'a str,
    /// Bytes bound so far.
    pub done: u64,
    /// Bytes that will be bound.
    pub total: u64,
}

/// What a run moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// Segments whose parameters were resident.
    pub resident: usize,
    /// Segments whose parameters were brought in for this run.
    pub streamed: usize,
    /// Bytes brought in for this run.
    pub streamed_bytes: u64,
}

struct Slot<S> {
    segment: Box<dyn Segment<State = S>>,
    bytes: u64,
    bound: Mutex<Option<Arc<Bindings>>>,
}

impl<S> Slot<S> {
    fn bound(&self) -> MutexGuard<'_, Option<Arc<Bindings>>> {
        // Holders only read or replace the option, so a panic cannot leave it half written.
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the segments of one model in order, each with resident parameters or with ones brought in for the run.
pub struct Executor<S> {
    slots: Vec<Slot<S>>,
    source: Arc<dyn ParameterSource>,
    limit: AtomicU64,
}

impl<S> std::fmt::Debug for Executor<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.slots.iter().map(|s| s.segment.declarations().name()).collect();
        f.debug_struct("Executor").field("segments", &names).field("resident_bytes", &self.resident_bytes()).finish()
    }
}

/// A model's memory, whatever flows through it.
pub trait Residency: Send + Sync {
    /// Bytes of all segments when resident.
    fn total_bytes(&self) -> u64;

    /// Bytes of the segments that are resident now.
    fn resident_bytes(&self) -> u64;

    /// Names and bytes of all segments, in the order in which they run.
    fn segments(&self) -> Vec<(String, u64)>;

    /// Sets how many bytes may stay resident. A run gives back what is above it at its next segment; nothing is brought
    /// in before [`Self::load`] is called again.
    fn set_limit(&self, bytes: u64);

    /// Binds what the limit allows and is not bound yet; prelude and epilogue first, then blocks spread evenly.
    /// `progress` is told after each segment and may stop it; what is bound by then stays bound.
    ///
    /// # Errors
    /// If weights do not fit or `progress` stops it.
    fn load(&self, progress: &mut dyn FnMut(&LoadEvent<'_>) -> ControlFlow<()>) -> Result<(), ExecutorError>;

    /// Drops all parameters.
    fn unload(&self);
}

impl<S> Executor<S> {
    /// A model of `segments` with parameters from `source`, none of them bound yet.
    pub fn new(segments: Vec<Box<dyn Segment<State = S>>>, source: Arc<dyn ParameterSource>) -> Self {
        let slot = |segment: Box<dyn Segment<State = S>>| Slot {
            bytes: segment.declarations().bound_bytes(),
            segment,
            bound: Mutex::new(None),
        };
        Self { slots: segments.into_iter().map(slot).collect(), source, limit: AtomicU64::new(0) }
    }

    /// Runs every segment on `state`. `observer` is asked before each.
    ///
    /// # Errors
    /// If a computation fails, weights do not fit or the observer stops the run; `state` is then of no use.
    pub fn run(&self, state: &mut S, observer: &mut dyn Observer) -> Result<RunStats, ExecutorError> {
        let mut stats = RunStats::default();
        let mut limit = self.limit.load(Ordering::Relaxed);
        for (index, slot) in self.slots.iter().enumerate() {
            let now = self.limit.load(Ordering::Relaxed);
            if now < limit {
                self.give_back(&self.residents());
            }
            limit = now;
            let declarations = slot.segment.declarations();
            let bound = slot.bound().clone();
            let event = SegmentEvent {
                index,
                count: self.slots.len(),
                name: declarations.name(),
                role: declarations.role(),
                resident: bound.is_some(),
                part: 0,
                parts: slot.segment.parts(state),
            };
            if observer.on_segment(&event).is_break() {
                return Err(ExecutorError::Cancelled { segment: declarations.name().into() });
            }
            let bindings = match bound {
                Some(bindings) => {
                    stats.resident += 1;
                    bindings
                }
                None => {
                    let bindings = Bindings::bind(declarations, &*self.source)?;
                    stats.streamed += 1;
                    stats.streamed_bytes += bindings.bytes();
                    Arc::new(bindings)
                }
            };
            let mut go_on = |part| observer.on_segment(&SegmentEvent { part, ..event });
            if slot.segment.run_in_parts(&bindings, state, &mut go_on)?.is_break() {
                return Err(ExecutorError::Cancelled { segment: declarations.name().into() });
            }
        }
        Ok(stats)
    }

    /// Which segments the limit keeps resident: a pure function of the limit and the segments' sizes.
    fn residents(&self) -> Vec<bool> {
        let sizes: Vec<(Role, u64)> =
            self.slots.iter().map(|slot| (slot.segment.declarations().role(), slot.bytes)).collect();
        residents(&sizes, self.limit.load(Ordering::Relaxed))
    }

    fn give_back(&self, keep: &[bool]) {
        for (slot, _) in self.slots.iter().zip(keep).filter(|(_, keep)| !**keep) {
            *slot.bound() = None;
        }
    }
}

impl<S> Residency for Executor<S> {
    fn total_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes).sum()
    }

    fn resident_bytes(&self) -> u64 {
        self.slots.iter().filter_map(|slot| slot.bound().as_ref().map(|b| b.bytes())).sum()
    }

    fn segments(&self) -> Vec<(String, u64)> {
        self.slots.iter().map(|slot| (slot.segment.declarations().name().to_owned(), slot.bytes)).collect()
    }

    fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    fn load(&self, progress: &mut dyn FnMut(&LoadEvent<'_>) -> ControlFlow<()>) -> Result<(), ExecutorError> {
        let keep = self.residents();
        self.give_back(&keep);
        let chosen = || self.slots.iter().zip(&keep).filter(|(_, keep)| **keep).map(|(slot, _)| slot);
        let total = chosen().map(|slot| slot.bytes).sum();
        let mut done = 0;
        for slot in chosen() {
            let name = slot.segment.declarations().name();
            if slot.bound().is_none() {
                let bindings = Bindings::bind(slot.segment.declarations(), &*self.source)?;
                *slot.bound() = Some(Arc::new(bindings));
            }
            done += slot.bytes;
            if progress(&LoadEvent { name, done, total }).is_break() {
                return Err(ExecutorError::Cancelled { segment: name.into() });
            }
        }
        Ok(())
    }

    fn unload(&self) {
        self.set_limit(0);
        self.give_back(&vec![false; self.slots.len()]);
    }
}

/// Prelude and epilogue, which run with every pass and are small, then blocks in an order that spreads them evenly
/// (van der Corput, base 2), as long as they fit.
fn residents(sizes: &[(Role, u64)], limit: u64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&i| sizes[i].0 != Role::Block).collect();
    let mut blocks: Vec<usize> = (0..sizes.len()).filter(|&i| sizes[i].0 == Role::Block).collect();
    let mut spread: Vec<(u32, usize)> =
        blocks.drain(..).enumerate().map(|(rank, i)| ((rank as u32).reverse_bits(), i)).collect();
    spread.sort_unstable();
    order.extend(spread.into_iter().map(|(_, i)| i));
    let mut keep = vec![false; sizes.len()];
    let mut left = limit;
    for i in order {
        // Stopping at the first that does not fit makes what a smaller limit keeps a part of what a larger one does.
        let Some(rest) = left.checked_sub(sizes[i].1) else { break };
        left = rest;
        keep[i] = true;
    }
    keep
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_come_first_and_blocks_are_spread() {
        let mut sizes = vec![(Role::Prelude, 10)];
        sizes.extend([(Role::Block, 100); 8]);
        sizes.push((Role::Epilogue, 10));
        assert_eq!(residents(&sizes, u64::MAX), [true; 10]);
        assert_eq!(residents(&sizes, 0), [false; 10]);
        let half = residents(&sizes, 20 + 450);
        assert!(half[0] && half[9]);
        let kept: Vec<usize> = (1..9).filter(|&i| half[i]).collect();
        assert_eq!(kept, [1, 3, 5, 7], "every other block");
    }

    #[test]
    fn a_smaller_limit_keeps_a_subset() {
        let sizes: Vec<_> = (0..13).map(|i| (Role::Block, 50 + i)).collect();
        let many = residents(&sizes, 600);
        let few = residents(&sizes, 300);
        assert!(few.iter().zip(&many).all(|(few, many)| !few || *many));
    }
}

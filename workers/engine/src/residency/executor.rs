//! The one way in which a model runs.

use std::sync::Arc;

use thiserror::Error;

use super::bindings::ParameterSource;
use super::memory::{Residency, RunStats};
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

/// Runs the segments of one model in order, each with resident parameters or with ones brought in for the run.
pub struct Executor<S> {
    segments: Vec<Box<dyn Segment<State = S>>>,
    residency: Arc<Residency>,
}

impl<S> std::fmt::Debug for Executor<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("residency", &self.residency).finish_non_exhaustive()
    }
}

/// A run that ended early leaves nothing behind that was read ahead for it.
struct Pass<'a> {
    residency: &'a Residency,
    finished: bool,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.residency.rest();
        }
    }
}

impl<S> Executor<S> {
    /// A model of `segments` with parameters from `source`, none of them bound yet.
    pub fn new(segments: Vec<Box<dyn Segment<State = S>>>, source: Arc<dyn ParameterSource>) -> Self {
        let declarations = segments.iter().map(|segment| segment.declarations().clone()).collect();
        Self { segments, residency: Arc::new(Residency::new(declarations, source)) }
    }

    /// Its memory.
    pub fn residency(&self) -> &Arc<Residency> {
        &self.residency
    }

    /// Bytes that its weights hold now.
    pub fn resident_bytes(&self) -> u64 {
        self.residency.resident_bytes()
    }

    /// Runs every segment on `state`. `observer` is asked before each; a limit that it sets is obeyed before the segment runs.
    ///
    /// # Errors
    /// If a computation fails, weights do not fit or the observer stops the run; `state` is then of no use.
    pub fn run(&self, state: &mut S, observer: &mut dyn Observer) -> Result<RunStats, ExecutorError> {
        let mut stats = RunStats::default();
        let mut pass = Pass { residency: &self.residency, finished: false };
        self.residency.begin();
        for (index, segment) in self.segments.iter().enumerate() {
            let declarations = segment.declarations();
            let event = SegmentEvent {
                index,
                count: self.segments.len(),
                name: declarations.name(),
                role: declarations.role(),
                resident: self.residency.is_resident(index),
                part: 0,
                parts: segment.parts(state),
            };
            if observer.on_segment(&event).is_break() {
                return Err(ExecutorError::Cancelled { segment: declarations.name().into() });
            }
            let held = self.residency.take(index)?;
            match held.passing {
                0 => stats.resident += 1,
                _ => {
                    stats.streamed += 1;
                    stats.streamed_bytes += held.bindings.bytes();
                }
            }
            let mut go_on = |part| observer.on_segment(&SegmentEvent { part, ..event });
            let ran = segment.run_in_parts(&held.bindings, state, &mut go_on);
            self.residency.release(index, held);
            if ran?.is_break() {
                return Err(ExecutorError::Cancelled { segment: declarations.name().into() });
            }
        }
        pass.finished = true;
        self.residency.finish(stats);
        Ok(stats)
    }
}

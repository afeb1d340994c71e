//! A part of a model, and what is told between two of them.

use std::ops::ControlFlow;

use super::bindings::Bindings;
use super::declare::{Declarations, Role};
use super::flow::Flow;

/// A part of a model: it declares its parameters and runs on the state that flows through.
pub trait Segment: Send + Sync {
    /// What flows through the model.
    type State;

    /// Its name, place and layers.
    fn declarations(&self) -> &Declarations;

    /// Computes with `parameters`, which are bound from [`Self::declarations`].
    ///
    /// # Errors
    /// If the state does not fit.
    fn run(&self, parameters: &Bindings, state: &mut Self::State) -> candle_core::Result<()>;

    /// In how many parts [`Self::run_in_parts`] works on such a state: progress within a segment that takes long.
    fn parts(&self, _state: &Self::State) -> usize {
        1
    }

    /// As [`Self::run`], and asks `go_on` between two parts, with the number of parts done; stops where it says so, after which
    /// the state is of no use.
    ///
    /// # Errors
    /// As [`Self::run`].
    fn run_in_parts(
        &self,
        parameters: &Bindings,
        state: &mut Self::State,
        _go_on: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> candle_core::Result<ControlFlow<()>> {
        self.run(parameters, state)?;
        Ok(ControlFlow::Continue(()))
    }

    /// Follows the state's memory through this segment.
    fn flow(&self, flow: &mut Flow);
}

/// Said before each segment is run, and between two parts of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEvent<'a> {
    /// The segment's place in the model, from zero.
    pub index: usize,
    /// How many segments the model has.
    pub count: usize,
    /// The segment's name.
    pub name: &'a str,
    /// Its role.
    pub role: Role,
    /// Whether its parameters are resident, or brought in for this run alone.
    pub resident: bool,
    /// Parts of the segment that are done: zero before it.
    pub part: usize,
    /// How many parts it has, one at least.
    pub parts: usize,
}

impl SegmentEvent<'_> {
    /// How far the run is and where it ends, in parts. A model whose segments have as many parts each goes up evenly.
    pub fn progress(&self) -> (usize, usize) {
        (self.index * self.parts + self.part, self.count * self.parts)
    }
}

/// Watches a run and may stop it; any `FnMut(&SegmentEvent) -> ControlFlow<()>` is one.
pub trait Observer {
    /// Called before each segment and between its parts; [`ControlFlow::Break`] cancels the run there.
    fn on_segment(&mut self, event: &SegmentEvent<'_>) -> ControlFlow<()>;
}

impl<F: FnMut(&SegmentEvent<'_>) -> ControlFlow<()>> Observer for F {
    fn on_segment(&mut self, event: &SegmentEvent<'_>) -> ControlFlow<()> {
        self(event)
    }
}

/// Never stops a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Uninterrupted;

impl Observer for Uninterrupted {
    fn on_segment(&mut self, _: &SegmentEvent<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

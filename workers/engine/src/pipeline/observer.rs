//! Who watches a stage at work.

use std::ops::ControlFlow;

use candle_core::Tensor;

use super::PipelineError;
use crate::residency::SegmentEvent;
use crate::sampling::Checkpoint;

/// Watches a stage; [`ControlFlow::Break`] cancels it there.
pub trait StageObserver {
    /// Before each segment of a model.
    fn on_block(&mut self, event: &SegmentEvent<'_>) -> ControlFlow<()>;

    /// After `done` of `total` calls of the diffusion model.
    fn on_step(&mut self, _done: usize, _total: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// After each call of the diffusion model and before [`StageObserver::on_step`] tells of it: `make` copies all that is
    /// needed to go on from there. Whoever keeps no checkpoints does not call it.
    ///
    /// # Errors
    /// What `make` says. A checkpoint that cannot be kept is no error of the run.
    fn on_checkpoint(&mut self, _make: &dyn Fn() -> Result<Checkpoint, PipelineError>) -> Result<(), PipelineError> {
        Ok(())
    }

    /// An intermediate result, named as diffusers' parts are: `text_encoder.0.out.last_hidden_state`, `unet.3.out.0`,
    /// `step.3.latents`, `vae.0.out`. For comparing with other programs; most observers ignore it.
    fn on_tensor(&mut self, _name: &str, _tensor: &Tensor) {}
}

/// Never stops a stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl StageObserver for Unwatched {
    fn on_block(&mut self, _: &SegmentEvent<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

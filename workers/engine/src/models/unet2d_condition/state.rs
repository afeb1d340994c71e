//! What flows through the network.

use std::borrow::Cow;

use candle_core::{Result, Tensor};

use crate::formats::Naming;
use crate::models::layers::CrossCache;
use crate::ops::Chunks;

/// Names are those of diffusers.
pub(super) const NAMING: Naming = Naming { canonical: |name| Cow::Borrowed(name), ignorable: |_| false };

/// The network's state between two segments.
#[derive(Debug)]
pub(super) struct UnetState {
    /// The feature map, `[B, H, W, C]`.
    pub(super) hidden: Tensor,
    pub(super) timestep: f32,
    /// The embedding of the guidance scale, `[1, dim]`.
    pub(super) guidance: Option<Tensor>,
    /// The activated time embedding, `[1, width]`, from the prelude on.
    pub(super) time: Option<Tensor>,
    /// Feature maps that the way up joins to its own, last first.
    pub(super) skips: Vec<Tensor>,
    /// The conditioning, `[B, T, W]`.
    pub(super) context: Tensor,
    /// Its keys and values.
    pub(super) cross: CrossCache,
    /// Rows that go through at once.
    pub(super) chunks: Chunks,
}

impl UnetState {
    /// Takes the last skip connection.
    pub(super) fn pop_skip(&mut self) -> Result<Tensor> {
        match self.skips.pop() {
            Some(skip) => Ok(skip),
            None => candle_core::bail!("unet: more layers on the way up than on the way down"),
        }
    }
}

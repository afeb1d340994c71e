//! What one task takes at one very shape, by a walk through its model: no weight is read, nothing is computed.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::assemble::{FIXED_BYTES, threads_bytes};
use super::report::Task;
use crate::models::{
    AutoencoderKl, AutoencoderKlConfig, ClipTextConfig, ClipTextModel, ModelError, TilePlan, Unet, UnetConfig, VaeHalf,
};

/// A shape, and the options that decide memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Pixels of the image.
    pub width: u64,
    /// Pixels of the image.
    pub height: u64,
    /// Prompts that go through together: 2 with guidance.
    pub rows: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Edge of a tile of the autoencoder in pixels; 0: whole.
    pub tile: u64,
    /// Overlap of two tiles in pixels.
    pub overlap: u64,
    /// Tiles that go through a layer together.
    pub tile_batch: u64,
}

/// What one task takes beside weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEstimate {
    /// The task.
    pub task: Task,
    /// Bytes.
    pub working_set_bytes: u64,
}

/// What `task` of the model in `folder` takes at `shape`.
///
/// # Errors
/// If its configuration cannot be read.
pub fn estimate(folder: &Path, task: Task, shape: &Shape) -> Result<TaskEstimate, ModelError> {
    let working_set_bytes = match task {
        Task::Encode => encode(folder, shape)?,
        Task::Denoise => denoise(folder, shape)?,
        Task::Decode => vae(folder, VaeHalf::Decoder, shape)?,
        Task::VaeEncode => vae(folder, VaeHalf::Encoder, shape)?,
    };
    Ok(TaskEstimate { task, working_set_bytes })
}

fn encode(folder: &Path, shape: &Shape) -> Result<u64, ModelError> {
    let config = ClipTextConfig::read(&folder.join("text_encoder/config.json"))?;
    let tokens = shape.rows.saturating_mul(shape.tokens);
    let flowing = ClipTextModel::flow(&config).bytes_at(1, tokens);
    Ok(FIXED_BYTES + threads_bytes(&ClipTextModel::declarations(&config)) + flowing)
}

fn denoise(folder: &Path, shape: &Shape) -> Result<u64, ModelError> {
    let config = UnetConfig::read(&folder.join("unet/config.json"))?;
    let factor = factor(folder)?;
    let flow = Unet::flow(&config);
    let map = flow.bytes_at(shape.height.div_ceil(factor), shape.width.div_ceil(factor));
    let context = shape.rows.saturating_mul(shape.tokens).saturating_mul(flow.bytes_per_token());
    let flowing = shape.rows.saturating_mul(map).saturating_add(context);
    Ok(flowing.saturating_add(FIXED_BYTES + threads_bytes(&Unet::declarations(&config))))
}

fn vae_config(folder: &Path) -> Result<AutoencoderKlConfig, ModelError> {
    Ok(AutoencoderKlConfig::read(&folder.join("vae/config.json"))?)
}

fn factor(folder: &Path) -> Result<u64, ModelError> {
    Ok(vae_config(folder)?.factor() as u64)
}

fn vae(folder: &Path, half: VaeHalf, shape: &Shape) -> Result<u64, ModelError> {
    let config = vae_config(folder)?;
    let fixed = FIXED_BYTES + threads_bytes(&AutoencoderKl::declarations(&config, half));
    let plan = TilePlan {
        tile: shape.tile as usize,
        overlap: shape.overlap as usize,
        batch: shape.tile_batch.max(1) as usize,
    };
    let flowing = if plan.cuts(shape.width, shape.height) {
        AutoencoderKl::tile_cost(&config, half).bytes(&plan, shape.width, shape.height)
    } else {
        let factor = match half {
            VaeHalf::Decoder => config.factor() as u64,
            VaeHalf::Encoder => 1,
        };
        let flow = AutoencoderKl::flow(&config, half);
        flow.bytes_at(shape.height.div_ceil(factor), shape.width.div_ceil(factor))
    };
    Ok(flowing.saturating_add(fixed))
}

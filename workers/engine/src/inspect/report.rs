//! The description of a model.

use serde::{Deserialize, Serialize};

use crate::formats::Precision;
use crate::models::{TileCost, TilePlan};

/// Counts the changes to the engine that change a picture's bytes.
pub const NUMERICS_VERSION: u32 = 1;

/// An architecture and its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Stable Diffusion 1.
    Sd1,
    /// Stable Diffusion 1 for inpainting.
    Sd1Inpaint,
    /// Stable Diffusion 2.
    Sd2,
    /// Stable Diffusion 2 for inpainting.
    Sd2Inpaint,
}

/// Which worker runs a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Text encoder.
    Text,
    /// Denoising network.
    Diffusion,
    /// Autoencoder.
    Vae,
}

/// What a worker does with a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Prompts to conditioning.
    Encode,
    /// Noise to latents.
    Denoise,
    /// Latents to an image.
    Decode,
    /// An image to latents.
    VaeEncode,
}

/// Memory that a task takes beside weights, at most: `fixed_bytes + bytes_per_pixel · width · height`, in pixels of the
/// image, for one picture, and `bytes_per_token` for each token of conditioning beyond what `fixed_bytes` covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// Whatever the size; it covers `fixed_tokens`.
    pub fixed_bytes: u64,
    /// For each pixel of the image. Denoising counts the pair of guidance.
    pub bytes_per_pixel: u64,
    /// Tokens, over prompt and negative prompt, that `fixed_bytes` covers.
    pub fixed_tokens: u64,
    /// For each token beyond these.
    pub bytes_per_token: u64,
    /// In tiles, beside `fixed_bytes`; absent where a task has none.
    pub tiled: Option<TileCost>,
}

impl WorkingSet {
    /// Bytes for an image of `width` × `height` under `tokens` of conditioning.
    pub fn bytes(&self, width: u64, height: u64, tokens: u64) -> u64 {
        let more = tokens.saturating_sub(self.fixed_tokens);
        let pixels = width.saturating_mul(height).saturating_mul(self.bytes_per_pixel);
        self.fixed_bytes.saturating_add(pixels).saturating_add(more.saturating_mul(self.bytes_per_token))
    }

    /// Bytes for an image of `width` × `height` in the tiles of `plan`.
    pub fn bytes_in(&self, plan: &TilePlan, width: u64, height: u64) -> u64 {
        match &self.tiled {
            Some(tiled) if plan.cuts(width, height) => {
                self.fixed_bytes.saturating_add(tiled.bytes(plan, width, height))
            }
            Some(_) | None => self.bytes(width, height, 0),
        }
    }
}

/// What one task needs of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskReport {
    /// The task.
    pub task: Task,
    /// Bytes of the weights that it binds.
    pub weights_bytes: u64,
    /// Bytes of its largest segment: the least that streaming must hold.
    pub largest_segment_bytes: u64,
    /// How many segments it runs.
    pub segments: usize,
    /// Bytes of each of its blocks (segments that are neither first nor last), in the order in which they run.
    pub block_bytes: Vec<u64>,
    /// What it takes beside.
    pub working_set: WorkingSet,
}

/// A file of weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileReport {
    /// Relative to the model's folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// One component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentReport {
    /// Which worker runs it.
    pub stage: Stage,
    /// Its folder.
    pub folder: String,
    /// Its class in diffusers or transformers.
    pub class_name: String,
    /// Its files.
    pub files: Vec<FileReport>,
    /// Tensors in them.
    pub tensors: usize,
    /// Numbers in them.
    pub parameters: u64,
    /// Bytes of them.
    pub file_bytes: u64,
    /// The type of their numbers.
    pub precision: Precision,
    /// Bytes that all weights hold on the CPU device once loaded: f32, packed.
    pub weights_bytes: u64,
    /// Changes with its configuration and weights; see [`ModelReport::fingerprint`].
    pub fingerprint: String,
    /// What it does.
    pub tasks: Vec<TaskReport>,
}

/// The text encoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextReport {
    /// Width of its hidden states, which is that of the conditioning.
    pub hidden_size: usize,
    /// Its layers.
    pub layers: usize,
    /// Tokens of one chunk, start and end included.
    pub max_tokens: usize,
}

/// The denoising network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffusionReport {
    /// Channels that it takes.
    pub in_channels: usize,
    /// Channels that it gives: those of the latents.
    pub out_channels: usize,
    /// Width of the conditioning that it takes.
    pub conditioning_width: usize,
    /// What it predicts, as diffusers names it.
    pub prediction_type: String,
    /// Whether guidance is an input of the network (few-step models), instead of a second pass.
    pub guidance_embedding: bool,
}

/// The autoencoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VaeReport {
    /// Channels of its latents.
    pub latent_channels: usize,
    /// Pixels of an image that one latent stands for along each axis; sides of images are multiples of it.
    pub scale_factor: usize,
    /// See [`crate::models::AutoencoderKlConfig::scaling_factor`].
    pub scaling_factor: f64,
    /// Whether its authors say that half precision overflows in it.
    pub force_upcast: bool,
}

/// What a request that says nothing gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Defaults {
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Denoising steps.
    pub steps: u32,
    /// Guidance scale.
    pub guidance_scale: f64,
    /// A sampler's name.
    pub sampler: String,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelReport {
    /// Its architecture.
    pub family: Family,
    /// The pipeline's class.
    pub pipeline: String,
    /// Changes with configurations, sizes and headers of weight files, and with samples of their contents: it tells
    /// trainings apart, and proves nothing.
    pub fingerprint: String,
    /// See [`NUMERICS_VERSION`].
    pub numerics_version: u32,
    /// The kernels that this machine runs; see [`crate::ops::backend`].
    pub backend: String,
    /// The components that stages run.
    pub components: Vec<ComponentReport>,
    /// The text encoder's numbers.
    pub text: TextReport,
    /// The denoising network's.
    pub diffusion: DiffusionReport,
    /// The autoencoder's.
    pub vae: VaeReport,
    /// The scheduler's class.
    pub scheduler: Option<String>,
    /// The sampler that the scheduler's configuration stands for.
    pub sampler: String,
    /// The family's defaults, with those of the folder's `sdd.json` over them.
    pub defaults: Defaults,
}

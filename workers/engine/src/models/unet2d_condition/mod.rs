//! The denoising network of Stable Diffusion 1 and 2 (Rombach et al. 2022), as UNet2DConditionModel of diffusers.

mod blocks;
mod config;
mod ends;
mod state;

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;

pub use config::UnetConfig;
use state::{NAMING, UnetState};

use super::layers::CrossCache;
use super::{LoadProgress, ModelError};
use crate::formats::WeightSet;
use crate::ops::{Chunks, nchw_to_nhwc, nhwc_to_nchw, timestep_embedding};
use crate::residency::{Declarations, Executor, Flow, Observer, Residency, Segment};

/// A denoising network, loaded or not.
#[derive(Debug)]
pub struct Unet {
    config: UnetConfig,
    chunks: Chunks,
    executor: Executor<UnetState>,
}

/// One run of a network over the steps of a picture or a batch: it holds what depends on the conditioning alone.
#[derive(Debug)]
pub struct UnetRun<'a> {
    unet: &'a Unet,
    conditioning: Tensor,
    guidance: Option<Tensor>,
    cross: CrossCache,
}

/// All segments of a model of this configuration, in the order in which they run.
fn segments(config: &UnetConfig) -> Vec<Box<dyn Segment<State = UnetState>>> {
    let mut list: Vec<Box<dyn Segment<State = UnetState>>> = vec![Box::new(ends::Prelude::new(config))];
    list.extend(blocks::blocks(config));
    list.push(Box::new(ends::Epilogue::new(config)));
    list
}

impl Unet {
    /// Opens `folder` (`config.json` and weights called `diffusion_pytorch_model*.safetensors`) without reading any weight.
    ///
    /// # Errors
    /// If the configuration is not supported or the files lie.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config = UnetConfig::read(&folder.join("config.json"))?;
        let executor = Executor::new(segments(&config), Arc::new(Self::weights(folder)?));
        Ok(Self { config, chunks: Chunks::default(), executor })
    }

    /// Opens `folder` and loads all of it.
    ///
    /// # Errors
    /// As [`Self::open`], if weights do not fit, or if `progress` cancels.
    pub fn load(folder: &Path, progress: &mut LoadProgress<'_>) -> Result<Self, ModelError> {
        let model = Self::open(folder)?;
        model.residency().set_limit(u64::MAX);
        model.residency().load(progress)?;
        Ok(model)
    }

    /// The weights in `folder`, by declared names.
    ///
    /// # Errors
    /// If the files lie.
    pub fn weights(folder: &Path) -> Result<WeightSet, ModelError> {
        Ok(WeightSet::open(folder, "diffusion_pytorch_model", NAMING)?)
    }

    /// What each segment of a model of this configuration declares.
    pub fn declarations(config: &UnetConfig) -> Vec<Declarations> {
        segments(config).iter().map(|s| s.declarations().clone()).collect()
    }

    /// How memory goes through a model of this configuration; see [`Flow`]. The unit is a latent pixel.
    pub fn flow(config: &UnetConfig) -> Flow {
        Self::follow(config, Flow::new(config.in_channels))
    }

    /// As [`Self::flow`], where [`Chunks`] are set: for each latent pixel of two images that are denoised together, beside
    /// [`Flow::bytes_per_row`] for each row of the larger chunk. Where all rows fit a chunk, [`Self::flow`] is the lower bound.
    pub fn flow_in_chunks(config: &UnetConfig) -> Flow {
        Self::follow(config, Flow::new(config.in_channels).in_chunks())
    }

    fn follow(config: &UnetConfig, mut flow: Flow) -> Flow {
        for segment in segments(config) {
            segment.flow(&mut flow);
        }
        flow
    }

    /// Its configuration.
    pub fn config(&self) -> &UnetConfig {
        &self.config
    }

    /// Sets how many rows go through at once from the next pass on. Changes no byte of a result.
    pub fn set_chunks(&mut self, chunks: Chunks) {
        self.chunks = chunks;
    }

    /// Its memory.
    pub fn residency(&self) -> &Arc<Residency> {
        self.executor.residency()
    }

    /// Bytes that its weights hold now.
    pub fn bytes(&self) -> u64 {
        self.executor.resident_bytes()
    }

    /// Starts a run under `conditioning` `[B, T, W]`. Few-step models with a guidance embedding
    /// ([`UnetConfig::time_cond_proj_dim`]) take the guidance scale here; others ignore it.
    ///
    /// # Errors
    /// If the conditioning has another width than the model.
    pub fn begin(&self, conditioning: &Tensor, guidance_scale: Option<f64>) -> Result<UnetRun<'_>, ModelError> {
        let (_, _, width) = conditioning.dims3()?;
        let expected = self.config.conditioning_width;
        if width != expected {
            let text = format!(
                "unet: conditioning of width {width} does not fit the model's {expected}; the text encoder belongs to another model"
            );
            return Err(ModelError::Input(text));
        }
        // The embedding of guidance in latent consistency models (Luo et al. 2023): sines of 1000 (scale − 1).
        let guidance = match (self.config.time_cond_proj_dim, guidance_scale) {
            (Some(dim), Some(scale)) => {
                Some(timestep_embedding(&[((scale - 1.0) as f32) * 1000.0], dim, false, 1.0, 10000.0)?)
            }
            _ => None,
        };
        Ok(UnetRun { unet: self, conditioning: conditioning.contiguous()?, guidance, cross: CrossCache::default() })
    }
}

impl UnetRun<'_> {
    /// What the network predicts for `latents` `[B, C, h, w]` at `timestep`: `[B, C', h, w]`. For inpainting the latents
    /// are joined with mask and masked latents by the caller. Any `h` and `w` will do.
    ///
    /// # Errors
    /// If the latents do not fit the model or the conditioning, or `observer` cancels.
    pub fn forward(
        &mut self,
        latents: &Tensor,
        timestep: f64,
        observer: &mut dyn Observer,
    ) -> Result<Tensor, ModelError> {
        let (batch, channels, h, w) = latents.dims4()?;
        let config = &self.unet.config;
        if channels != config.in_channels {
            let text = format!("unet: latents of {channels} channels do not fit the model's {}", config.in_channels);
            return Err(ModelError::Input(text));
        }
        if batch != self.conditioning.dim(0)? || h == 0 || w == 0 {
            let text =
                format!("unet: latents {:?} do not fit conditioning {:?}", latents.dims(), self.conditioning.dims());
            return Err(ModelError::Input(text));
        }
        let mut state = UnetState {
            hidden: nchw_to_nhwc(latents)?,
            timestep: timestep as f32,
            guidance: self.guidance.clone(),
            time: None,
            skips: Vec::new(),
            context: self.conditioning.clone(),
            cross: std::mem::take(&mut self.cross),
            chunks: self.unet.chunks,
        };
        self.unet.executor.run(&mut state, observer)?;
        self.cross = state.cross;
        Ok(nhwc_to_nchw(&state.hidden)?)
    }
}

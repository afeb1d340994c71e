//! The autoencoder of latent diffusion (Rombach et al. 2022), as AutoencoderKL of diffusers.

mod config;
mod segments;

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;

pub use config::AutoencoderKlConfig;
use segments::{ImageState, NAMING};

use super::{LoadProgress, ModelError};
use crate::formats::WeightSet;
use crate::ops::{nchw_to_nhwc, nhwc_to_nchw};
use crate::residency::{Declarations, Executor, Flow, Observer, Residency, Segment};

/// Which half of the autoencoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VaeHalf {
    /// Images to latents.
    Encoder,
    /// Latents to images.
    Decoder,
}

/// An autoencoder whose halves are loaded apart: text to image needs the decoder alone.
#[derive(Debug)]
pub struct AutoencoderKl {
    config: AutoencoderKlConfig,
    encoder: Executor<ImageState>,
    decoder: Executor<ImageState>,
}

fn segments(config: &AutoencoderKlConfig, half: VaeHalf) -> Vec<Box<dyn Segment<State = ImageState>>> {
    match half {
        VaeHalf::Encoder => segments::encoder(config),
        VaeHalf::Decoder => segments::decoder(config),
    }
}

impl AutoencoderKl {
    /// Opens `folder` (`config.json` and weights called `diffusion_pytorch_model*.safetensors`) without reading any weight.
    ///
    /// # Errors
    /// If the configuration is not supported or the files lie.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config = AutoencoderKlConfig::read(&folder.join("config.json"))?;
        let weights = Arc::new(Self::weights(folder)?);
        let encoder = Executor::new(segments::encoder(&config), weights.clone());
        let decoder = Executor::new(segments::decoder(&config), weights);
        Ok(Self { config, encoder, decoder })
    }

    /// Opens `folder` and loads the given halves; the other one can be loaded later through [`Self::residency`].
    ///
    /// # Errors
    /// As [`Self::open`], if weights do not fit, or if `progress` cancels.
    pub fn load(folder: &Path, halves: &[VaeHalf], progress: &mut LoadProgress<'_>) -> Result<Self, ModelError> {
        let model = Self::open(folder)?;
        for &half in halves {
            model.residency(half).set_limit(u64::MAX);
            model.residency(half).load(progress)?;
        }
        Ok(model)
    }

    /// The weights in `folder`, by declared names.
    ///
    /// # Errors
    /// If the files lie.
    pub fn weights(folder: &Path) -> Result<WeightSet, ModelError> {
        Ok(WeightSet::open(folder, "diffusion_pytorch_model", NAMING)?)
    }

    /// What each segment of a half of this configuration declares.
    pub fn declarations(config: &AutoencoderKlConfig, half: VaeHalf) -> Vec<Declarations> {
        segments(config, half).iter().map(|s| s.declarations().clone()).collect()
    }

    /// How memory goes through a half; see [`Flow`]. The unit is a pixel of the half's input.
    pub fn flow(config: &AutoencoderKlConfig, half: VaeHalf) -> Flow {
        let mut flow = Flow::new(match half {
            VaeHalf::Encoder => config.in_channels,
            VaeHalf::Decoder => config.latent_channels,
        });
        for segment in segments(config, half) {
            segment.flow(&mut flow);
        }
        flow
    }

    /// Its configuration.
    pub fn config(&self) -> &AutoencoderKlConfig {
        &self.config
    }

    /// The memory of one half.
    pub fn residency(&self, half: VaeHalf) -> &dyn Residency {
        match half {
            VaeHalf::Encoder => &self.encoder,
            VaeHalf::Decoder => &self.decoder,
        }
    }

    /// Bytes that its weights hold now.
    pub fn bytes(&self) -> u64 {
        self.encoder.resident_bytes() + self.decoder.resident_bytes()
    }

    /// Latents of diffusion, from latents of the autoencoder: `(z − shift) · scaling`.
    ///
    /// # Errors
    /// If `z` is not f32.
    pub fn to_diffusion(&self, z: &Tensor) -> Result<Tensor, ModelError> {
        let c = &self.config;
        Ok(z.affine(c.scaling_factor, -c.shift_factor * c.scaling_factor)?)
    }

    /// Latents of the autoencoder, from latents of diffusion: `latents / scaling + shift`.
    ///
    /// # Errors
    /// If `latents` are not f32.
    pub fn from_diffusion(&self, latents: &Tensor) -> Result<Tensor, ModelError> {
        let c = &self.config;
        Ok(latents.affine(1.0 / c.scaling_factor, c.shift_factor)?)
    }

    /// Images `[B, 3, H, W]`, about −1 to 1 and not clamped, from latents of the autoencoder `[B, C, h, w]`
    /// (see [`Self::from_diffusion`]).
    ///
    /// # Errors
    /// If `z` has other channels than the model, or `observer` cancels.
    pub fn decode(&self, z: &Tensor, observer: &mut dyn Observer) -> Result<Tensor, ModelError> {
        let (_, channels, h, w) = z.dims4()?;
        let expected = self.config.latent_channels;
        if channels != expected || h == 0 || w == 0 {
            let text = format!("vae: latents {:?} do not fit a decoder of {expected} channels", z.dims());
            return Err(ModelError::Input(text));
        }
        let mut state = ImageState { hidden: nchw_to_nhwc(z)? };
        self.decoder.run(&mut state, observer)?;
        Ok(nhwc_to_nchw(&state.hidden)?)
    }

    /// Mean and logarithm of the variance (clamped to −30..20) of the latents of `image` `[B, 3, H, W]` in −1 to 1:
    /// `[B, C, h, w]` each.
    ///
    /// # Errors
    /// If height or width is not a multiple of [`AutoencoderKlConfig::factor`], channels differ, or `observer` cancels.
    pub fn encode(&self, image: &Tensor, observer: &mut dyn Observer) -> Result<(Tensor, Tensor), ModelError> {
        let (_, channels, h, w) = image.dims4()?;
        let (expected, factor) = (self.config.in_channels, self.config.factor());
        if channels != expected || h == 0 || w == 0 || h % factor != 0 || w % factor != 0 {
            let text = format!(
                "vae: an image {:?} does not fit an encoder of {expected} channels and sides that are multiples of {factor}",
                image.dims()
            );
            return Err(ModelError::Input(text));
        }
        let mut state = ImageState { hidden: nchw_to_nhwc(image)? };
        self.encoder.run(&mut state, observer)?;
        let moments = nhwc_to_nchw(&state.hidden)?;
        let latents = self.config.latent_channels;
        let mean = moments.narrow(1, 0, latents)?.contiguous()?;
        let logvar = moments.narrow(1, latents, latents)?.contiguous()?.clamp(-30f32, 20f32)?;
        Ok((mean, logvar))
    }
}

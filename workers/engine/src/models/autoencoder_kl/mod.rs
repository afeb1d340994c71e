//! The autoencoder of latent diffusion (Rombach et al. 2022), as AutoencoderKL of diffusers.

mod attention;
mod config;
mod cost;
mod map;
mod pieces;
mod segments;
mod source;
mod sweep;
mod tiles;

use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;

pub use config::AutoencoderKlConfig;
pub use cost::TileCost;
use segments::{ImageState, NAMING, Part};
use source::Source;
use tiles::Grid;
pub use tiles::TilePlan;

use super::{LoadProgress, ModelError};
use crate::formats::WeightSet;
use crate::ops::{ComputeType, nchw_to_nhwc, nhwc_to_nchw, round};
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
    source: Arc<Source>,
    encoder: Executor<ImageState>,
    decoder: Executor<ImageState>,
}

fn parts(config: &AutoencoderKlConfig, half: VaeHalf) -> Vec<Part> {
    match half {
        VaeHalf::Encoder => segments::encoder(config),
        VaeHalf::Decoder => segments::decoder(config),
    }
}

fn segments(config: &AutoencoderKlConfig, half: VaeHalf) -> Vec<Box<dyn Segment<State = ImageState>>> {
    parts(config, half).into_iter().map(|part| Box::new(part) as Box<dyn Segment<State = ImageState>>).collect()
}

impl AutoencoderKl {
    /// Opens `folder` (`config.json` and weights called `diffusion_pytorch_model*.safetensors`) without reading any weight.
    ///
    /// # Errors
    /// If the configuration is not supported or the files lie.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config = AutoencoderKlConfig::read(&folder.join("config.json"))?;
        let source = Arc::new(Source::new(Self::weights(folder)?));
        let encoder = Executor::new(segments(&config, VaeHalf::Encoder), source.clone());
        let decoder = Executor::new(segments(&config, VaeHalf::Decoder), source.clone());
        Ok(Self { config, source, encoder, decoder })
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

    /// What a half takes in tiles.
    pub fn tile_cost(config: &AutoencoderKlConfig, half: VaeHalf) -> TileCost {
        TileCost::new(config, half)
    }

    /// Bytes that a half takes for a picture of `width` × `height` pixels, beside weights and what the threads of the pool keep: at
    /// most, for sides of at least eight latents.
    pub fn working_set(config: &AutoencoderKlConfig, half: VaeHalf, plan: &TilePlan, width: u64, height: u64) -> u64 {
        if plan.cuts(width, height) {
            return Self::tile_cost(config, half).bytes(plan, width, height);
        }
        let unit = match half {
            VaeHalf::Encoder => 1,
            VaeHalf::Decoder => (config.factor() * config.factor()) as u64,
        };
        let pixels = width.saturating_mul(height).div_ceil(unit);
        pixels.saturating_mul(Self::flow(config, half).bytes_per_pixel())
    }

    /// What it computes in.
    pub fn compute(&self) -> ComputeType {
        self.source.compute()
    }

    /// Computes in another type from now on. Weights of the former one are dropped, and limits of both halves with them.
    pub fn compute_in(&mut self, compute: ComputeType) {
        if self.compute() != compute {
            self.encoder.residency().unload();
            self.decoder.residency().unload();
            self.source.compute_in(compute);
        }
    }

    /// Its configuration.
    pub fn config(&self) -> &AutoencoderKlConfig {
        &self.config
    }

    /// The memory of one half.
    pub fn residency(&self, half: VaeHalf) -> &Arc<Residency> {
        match half {
            VaeHalf::Encoder => self.encoder.residency(),
            VaeHalf::Decoder => self.decoder.residency(),
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
    /// (see [`Self::from_diffusion`]), in one piece.
    ///
    /// # Errors
    /// If `z` has other channels than the model, or `observer` cancels.
    pub fn decode(&self, z: &Tensor, observer: &mut dyn Observer) -> Result<Tensor, ModelError> {
        self.decode_in(z, &TilePlan::WHOLE, observer)
    }

    /// As [`Self::decode`], in the tiles of `plan`; several images one after another.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_in(&self, z: &Tensor, plan: &TilePlan, observer: &mut dyn Observer) -> Result<Tensor, ModelError> {
        let (_, channels, h, w) = z.dims4()?;
        let (expected, factor) = (self.config.latent_channels, self.config.factor());
        if channels != expected || h == 0 || w == 0 {
            let text = format!("vae: latents {:?} do not fit a decoder of {expected} channels", z.dims());
            return Err(ModelError::Input(text));
        }
        self.run(&self.decoder, z, Grid::new(plan, factor, h * factor, w * factor), observer)
    }

    /// Mean and logarithm of the variance (clamped to −30..20) of the latents of `image` `[B, 3, H, W]` in −1 to 1:
    /// `[B, C, h, w]` each, in one piece.
    ///
    /// # Errors
    /// If height or width is not a multiple of [`AutoencoderKlConfig::factor`], channels differ, or `observer` cancels.
    pub fn encode(&self, image: &Tensor, observer: &mut dyn Observer) -> Result<(Tensor, Tensor), ModelError> {
        self.encode_in(image, &TilePlan::WHOLE, observer)
    }

    /// As [`Self::encode`], in the tiles of `plan`; several images one after another.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_in(
        &self,
        image: &Tensor,
        plan: &TilePlan,
        observer: &mut dyn Observer,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let (_, channels, h, w) = image.dims4()?;
        let (expected, factor) = (self.config.in_channels, self.config.factor());
        if channels != expected || h == 0 || w == 0 || h % factor != 0 || w % factor != 0 {
            let text = format!(
                "vae: an image {:?} does not fit an encoder of {expected} channels and sides that are multiples of {factor}",
                image.dims()
            );
            return Err(ModelError::Input(text));
        }
        let moments = self.run(&self.encoder, image, Grid::new(plan, factor, h, w), observer)?;
        let latents = self.config.latent_channels;
        let mean = moments.narrow(1, 0, latents)?.contiguous()?;
        let logvar = moments.narrow(1, latents, latents)?.contiguous()?.clamp(-30f32, 20f32)?;
        Ok((mean, logvar))
    }

    /// `x` `[B, C, H, W]` through one half.
    fn run(
        &self,
        half: &Executor<ImageState>,
        x: &Tensor,
        grid: Option<Grid>,
        observer: &mut dyn Observer,
    ) -> Result<Tensor, ModelError> {
        let mut run = |x: &Tensor| -> Result<Tensor, ModelError> {
            let hidden = nchw_to_nhwc(x)?;
            round(&hidden, self.compute())?;
            let mut state = ImageState::new(hidden, grid, self.compute());
            half.run(&mut state, observer)?;
            Ok(nhwc_to_nchw(&state.take()?)?)
        };
        // A batch goes through whole layers together, and through tiles image by image.
        let images = x.dim(0)?;
        if grid.is_none() || images == 1 {
            return run(x);
        }
        let results: Result<Vec<Tensor>, ModelError> = (0..images).map(|i| run(&x.narrow(0, i, 1)?)).collect();
        Ok(Tensor::cat(&results?, 0)?)
    }
}

//! Euler's method on the probability flow, plain and ancestral (Karras et al. 2022; the samples here are
//! `original + sigma * noise`, and the model sees them scaled to unit variance).

use candle_core::{Device, Tensor};

use super::config::TimestepSpacing;
use super::math::{combine, output_like};
use super::schedule::{Grid, NoiseLevels, fractional_grid};
use super::settings::Settings;
use super::{History, NoiseSource, PredictionType, Sampler, SamplerKind, SamplingError};

/// What Euler's and Heun's samplers share: noise levels in units of the original.
pub(super) struct SigmaSpace {
    pub(super) grid: Grid,
    pub(super) init_noise_sigma: f64,
    prediction: PredictionType,
}

impl SigmaSpace {
    pub(super) fn new(settings: &Settings, steps: usize) -> Self {
        let grid = fractional_grid(settings, &NoiseLevels::new(settings), steps);
        let most = grid.sigmas.iter().copied().fold(0.0, f64::max);
        // diffusers begins leading schedules, whose first level is not the last of training, a little wider.
        let init_noise_sigma = match settings.spacing {
            TimestepSpacing::Leading => (most * most + 1.0).sqrt(),
            TimestepSpacing::Trailing | TimestepSpacing::Linspace | TimestepSpacing::SgmUniform => most,
        };
        Self { grid, init_noise_sigma, prediction: settings.prediction }
    }

    /// The sample at a noise level scaled to unit variance.
    pub(super) fn scaled(sample: &Tensor, sigma: f64) -> Result<Tensor, SamplingError> {
        combine(&[(1.0 / (sigma * sigma + 1.0).sqrt(), sample)])
    }

    /// The original that the model predicts for a sample at a noise level.
    pub(super) fn original(&self, output: &Tensor, sample: &Tensor, sigma: f64) -> Result<Tensor, SamplingError> {
        let variance = sigma * sigma + 1.0;
        match self.prediction {
            PredictionType::Epsilon => combine(&[(1.0, sample), (-sigma, output)]),
            PredictionType::Velocity => combine(&[(1.0 / variance, sample), (-sigma / variance.sqrt(), output)]),
            PredictionType::Sample => Ok(output.clone()),
            PredictionType::Flow => {
                Err(SamplingError::Unsupported("flow prediction is not of this family of samplers".into()))
            }
        }
    }
}

/// Euler and Euler ancestral: they differ in how much fresh noise a step brings.
pub(super) struct Euler {
    space: SigmaSpace,
    ancestral: bool,
    start: usize,
}

impl Euler {
    pub(super) fn new(settings: &Settings, steps: usize, start: usize) -> Self {
        let ancestral = settings.kind == SamplerKind::EulerAncestral;
        Self { space: SigmaSpace::new(settings, steps), ancestral, start }
    }
}

impl Sampler for Euler {
    fn kind(&self) -> SamplerKind {
        if self.ancestral { SamplerKind::EulerAncestral } else { SamplerKind::Euler }
    }

    fn timesteps(&self) -> &[f64] {
        &self.space.grid.timesteps
    }

    fn start(&self) -> usize {
        self.start
    }

    fn init_noise_sigma(&self) -> f64 {
        self.space.init_noise_sigma
    }

    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        SigmaSpace::scaled(sample, self.space.grid.sigmas[index])
    }

    fn step(
        &mut self,
        model_output: &Tensor,
        index: usize,
        sample: &Tensor,
        noise: &mut dyn NoiseSource,
    ) -> Result<Tensor, SamplingError> {
        let output = output_like(model_output, sample)?;
        let (sigma, next) = (self.space.grid.sigmas[index], self.space.grid.sigmas[index + 1]);
        let original = self.space.original(&output, sample, sigma)?;
        if !self.ancestral {
            return combine(&[(next / sigma, sample), (1.0 - next / sigma, &original)]);
        }
        let up = (next * next * (sigma * sigma - next * next) / (sigma * sigma)).max(0.0).sqrt();
        let down = (next * next - up * up).max(0.0).sqrt();
        // The last step draws too, though it adds nothing: the generator must stand where diffusers' does.
        let fresh = noise.noise_like(sample)?;
        combine(&[(down / sigma, sample), (1.0 - down / sigma, &original), (up, &fresh)])
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        combine(&[(1.0, original), (self.space.grid.sigmas[index], noise)])
    }

    fn history(&self) -> Result<History, SamplingError> {
        Ok(History::None)
    }

    fn restore(&mut self, history: &History, _device: &Device) -> Result<(), SamplingError> {
        match history {
            History::None => Ok(()),
            History::Heun { .. } | History::Multistep { .. } | History::Unipc { .. } => Err(history.mismatch("euler")),
        }
    }
}

//! Latent consistency models (Luo et al. 2023): each step predicts the original and brings it back to the next,
//! lower noise level with fresh noise.

use candle_core::{Device, Tensor};

use super::ddim::refuse_no_signal;
use super::math::{combine, limited, output_like, predicted_original};
use super::schedule::{NoiseLevels, whole_timesteps};
use super::settings::{Limit, Settings};
use super::{History, NoiseSource, PredictionType, Sampler, SamplerKind, SamplingError};

/// The standard deviation of originals that the boundary condition assumes.
const SIGMA_DATA: f64 = 0.5;

pub(super) struct Lcm {
    timesteps: Vec<f64>,
    /// The signal's share at each timestep.
    alphas: Vec<f64>,
    timestep_scaling: f64,
    prediction: PredictionType,
    limit: Limit,
    start: usize,
}

impl Lcm {
    pub(super) fn new(settings: &Settings, steps: usize, start: usize) -> Result<Self, SamplingError> {
        let levels = NoiseLevels::new(settings);
        let whole = if settings.named {
            let whole = whole_timesteps(settings, &levels, steps);
            if whole.windows(2).any(|pair| pair[0] <= pair[1]) {
                return Err(SamplingError::OutOfRange(format!(
                    "this schedule repeats a timestep at {steps} steps, which lcm cannot take: ask for fewer"
                )));
            }
            whole
        } else {
            distilled_timesteps(settings, steps)?
        };
        let alphas: Vec<f64> = whole.iter().map(|&t| f64::from(levels.alphas_cumprod[t])).collect();
        refuse_no_signal(settings.prediction, alphas.iter().copied(), SamplerKind::Lcm)?;
        Ok(Self {
            timesteps: whole.into_iter().map(|t| t as f64).collect(),
            alphas,
            timestep_scaling: settings.timestep_scaling,
            prediction: settings.prediction,
            limit: settings.limit,
            start,
        })
    }
}

/// A subset of the timesteps that the model was distilled on.
fn distilled_timesteps(settings: &Settings, steps: usize) -> Result<Vec<usize>, SamplingError> {
    let original = settings.original_steps;
    if original == 0 || original > settings.train_steps {
        return Err(SamplingError::Config(format!(
            "original_inference_steps must be from 1 to {}, not {original}",
            settings.train_steps
        )));
    }
    if steps > original {
        return Err(SamplingError::OutOfRange(format!(
            "{steps} steps are more than the {original} that lcm's model was distilled with: ask for fewer"
        )));
    }
    let stride = settings.train_steps / original;
    // numpy.linspace without its end, rounded down: exact products, so that whole numbers stay whole.
    let width = original as f64 / steps as f64;
    Ok((0..steps).map(|i| (original - (i as f64 * width) as usize) * stride - 1).collect())
}

impl Sampler for Lcm {
    fn kind(&self) -> SamplerKind {
        SamplerKind::Lcm
    }

    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn start(&self) -> usize {
        self.start
    }

    fn init_noise_sigma(&self) -> f64 {
        1.0
    }

    fn scale_model_input(&self, sample: &Tensor, _index: usize) -> Result<Tensor, SamplingError> {
        Ok(sample.clone())
    }

    fn step(
        &mut self,
        model_output: &Tensor,
        index: usize,
        sample: &Tensor,
        noise: &mut dyn NoiseSource,
    ) -> Result<Tensor, SamplingError> {
        let output = output_like(model_output, sample)?;
        let alpha = self.alphas[index];
        let original = predicted_original(self.prediction, &output, sample, alpha.sqrt(), (1.0 - alpha).sqrt())?;
        let original = limited(original, self.limit)?;
        let scaled = self.timesteps[index] * self.timestep_scaling;
        let spread = scaled * scaled + SIGMA_DATA * SIGMA_DATA;
        let (skip, out) = (SIGMA_DATA * SIGMA_DATA / spread, scaled / spread.sqrt());
        let denoised = combine(&[(out, &original), (skip, sample)])?;
        match self.alphas.get(index + 1) {
            None => Ok(denoised),
            Some(after) => {
                let fresh = noise.noise_like(sample)?;
                combine(&[(after.sqrt(), &denoised), ((1.0 - after).sqrt(), &fresh)])
            }
        }
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        let alpha = self.alphas[index];
        combine(&[(alpha.sqrt(), original), ((1.0 - alpha).sqrt(), noise)])
    }

    fn history(&self) -> Result<History, SamplingError> {
        Ok(History::None)
    }

    fn restore(&mut self, history: &History, _device: &Device) -> Result<(), SamplingError> {
        match history {
            History::None => Ok(()),
            History::Heun { .. } | History::Multistep { .. } | History::Unipc { .. } => Err(history.mismatch("lcm")),
        }
    }
}

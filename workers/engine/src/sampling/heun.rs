//! Heun's second-order method (Karras et al. 2022, algorithm 1 without churn): an Euler step, then the same step again
//! with the mean of the derivatives at both its ends. The last step, to no noise, is Euler's.

use candle_core::{Device, Tensor};

use super::euler::SigmaSpace;
use super::history::SavedTensor;
use super::math::{combine, limited, output_like};
use super::settings::{Limit, Settings};
use super::{History, NoiseSource, Sampler, SamplerKind, SamplingError};

pub(super) struct Heun {
    space: SigmaSpace,
    /// A timestep for each call.
    timesteps: Vec<f64>,
    limit: Limit,
    start: usize,
    /// Between the two calls of a step: the sample and the derivative at its beginning.
    begun: Option<(Tensor, Tensor)>,
}

impl Heun {
    pub(super) fn new(settings: &Settings, steps: usize, start: usize) -> Self {
        let space = SigmaSpace::new(settings, steps);
        let timesteps = (0..2 * steps - 1).map(|call| space.grid.timesteps[level(call)]).collect();
        Self { space, timesteps, limit: settings.limit, start: 2 * start, begun: None }
    }
}

/// The noise level that a call looks at: calls come in pairs, the second at the end of the step.
fn level(call: usize) -> usize {
    call.div_ceil(2)
}

impl Sampler for Heun {
    fn kind(&self) -> SamplerKind {
        SamplerKind::Heun
    }

    fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    fn start(&self) -> usize {
        self.start
    }

    fn init_noise_sigma(&self) -> f64 {
        self.space.init_noise_sigma
    }

    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        SigmaSpace::scaled(sample, self.space.grid.sigmas[level(index)])
    }

    fn step(
        &mut self,
        model_output: &Tensor,
        index: usize,
        sample: &Tensor,
        _noise: &mut dyn NoiseSource,
    ) -> Result<Tensor, SamplingError> {
        let output = output_like(model_output, sample)?;
        let sigma = self.space.grid.sigmas[level(index)];
        let original = limited(self.space.original(&output, sample, sigma)?, self.limit)?;
        let derivative = combine(&[(1.0 / sigma, sample), (-1.0 / sigma, &original)])?;
        let step = index / 2;
        let width = self.space.grid.sigmas[step + 1] - self.space.grid.sigmas[step];
        if index.is_multiple_of(2) {
            let next = combine(&[(1.0, sample), (width, &derivative)])?;
            self.begun = (index + 1 < self.timesteps.len()).then(|| (sample.clone(), derivative));
            return Ok(next);
        }
        let Some((begin, first)) = self.begun.take() else {
            return Err(SamplingError::State("heun's second call of a step came without its first".into()));
        };
        combine(&[(1.0, &begin), (0.5 * width, &first), (0.5 * width, &derivative)])
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        combine(&[(1.0, original), (self.space.grid.sigmas[level(index)], noise)])
    }

    fn history(&self) -> Result<History, SamplingError> {
        match &self.begun {
            None => Ok(History::None),
            Some((sample, derivative)) => {
                Ok(History::Heun { sample: SavedTensor::save(sample)?, derivative: SavedTensor::save(derivative)? })
            }
        }
    }

    fn restore(&mut self, history: &History, device: &Device) -> Result<(), SamplingError> {
        self.begun = match history {
            History::None => None,
            History::Heun { sample, derivative } => Some((sample.load(device)?, derivative.load(device)?)),
            History::Multistep { .. } | History::Unipc { .. } => return Err(history.mismatch("heun")),
        };
        Ok(())
    }
}

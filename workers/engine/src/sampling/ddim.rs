//! DDIM (Song et al. 2020, equation 12) with diffusers' conventions for the previous timestep.

use candle_core::{Device, Tensor};

use super::config::TimestepSpacing;
use super::math::{combine, limited, output_like, predicted_noise, predicted_original};
use super::schedule::{NoiseLevels, whole_timesteps};
use super::settings::{Limit, Settings, SigmaCurve};
use super::{History, NoiseSource, PredictionType, Sampler, SamplerKind, SamplingError};

pub(super) struct Ddim {
    timesteps: Vec<f64>,
    /// The signal's share at each call and after it.
    alphas: Vec<(f64, f64)>,
    prediction: PredictionType,
    limit: Limit,
    eta: f64,
    start: usize,
}

impl Ddim {
    pub(super) fn new(settings: &Settings, steps: usize, start: usize, eta: f64) -> Result<Self, SamplingError> {
        let levels = NoiseLevels::new(settings);
        let whole = whole_timesteps(settings, &levels, steps);
        let alpha = |t: usize| f64::from(levels.alphas_cumprod[t]);
        let last = if settings.set_alpha_to_one { 1.0 } else { alpha(0) };
        // diffusers goes back by a fixed stride of training steps, which need not meet the next timestep; schedules that
        // it does not have for DDIM go to the next timestep.
        let even = settings.curve == SigmaCurve::Training && settings.spacing != TimestepSpacing::SgmUniform;
        let stride = settings.train_steps / steps;
        let after = |i: usize| match (even, whole.get(i + 1)) {
            (true, _) => whole[i].checked_sub(stride).map_or(last, alpha),
            (false, Some(&next)) => alpha(next),
            (false, None) => last,
        };
        let alphas: Vec<(f64, f64)> = (0..whole.len()).map(|i| (alpha(whole[i]), after(i))).collect();
        refuse_no_signal(settings.prediction, alphas.iter().map(|pair| pair.0), SamplerKind::Ddim)?;
        Ok(Self {
            timesteps: whole.into_iter().map(|t| t as f64).collect(),
            alphas,
            prediction: settings.prediction,
            limit: settings.limit,
            eta,
            start,
        })
    }
}

/// A model that predicts noise says nothing about the original where the sample is noise alone.
pub(super) fn refuse_no_signal(
    prediction: PredictionType,
    mut alphas: impl Iterator<Item = f64>,
    kind: SamplerKind,
) -> Result<(), SamplingError> {
    if prediction == PredictionType::Epsilon && alphas.any(|alpha| alpha <= 0.0) {
        return Err(SamplingError::Unsupported(format!(
            "zero-terminal SNR with {kind} needs a model with v prediction, and this one predicts noise: leave the switch out"
        )));
    }
    Ok(())
}

impl Sampler for Ddim {
    fn kind(&self) -> SamplerKind {
        SamplerKind::Ddim
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
        let (alpha, after) = self.alphas[index];
        let (signal, spread) = (alpha.sqrt(), (1.0 - alpha).sqrt());
        let original = predicted_original(self.prediction, &output, sample, signal, spread)?;
        let original = limited(original, self.limit)?;
        let direction = predicted_noise(self.prediction, &output, sample, signal, spread)?;
        let variance = (1.0 - after) / (1.0 - alpha) * (1.0 - alpha / after);
        let fresh = self.eta * variance.max(0.0).sqrt();
        let kept = (1.0 - after - fresh * fresh).max(0.0).sqrt();
        let next = combine(&[(after.sqrt(), &original), (kept, &direction)])?;
        if self.eta > 0.0 {
            return combine(&[(1.0, &next), (fresh, &noise.noise_like(sample)?)]);
        }
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        let (alpha, _) = self.alphas[index];
        combine(&[(alpha.sqrt(), original), ((1.0 - alpha).sqrt(), noise)])
    }

    fn history(&self) -> Result<History, SamplingError> {
        Ok(History::None)
    }

    fn restore(&mut self, history: &History, _device: &Device) -> Result<(), SamplingError> {
        match history {
            History::None => Ok(()),
            History::Heun { .. } | History::Multistep { .. } | History::Unipc { .. } => Err(history.mismatch("ddim")),
        }
    }
}

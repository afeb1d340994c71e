//! DPM-Solver++ (Lu et al. 2022), multistep, of the ordinary and of the stochastic equation.
//!
//! With `lambda = ln(alpha / sigma)` and `h` a step's width in it, a step is an exact solution of the linear part plus a
//! Taylor expansion of the predicted original from the earlier ones (equations 4.1 to 4.3 and appendix B; for the
//! stochastic equation section 5.2).

use candle_core::{Device, Tensor};

use super::config::FinalSigma;
use super::history::SavedTensor;
use super::math::{combine, limited, output_like, predicted_original};
use super::schedule::{Grid, NoiseLevels, whole_grid};
use super::settings::{Limit, Settings};
use super::{History, NoiseSource, PredictionType, Sampler, SamplerKind, SamplingError};

/// Below this many steps the last ones are of lower order, for stability.
const FEW_STEPS: usize = 15;

/// A noise level as the two roots of a variance of 1, and its logarithmic ratio.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    pub(super) alpha: f64,
    pub(super) sigma: f64,
    pub(super) lambda: f64,
}

impl Level {
    /// From a level in units of the original.
    pub(super) fn new(ratio: f64) -> Self {
        let alpha = 1.0 / (ratio * ratio + 1.0).sqrt();
        let sigma = ratio * alpha;
        Self { alpha, sigma, lambda: alpha.ln() - sigma.ln() }
    }
}

/// How the second-order term is weighed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Solver {
    Midpoint,
    Heun,
}

pub(super) struct Dpmpp {
    grid: Grid,
    stochastic: bool,
    solver: Solver,
    order: usize,
    lower_order_final: bool,
    euler_at_final: bool,
    final_sigma: FinalSigma,
    prediction: PredictionType,
    limit: Limit,
    start: usize,
    /// Predicted originals, oldest first, at most `order`.
    originals: Vec<Tensor>,
}

impl Dpmpp {
    pub(super) fn new(settings: &Settings, steps: usize, start: usize) -> Self {
        let solver = match settings.solver_type.as_deref() {
            Some("heun") => Solver::Heun,
            // UniPC's and DEIS' names mean the default here.
            _ => Solver::Midpoint,
        };
        Self {
            grid: whole_grid(settings, &NoiseLevels::new(settings), steps),
            stochastic: settings.kind == SamplerKind::Dpmpp2mSde,
            solver,
            order: settings.solver_order,
            lower_order_final: settings.lower_order_final,
            euler_at_final: settings.euler_at_final,
            final_sigma: settings.final_sigma,
            prediction: settings.prediction,
            limit: settings.limit,
            start,
            originals: Vec::new(),
        }
    }

    fn level(&self, index: usize) -> Level {
        Level::new(self.grid.sigmas[index])
    }

    /// The order of the step at an index, given how many originals are known.
    fn order_at(&self, index: usize) -> usize {
        let steps = self.grid.timesteps.len();
        let careful = self.lower_order_final && steps < FEW_STEPS;
        let last = index + 1 == steps && (self.euler_at_final || careful || self.final_sigma == FinalSigma::Zero);
        let before_last = index + 2 == steps && careful;
        let most = if last {
            1
        } else if before_last {
            2
        } else {
            self.order
        };
        most.min(self.order).min(self.originals.len())
    }

    /// Weights of the sample, of the derivatives of the original (none, first, second), and of fresh noise.
    fn weights(&self, to: Level, from: Level, order: usize) -> ([f64; 4], f64) {
        let h = to.lambda - from.lambda;
        // Of the stochastic equation the decay counts twice, and half of it comes back as noise.
        let width = if self.stochastic { 2.0 * h } else { h };
        let gone = -(-width).exp_m1();
        let kept = to.sigma / from.sigma * if self.stochastic { (-h).exp() } else { 1.0 };
        let noise = if self.stochastic { to.sigma * gone.sqrt() } else { 0.0 };
        let slope = match (order, self.solver) {
            (1, _) => 0.0,
            (2, Solver::Midpoint) => 0.5 * gone,
            _ => 1.0 - gone / width,
        };
        let bend = if order < 3 {
            0.0
        } else if self.stochastic {
            (gone - width) / (width * width) - 0.5
        } else {
            -((width - gone) / (width * width) - 0.5)
        };
        ([kept, to.alpha * gone, to.alpha * slope, to.alpha * bend], noise)
    }
}

impl Sampler for Dpmpp {
    fn kind(&self) -> SamplerKind {
        if self.stochastic { SamplerKind::Dpmpp2mSde } else { SamplerKind::Dpmpp2m }
    }

    fn timesteps(&self) -> &[f64] {
        &self.grid.timesteps
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
        let (from, to) = (self.level(index), self.level(index + 1));
        let original = predicted_original(self.prediction, &output, sample, from.alpha, from.sigma)?;
        if self.originals.len() == self.order {
            self.originals.remove(0);
        }
        self.originals.push(limited(original, self.limit)?);
        let order = self.order_at(index);
        let ([kept, value, slope, bend], fresh) = self.weights(to, from, order);
        // Divided differences over lambda, in units of this step, as weights of the originals (latest first).
        let h = to.lambda - from.lambda;
        let mut weights = [value, 0.0, 0.0];
        if order > 1 {
            let r0 = (from.lambda - self.level(index - 1).lambda) / h;
            let first = [1.0 / r0, -1.0 / r0, 0.0];
            let (mut derivative, mut second) = (first, [0.0; 3]);
            if order > 2 {
                let r1 = (self.level(index - 1).lambda - self.level(index - 2).lambda) / h;
                let before = [0.0, 1.0 / r1, -1.0 / r1];
                for k in 0..3 {
                    let change = (first[k] - before[k]) / (r0 + r1);
                    derivative[k] += r0 * change;
                    second[k] = change;
                }
            }
            for k in 0..3 {
                weights[k] += slope * derivative[k] + bend * second[k];
            }
        }
        let fresh_noise = if self.stochastic { Some(noise.noise_like(sample)?) } else { None };
        let mut terms = vec![(kept, sample)];
        terms.extend(weights.iter().zip(self.originals.iter().rev()).map(|(&weight, original)| (weight, original)));
        terms.extend(fresh_noise.as_ref().map(|noise| (fresh, noise)));
        combine(&terms)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        let level = self.level(index);
        combine(&[(level.alpha, original), (level.sigma, noise)])
    }

    fn history(&self) -> Result<History, SamplingError> {
        let originals = self.originals.iter().map(SavedTensor::save).collect::<Result<_, _>>()?;
        Ok(History::Multistep { originals })
    }

    fn restore(&mut self, history: &History, device: &Device) -> Result<(), SamplingError> {
        let History::Multistep { originals } = history else {
            return Err(history.mismatch("dpm++"));
        };
        if originals.len() > self.order {
            return Err(SamplingError::State(format!(
                "{} originals were stored for a solver of order {}",
                originals.len(),
                self.order
            )));
        }
        self.originals = originals.iter().map(|saved| saved.load(device)).collect::<Result<_, _>>()?;
        Ok(())
    }
}

//! UniPC (Zhao et al. 2023): a multistep predictor, and a corrector of the same form that uses the next call's output, so
//! that no call is added. Equations 3 and 6 with `B(h)` either `h` (bh1) or `exp(h) - 1` (bh2).

use candle_core::{Device, Tensor};

use super::config::FinalSigma;
use super::dpmpp::Level;
use super::history::SavedTensor;
use super::math::{combine, limited, output_like, predicted_noise, predicted_original};
use super::schedule::{Grid, NoiseLevels, whole_grid};
use super::settings::{Limit, Settings};
use super::{History, NoiseSource, PredictionType, Sampler, SamplerKind, SamplingError};

pub(super) struct Unipc {
    grid: Grid,
    order: usize,
    /// `B(h) = h` instead of `exp(h) - 1`.
    bh1: bool,
    predict_original: bool,
    lower_order_final: bool,
    /// Steps after which nothing is corrected.
    uncorrected: Vec<usize>,
    prediction: PredictionType,
    limit: Limit,
    start: usize,
    /// Converted model outputs, oldest first, at most `order`.
    outputs: Vec<Tensor>,
    last_sample: Option<Tensor>,
    last_order: usize,
}

/// One step of predictor or corrector, from a level to the next in units of its width.
struct Leap {
    /// Weight of the sample the step starts from.
    kept: f64,
    /// Weight of the latest output.
    value: f64,
    /// Weight of the correction terms together.
    correction: f64,
    /// Positions of the older outputs, and 1 for the end.
    positions: Vec<f64>,
    /// Right-hand sides of the order conditions.
    conditions: Vec<f64>,
}

impl Unipc {
    pub(super) fn new(settings: &Settings, steps: usize, start: usize) -> Result<Self, SamplingError> {
        if !settings.predict_x0 && settings.final_sigma == FinalSigma::Zero {
            return Err(SamplingError::Unsupported(
                "unipc without predict_x0 cannot end at zero noise: set final_sigmas_type to sigma_min".into(),
            ));
        }
        Ok(Self {
            grid: whole_grid(settings, &NoiseLevels::new(settings), steps),
            order: settings.solver_order,
            bh1: settings.solver_type.as_deref() == Some("bh1"),
            predict_original: settings.predict_x0,
            lower_order_final: settings.lower_order_final,
            uncorrected: settings.disable_corrector.clone(),
            prediction: settings.prediction,
            limit: settings.limit,
            start,
            outputs: Vec::new(),
            last_sample: None,
            last_order: 0,
        })
    }

    fn level(&self, index: usize) -> Level {
        Level::new(self.grid.sigmas[index])
    }

    /// The leap from the level at `from` to the next, with the outputs of `order - 1` levels before it.
    fn leap(&self, from: usize, order: usize) -> Leap {
        let (begin, end) = (self.level(from), self.level(from + 1));
        let h = end.lambda - begin.lambda;
        let hh = if self.predict_original { -h } else { h };
        let grown = hh.exp_m1();
        let weight = if self.bh1 { hh } else { grown };
        let mut positions: Vec<f64> = (1..order).map(|i| (self.level(from - i).lambda - begin.lambda) / h).collect();
        positions.push(1.0);
        let mut phi = grown / hh - 1.0;
        let mut factorial = 1.0;
        let conditions = (1..=order)
            .map(|i| {
                let condition = phi * factorial / weight;
                factorial *= (i + 1) as f64;
                phi = phi / hh - 1.0 / factorial;
                condition
            })
            .collect();
        let (kept, scale) = if self.predict_original {
            (end.sigma / begin.sigma, end.alpha)
        } else {
            (end.alpha / begin.alpha, end.sigma)
        };
        Leap { kept, value: -scale * grown, correction: -scale * weight, positions, conditions }
    }

    /// Predicts the sample at the next level.
    fn predict(&self, sample: &Tensor, index: usize, order: usize) -> Result<Tensor, SamplingError> {
        let leap = self.leap(index, order);
        let weights = match order {
            1 => Vec::new(),
            // The paper's simplification, exact for these conditions up to the order.
            2 => vec![0.5],
            _ => solved(&leap.positions[..order - 1], &leap.conditions[..order - 1])?,
        };
        let latest = &self.outputs[self.outputs.len() - 1];
        let mut value = leap.value;
        let mut terms = vec![(leap.kept, sample)];
        for (i, weight) in weights.iter().enumerate() {
            let each = leap.correction * weight / leap.positions[i];
            value -= each;
            terms.push((each, &self.outputs[self.outputs.len() - 2 - i]));
        }
        terms.push((value, latest));
        combine(&terms)
    }

    /// Redoes the last prediction with the output at its end.
    fn correct(&self, last_sample: &Tensor, output: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        let order = self.last_order;
        let leap = self.leap(index - 1, order);
        let weights = if order == 1 { vec![0.5] } else { solved(&leap.positions, &leap.conditions)? };
        let latest = &self.outputs[self.outputs.len() - 1];
        let mut value = leap.value;
        let mut terms = vec![(leap.kept, last_sample)];
        for (i, weight) in weights.iter().enumerate() {
            let each = leap.correction * weight / leap.positions[i];
            value -= each;
            let other = if i + 1 == order { output } else { &self.outputs[self.outputs.len() - 2 - i] };
            terms.push((each, other));
        }
        terms.push((value, latest));
        combine(&terms)
    }
}

/// Weights `w` with `sum_j positions[j]^i w[j] = conditions[i]`, by elimination with pivots.
fn solved(positions: &[f64], conditions: &[f64]) -> Result<Vec<f64>, SamplingError> {
    let n = positions.len();
    let mut rows: Vec<Vec<f64>> = (0..n)
        .map(|i| positions.iter().map(|p| p.powi(i as i32)).chain(std::iter::once(conditions[i])).collect())
        .collect();
    for column in 0..n {
        let pivot = (column..n).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()));
        rows.swap(column, pivot.unwrap_or(column));
        let head = rows[column].clone();
        if head[column] == 0.0 {
            return Err(SamplingError::OutOfRange(
                "two steps of this schedule share a noise level, which unipc cannot take: ask for fewer steps".into(),
            ));
        }
        for (i, row) in rows.iter_mut().enumerate() {
            if i != column {
                let factor = row[column] / head[column];
                for (value, above) in row.iter_mut().zip(&head) {
                    *value -= factor * above;
                }
            }
        }
    }
    Ok((0..n).map(|i| rows[i][n] / rows[i][i]).collect())
}

impl Sampler for Unipc {
    fn kind(&self) -> SamplerKind {
        SamplerKind::Unipc
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
        _noise: &mut dyn NoiseSource,
    ) -> Result<Tensor, SamplingError> {
        let output = output_like(model_output, sample)?;
        let level = self.level(index);
        let converted = if self.predict_original {
            limited(predicted_original(self.prediction, &output, sample, level.alpha, level.sigma)?, self.limit)?
        } else {
            predicted_noise(self.prediction, &output, sample, level.alpha, level.sigma)?
        };
        let sample = match &self.last_sample {
            Some(last) if index > 0 && !self.uncorrected.contains(&(index - 1)) => {
                self.correct(last, &converted, index)?
            }
            _ => sample.clone(),
        };
        if self.outputs.len() == self.order {
            self.outputs.remove(0);
        }
        self.outputs.push(converted);
        let left = self.grid.timesteps.len() - index;
        // A step to zero noise is infinitely wide: nothing of higher order is left of it.
        let careful = self.lower_order_final || self.grid.sigmas[index + 1] == 0.0 && left == 1;
        let most = if careful { self.order.min(left) } else { self.order };
        self.last_order = most.min(self.outputs.len());
        let next = self.predict(&sample, index, self.last_order)?;
        self.last_sample = Some(sample);
        Ok(next)
    }

    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError> {
        let level = self.level(index);
        combine(&[(level.alpha, original), (level.sigma, noise)])
    }

    fn history(&self) -> Result<History, SamplingError> {
        Ok(History::Unipc {
            outputs: self.outputs.iter().map(SavedTensor::save).collect::<Result<_, _>>()?,
            last_sample: self.last_sample.as_ref().map(SavedTensor::save).transpose()?,
            last_order: self.last_order,
        })
    }

    fn restore(&mut self, history: &History, device: &Device) -> Result<(), SamplingError> {
        let History::Unipc { outputs, last_sample, last_order } = history else {
            return Err(history.mismatch("unipc"));
        };
        if outputs.len() > self.order || *last_order > outputs.len() {
            return Err(SamplingError::State(format!(
                "{} outputs and a step of order {last_order} were stored for a solver of order {}",
                outputs.len(),
                self.order
            )));
        }
        self.outputs = outputs.iter().map(|saved| saved.load(device)).collect::<Result<_, _>>()?;
        self.last_sample = last_sample.as_ref().map(|saved| saved.load(device)).transpose()?;
        self.last_order = *last_order;
        Ok(())
    }
}

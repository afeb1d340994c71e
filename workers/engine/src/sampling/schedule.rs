//! Noise schedules: the training noise, and the timesteps and noise levels a run goes through.
//!
//! The numbers follow diffusers' schedulers to the last bit of single precision where they can: the cumulative products
//! lie so near 1 that another rounding of them would show in the pictures.

use super::config::{BetaSchedule, FinalSigma, TimestepSpacing};
use super::settings::{Settings, SigmaCurve};
use super::{SamplerKind, SamplingError};

/// What diffusers puts for a cumulative product of zero, so that the noise level stays finite.
const LEAST_ALPHA: f32 = 1.0 / 16_777_216.0;

/// The noise of training, a value for each of its timesteps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NoiseLevels {
    /// The cumulative products of `1 - beta`: the share of the original in the sample's variance.
    pub(super) alphas_cumprod: Vec<f32>,
}

/// The timesteps of a run and its noise levels, one more: the last is the level after the last step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grid {
    pub(super) timesteps: Vec<f64>,
    /// Rounded to single precision.
    pub(super) sigmas: Vec<f64>,
}

/// The step at which image to image starts, as diffusers' pipelines count: of `steps`, the last `strength` are run.
///
/// # Errors
/// A strength outside (0, 1], or one that leaves no step to run.
pub fn start_step(steps: usize, strength: Option<f64>) -> Result<usize, SamplingError> {
    let Some(strength) = strength else { return Ok(0) };
    if !(strength > 0.0 && strength <= 1.0) {
        return Err(SamplingError::OutOfRange(format!("strength must be above 0 and at most 1, not {strength}")));
    }
    let run = ((steps as f64 * strength) as usize).min(steps);
    if run == 0 {
        return Err(SamplingError::OutOfRange(format!(
            "strength {strength} of {steps} steps leaves none to run: raise one of them (at least {} steps)",
            (1.0 / strength).ceil()
        )));
    }
    Ok(steps - run)
}

impl NoiseLevels {
    /// The levels of a configuration.
    pub(super) fn new(settings: &Settings) -> Self {
        let mut betas = betas(settings);
        if settings.zero_snr {
            betas = rescaled_to_zero_snr(&betas);
        }
        let mut alphas_cumprod = cumulative_products(&betas);
        // Those that divide by the signal's share get the least positive one instead of none.
        let divides = match settings.kind {
            SamplerKind::Ddim | SamplerKind::Lcm => false,
            SamplerKind::Euler
            | SamplerKind::EulerAncestral
            | SamplerKind::Heun
            | SamplerKind::Dpmpp2m
            | SamplerKind::Dpmpp2mSde
            | SamplerKind::Unipc => true,
        };
        if settings.zero_snr
            && divides
            && let Some(last) = alphas_cumprod.last_mut()
        {
            *last = LEAST_ALPHA;
        }
        Self { alphas_cumprod }
    }

    /// The noise level of a timestep in units of the original: `sqrt((1 - alpha) / alpha)`.
    fn sigma(&self, timestep: usize) -> f32 {
        let alpha = self.alphas_cumprod[timestep.min(self.alphas_cumprod.len() - 1)];
        ((1.0 - alpha) / alpha).sqrt()
    }

    fn sigmas(&self) -> Vec<f32> {
        (0..self.alphas_cumprod.len()).map(|timestep| self.sigma(timestep)).collect()
    }
}

fn betas(settings: &Settings) -> Vec<f32> {
    let n = settings.train_steps;
    if let Some(betas) = &settings.trained_betas {
        return betas.iter().map(|&beta| beta as f32).collect();
    }
    let (start, end) = (settings.beta_start, settings.beta_end);
    match settings.beta_schedule {
        BetaSchedule::Linear => linspace_f32(start, end, n),
        BetaSchedule::ScaledLinear => {
            linspace_f32(start.sqrt(), end.sqrt(), n).into_iter().map(|root| root * root).collect()
        }
        BetaSchedule::SquaredCosine => {
            betas_of_products(n, |t| ((t + 0.008) / 1.008 * std::f64::consts::PI / 2.0).cos().powi(2))
        }
        BetaSchedule::Exponential => betas_of_products(n, |t| (-12.0 * t).exp()),
    }
}

/// The betas whose cumulative product follows the function of time, each at most 0.999.
fn betas_of_products(n: usize, product: impl Fn(f64) -> f64) -> Vec<f32> {
    let at = |i: usize| product(i as f64 / n as f64);
    (0..n).map(|i| (1.0 - at(i + 1) / at(i)).min(0.999) as f32).collect()
}

/// `torch.linspace` in f32: from both ends, each value rounded once.
fn linspace_f32(start: f64, end: f64, n: usize) -> Vec<f32> {
    let (start, end) = (start as f32, end as f32);
    let step = (end - start) / (n - 1) as f32;
    let value = |i: usize| {
        if i < n / 2 { step.mul_add(i as f32, start) } else { (-step).mul_add((n - 1 - i) as f32, end) }
    };
    (0..n).map(value).collect()
}

/// Products of `1 - beta`, accumulated in double precision as torch does on the CPU.
fn cumulative_products(betas: &[f32]) -> Vec<f32> {
    let mut product = 1.0f64;
    betas
        .iter()
        .map(|&beta| {
            product *= f64::from(1.0 - beta);
            product as f32
        })
        .collect()
}

/// Betas whose last step has no signal left: Lin et al. 2023, algorithm 1.
fn rescaled_to_zero_snr(betas: &[f32]) -> Vec<f32> {
    let mut roots: Vec<f32> = cumulative_products(betas).into_iter().map(f32::sqrt).collect();
    let (Some(&first), Some(&last)) = (roots.first(), roots.last()) else { return Vec::new() };
    let scale = first / (first - last);
    for root in &mut roots {
        *root = (*root - last) * scale;
    }
    let products: Vec<f32> = roots.into_iter().map(|root| root * root).collect();
    let ratios = products.windows(2).map(|pair| 1.0 - pair[1] / pair[0]);
    std::iter::once(1.0 - products[0]).chain(ratios).collect()
}

/// `numpy.linspace` from 0 to `last`, both included, ascending.
fn linspace_f64(last: f64, n: usize) -> Vec<f64> {
    let step = last / n.saturating_sub(1).max(1) as f64;
    let mut values: Vec<f64> = (0..n).map(|i| i as f64 * step).collect();
    if n > 1 {
        values[n - 1] = last;
    }
    values
}

/// `numpy.arange(last, 0, -last / n)`, rounded, minus one; cut to `n` where rounding would give one more.
fn trailing(last: f64, train_steps: f64, n: usize) -> Vec<f64> {
    let ratio = train_steps / n as f64;
    let delta = (last - ratio) - last;
    let count = ((last / ratio).ceil() as usize).min(n);
    (0..count).map(|i| (last + i as f64 * delta).round_ties_even() - 1.0).collect()
}

/// Whole timesteps of a run, descending, for the samplers that index the training steps (DDIM, LCM).
pub(super) fn whole_timesteps(settings: &Settings, levels: &NoiseLevels, n: usize) -> Vec<usize> {
    let last = settings.train_steps - 1;
    let values: Vec<f64> = match (settings.curve, settings.spacing) {
        (SigmaCurve::Training, TimestepSpacing::Linspace) => descending(linspace_f64(last as f64, n)),
        (SigmaCurve::Training, TimestepSpacing::Leading) => leading(settings.train_steps / n, n, settings.steps_offset),
        (SigmaCurve::Training, TimestepSpacing::Trailing) => {
            trailing(settings.train_steps as f64, settings.train_steps as f64, n)
        }
        (SigmaCurve::Training, TimestepSpacing::SgmUniform) => sgm_uniform(last as f64, n),
        (SigmaCurve::Karras | SigmaCurve::Exponential | SigmaCurve::Lambda, _) => {
            let training = levels.sigmas();
            let sigmas = curve(settings, f64::from(training[last]), f64::from(training[0]), n);
            sigmas.into_iter().map(|sigma| timestep_of(sigma, &training)).collect()
        }
    };
    values.into_iter().map(|t| (t.round_ties_even().max(0.0) as usize).min(last)).collect()
}

/// The grid of Euler, Euler ancestral and Heun: timesteps may lie between those of training.
pub(super) fn fractional_grid(settings: &Settings, levels: &NoiseLevels, n: usize) -> Grid {
    let train = settings.train_steps;
    let last = (train - 1) as f64;
    let training = levels.sigmas();
    let single = |values: Vec<f64>| values.into_iter().map(|t| f64::from(t as f32)).collect::<Vec<f64>>();
    let mut timesteps = single(match settings.spacing {
        TimestepSpacing::Linspace => descending(linspace_f64(last, n)),
        TimestepSpacing::Leading => leading(train / n, n, settings.steps_offset),
        TimestepSpacing::Trailing => trailing(train as f64, train as f64, n),
        TimestepSpacing::SgmUniform => sgm_uniform(last, n),
    });
    let mut sigmas: Vec<f64> = if settings.log_linear && settings.kind == SamplerKind::Euler {
        let (high, low) = (training[train - 1].ln(), training[0].ln());
        linspace_f32(f64::from(high), f64::from(low), n + 1).into_iter().map(|log| f64::from(log.exp())).collect()
    } else {
        timesteps.iter().map(|&t| interpolated(t, &training)).collect()
    };
    if settings.curve != SigmaCurve::Training {
        sigmas = curve(settings, sigmas[0], sigmas[sigmas.len() - 1], n);
        timesteps = single(sigmas.iter().map(|&sigma| timestep_of(sigma, &training)).collect());
    }
    // diffusers appends a level after the log-linear ones too, which no step reaches.
    if sigmas.len() == n {
        let least = settings.kind == SamplerKind::Euler && settings.final_sigma == FinalSigma::SigmaMin;
        sigmas.push(if least { f64::from(training[0]) } else { 0.0 });
    }
    let sigmas = single(sigmas);
    if settings.continuous
        && settings.kind == SamplerKind::Euler
        && settings.prediction == super::PredictionType::Velocity
    {
        timesteps = single(sigmas[..n].iter().map(|&sigma| f64::from(0.25 * (sigma as f32).ln())).collect());
    }
    Grid { timesteps, sigmas }
}

/// The grid of DPM++ and UniPC: whole timesteps, the ends of `n + 1` intervals unless trailing.
pub(super) fn whole_grid(settings: &Settings, levels: &NoiseLevels, n: usize) -> Grid {
    let training = levels.sigmas();
    let train = settings.train_steps;
    // Noise beyond the configured log signal-to-noise ratio is not used (cosine schedules end too high).
    let usable = match settings.kind {
        SamplerKind::Unipc => train,
        _ => training.iter().filter(|&&sigma| -f64::from(sigma).ln() >= settings.lambda_min_clipped).count().max(1),
    };
    let by_interval = || match settings.spacing {
        TimestepSpacing::Linspace | TimestepSpacing::SgmUniform => sgm_uniform((usable - 1) as f64, n),
        TimestepSpacing::Leading => {
            let ratio = usable / (n + 1);
            let mut values = leading(ratio, n + 1, settings.steps_offset);
            values.truncate(n);
            values
        }
        TimestepSpacing::Trailing => trailing(usable as f64, train as f64, n),
    };
    let bends = settings.beta_schedule == BetaSchedule::SquaredCosine;
    let (high, low) = (f64::from(training[train - 1]), f64::from(training[0]));
    let along = |rounded: bool| {
        let sigmas = curve(settings, high, low, n);
        let timesteps = sigmas.iter().map(|&sigma| {
            let t = timestep_of(sigma, &training);
            if rounded { t.round_ties_even() } else { t.trunc() }
        });
        (timesteps.collect::<Vec<f64>>(), sigmas)
    };
    let (timesteps, mut sigmas) = match settings.curve {
        SigmaCurve::Training => {
            let timesteps: Vec<f64> = by_interval().into_iter().map(f64::round_ties_even).collect();
            let sigmas = timesteps.iter().map(|&t| interpolated(t, &training)).collect();
            (timesteps, sigmas)
        }
        SigmaCurve::Karras => along(settings.kind == SamplerKind::Unipc || !bends),
        SigmaCurve::Lambda => along(!bends),
        SigmaCurve::Exponential => along(false),
    };
    let unipc_curve = settings.kind == SamplerKind::Unipc && settings.curve != SigmaCurve::Training;
    sigmas.push(match settings.final_sigma {
        FinalSigma::Zero => 0.0,
        FinalSigma::SigmaMin if unipc_curve => sigmas[sigmas.len() - 1],
        FinalSigma::SigmaMin => low,
    });
    Grid { timesteps, sigmas: sigmas.into_iter().map(|sigma| f64::from(sigma as f32)).collect() }
}

fn descending(mut values: Vec<f64>) -> Vec<f64> {
    values.reverse();
    values
}

fn leading(ratio: usize, n: usize, offset: usize) -> Vec<f64> {
    (0..n).rev().map(|i| (i * ratio + offset) as f64).collect()
}

fn sgm_uniform(last: f64, n: usize) -> Vec<f64> {
    let mut values = descending(linspace_f64(last, n + 1));
    values.truncate(n);
    values
}

/// Noise levels from `high` to `low` along the settings' curve.
fn curve(settings: &Settings, high: f64, low: f64, n: usize) -> Vec<f64> {
    let (least, most) = settings.sigma_range;
    let (high, low) = (most.unwrap_or(high), least.unwrap_or(low));
    let even = |from: f64, to: f64| -> Vec<f64> {
        let ramp = linspace_f64(1.0, n);
        ramp.into_iter().map(|part| from + part * (to - from)).collect()
    };
    match settings.curve {
        SigmaCurve::Karras => {
            let rho = 7.0;
            even(high.powf(1.0 / rho), low.powf(1.0 / rho)).into_iter().map(|root| root.powf(rho)).collect()
        }
        SigmaCurve::Exponential | SigmaCurve::Lambda | SigmaCurve::Training => {
            even(high.ln(), low.ln()).into_iter().map(f64::exp).collect()
        }
    }
}

/// Linear interpolation of the training levels at a timestep, held at the ends.
fn interpolated(timestep: f64, training: &[f32]) -> f64 {
    let last = training.len() - 1;
    if timestep <= 0.0 {
        return f64::from(training[0]);
    }
    let below = timestep.floor() as usize;
    if below >= last {
        return f64::from(training[last]);
    }
    let (low, high) = (f64::from(training[below]), f64::from(training[below + 1]));
    (high - low) * (timestep - below as f64) + low
}

/// The timestep of a noise level: linear interpolation in the logarithm.
fn timestep_of(sigma: f64, training: &[f32]) -> f64 {
    let log_of = |i: usize| f64::from(f64::from(training[i]).ln() as f32);
    let log = sigma.max(1e-10).ln();
    let not_above = (0..training.len()).filter(|&i| log >= log_of(i)).count();
    let low = not_above.saturating_sub(1).min(training.len() - 2);
    let (below, above) = (log_of(low), log_of(low + 1));
    let width = f64::from(below as f32 - above as f32);
    let part = ((below - log) / width).clamp(0.0, 1.0);
    (1.0 - part) * low as f64 + part * (low + 1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_to_image_runs_the_last_steps() {
        assert_eq!(start_step(20, None).unwrap(), 0);
        assert_eq!(start_step(20, Some(1.0)).unwrap(), 0);
        assert_eq!(start_step(20, Some(0.75)).unwrap(), 5);
        // 50 * 0.3 is 15 exactly, 10 * 0.29 rounds down to 2.
        assert_eq!(start_step(50, Some(0.3)).unwrap(), 35);
        assert_eq!(start_step(10, Some(0.29)).unwrap(), 8);
        for bad in [0.0, -0.1, 1.01, f64::NAN] {
            assert!(start_step(20, Some(bad)).is_err(), "{bad}");
        }
        let error = start_step(4, Some(0.2)).unwrap_err().to_string();
        assert!(error.contains("at least 5 steps"), "{error}");
    }

    #[test]
    fn trailing_never_exceeds_the_steps() {
        for n in 1..=1000 {
            let values = trailing(1000.0, 1000.0, n);
            assert_eq!((values.len(), values[0]), (n, 999.0));
            assert!(values.iter().all(|&t| t >= 0.0), "{n}");
        }
    }

    #[test]
    fn a_timestep_is_found_again() {
        let training: Vec<f32> = (0..100).map(|i| 0.01 * 1.1f32.powi(i)).collect();
        for t in [0.0, 0.25, 17.5, 98.75, 99.0] {
            let whole = t as usize;
            let sigma = 0.01 * 1.1f64.powf(t);
            assert!((timestep_of(sigma, &training) - t).abs() < 1e-3, "{t} ({whole})");
        }
        assert_eq!(timestep_of(0.0, &training), 0.0);
        assert_eq!(timestep_of(1e9, &training), 99.0);
    }
}

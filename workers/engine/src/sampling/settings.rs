//! A scheduler's configuration made complete for one sampler and one request.

use super::config::{BetaSchedule, FinalSigma, PredictionType, SchedulerConfig, TimestepSpacing};
use super::{SamplerKind, SamplingError, Schedule, ScheduleChoice};

/// How noise levels lie between the largest and the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SigmaCurve {
    /// Those of training at the timesteps used.
    Training,
    /// Karras et al. 2022, equation 5, rho 7.
    Karras,
    /// Even in the logarithm.
    Exponential,
    /// Even in the logarithm with timesteps rounded (Lu et al. 2022).
    Lambda,
}

/// A configuration with every default filled in for one sampler and the request's schedule applied.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) kind: SamplerKind,
    /// Whether the request names the schedule, rather than the configuration.
    pub(super) named: bool,
    pub(super) train_steps: usize,
    pub(super) beta_start: f64,
    pub(super) beta_end: f64,
    pub(super) beta_schedule: BetaSchedule,
    pub(super) trained_betas: Option<Vec<f64>>,
    pub(super) prediction: PredictionType,
    pub(super) spacing: TimestepSpacing,
    pub(super) curve: SigmaCurve,
    pub(super) continuous: bool,
    pub(super) log_linear: bool,
    pub(super) steps_offset: usize,
    pub(super) set_alpha_to_one: bool,
    pub(super) final_sigma: FinalSigma,
    pub(super) zero_snr: bool,
    pub(super) limit: Limit,
    pub(super) sigma_range: (Option<f64>, Option<f64>),
    pub(super) lambda_min_clipped: f64,
    pub(super) solver_order: usize,
    pub(super) solver_type: Option<String>,
    pub(super) lower_order_final: bool,
    pub(super) euler_at_final: bool,
    pub(super) predict_x0: bool,
    pub(super) disable_corrector: Vec<usize>,
    pub(super) original_steps: usize,
    pub(super) timestep_scaling: f64,
}

/// How predicted originals are kept in range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Limit {
    /// Not at all; right for latents.
    None,
    /// Clamped to this range both ways.
    Clip(f64),
    /// Dynamic thresholding (Saharia et al. 2022): quantile and the largest value it may give.
    Quantile(f64, f64),
}

impl SchedulerConfig {
    /// Fills in what is absent for this sampler and applies the request's schedule.
    pub(super) fn resolve(&self, kind: SamplerKind, choice: ScheduleChoice) -> Result<Settings, SamplingError> {
        if self.use_flow_sigmas == Some(true) || self.prediction_type == Some(PredictionType::Flow) {
            return Err(SamplingError::Unsupported("flow prediction is not of this family of samplers".into()));
        }
        let leading_by_default = matches!(kind, SamplerKind::Ddim | SamplerKind::Lcm);
        let default_spacing = if leading_by_default { TimestepSpacing::Leading } else { TimestepSpacing::Linspace };
        let configured = self.timestep_spacing.unwrap_or(default_spacing);
        let (spacing, curve) = match choice.schedule {
            Schedule::Configured => (configured, self.curve(kind)?),
            Schedule::Leading => (TimestepSpacing::Leading, SigmaCurve::Training),
            Schedule::Trailing => (TimestepSpacing::Trailing, SigmaCurve::Training),
            Schedule::Linspace => (TimestepSpacing::Linspace, SigmaCurve::Training),
            Schedule::SgmUniform => (TimestepSpacing::SgmUniform, SigmaCurve::Training),
            Schedule::Karras => (TimestepSpacing::Linspace, SigmaCurve::Karras),
            Schedule::Exponential => (TimestepSpacing::Linspace, SigmaCurve::Exponential),
        };
        let distilled = matches!(kind, SamplerKind::Lcm);
        let latent_betas = distilled || kind == SamplerKind::Heun;
        let settings = Settings {
            kind,
            named: choice.schedule != Schedule::Configured,
            train_steps: self.num_train_timesteps.unwrap_or(1000),
            beta_start: self.beta_start.unwrap_or(if latent_betas { 0.00085 } else { 0.0001 }),
            beta_end: self.beta_end.unwrap_or(if latent_betas { 0.012 } else { 0.02 }),
            beta_schedule: self.beta_schedule.unwrap_or(if distilled {
                BetaSchedule::ScaledLinear
            } else {
                BetaSchedule::Linear
            }),
            trained_betas: self.trained_betas.clone(),
            prediction: self.prediction_type.unwrap_or(PredictionType::Epsilon),
            spacing,
            curve,
            continuous: self.timestep_type.as_deref() == Some("continuous"),
            log_linear: self.interpolation_type.as_deref() == Some("log_linear"),
            steps_offset: self.steps_offset.unwrap_or(0),
            set_alpha_to_one: self.set_alpha_to_one.unwrap_or(true),
            final_sigma: self.final_sigmas_type.unwrap_or(FinalSigma::Zero),
            zero_snr: choice.zero_snr.or(self.rescale_betas_zero_snr).unwrap_or(false),
            limit: self.limit(kind),
            sigma_range: (self.sigma_min, self.sigma_max),
            lambda_min_clipped: self.lambda_min_clipped.unwrap_or(f64::NEG_INFINITY),
            solver_order: self.solver_order.unwrap_or(2),
            solver_type: self.solver_type.clone(),
            lower_order_final: self.lower_order_final.unwrap_or(true),
            euler_at_final: self.euler_at_final.unwrap_or(false),
            predict_x0: self.predict_x0.unwrap_or(true),
            disable_corrector: self.disable_corrector.clone().unwrap_or_default(),
            original_steps: self.original_inference_steps.unwrap_or(50),
            timestep_scaling: self.timestep_scaling.unwrap_or(10.0),
        };
        settings.check()?;
        Ok(settings)
    }

    /// The curve the configuration asks for, among those the sampler's class reads.
    fn curve(&self, kind: SamplerKind) -> Result<SigmaCurve, SamplingError> {
        match kind {
            // These read none of the keys.
            SamplerKind::Ddim | SamplerKind::Lcm | SamplerKind::EulerAncestral => return Ok(SigmaCurve::Training),
            SamplerKind::Euler
            | SamplerKind::Heun
            | SamplerKind::Dpmpp2m
            | SamplerKind::Dpmpp2mSde
            | SamplerKind::Unipc => {}
        }
        if self.use_beta_sigmas == Some(true) {
            return Err(SamplingError::Unsupported(
                "the configuration asks for beta sigmas, which are not supported: name a schedule".into(),
            ));
        }
        let multistep = matches!(kind, SamplerKind::Dpmpp2m | SamplerKind::Dpmpp2mSde);
        Ok(if self.use_karras_sigmas == Some(true) {
            SigmaCurve::Karras
        } else if multistep && self.use_lu_lambdas == Some(true) {
            SigmaCurve::Lambda
        } else if self.use_exponential_sigmas == Some(true) {
            SigmaCurve::Exponential
        } else {
            SigmaCurve::Training
        })
    }

    /// The limit on predicted originals, among those the sampler's class reads. Where the key is absent nothing is
    /// clipped: DDIM's class would, but no latent pipeline lets it.
    fn limit(&self, kind: SamplerKind) -> Limit {
        let (clips, thresholds) = match kind {
            SamplerKind::Ddim | SamplerKind::Lcm => (true, true),
            SamplerKind::Heun => (true, false),
            SamplerKind::Dpmpp2m | SamplerKind::Dpmpp2mSde | SamplerKind::Unipc => (false, true),
            SamplerKind::Euler | SamplerKind::EulerAncestral => (false, false),
        };
        if thresholds && self.thresholding == Some(true) {
            let ratio = self.dynamic_thresholding_ratio.unwrap_or(0.995);
            Limit::Quantile(ratio, self.sample_max_value.unwrap_or(1.0))
        } else if clips && self.clip_sample == Some(true) {
            Limit::Clip(self.clip_sample_range.unwrap_or(1.0))
        } else {
            Limit::None
        }
    }
}

impl Settings {
    fn check(&self) -> Result<(), SamplingError> {
        let fail = |message: String| Err(SamplingError::Config(message));
        if !(2..=100_000).contains(&self.train_steps) {
            return fail(format!("num_train_timesteps must be from 2 to 100000, not {}", self.train_steps));
        }
        if !(1..=3).contains(&self.solver_order) {
            return fail(format!("solver_order must be 1, 2 or 3, not {}", self.solver_order));
        }
        if let Limit::Quantile(ratio, _) = self.limit
            && !(0.0..=1.0).contains(&ratio)
        {
            return fail(format!("dynamic_thresholding_ratio must be from 0 to 1, not {ratio}"));
        }
        if let Some(betas) = &self.trained_betas
            && betas.len() != self.train_steps
        {
            return fail(format!("trained_betas has {} values for {} timesteps", betas.len(), self.train_steps));
        }
        Ok(())
    }

    /// Refuses step counts without meaning.
    pub(super) fn check_steps(&self, steps: usize) -> Result<(), SamplingError> {
        if steps == 0 {
            return Err(SamplingError::OutOfRange("steps must be at least 1".into()));
        }
        if steps > self.train_steps {
            return Err(SamplingError::OutOfRange(format!(
                "{steps} steps are more than the {} the model was trained with: ask for fewer",
                self.train_steps
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_numbers_are_refused() {
        for text in [r#"{"solver_order": 4}"#, r#"{"num_train_timesteps": 1}"#, r#"{"trained_betas": [0.1]}"#] {
            let config = SchedulerConfig::from_json(text).unwrap();
            assert!(config.resolve(SamplerKind::Unipc, ScheduleChoice::default()).is_err(), "{text}");
        }
    }
}

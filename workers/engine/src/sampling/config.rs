//! `scheduler_config.json` as diffusers writes it.

use std::path::Path;

use serde::Deserialize;

use super::{SamplerKind, SamplingError, Schedule, ScheduleChoice};

/// A scheduler's configuration. Absent keys take the default of the sampler that is built from it, as diffusers'
/// `from_config` does; unknown keys are ignored, since every scheduler class has its own.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the keys are diffusers' own
pub struct SchedulerConfig {
    #[serde(rename = "_class_name")]
    pub class_name: Option<String>,
    pub num_train_timesteps: Option<usize>,
    pub beta_start: Option<f64>,
    pub beta_end: Option<f64>,
    pub beta_schedule: Option<BetaSchedule>,
    pub trained_betas: Option<Vec<f64>>,
    pub prediction_type: Option<PredictionType>,
    pub timestep_spacing: Option<TimestepSpacing>,
    pub timestep_type: Option<String>,
    pub interpolation_type: Option<String>,
    pub steps_offset: Option<usize>,
    pub set_alpha_to_one: Option<bool>,
    pub final_sigmas_type: Option<FinalSigma>,
    pub rescale_betas_zero_snr: Option<bool>,
    pub clip_sample: Option<bool>,
    pub clip_sample_range: Option<f64>,
    pub thresholding: Option<bool>,
    pub dynamic_thresholding_ratio: Option<f64>,
    pub sample_max_value: Option<f64>,
    pub use_karras_sigmas: Option<bool>,
    pub use_exponential_sigmas: Option<bool>,
    pub use_beta_sigmas: Option<bool>,
    pub use_lu_lambdas: Option<bool>,
    pub use_flow_sigmas: Option<bool>,
    pub sigma_min: Option<f64>,
    pub sigma_max: Option<f64>,
    pub lambda_min_clipped: Option<f64>,
    pub solver_order: Option<usize>,
    pub solver_type: Option<String>,
    pub algorithm_type: Option<String>,
    pub lower_order_final: Option<bool>,
    pub euler_at_final: Option<bool>,
    pub predict_x0: Option<bool>,
    pub disable_corrector: Option<Vec<usize>>,
    pub original_inference_steps: Option<usize>,
    pub timestep_scaling: Option<f64>,
}

/// How the training noise grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum BetaSchedule {
    /// Evenly from `beta_start` to `beta_end`.
    #[serde(rename = "linear")]
    Linear,
    /// The square of an even walk between the roots; what Stable Diffusion was trained with.
    #[serde(rename = "scaled_linear")]
    ScaledLinear,
    /// The squared cosine of improved DDPM (Nichol & Dhariwal 2021), with betas of 0.999 at most.
    #[serde(rename = "squaredcos_cap_v2")]
    SquaredCosine,
    /// `exp(-12 t)`, which Heun's configuration knows.
    #[serde(rename = "exp")]
    Exponential,
}

/// What the model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum PredictionType {
    /// The noise.
    #[serde(rename = "epsilon")]
    Epsilon,
    /// The velocity `sqrt(alpha) noise - sqrt(1 - alpha) original` (Salimans & Ho 2022).
    #[serde(rename = "v_prediction")]
    Velocity,
    /// The original.
    #[serde(rename = "sample", alias = "original_sample")]
    Sample,
    /// Rectified flow's velocity, which this family does not have.
    #[serde(rename = "flow_prediction")]
    Flow,
}

/// Which of the training timesteps are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum TimestepSpacing {
    /// Multiples of a whole step ratio from 0, plus `steps_offset`.
    #[serde(rename = "leading")]
    Leading,
    /// From the last training timestep down by equal steps.
    #[serde(rename = "trailing")]
    Trailing,
    /// Evenly from the last to the first, both used.
    #[serde(rename = "linspace")]
    Linspace,
    /// Evenly from the last towards the first, which is left out (the web UIs' "SGM Uniform"); requests alone name it.
    #[serde(skip)]
    SgmUniform,
}

/// The noise level after the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum FinalSigma {
    /// None.
    #[serde(rename = "zero")]
    Zero,
    /// The least of training.
    #[serde(rename = "sigma_min")]
    SigmaMin,
}

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
    /// Reads a configuration file.
    ///
    /// # Errors
    /// An unreadable or malformed file, by name.
    pub fn load(path: &Path) -> Result<Self, SamplingError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| SamplingError::Config(format!("cannot read {}: {error}", path.display())))?;
        Self::from_json(&text).map_err(|error| match error {
            SamplingError::Config(message) => SamplingError::Config(format!("{}: {message}", path.display())),
            other => other,
        })
    }

    /// Reads a configuration from its text. Python's `Infinity` and `NaN`, which diffusers writes, are taken as absent.
    ///
    /// # Errors
    /// Text that is no JSON, or a key of this family with a value that it cannot have.
    pub fn from_json(text: &str) -> Result<Self, SamplingError> {
        serde_json::from_str(&without_python_numbers(text)).map_err(|error| SamplingError::Config(error.to_string()))
    }

    /// The corrections that diffusers' Stable Diffusion pipelines make to the configuration they load: latents are never
    /// clipped, and the offset of leading timesteps is 1.
    pub fn for_latents(mut self) -> Self {
        self.clip_sample = Some(false);
        if self.steps_offset.is_some() {
            self.steps_offset = Some(1);
        }
        self
    }

    /// The sampler that the configuration names. Schedulers that are not built here are stood in for by the nearest
    /// that is: PNDM, DEIS and single-step DPM-Solver by DPM++ 2M, LMS by Euler, DDPM and the ancestral ones by Euler
    /// ancestral, KDPM2 by Heun.
    ///
    /// # Errors
    /// A class of another family (flow matching, say).
    pub fn default_sampler(&self) -> Result<SamplerKind, SamplingError> {
        let Some(class) = self.class_name.as_deref() else {
            return Err(SamplingError::Config("it names no class (`_class_name`): name a sampler".into()));
        };
        match (SamplerKind::from_class(class), self.algorithm_type.as_deref()) {
            (Some(SamplerKind::Dpmpp2m), Some("sde-dpmsolver++" | "sde-dpmsolver")) => Ok(SamplerKind::Dpmpp2mSde),
            (Some(kind), _) => Ok(kind),
            (None, _) => Err(SamplingError::Config(format!(
                "its class `{class}` is not supported: name a sampler ({})",
                SamplerKind::valid_names()
            ))),
        }
    }

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

/// The text with Python's bare `Infinity`, `-Infinity` and `NaN` replaced by `null`.
fn without_python_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_string = false;
    while let Some(c) = rest.chars().next() {
        let mut length = c.len_utf8();
        if in_string {
            if c == '\\' {
                length += rest[length..].chars().next().map_or(0, char::len_utf8);
            } else if c == '"' {
                in_string = false;
            }
        } else if let Some(word) = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| rest.starts_with(word)) {
            out.push_str("null");
            rest = &rest[word.len()..];
            continue;
        } else if c == '"' {
            in_string = true;
        }
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_numbers_outside_strings_are_taken_as_absent() {
        let config = SchedulerConfig::from_json(
            r#"{"_class_name": "DPMSolverMultistepScheduler", "lambda_min_clipped": -Infinity, "note": "a \"NaN\" stays"}"#,
        )
        .unwrap();
        assert_eq!(config.lambda_min_clipped, None);
        assert_eq!(without_python_numbers(r#"{"a":"x\\","b":NaN}"#), r#"{"a":"x\\","b":null}"#);
    }

    #[test]
    fn a_wrong_value_names_the_choices() {
        let error = SchedulerConfig::from_json(r#"{"beta_schedule": "sigmoid"}"#).unwrap_err().to_string();
        assert!(error.contains("sigmoid") && error.contains("scaled_linear"), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = SchedulerConfig::load(Path::new("nowhere/scheduler_config.json")).unwrap_err().to_string();
        assert!(error.contains("nowhere/scheduler_config.json"), "{error}");
    }

    #[test]
    fn the_algorithm_decides_between_ode_and_sde() {
        let of = |text: &str| SchedulerConfig::from_json(text).unwrap().default_sampler();
        assert_eq!(of(r#"{"_class_name": "DPMSolverMultistepScheduler"}"#).unwrap(), SamplerKind::Dpmpp2m);
        assert_eq!(
            of(r#"{"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}"#).unwrap(),
            SamplerKind::Dpmpp2mSde
        );
        assert!(of(r#"{"_class_name": "FlowMatchEulerDiscreteScheduler"}"#).is_err());
    }

    #[test]
    fn wrong_numbers_are_refused() {
        for text in [r#"{"solver_order": 4}"#, r#"{"num_train_timesteps": 1}"#, r#"{"trained_betas": [0.1]}"#] {
            let config = SchedulerConfig::from_json(text).unwrap();
            assert!(config.resolve(SamplerKind::Unipc, ScheduleChoice::default()).is_err(), "{text}");
        }
    }
}

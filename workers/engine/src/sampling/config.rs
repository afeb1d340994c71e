//! `scheduler_config.json` as diffusers writes it.

use std::path::Path;

use serde::Deserialize;

use super::{SamplerKind, SamplingError};

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

    /// The corrections that diffusers' pipelines of SD1.x and SD2.x make to the configuration they load: latents are
    /// never clipped, and the offset of leading timesteps is 1.
    pub fn for_latents(mut self) -> Self {
        self.clip_sample = Some(false);
        self.steps_offset = Some(1);
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
    fn latents_are_never_clipped_and_lead_by_one() {
        let text = r#"{"_class_name": "DDIMScheduler", "clip_sample": true, "steps_offset": 0}"#;
        let config = SchedulerConfig::from_json(text).unwrap();
        assert_eq!((config.clip_sample, config.steps_offset), (Some(true), Some(0)));
        let latent = config.for_latents();
        assert_eq!((latent.clip_sample, latent.steps_offset), (Some(false), Some(1)));
        assert_eq!(SchedulerConfig::default().for_latents().steps_offset, Some(1));
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
}

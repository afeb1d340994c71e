//! The names of samplers and schedules, as users of web UIs and of diffusers write them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::SamplingError;

/// The samplers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplerKind {
    /// Denoising diffusion implicit models (Song et al. 2020).
    Ddim,
    /// Euler's method on the probability flow (Karras et al. 2022, algorithm 2 without churn).
    Euler,
    /// Euler's method with ancestral noise.
    #[serde(rename = "euler_a")]
    EulerAncestral,
    /// Heun's second-order method; two model calls a step.
    Heun,
    /// DPM-Solver++ (Lu et al. 2022), multistep.
    #[serde(rename = "dpmpp_2m")]
    Dpmpp2m,
    /// DPM-Solver++ of the stochastic equation, multistep.
    #[serde(rename = "dpmpp_2m_sde")]
    Dpmpp2mSde,
    /// Latent consistency models (Luo et al. 2023).
    Lcm,
    /// UniPC (Zhao et al. 2023).
    Unipc,
}

impl SamplerKind {
    /// All, in the order in which they are listed.
    pub const ALL: [Self; 8] = [
        Self::Ddim,
        Self::Euler,
        Self::EulerAncestral,
        Self::Heun,
        Self::Dpmpp2m,
        Self::Dpmpp2mSde,
        Self::Lcm,
        Self::Unipc,
    ];

    /// The name in requests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddim => "ddim",
            Self::Euler => "euler",
            Self::EulerAncestral => "euler_a",
            Self::Heun => "heun",
            Self::Dpmpp2m => "dpmpp_2m",
            Self::Dpmpp2mSde => "dpmpp_2m_sde",
            Self::Lcm => "lcm",
            Self::Unipc => "unipc",
        }
    }

    /// The name that web UIs show and write into pictures.
    pub fn display_name(self) -> &'static str {
        match self {
            Self::Ddim => "DDIM",
            Self::Euler => "Euler",
            Self::EulerAncestral => "Euler a",
            Self::Heun => "Heun",
            Self::Dpmpp2m => "DPM++ 2M",
            Self::Dpmpp2mSde => "DPM++ 2M SDE",
            Self::Lcm => "LCM",
            Self::Unipc => "UniPC",
        }
    }

    /// The names that can be chosen, for messages.
    pub fn valid_names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// The sampler for a diffusers class, with the stand-ins of [`SchedulerConfig::default_sampler`].
    ///
    /// [`SchedulerConfig::default_sampler`]: super::SchedulerConfig::default_sampler
    pub fn from_class(class: &str) -> Option<Self> {
        Some(match class {
            "DDIMScheduler" => Self::Ddim,
            "EulerDiscreteScheduler" | "LMSDiscreteScheduler" => Self::Euler,
            "EulerAncestralDiscreteScheduler" | "KDPM2AncestralDiscreteScheduler" | "DDPMScheduler" => {
                Self::EulerAncestral
            }
            "HeunDiscreteScheduler" | "KDPM2DiscreteScheduler" => Self::Heun,
            "DPMSolverMultistepScheduler"
            | "DPMSolverSinglestepScheduler"
            | "DEISMultistepScheduler"
            | "PNDMScheduler" => Self::Dpmpp2m,
            "DPMSolverSDEScheduler" => Self::Dpmpp2mSde,
            "LCMScheduler" => Self::Lcm,
            "UniPCMultistepScheduler" => Self::Unipc,
            _ => return None,
        })
    }
}

impl fmt::Display for SamplerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SamplerKind {
    type Err = SamplingError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        if let Some(kind) = Self::from_class(name) {
            return Ok(kind);
        }
        Ok(match plain(name).as_str() {
            "ddim" => Self::Ddim,
            "euler" | "euler discrete" | "k euler" => Self::Euler,
            "euler a" | "euler ancestral" | "k euler a" | "k euler ancestral" => Self::EulerAncestral,
            "heun" | "k heun" => Self::Heun,
            "dpm++ 2m" | "dpmpp 2m" | "dpmpp2m" | "dpm++2m" | "k dpmpp 2m" | "dpm solver++" | "dpmsolver++" => {
                Self::Dpmpp2m
            }
            "dpm++ 2m sde" | "dpmpp 2m sde" | "dpmpp2m sde" | "dpm++2m sde" | "k dpmpp 2m sde" | "sde dpmsolver++" => {
                Self::Dpmpp2mSde
            }
            "lcm" => Self::Lcm,
            "unipc" | "uni pc" | "uni pc bh2" => Self::Unipc,
            _ => {
                return Err(SamplingError::UnknownSampler { name: name.into(), valid: Self::valid_names() });
            }
        })
    }
}

/// Which timesteps and noise levels a run goes through. For each sampler:
///
/// * *leading*, *trailing*, *linspace* are diffusers' `timestep_spacing` (a trailing schedule is never longer than the
///   steps asked for, where diffusers' rounding sometimes adds one). LCM takes them as custom timesteps.
/// * *karras*, *exponential* go from the largest to the least noise level of training, as in the web UIs and as
///   diffusers does with `timestep_spacing = "linspace"`. DDIM and LCM take the whole timesteps nearest to those levels.
/// * *sgm uniform* are even timesteps from the last training one towards the first, which is left out; whole numbers
///   for DDIM, LCM, DPM++ and UniPC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// As the model's configuration says.
    #[default]
    #[serde(rename = "default")]
    Configured,
    /// Multiples of a whole step from the first training timestep, plus the configured offset.
    Leading,
    /// Equal steps from the last training timestep.
    Trailing,
    /// Even from the last training timestep to the first.
    Linspace,
    /// Karras et al. 2022, rho 7.
    Karras,
    /// Even in the logarithm of the noise level.
    Exponential,
    /// The web UIs' "SGM Uniform".
    SgmUniform,
}

impl Schedule {
    /// All, in the order in which they are listed.
    pub const ALL: [Self; 7] = [
        Self::Configured,
        Self::Leading,
        Self::Trailing,
        Self::Linspace,
        Self::Karras,
        Self::Exponential,
        Self::SgmUniform,
    ];

    /// The name in requests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Configured => "default",
            Self::Leading => "leading",
            Self::Trailing => "trailing",
            Self::Linspace => "linspace",
            Self::Karras => "karras",
            Self::Exponential => "exponential",
            Self::SgmUniform => "sgm_uniform",
        }
    }

    /// The names that can be chosen, for messages.
    pub fn valid_names() -> String {
        format!("{}, each also with `+zero_snr` or `-zero_snr`", Self::ALL.map(Self::name).join(", "))
    }

    fn from_plain(name: &str) -> Option<Self> {
        Some(match name {
            "default" | "automatic" | "configured" | "" => Self::Configured,
            "leading" => Self::Leading,
            "trailing" | "simple" => Self::Trailing,
            "linspace" | "uniform" | "normal" => Self::Linspace,
            "karras" => Self::Karras,
            "exponential" => Self::Exponential,
            "sgm uniform" | "sgm" => Self::SgmUniform,
            _ => return None,
        })
    }
}

/// A schedule and whether training noise is rescaled to end in pure noise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ScheduleChoice {
    /// Timesteps and noise levels.
    pub schedule: Schedule,
    /// Zero-terminal SNR (Lin et al. 2023); `None` as the configuration says.
    pub zero_snr: Option<bool>,
}

impl fmt::Display for ScheduleChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.schedule.name())?;
        match self.zero_snr {
            None => Ok(()),
            Some(true) => f.write_str("+zero_snr"),
            Some(false) => f.write_str("-zero_snr"),
        }
    }
}

impl FromStr for ScheduleChoice {
    type Err = SamplingError;

    /// A schedule's name, alone or with the switch: `karras`, `SGM Uniform`, `trailing+zero_snr`, `zero_snr`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = plain(text);
        let (schedule, zero_snr) = ["zero snr", "zsnr", "zero terminal snr"]
            .iter()
            .find_map(|switch| name.strip_suffix(switch))
            .map_or((name.as_str(), None), |before| {
                let before = before.trim_end();
                match before.strip_suffix("no") {
                    // `plain` spells a minus sign before the switch as "no".
                    Some(before) if before.is_empty() || before.ends_with(' ') => (before.trim_end(), Some(false)),
                    _ => (before.trim_end_matches(['+', ',', ' ']), Some(true)),
                }
            });
        match Schedule::from_plain(schedule) {
            Some(schedule) => Ok(Self { schedule, zero_snr }),
            None => Err(SamplingError::UnknownSchedule { name: text.into(), valid: Schedule::valid_names() }),
        }
    }
}

impl From<Schedule> for ScheduleChoice {
    fn from(schedule: Schedule) -> Self {
        Self { schedule, zero_snr: None }
    }
}

/// Splits a web UI's combined spelling: "DPM++ 2M Karras" is a sampler and a schedule. A name without a schedule gives
/// `None` for it.
///
/// # Errors
/// No sampler of that name.
pub fn sampler_and_schedule(name: &str) -> Result<(SamplerKind, Option<Schedule>), SamplingError> {
    if let Ok(kind) = name.parse() {
        return Ok((kind, None));
    }
    let plain_name = plain(name);
    for (suffix, schedule) in [
        ("karras", Schedule::Karras),
        ("exponential", Schedule::Exponential),
        ("sgm uniform", Schedule::SgmUniform),
        ("trailing", Schedule::Trailing),
    ] {
        if let Some(before) = plain_name.strip_suffix(suffix)
            && let Ok(kind) = before.trim_end().parse()
        {
            return Ok((kind, Some(schedule)));
        }
    }
    Err(SamplingError::UnknownSampler { name: name.into(), valid: SamplerKind::valid_names() })
}

/// Lowercase with underscores, hyphens and runs of blanks as one blank; `-zero_snr` becomes `no zero snr`.
fn plain(name: &str) -> String {
    let lower = name.trim().to_lowercase();
    let lower = lower.replace("-zero", " no zero").replace("-zsnr", " no zsnr");
    lower
        .split(|c: char| c == '_' || c == '-' || c.is_whitespace())
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back() {
        for kind in SamplerKind::ALL {
            assert_eq!(kind.name().parse::<SamplerKind>().unwrap(), kind);
            assert_eq!(kind.display_name().parse::<SamplerKind>().unwrap(), kind);
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        for schedule in Schedule::ALL {
            assert_eq!(serde_json::to_value(schedule).unwrap(), schedule.name());
            for zero_snr in [None, Some(true), Some(false)] {
                let choice = ScheduleChoice { schedule, zero_snr };
                assert_eq!(choice.to_string().parse::<ScheduleChoice>().unwrap(), choice, "{choice}");
            }
        }
    }

    #[test]
    fn spellings_of_web_uis_and_of_diffusers() {
        for (name, kind) in [
            ("Euler a", SamplerKind::EulerAncestral),
            ("euler_ancestral", SamplerKind::EulerAncestral),
            ("EulerAncestralDiscreteScheduler", SamplerKind::EulerAncestral),
            ("k_euler", SamplerKind::Euler),
            ("DPM++ 2M SDE", SamplerKind::Dpmpp2mSde),
            ("dpmpp-2m", SamplerKind::Dpmpp2m),
            ("DPMSolverMultistepScheduler", SamplerKind::Dpmpp2m),
            ("uni_pc", SamplerKind::Unipc),
            (" DDIM ", SamplerKind::Ddim),
        ] {
            assert_eq!(name.parse::<SamplerKind>().unwrap(), kind, "{name}");
        }
        assert_eq!(sampler_and_schedule("DPM++ 2M Karras").unwrap(), (SamplerKind::Dpmpp2m, Some(Schedule::Karras)));
        assert_eq!(
            sampler_and_schedule("dpmpp_2m_sde_karras").unwrap(),
            (SamplerKind::Dpmpp2mSde, Some(Schedule::Karras))
        );
        assert_eq!(sampler_and_schedule("lcm").unwrap(), (SamplerKind::Lcm, None));
    }

    #[test]
    fn switches_of_zero_snr() {
        let of = |text: &str| text.parse::<ScheduleChoice>().unwrap();
        assert_eq!(of("zero_snr"), ScheduleChoice { schedule: Schedule::Configured, zero_snr: Some(true) });
        assert_eq!(of("trailing, zsnr"), ScheduleChoice { schedule: Schedule::Trailing, zero_snr: Some(true) });
        assert_eq!(of("SGM Uniform"), Schedule::SgmUniform.into());
        assert_eq!(of("karras-zero_snr"), ScheduleChoice { schedule: Schedule::Karras, zero_snr: Some(false) });
    }

    #[test]
    fn unknown_names_list_the_choices() {
        let error = "plms2".parse::<SamplerKind>().unwrap_err().to_string();
        assert!(error.contains("plms2") && error.contains("dpmpp_2m_sde"), "{error}");
        let error = "cosine".parse::<ScheduleChoice>().unwrap_err().to_string();
        assert!(error.contains("cosine") && error.contains("sgm_uniform"), "{error}");
        assert!(sampler_and_schedule("foo karras").is_err());
    }
}

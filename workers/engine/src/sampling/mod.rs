//! Sampling: noise, schedules and samplers, all checked against diffusers' schedulers.
//!
//! A [`Sampler`] is a state machine without I/O. A caller runs it so, with one image a sampler and a sample of shape
//! `[1, channels, height, width]` in f32 (noise is drawn in that row-major order, as torch does):
//!
//! ```text
//! let mut sampler = sampling::build(&config, &request)?;
//! let mut generator = Generator::new(seed);
//! let noise = generator.noise_like(&zeros)?;
//! let mut sample = match image { None => noise * sampler.init_noise_sigma(), Some(x) => sampler.add_noise(&x, &noise, sampler.start())? };
//! for index in sampler.start()..sampler.timesteps().len() {
//!     let input = sampler.scale_model_input(&sample, index)?;
//!     let output = model(input, sampler.timesteps()[index]);
//!     sample = sampler.step(&output, index, &sample, &mut generator)?;
//! }
//! ```

mod checkpoint;
mod config;
mod ddim;
mod dpmpp;
mod euler;
mod heun;
mod history;
mod kind;
mod lcm;
mod math;
mod rng;
mod schedule;
mod settings;
mod unipc;

use candle_core::Tensor;

pub use checkpoint::Checkpoint;
pub use config::{BetaSchedule, FinalSigma, PredictionType, SchedulerConfig, TimestepSpacing};
pub use history::{History, SavedTensor};
pub use kind::{SamplerKind, Schedule, ScheduleChoice, sampler_and_schedule};
pub use rng::Generator;
pub use schedule::start_step;

/// Why sampling cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    /// A sampler's name that nobody knows.
    #[error("unknown sampler `{name}`: choose one of {valid}")]
    UnknownSampler {
        /// As it was given.
        name: String,
        /// What can be chosen.
        valid: String,
    },
    /// A schedule's name that nobody knows.
    #[error("unknown schedule `{name}`: choose one of {valid}")]
    UnknownSchedule {
        /// As it was given.
        name: String,
        /// What can be chosen.
        valid: String,
    },
    /// A number of steps, strength or other setting out of range.
    #[error("{0}")]
    OutOfRange(String),
    /// A combination that has no meaning, or that is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// `scheduler_config.json` cannot be understood.
    #[error("scheduler configuration: {0}")]
    Config(String),
    /// A stored state does not fit.
    #[error("sampler state: {0}")]
    State(String),
    /// A tensor operation failed.
    #[error("sampling: {0}")]
    Tensor(#[from] candle_core::Error),
}

/// Where fresh noise comes from while sampling; a [`Generator`] in service, a recording in tests.
pub trait NoiseSource {
    /// Standard normal values in f32, of the sample's shape and on its device.
    fn noise_like(&mut self, sample: &Tensor) -> Result<Tensor, SamplingError>;
}

/// One sampler at work on one sample. `index` counts the model's calls from the whole schedule's first.
pub trait Sampler: Send {
    /// Which sampler this is.
    fn kind(&self) -> SamplerKind;

    /// The timestep of every model call of the whole schedule (two a step for Heun but the last).
    fn timesteps(&self) -> &[f64];

    /// The first call to make: 0, or later where an image to image strength below 1 skips the noisiest steps.
    fn start(&self) -> usize;

    /// What unit noise is multiplied by to begin from nothing.
    fn init_noise_sigma(&self) -> f64;

    /// The model's input at this call for this sample.
    fn scale_model_input(&self, sample: &Tensor, index: usize) -> Result<Tensor, SamplingError>;

    /// The next sample from the model's output at this call, in f32.
    fn step(
        &mut self,
        model_output: &Tensor,
        index: usize,
        sample: &Tensor,
        noise: &mut dyn NoiseSource,
    ) -> Result<Tensor, SamplingError>;

    /// The original brought to the noise level at which this call starts.
    fn add_noise(&self, original: &Tensor, noise: &Tensor, index: usize) -> Result<Tensor, SamplingError>;

    /// What must be kept, besides sample, index and generator, to go on after this call.
    fn history(&self) -> Result<History, SamplingError>;

    /// Takes back what [`Sampler::history`] gave.
    fn restore(&mut self, history: &History, device: &candle_core::Device) -> Result<(), SamplingError>;

    /// Calls of the model from [`Sampler::start`] to the end.
    fn model_calls(&self) -> usize {
        self.timesteps().len() - self.start()
    }
}

/// What a request says about sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerRequest {
    /// `None`: the sampler that the model's configuration names.
    pub sampler: Option<SamplerKind>,
    /// Which timesteps and noise levels.
    pub schedule: ScheduleChoice,
    /// Steps, at least one.
    pub steps: usize,
    /// Image to image: the share of the steps that is run, above 0 and at most 1. `None` from nothing.
    pub strength: Option<f64>,
    /// DDIM's share of fresh noise, 0 to 1; others ignore it.
    pub eta: f64,
}

impl SamplerRequest {
    /// The model's own sampler and schedule for this many steps.
    pub fn new(steps: usize) -> Self {
        Self { sampler: None, schedule: ScheduleChoice::default(), steps, strength: None, eta: 0.0 }
    }
}

/// The sampler for a request on a model's scheduler configuration.
///
/// # Errors
/// No steps or more than the model was trained with, a strength that leaves no step, a combination without meaning, or a
/// configuration that is not of this family.
pub fn build(config: &SchedulerConfig, request: &SamplerRequest) -> Result<Box<dyn Sampler>, SamplingError> {
    let kind = match request.sampler {
        Some(kind) => kind,
        None => config.default_sampler()?,
    };
    let settings = config.resolve(kind, request.schedule)?;
    settings.check_steps(request.steps)?;
    let first = start_step(request.steps, request.strength)?;
    if !(0.0..=1.0).contains(&request.eta) {
        return Err(SamplingError::OutOfRange(format!("eta must be from 0 to 1, not {}", request.eta)));
    }
    Ok(match kind {
        SamplerKind::Ddim => Box::new(ddim::Ddim::new(&settings, request.steps, first, request.eta)?),
        SamplerKind::Euler | SamplerKind::EulerAncestral => {
            Box::new(euler::Euler::new(&settings, request.steps, first))
        }
        SamplerKind::Heun => Box::new(heun::Heun::new(&settings, request.steps, first)),
        SamplerKind::Dpmpp2m | SamplerKind::Dpmpp2mSde => Box::new(dpmpp::Dpmpp::new(&settings, request.steps, first)),
        SamplerKind::Lcm => Box::new(lcm::Lcm::new(&settings, request.steps, first)?),
        SamplerKind::Unipc => Box::new(unipc::Unipc::new(&settings, request.steps, first)?),
    })
}

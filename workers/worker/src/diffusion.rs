//! The diffusion stage: noise and conditioning to latents.

use std::path::Path;

use sd_engine::formats::WeightSet;
use sd_engine::models::{ModelError, Unet};
use sd_engine::pipeline::{self, DenoiseInputs, DenoiseRequest, PipelineError};
use sd_engine::sampling::{Checkpoint, SamplerKind, ScheduleChoice, SchedulerConfig};
use sd_engine::tensor;
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{DenoiseWork, ElementType, Task};

use crate::governor;
use crate::runner::{Control, Finished, RunError, StageModel};
use crate::segment;
use crate::watch::Watch;

/// A UNet and the model's scheduler configuration.
#[derive(Default)]
pub(crate) struct DiffusionStage {
    loaded: Option<(SchedulerConfig, Unet)>,
}

impl StageModel for DiffusionStage {
    fn load(&mut self, folder: &Path, task: &Task, control: &Control<'_>) -> Result<(), RunError> {
        if self.loaded.is_none() {
            let config = SchedulerConfig::load(&folder.join("scheduler").join("scheduler_config.json"))
                .map_err(PipelineError::from)?
                .for_latents();
            self.loaded = Some((config, Unet::open(&folder.join("unet"))?));
        }
        if let Some((_, unet)) = &mut self.loaded {
            unet.set_chunks(governor::chunks(task));
            control.govern(task, &[unet.residency()])?;
            control.load(unet.residency())?;
        }
        Ok(())
    }

    fn run(&mut self, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
        let (Some((config, unet)), Some(Work::Denoise(work))) = (&self.loaded, &task.work) else {
            return Err(PipelineError::Internal("the diffusion stage is not loaded for this task".into()).into());
        };
        let input = |role| -> Result<_, RunError> {
            if !segment::has_input(task, role) {
                return Ok(None);
            }
            let (shape, values) = segment::read_f32(task, role)?;
            Ok(Some(tensor::from_f32(values, &shape).map_err(PipelineError::from)?))
        };
        let conditioning =
            input("conditioning")?.ok_or(segment::SegmentUseError::Absent { list: "input", role: "conditioning" })?;
        let inputs = DenoiseInputs {
            conditioning,
            image_latents: input("image_latents")?,
            latent_mask: input("latent_mask")?,
            masked_image_latents: input("masked_image_latents")?,
        };
        let request = request(work)?;
        let resume = segment::read_resume(task)?;
        let resume = resume.map(|body| Checkpoint::from_bytes(&body).map_err(PipelineError::from)).transpose()?;
        let mut watch = Watch::steps(control, segment::Slots::open(task)?);
        let latents = pipeline::denoise_from(unet, config, &request, &inputs, resume.as_ref(), &mut watch)?;
        let shape = latents.dims().to_vec();
        let values = segment::values(&latents)?;
        let output = segment::write(task, "latents", ElementType::F32, &shape, &segment::f32_bytes(&values))?;
        let resumed_at = resume.map_or(0, |checkpoint| checkpoint.done as u32);
        Ok(Finished { outputs: vec![output], notes: watch.notes(), resumed_at, ..Finished::default() })
    }

    fn unload(&mut self) {
        self.loaded = None;
    }

    fn weights(&self, folder: &Path) -> Result<WeightSet, ModelError> {
        Unet::weights(&folder.join("unet"))
    }

    fn weights_bytes(&self) -> u64 {
        self.loaded.as_ref().map_or(0, |(_, unet)| unet.bytes())
    }
}

fn request(work: &DenoiseWork) -> Result<DenoiseRequest, RunError> {
    const SCALE: u32 = 8;
    let sampler = match work.sampler.as_str() {
        "" => None,
        name => Some(name.parse::<SamplerKind>().map_err(PipelineError::from)?),
    };
    let mut schedule = work.schedule.parse::<ScheduleChoice>().map_err(PipelineError::from)?;
    schedule.zero_snr = work.zero_terminal_snr.or(schedule.zero_snr);
    Ok(DenoiseRequest {
        seed: work.seed,
        latent_size: ((work.height / SCALE) as usize, (work.width / SCALE) as usize),
        steps: work.steps as usize,
        guidance_scale: work.guidance_scale,
        guidance_rescale: work.guidance_rescale,
        sampler,
        schedule,
        eta: work.eta,
        strength: work.strength,
    })
}

//! The autoencoder's stage: latents to pixels, and image files to latents.

use std::path::Path;

use sd_engine::formats::WeightSet;
use sd_engine::models::{AutoencoderKl, ModelError, TilePlan, VaeHalf};
use sd_engine::ops::ComputeType;
use sd_engine::pipeline::{self, PipelineError, SourceImage, SourceMask, VaeEncodeRequest};
use sd_engine::tensor;
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{DecodeWork, ElementType, Task, TaskMemory, VaeEncodeWork};

use crate::runner::{Control, Finished, RunError, StageModel};
use crate::segment;
use crate::watch::Watch;

/// An autoencoder.
#[derive(Default)]
pub(crate) struct VaeStage {
    loaded: Option<AutoencoderKl>,
}

impl StageModel for VaeStage {
    fn load(&mut self, folder: &Path, task: &Task, control: &Control<'_>) -> Result<(), RunError> {
        let vae = match &mut self.loaded {
            Some(vae) => vae,
            none => none.insert(AutoencoderKl::open(&folder.join("vae"))?),
        };
        if let Some(memory) = &task.memory {
            vae.compute_in(compute(memory)?);
        }
        bind(vae, task, control)
    }

    fn run(&mut self, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
        let Some(vae) = &mut self.loaded else {
            return Err(PipelineError::Internal("the vae stage is not loaded".into()).into());
        };
        let asked = vae.compute();
        match (run(vae, task, control), asked) {
            // What a short type cannot hold, f32 may. If the weights are to blame, it fails again and they are named.
            (Err(RunError::Pipeline(PipelineError::NonFinite { what })), ComputeType::F16 | ComputeType::Bf16) => {
                vae.compute_in(ComputeType::F32);
                bind(vae, task, control)?;
                let degraded = format!("{what} was not finite in {}: it was computed again in f32", asked.name());
                Ok(Finished { degraded, ..run(vae, task, control)? })
            }
            (result, _) => result,
        }
    }

    fn unload(&mut self) {
        self.loaded = None;
    }

    fn weights(&self, folder: &Path) -> Result<WeightSet, ModelError> {
        AutoencoderKl::weights(&folder.join("vae"))
    }

    fn weights_bytes(&self) -> u64 {
        self.loaded.as_ref().map_or(0, AutoencoderKl::bytes)
    }
}

/// Loads the half that a task needs, as far as the lease allows. The two are loaded apart: text to image never needs the encoder.
fn bind(vae: &AutoencoderKl, task: &Task, control: &Control<'_>) -> Result<(), RunError> {
    let (half, other) = match &task.work {
        Some(Work::VaeEncode(_)) => (VaeHalf::Encoder, VaeHalf::Decoder),
        Some(Work::Decode(_) | Work::Load(_) | Work::Encode(_) | Work::Denoise(_)) | None => {
            (VaeHalf::Decoder, VaeHalf::Encoder)
        }
    };
    control.govern(task, &[vae.residency(half), vae.residency(other)])?;
    control.load(vae.residency(half))
}

fn run(vae: &AutoencoderKl, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
    match &task.work {
        Some(Work::Decode(work)) => decode(vae, work, task, control),
        Some(Work::VaeEncode(work)) => encode(vae, *work, task, control),
        Some(Work::Load(_) | Work::Encode(_) | Work::Denoise(_)) | None => {
            Err(PipelineError::Internal("the vae stage does not run this task".into()).into())
        }
    }
}

/// What a task asks to compute in.
fn compute(memory: &TaskMemory) -> Result<ComputeType, RunError> {
    match memory.vae_type() {
        ElementType::Unspecified | ElementType::F32 => Ok(ComputeType::F32),
        ElementType::F16 => Ok(ComputeType::F16),
        ElementType::Bf16 => Ok(ComputeType::Bf16),
        other @ (ElementType::U8 | ElementType::I64) => {
            let name = other.as_str_name();
            Err(PipelineError::Request(format!("a vae computes in f32, f16 or bf16, not in {name}")).into())
        }
    }
}

/// The tiles that a task asks for.
fn tiles(task: &Task) -> TilePlan {
    task.memory.as_ref().map_or(TilePlan::WHOLE, |memory| TilePlan {
        tile: memory.vae_tile as usize,
        overlap: memory.vae_tile_overlap as usize,
        batch: memory.vae_tile_batch as usize,
    })
}

fn decode(vae: &AutoencoderKl, work: &DecodeWork, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
    let (shape, values) = segment::read_f32(task, "latents")?;
    let latents = tensor::from_f32(values, &shape).map_err(PipelineError::from)?;
    let mut observer = Watch::blocks(control);
    let pixels = pipeline::decode(vae, &latents, &tiles(task), &mut observer)?;
    let shape = [1, work.height as usize, work.width as usize, 3];
    let output = segment::write(task, "pixels", ElementType::U8, &shape, &pixels)?;
    Ok(Finished { outputs: vec![output], notes: Vec::new(), ..Finished::default() })
}

fn encode(vae: &AutoencoderKl, work: VaeEncodeWork, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
    let (width, height) = (work.width as usize, work.height as usize);
    let image = SourceImage::read(&segment::read_bytes(task, "init_image")?, width, height)?;
    let mask = if segment::has_input(task, "mask") {
        Some(SourceMask::read(&segment::read_bytes(task, "mask")?, width, height)?)
    } else {
        None
    };
    let request = VaeEncodeRequest {
        seed: work.seed,
        image_latents: segment::has_output(task, "image_latents"),
        masked_image_latents: segment::has_output(task, "masked_image_latents"),
        tiles: tiles(task),
    };
    let mut observer = Watch::blocks(control);
    let encoded = pipeline::vae_encode(vae, request, &image, mask.as_ref(), &mut observer)?;
    let mut outputs = Vec::new();
    for (role, latents) in [
        ("image_latents", &encoded.image_latents),
        ("latent_mask", &encoded.latent_mask),
        ("masked_image_latents", &encoded.masked_image_latents),
    ] {
        if let Some(latents) = latents
            && segment::has_output(task, role)
        {
            let values = segment::values(latents)?;
            let bytes = segment::f32_bytes(&values);
            outputs.push(segment::write(task, role, ElementType::F32, latents.dims(), &bytes)?);
        }
    }
    Ok(Finished { outputs, notes: Vec::new(), ..Finished::default() })
}

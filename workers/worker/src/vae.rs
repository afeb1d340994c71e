//! The autoencoder's stage: latents to pixels, and image files to latents.

use std::path::Path;

use sd_engine::formats::WeightSet;
use sd_engine::models::{AutoencoderKl, ModelError, TilePlan, VaeHalf};
use sd_engine::pipeline::{self, PipelineError, SourceImage, SourceMask, VaeEncodeRequest};
use sd_engine::tensor;
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{DecodeWork, ElementType, Task, VaeEncodeWork};

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
        let (half, other) = match &task.work {
            Some(Work::VaeEncode(_)) => (VaeHalf::Encoder, VaeHalf::Decoder),
            Some(Work::Decode(_) | Work::Load(_) | Work::Encode(_) | Work::Denoise(_)) | None => {
                (VaeHalf::Decoder, VaeHalf::Encoder)
            }
        };
        if self.loaded.is_none() {
            self.loaded = Some(AutoencoderKl::open(&folder.join("vae"))?);
        }
        // The two halves are loaded apart: text to image never needs the encoder.
        if let Some(vae) = &self.loaded {
            control.govern(task, &[vae.residency(half), vae.residency(other)])?;
            control.load(vae.residency(half))?;
        }
        Ok(())
    }

    fn run(&mut self, task: &Task, control: &Control<'_>) -> Result<Finished, RunError> {
        match (&self.loaded, &task.work) {
            (Some(vae), Some(Work::Decode(work))) => decode(vae, work, task, control),
            (Some(vae), Some(Work::VaeEncode(work))) => encode(vae, *work, task, control),
            _ => Err(PipelineError::Internal("the vae stage is not loaded for this task".into()).into()),
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
    Ok(Finished { outputs: vec![output], notes: Vec::new() })
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
    Ok(Finished { outputs, notes: Vec::new() })
}

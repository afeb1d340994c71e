//! The stage runs of a request, in order, and the tensors that they hand to each other.

use sd_proto::v1::Stage;
use sd_proto::worker::v1::WorkerStage;

use crate::jobs::request::Admitted;

/// What a tensor is, by the names of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Encoded prompts.
    Conditioning,
    /// Latents of the initial image.
    ImageLatents,
    /// Latents of the initial image without its masked part, for inpainting models.
    MaskedImageLatents,
    /// The mask at the latents' size.
    LatentMask,
    /// Denoised latents.
    Latents,
    /// The picture.
    Pixels,
}

impl Role {
    /// The role of a name.
    pub fn of_name(name: &str) -> Option<Self> {
        use Role::{Conditioning, ImageLatents, LatentMask, Latents, MaskedImageLatents, Pixels};
        [Conditioning, ImageLatents, MaskedImageLatents, LatentMask, Latents, Pixels]
            .into_iter()
            .find(|role| role.name() == name)
    }

    /// The name on the link.
    pub fn name(self) -> &'static str {
        match self {
            Self::Conditioning => "conditioning",
            Self::ImageLatents => "image_latents",
            Self::MaskedImageLatents => "masked_image_latents",
            Self::LatentMask => "latent_mask",
            Self::Latents => "latents",
            Self::Pixels => "pixels",
        }
    }
}

/// A tensor of a job: shared by its images, or one image's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot {
    /// What it is.
    pub role: Role,
    /// Whose; `None`: all images'.
    pub image: Option<u32>,
}

/// One run of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageRun {
    /// Which stage.
    pub stage: Stage,
    /// For which image; 0 where it is for all.
    pub image: u32,
    /// What it reads.
    pub inputs: Vec<Slot>,
    /// What it writes.
    pub outputs: Vec<Slot>,
}

/// The kind of worker that runs a stage; `None` for the unspecified one.
pub fn worker_stage(stage: Stage) -> Option<WorkerStage> {
    match stage {
        Stage::Unspecified => None,
        Stage::Encode => Some(WorkerStage::Text),
        Stage::VaeEncode | Stage::Decode => Some(WorkerStage::Vae),
        Stage::Denoise => Some(WorkerStage::Diffusion),
    }
}

/// In which order the runs of several images come. Never decides a picture's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grouping {
    /// All images of a stage together: each stage's weights move once though not all stages fit side by side.
    ByStage,
    /// Image by image, so that the first is shown soon: where all stages fit side by side.
    ByImage,
}

/// All stage runs of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagePlan {
    runs: Vec<StageRun>,
}

impl StagePlan {
    /// The plan of an admitted request: `encode → [vae encode × n] → denoise × n → decode × n`.
    pub fn of(request: &Admitted, grouping: Grouping) -> Self {
        let images: Vec<u32> = (0..request.count).collect();
        let mut runs = vec![encode()];
        match grouping {
            Grouping::ByStage => {
                runs.extend(images.iter().filter_map(|image| vae_encode(request, *image)));
                runs.extend(images.iter().map(|image| denoise(request, *image)));
                runs.extend(images.iter().map(|image| decode(*image)));
            }
            Grouping::ByImage => {
                for image in images {
                    runs.extend(vae_encode(request, image));
                    runs.push(denoise(request, image));
                    runs.push(decode(image));
                }
            }
        }
        Self { runs }
    }

    /// The runs in their order.
    pub fn runs(&self) -> &[StageRun] {
        &self.runs
    }

    /// Whether a tensor is still read by run `next` or a later one.
    pub fn needed_from(&self, slot: Slot, next: usize) -> bool {
        self.runs.iter().skip(next).any(|run| run.inputs.contains(&slot))
    }
}

fn own(role: Role, image: u32) -> Slot {
    Slot { role, image: Some(image) }
}

const CONDITIONING: Slot = Slot { role: Role::Conditioning, image: None };

fn encode() -> StageRun {
    StageRun { stage: Stage::Encode, image: 0, inputs: Vec::new(), outputs: vec![CONDITIONING] }
}

/// What the VAE makes of the initial image, as the link's contract lists it. Each image has its own: the posterior is
/// sampled with its seed.
fn image_slots(request: &Admitted, image: u32) -> Vec<Slot> {
    let Some(initial) = &request.initial else { return Vec::new() };
    let inpainting = request.model.report.is_inpainting();
    let mut slots = Vec::new();
    // An inpainting model at full strength starts from pure noise and does not look at the image's latents.
    if !(inpainting && initial.mask.is_some() && initial.strength >= 1.0) {
        slots.push(own(Role::ImageLatents, image));
    }
    if initial.mask.is_some() {
        slots.push(own(Role::LatentMask, image));
        if inpainting {
            slots.push(own(Role::MaskedImageLatents, image));
        }
    }
    slots
}

fn vae_encode(request: &Admitted, image: u32) -> Option<StageRun> {
    let outputs = image_slots(request, image);
    (!outputs.is_empty()).then(|| StageRun { stage: Stage::VaeEncode, image, inputs: Vec::new(), outputs })
}

fn denoise(request: &Admitted, image: u32) -> StageRun {
    let mut inputs = vec![CONDITIONING];
    inputs.extend(image_slots(request, image));
    StageRun { stage: Stage::Denoise, image, inputs, outputs: vec![own(Role::Latents, image)] }
}

fn decode(image: u32) -> StageRun {
    StageRun {
        stage: Stage::Decode,
        image,
        inputs: vec![own(Role::Latents, image)],
        outputs: vec![own(Role::Pixels, image)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use crate::jobs::request::{ImageFile, InitialImage};
    use std::sync::Arc;

    fn with_image(mask: bool, strength: f64, inpainting: bool) -> Admitted {
        let mut request = fixtures::admitted();
        if inpainting {
            let mut model = crate::models::Model::clone(&request.model);
            model.report.diffusion.in_channels = 9;
            request.model = Arc::new(model);
        }
        let mask = mask.then(|| ImageFile::new(b"mask"));
        request.initial = Some(InitialImage { image: ImageFile::new(b"image"), mask, strength });
        request
    }

    fn roles(slots: &[Slot]) -> Vec<&'static str> {
        slots.iter().map(|slot| slot.role.name()).collect()
    }

    #[test]
    fn an_image_is_encoded_into_what_the_denoiser_reads() {
        for (request, expected) in [
            (with_image(false, 0.5, false), vec!["image_latents"]),
            (with_image(true, 1.0, false), vec!["image_latents", "latent_mask"]),
            (with_image(true, 0.5, true), vec!["image_latents", "latent_mask", "masked_image_latents"]),
            (with_image(true, 1.0, true), vec!["latent_mask", "masked_image_latents"]),
        ] {
            let plan = StagePlan::of(&request, Grouping::ByImage);
            let stages: Vec<Stage> = plan.runs().iter().map(|run| run.stage).collect();
            assert_eq!(stages, [Stage::Encode, Stage::VaeEncode, Stage::Denoise, Stage::Decode]);
            assert_eq!(roles(&plan.runs()[1].outputs), expected);
            assert_eq!(roles(&plan.runs()[2].inputs[1..]), expected);
        }
    }

    #[test]
    fn every_input_was_written_before_in_either_order() {
        let mut request = with_image(true, 0.5, true);
        request.count = 3;
        for grouping in [Grouping::ByStage, Grouping::ByImage] {
            let plan = StagePlan::of(&request, grouping);
            assert_eq!(plan.runs().len(), 1 + 3 * 3);
            let mut written: Vec<Slot> = Vec::new();
            for run in plan.runs() {
                assert!(run.inputs.iter().all(|slot| written.contains(slot)), "{run:?}");
                assert!(run.outputs.iter().all(|slot| !written.contains(slot)), "{run:?}");
                written.extend(&run.outputs);
            }
        }
    }

    #[test]
    fn a_tensor_is_needed_until_its_last_reader() {
        let mut request = fixtures::admitted();
        request.count = 2;
        let plan = StagePlan::of(&request, Grouping::ByStage);
        // encode, denoise 0, denoise 1, decode 0, decode 1
        assert!(plan.needed_from(CONDITIONING, 2) && !plan.needed_from(CONDITIONING, 3));
        assert!(plan.needed_from(own(Role::Latents, 1), 4) && !plan.needed_from(own(Role::Latents, 1), 5));
        assert!(!plan.needed_from(own(Role::Latents, 0), 4));
    }
}

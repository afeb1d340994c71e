//! A request as it was admitted: every default filled in, every value checked.

use std::sync::Arc;

use sd_proto::v1::{Emphasis, ImageRequest, MemoryRequest, NumericPlan, Sampler, Schedule};

use crate::models::Model;
use crate::stages::memory::MemoryPlan;

/// An image file of a request, shared between the job and its stage tasks and freed with the last of them.
#[derive(Clone, PartialEq, Eq)]
pub struct ImageFile {
    bytes: Arc<[u8]>,
    sha256: String,
}

impl ImageFile {
    /// Takes the file's bytes and notes their SHA-256, which stands for them wherever the request is shown.
    pub fn new(bytes: &[u8]) -> Self {
        use sha2::Digest as _;
        let sha256 = sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { bytes: bytes.into(), sha256 }
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// SHA-256 of the bytes, 64 hexadecimal digits.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

impl std::fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ImageFile({} bytes, sha256 {})", self.bytes.len(), self.sha256)
    }
}

/// What an image-to-image request starts from.
#[derive(Debug, Clone, PartialEq)]
pub struct InitialImage {
    /// The picture.
    pub image: ImageFile,
    /// White where it is to be painted anew.
    pub mask: Option<ImageFile>,
    /// How much of it is replaced, above 0 up to 1.
    pub strength: f64,
}

/// A request as admitted.
#[derive(Debug, Clone)]
pub struct Admitted {
    /// The model, with its folder and what its inspection said.
    pub model: Arc<Model>,
    /// What to paint.
    pub prompt: String,
    /// What to avoid; used only with guidance.
    pub negative_prompt: String,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Denoising steps, at least 1.
    pub steps: u32,
    /// Classifier-free guidance scale; 1 or less is off.
    pub guidance_scale: f64,
    /// Seed of the first image; image `i` uses `seed + i`.
    pub seed: u64,
    /// Number of images, at least 1.
    pub count: u32,
    /// Sampler; unspecified where neither request nor model names one: the worker takes the scheduler configuration's.
    pub sampler: Sampler,
    /// Spacing; unspecified: as the model's scheduler configuration says.
    pub schedule: Schedule,
    /// Betas rescaled to zero terminal SNR; absent: as the scheduler configuration says.
    pub zero_terminal_snr: Option<bool>,
    /// DDIM's eta.
    pub eta: f64,
    /// Guidance rescale, 0 to 1.
    pub guidance_rescale: f64,
    /// Whether `(word:1.2)` changes weights.
    pub emphasis: bool,
    /// Final text encoder layer counted from the end; 0: as the model says.
    pub clip_skip: u32,
    /// Image to image.
    pub initial: Option<InitialImage>,
    /// The numeric choices that decide the bytes.
    pub plan: NumericPlan,
    /// How its stages use memory.
    pub memory: MemoryPlan,
    /// What the request said about memory.
    pub asked_memory: Option<MemoryRequest>,
}

impl Admitted {
    /// Seed of image `index`.
    pub fn image_seed(&self, index: u32) -> u64 {
        // Admission refuses a request whose last seed would overflow.
        self.seed.wrapping_add(u64::from(index))
    }

    /// Whether the diffusion model runs a guidance pair a step.
    pub fn guided(&self) -> bool {
        self.guidance_scale > 1.0 && !self.model.report.diffusion.guidance_embedding
    }

    /// The request as it is shown to clients: every default filled in, without its image files.
    pub fn to_proto(&self) -> ImageRequest {
        ImageRequest {
            model: self.model.name.clone(),
            prompt: self.prompt.clone(),
            negative_prompt: self.negative_prompt.clone(),
            width: self.width,
            height: self.height,
            steps: Some(self.steps),
            guidance_scale: Some(self.guidance_scale),
            seed: Some(self.seed),
            count: self.count,
            sampler: self.sampler as i32,
            schedule: self.schedule as i32,
            zero_terminal_snr: self.zero_terminal_snr,
            eta: Some(self.eta),
            guidance_rescale: Some(self.guidance_rescale),
            emphasis: (if self.emphasis { Emphasis::WebUi } else { Emphasis::Off }) as i32,
            clip_skip: self.clip_skip,
            init_image: Vec::new(),
            mask: Vec::new(),
            strength: self.initial.as_ref().map(|initial| initial.strength),
            memory: self.asked_memory,
        }
    }
}

/// The sampler's name on the link to workers; empty: the model's own.
pub fn sampler_name(sampler: Sampler) -> &'static str {
    match sampler {
        Sampler::Unspecified => "",
        Sampler::Ddim => "ddim",
        Sampler::Euler => "euler",
        Sampler::EulerAncestral => "euler_ancestral",
        Sampler::Heun => "heun",
        Sampler::Dpmpp2m => "dpmpp_2m",
        Sampler::Dpmpp2mSde => "dpmpp_2m_sde",
        Sampler::Lcm => "lcm",
        Sampler::Unipc => "unipc",
    }
}

/// The sampler of a name as model reports and workers write it.
pub fn sampler_of_name(name: &str) -> Option<Sampler> {
    Some(match name {
        "ddim" => Sampler::Ddim,
        "euler" => Sampler::Euler,
        "euler_ancestral" | "euler_a" => Sampler::EulerAncestral,
        "heun" => Sampler::Heun,
        "dpmpp_2m" => Sampler::Dpmpp2m,
        "dpmpp_2m_sde" => Sampler::Dpmpp2mSde,
        "lcm" => Sampler::Lcm,
        "unipc" => Sampler::Unipc,
        _ => return None,
    })
}

/// The schedule's name on the link to workers; empty: the model's own.
pub fn schedule_name(schedule: Schedule) -> &'static str {
    match schedule {
        Schedule::Unspecified => "",
        Schedule::Leading => "leading",
        Schedule::Trailing => "trailing",
        Schedule::Linspace => "linspace",
        Schedule::Karras => "karras",
        Schedule::Exponential => "exponential",
        Schedule::SgmUniform => "sgm_uniform",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sampler_has_a_name_that_leads_back_to_it() {
        for number in 1..=8 {
            let sampler = Sampler::try_from(number).unwrap();
            assert_eq!(sampler_of_name(sampler_name(sampler)), Some(sampler));
        }
        assert_eq!(sampler_of_name(""), None);
        assert!(Sampler::try_from(9).is_err(), "a new sampler needs a name here");
        assert!(Schedule::try_from(7).is_err(), "a new schedule needs a name here");
    }

    #[test]
    fn an_image_file_is_shown_by_its_hash() {
        let file = ImageFile::new(b"abc");
        assert_eq!(file.sha256(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(!format!("{file:?}").contains("[97"), "bytes must not be printed");
    }
}

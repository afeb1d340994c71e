//! How large each tensor of a request is, or can be at most.

use sd_proto::segment::payload_bytes;
use sd_proto::v1::Sampler;
use sd_proto::worker::v1::ElementType;

use super::plan::Role;
use crate::jobs::request::Admitted;

/// Tokens of a chunk that can hold words; a chunk's start and end take two more.
const CHUNK_WORDS: u64 = 75;
/// Fewest tokens that end up in a chunk that is not the last: the web UIs end one early, by at most this many less than
/// 75, so as not to cut what stands between two commas.
const CHUNK_WORDS_LEAST: u64 = CHUNK_WORDS - 20;
/// Most chunks that a worker makes of a prompt; a longer one is refused by it.
const MAX_CHUNKS: u64 = 64;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Type of one element.
    pub element_type: ElementType,
    /// Its shape, or empty where the writer decides it within the capacity.
    pub shape: Vec<u64>,
    /// Payload bytes to reserve.
    pub capacity: u64,
}

impl TensorSpec {
    fn fixed(element_type: ElementType, shape: Vec<u64>) -> Self {
        // A product beyond u64 is refused by the arena as more than there is.
        let capacity = payload_bytes(element_type, &shape).unwrap_or(u64::MAX);
        Self { element_type, shape, capacity }
    }
}

/// Most tokens that a text can become. A token covers at least one byte of the normalised text, white space is covered by
/// none, and normalisation (NFC, lower case) makes text beyond ASCII at most three times as long.
pub fn token_bound(text: &str) -> u64 {
    text.chars()
        .map(|c| match c {
            c if c.is_ascii_whitespace() => 0,
            c if c.is_ascii() => 1,
            c => 3 * c.len_utf8() as u64,
        })
        .sum()
}

/// Most chunks of 75 tokens that a request's prompts can become; both become as many as the longer.
pub fn chunk_bound(request: &Admitted) -> u64 {
    let chunks = |text: &str| {
        // The word BREAK ends a chunk early.
        let breaks = if request.emphasis { text.matches("BREAK").count() as u64 } else { 0 };
        1 + breaks + token_bound(text) / CHUNK_WORDS_LEAST
    };
    let negative = if request.guided() { chunks(&request.negative_prompt) } else { 1 };
    chunks(&request.prompt).max(negative).min(MAX_CHUNKS)
}

/// What a checkpoint takes beside tensors: the generator's state (2.5 KB), shapes, heads.
const CHECKPOINT_BESIDE: u64 = 8 << 10;

/// Payload bytes of one of the denoiser's checkpoints, at most: latents, what the sampler remembers of earlier calls, and the
/// generator.
pub fn checkpoint_capacity(request: &Admitted) -> u64 {
    let remembered = match request.sampler {
        Sampler::Ddim | Sampler::Euler | Sampler::EulerAncestral | Sampler::Lcm => 0,
        // The sample and the derivative at a step's beginning.
        Sampler::Heun => 2,
        // As many predicted originals as the largest order has.
        Sampler::Dpmpp2m | Sampler::Dpmpp2mSde => 3,
        // These and the last sample. The model's own sampler may be any of them.
        Sampler::Unipc | Sampler::Unspecified => 4,
    };
    tensor(request, Role::Latents).capacity.saturating_mul(1 + remembered).saturating_add(CHECKPOINT_BESIDE)
}

/// The tensor of a role in a request.
pub fn tensor(request: &Admitted, role: Role) -> TensorSpec {
    let report = &request.model.report;
    let factor = report.scale_factor();
    let latent =
        |channels: u64| vec![1, channels, u64::from(request.height / factor), u64::from(request.width / factor)];
    match role {
        Role::Conditioning => {
            let rows = if request.guided() { 2 } else { 1 };
            let tokens = chunk_bound(request).saturating_mul(report.chunk_tokens());
            let most = TensorSpec::fixed(ElementType::F32, vec![rows, tokens, report.text.hidden_size]);
            TensorSpec { shape: Vec::new(), ..most }
        }
        Role::ImageLatents | Role::MaskedImageLatents | Role::Latents => {
            TensorSpec::fixed(ElementType::F32, latent(report.vae.latent_channels))
        }
        Role::LatentMask => TensorSpec::fixed(ElementType::F32, latent(1)),
        Role::Pixels => {
            let shape = vec![1, u64::from(request.height), u64::from(request.width), 3];
            TensorSpec::fixed(ElementType::U8, shape)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;

    #[test]
    fn a_short_prompt_reserves_one_chunk_and_a_long_one_enough() {
        let mut request = fixtures::admitted();
        request.prompt = "a red heart".into();
        assert_eq!(chunk_bound(&request), 1);
        // One token a byte is the worst that byte-pair encoding does.
        request.prompt = "!?".repeat(200);
        assert!(chunk_bound(&request) * CHUNK_WORDS_LEAST >= 400);
        request.prompt = "\u{1d160}".into();
        assert!(chunk_bound(&request) * CHUNK_WORDS_LEAST >= 12, "this character's canonical form has 12 bytes");

        request.prompt = "a BREAK b BREAK c".into();
        assert_eq!(chunk_bound(&request), 3);
        request.prompt = "x".repeat(10_000);
        assert_eq!(chunk_bound(&request), MAX_CHUNKS);

        request.prompt = "x".into();
        request.negative_prompt = "y".repeat(1000);
        let guided = chunk_bound(&request);
        request.guidance_scale = 1.0;
        assert!(guided > 1 && chunk_bound(&request) == 1, "without guidance the negative prompt is not encoded");
    }

    #[test]
    fn sizes_follow_from_the_request() {
        let request = fixtures::admitted();
        let (w, h) = (u64::from(request.width), u64::from(request.height));
        let pixels = tensor(&request, Role::Pixels);
        assert_eq!((pixels.capacity, pixels.shape), (w * h * 3, vec![1, h, w, 3]));
        let latents = tensor(&request, Role::Latents);
        assert_eq!((latents.capacity, latents.shape), (4 * 4 * (w / 8) * (h / 8), vec![1, 4, h / 8, w / 8]));
        assert_eq!(tensor(&request, Role::Conditioning).shape, [0u64; 0]);
    }
}

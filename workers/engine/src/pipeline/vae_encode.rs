//! Image files to latents.

use candle_core::Tensor;

use super::decode::is_finite;
use super::{PipelineError, SourceImage, SourceMask, StageObserver};
use crate::models::{AutoencoderKl, TilePlan};
use crate::residency::SegmentEvent;
use crate::sampling::{Generator, NoiseSource as _};

/// Which latents are wanted of an image, and the seed whose generator samples their posteriors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VaeEncodeRequest {
    /// Seed of the image that is generated.
    pub seed: u64,
    /// The image's own latents: always but for an inpainting model at strength 1.
    pub image_latents: bool,
    /// Latents of the image without its masked part: for a model of 9 input channels.
    pub masked_image_latents: bool,
    /// In which tiles the image is encoded.
    pub tiles: TilePlan,
}

/// What was wanted, each f32.
#[derive(Debug, Clone, Default)]
pub struct VaeEncoded {
    /// `[1, c, h, w]`, scaled.
    pub image_latents: Option<Tensor>,
    /// `[1, 1, h, w]`, with a mask.
    pub latent_mask: Option<Tensor>,
    /// `[1, c, h, w]`, scaled.
    pub masked_image_latents: Option<Tensor>,
}

/// Encodes an image, and its mask.
///
/// The generator is drawn from in the order of diffusers' pipelines: the image's posterior where it is encoded, the noise (drawn
/// by the denoiser, skipped here), the masked image's posterior.
///
/// # Errors
/// A size that does not fit the model, a cancelled run, or latents that are not finite: in a short type, a type of more range may
/// give ones that are.
pub fn vae_encode(
    vae: &AutoencoderKl,
    request: VaeEncodeRequest,
    image: &SourceImage,
    mask: Option<&SourceMask>,
    observer: &mut dyn StageObserver,
) -> Result<VaeEncoded, PipelineError> {
    let mut generator = Generator::new(request.seed);
    let mut encoded = VaeEncoded::default();
    let mut elements = 0;
    if request.image_latents {
        let latents = sample(vae, &image.tensor()?, &request.tiles, &mut generator, observer)?;
        elements = latents.elem_count();
        encoded.image_latents = Some(latents);
    }
    let Some(mask) = mask else { return Ok(encoded) };
    encoded.latent_mask = Some(mask.latent_mask(vae.config().factor())?);
    if request.masked_image_latents {
        let masked = mask.masked(image)?;
        if elements == 0 {
            let (_, _, height, width) = masked.dims4()?;
            let scale = vae.config().factor();
            elements = vae.config().latent_channels * (height / scale) * (width / scale);
        }
        generator.randn(elements);
        encoded.masked_image_latents = Some(sample(vae, &masked, &request.tiles, &mut generator, observer)?);
    }
    Ok(encoded)
}

/// A sample of the posterior, scaled as the denoiser takes it.
fn sample(
    vae: &AutoencoderKl,
    image: &Tensor,
    tiles: &TilePlan,
    generator: &mut Generator,
    observer: &mut dyn StageObserver,
) -> Result<Tensor, PipelineError> {
    observer.on_tensor("vae_encode.in", image);
    let (mean, log_variance) = vae.encode_in(image, tiles, &mut |event: &SegmentEvent<'_>| observer.on_block(event))?;
    observer.on_tensor("vae_encode.mode", &mean);
    let deviation = (log_variance * 0.5)?.exp()?;
    let noise = generator.noise_like(&mean)?;
    let latents = vae.to_diffusion(&(mean + (deviation * noise)?)?)?;
    if !is_finite(&latents)? {
        return Err(PipelineError::NonFinite { what: "the encoded image" });
    }
    Ok(latents)
}

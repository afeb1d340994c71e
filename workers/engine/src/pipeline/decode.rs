//! Latents to pixels.

use candle_core::Tensor;

use super::{PipelineError, StageObserver};
use crate::models::{AutoencoderKl, TilePlan};
use crate::ops::with_values;
use crate::residency::SegmentEvent;

/// Decodes latents `[1, c, h, w]` as the denoiser left them into 8-bit RGB, row-major `[height, width, 3]`, in the tiles of `plan`.
///
/// # Errors
/// Latents that do not fit the model, a cancelled run, or an output that is not finite: in a short type, a type of more range may
/// give one that is.
pub fn decode(
    vae: &AutoencoderKl,
    latents: &Tensor,
    plan: &TilePlan,
    observer: &mut dyn StageObserver,
) -> Result<Vec<u8>, PipelineError> {
    let latents = vae.from_diffusion(latents)?;
    observer.on_tensor("vae.0.in", &latents);
    let image = vae.decode_in(&latents, plan, &mut |event: &SegmentEvent<'_>| observer.on_block(event))?;
    observer.on_tensor("vae.0.out", &image);
    if !is_finite(&image)? {
        return Err(PipelineError::NonFinite { what: "the decoded image" });
    }
    let (_, channels, height, width) = image.dims4()?;
    if channels != 3 {
        return Err(PipelineError::Model(format!("the autoencoder decodes to {channels} channels, 3 are needed")));
    }
    let area = height * width;
    Ok(with_values(&image, |planes| {
        let mut pixels = Vec::with_capacity(3 * area);
        for at in 0..area {
            pixels.extend([planes[at], planes[area + at], planes[2 * area + at]].map(to_byte));
        }
        Ok(pixels)
    })?)
}

/// -1 to 1 becomes 0 to 255, rounded half to even as numpy does.
fn to_byte(value: f32) -> u8 {
    ((value / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8
}

/// Whether all values are finite.
pub(super) fn is_finite(values: &Tensor) -> Result<bool, PipelineError> {
    Ok(with_values(values, |values| Ok(values.iter().all(|value| value.is_finite())))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_half_to_even_and_clamped() {
        assert_eq!([-2.0, -1.0, 0.0, 1.0, 3.0].map(to_byte), [0, 0, 128, 255, 255]);
        for byte in 0..=255u8 {
            assert_eq!(to_byte(f32::from(byte) / 255.0 * 2.0 - 1.0), byte, "there and back");
        }
    }
}

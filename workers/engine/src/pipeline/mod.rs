//! What a stage does, from plain inputs to plain outputs: prompts to conditioning, images to latents, noise to latents, latents to
//! pixels. These are the recipes of the Stable Diffusion family as diffusers' pipelines run them; the networks are in
//! [`crate::models`], the samplers in [`crate::sampling`].

mod decode;
mod denoise;
mod encode;
mod error;
mod image;
mod observer;
mod vae_encode;

pub use decode::decode;
pub use denoise::{DenoiseInputs, DenoiseRequest, denoise, denoise_from};
pub use encode::{EncodeRequest, Encoded, encode};
pub use error::{PipelineError, blame};
pub use image::{SourceImage, SourceMask};
pub use observer::{StageObserver, Unwatched};
pub use vae_encode::{VaeEncodeRequest, VaeEncoded, vae_encode};

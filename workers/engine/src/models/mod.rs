//! The networks, each as a list of segments.
//!
//! Images and feature maps are channels-last inside and channels-first at the borders, as in diffusers.

mod autoencoder_kl;
mod clip_text;
mod config;
mod error;
mod layers;
mod unet2d_condition;

pub use autoencoder_kl::{AutoencoderKl, AutoencoderKlConfig, TileCost, TilePlan, VaeHalf};
pub use clip_text::{ClipTextConfig, ClipTextModel, ClipTextOutput};
pub use config::ConfigError;
pub use error::{LoadProgress, ModelError};
pub use unet2d_condition::{Unet, UnetConfig, UnetRun};

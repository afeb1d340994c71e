//! `config.json` of AutoencoderKL.

use std::path::Path;

use crate::models::config::{ConfigError, Fields, sample_size};

/// The fields that decide the autoencoder's result.
#[derive(Clone, Debug)]
pub struct AutoencoderKlConfig {
    /// Channels of images it encodes.
    pub in_channels: usize,
    /// Channels of images it decodes to.
    pub out_channels: usize,
    /// Channels of its latents.
    pub latent_channels: usize,
    /// Height and width of the images that it was trained for.
    pub sample_size: Option<[usize; 2]>,
    /// Diffusion works on `(z − shift_factor) · scaling_factor`.
    pub scaling_factor: f64,
    /// See [`Self::scaling_factor`].
    pub shift_factor: f64,
    /// Whether half precision overflows in it.
    pub force_upcast: bool,
    pub(super) channels: Vec<usize>,
    pub(super) layers: usize,
    pub(super) groups: usize,
    pub(super) mid_attention: bool,
    pub(super) quant: bool,
    pub(super) post_quant: bool,
}

impl AutoencoderKlConfig {
    /// Reads `path`.
    ///
    /// # Errors
    /// If a field that changes the result is not supported.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let f = Fields::read(path)?;
        f.only("_class_name", "AutoencoderKL")?;
        f.absent("latents_mean")?;
        f.absent("latents_std")?;
        if !matches!(f.or("act_fn", "silu".to_owned())?.as_str(), "silu" | "swish") {
            return Err(f.refuse("act_fn", "the supported value is \"silu\""));
        }
        let channels = f.or("block_out_channels", vec![64])?;
        if channels.is_empty() || channels.contains(&0) {
            return Err(f.refuse("block_out_channels", "it must list at least one block, each above zero"));
        }
        for (field, kind) in [("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")] {
            let blocks = f.or(field, vec![kind.to_owned(); channels.len()])?;
            if blocks.len() != channels.len() || blocks.iter().any(|block| block != kind) {
                return Err(f.refuse(field, format!("supported is {} times {kind}", channels.len())));
            }
        }
        let groups = f.count("norm_num_groups", 32)?;
        if let Some(c) = channels.iter().find(|&c| c % groups != 0) {
            return Err(f.refuse("norm_num_groups", format!("it must divide the {c} channels")));
        }
        let scaling_factor = f.or("scaling_factor", 0.18215)?;
        if scaling_factor == 0.0 {
            return Err(f.refuse("scaling_factor", "it must not be zero"));
        }
        Ok(Self {
            in_channels: f.count("in_channels", 3)?,
            out_channels: f.count("out_channels", 3)?,
            latent_channels: f.count("latent_channels", 4)?,
            sample_size: sample_size(&f)?,
            scaling_factor,
            shift_factor: f.or("shift_factor", 0.0)?,
            force_upcast: f.or("force_upcast", true)?,
            layers: f.count("layers_per_block", 1)?,
            groups,
            mid_attention: f.or("mid_block_add_attention", true)?,
            quant: f.or("use_quant_conv", true)?,
            post_quant: f.or("use_post_quant_conv", true)?,
            channels,
        })
    }

    /// How many pixels of an image one latent stands for, along each axis.
    pub fn factor(&self) -> usize {
        1 << (self.channels.len() - 1)
    }
}

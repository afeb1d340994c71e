//! `config.json` of UNet2DConditionModel.

use std::path::Path;

use crate::models::config::{ConfigError, Fields, sample_size};
use crate::models::layers::TimeNorm;
use crate::ops::Activation;

/// One resolution of the network: the down block and the up block that mirrors it.
#[derive(Clone, Debug)]
pub(super) struct Level {
    pub(super) channels: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) context: usize,
    pub(super) only_cross: bool,
    /// Transformer blocks of each layer on the way down, if it attends to the conditioning.
    pub(super) down: Option<usize>,
    /// The same on the way up.
    pub(super) up: Option<usize>,
}

/// The block between down and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Middle {
    /// `UNetMidBlock2DCrossAttn`, with this many transformer blocks.
    Attending(usize),
    /// `UNetMidBlock2D` as diffusers builds it here: one residual block.
    Plain,
    /// Nothing.
    Absent,
}

/// The fields that decide the network's result.
#[derive(Clone, Debug)]
pub struct UnetConfig {
    /// Channels of the input: 4, or 9 for inpainting.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Height and width of the latents that it was trained for.
    pub sample_size: Option<[usize; 2]>,
    /// Width of the conditioning.
    pub conditioning_width: usize,
    /// Width of the guidance embedding of few-step models.
    pub time_cond_proj_dim: Option<usize>,
    pub(super) levels: Vec<Level>,
    pub(super) middle: Middle,
    pub(super) groups: usize,
    pub(super) eps: f64,
    pub(super) act: Activation,
    pub(super) flip_sin_to_cos: bool,
    pub(super) freq_shift: f32,
    pub(super) time_width: usize,
    pub(super) time_norm: TimeNorm,
    pub(super) center_input: bool,
    pub(super) conv_in_kernel: usize,
    pub(super) conv_out_kernel: usize,
    pub(super) downsample_padding: usize,
}

/// Fields for which diffusers has one value in every model of these families.
const ABSENT: [&str; 10] = [
    "num_attention_heads",
    "class_embed_type",
    "num_class_embeds",
    "addition_embed_type",
    "encoder_hid_dim",
    "encoder_hid_dim_type",
    "time_embedding_act_fn",
    "timestep_post_act",
    "cross_attention_norm",
    "reverse_transformer_layers_per_block",
];

impl UnetConfig {
    /// Reads `path`.
    ///
    /// # Errors
    /// If a field that changes the result is not supported.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let f = Fields::read(path)?;
        f.only("_class_name", "UNet2DConditionModel")?;
        for field in ABSENT {
            f.absent(field)?;
        }
        f.only("dual_cross_attention", false)?;
        f.only("class_embeddings_concat", false)?;
        f.only("resnet_skip_time_act", false)?;
        f.only("mid_block_only_cross_attention", false)?;
        f.only("mid_block_scale_factor", 1.0)?;
        f.only("resnet_out_scale_factor", 1.0)?;
        f.only("time_embedding_type", "positional")?;
        f.only("attention_type", "default")?;
        let act = match f.or("act_fn", "silu".to_owned())?.as_str() {
            "silu" | "swish" => Activation::Silu,
            "gelu" => Activation::Gelu,
            _ => return Err(f.refuse("act_fn", "supported are silu and gelu")),
        };
        let time_norm = match f.or("resnet_time_scale_shift", "default".to_owned())?.as_str() {
            "default" => TimeNorm::Added,
            "scale_shift" => TimeNorm::ScaleShift,
            _ => return Err(f.refuse("resnet_time_scale_shift", "supported are default and scale_shift")),
        };
        let levels = levels(&f)?;
        let base = levels.first().map_or(0, |level| level.channels);
        let groups = f.count("norm_num_groups", 32)?;
        if let Some(level) = levels.iter().find(|level| level.channels % groups != 0) {
            return Err(f.refuse("norm_num_groups", format!("it must divide the {} channels", level.channels)));
        }
        let odd = |field: &str, default| match f.count(field, default)? {
            n if n % 2 == 1 => Ok(n),
            _ => Err(f.refuse(field, "a kernel must be odd")),
        };
        Ok(Self {
            in_channels: f.count("in_channels", 4)?,
            out_channels: f.count("out_channels", 4)?,
            sample_size: sample_size(&f)?,
            conditioning_width: levels.first().map_or(0, |level| level.context),
            time_cond_proj_dim: f.optional("time_cond_proj_dim")?,
            middle: middle(&f, &levels)?,
            groups,
            eps: f.or("norm_eps", 1e-5)?,
            act,
            flip_sin_to_cos: f.or("flip_sin_to_cos", true)?,
            freq_shift: f.or("freq_shift", 0.0)?,
            time_width: f.optional("time_embedding_dim")?.unwrap_or(4 * base),
            time_norm,
            center_input: f.or("center_input_sample", false)?,
            conv_in_kernel: odd("conv_in_kernel", 3)?,
            conv_out_kernel: odd("conv_out_kernel", 3)?,
            downsample_padding: f.or("downsample_padding", 1)?,
            levels,
        })
    }

    /// How many times the network halves its input.
    pub fn halvings(&self) -> usize {
        self.levels.len().saturating_sub(1)
    }
}

/// Whether each of the blocks that `field` lists attends to the conditioning.
fn attending(f: &Fields, field: &str, plain: &str, attends: &str, default: &[&str]) -> Result<Vec<bool>, ConfigError> {
    let names = f.or(field, default.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())?;
    let kind = |name: &String| match name {
        name if name == plain => Ok(false),
        name if name == attends => Ok(true),
        _ => Err(f.refuse(field, format!("supported are {plain} and {attends}"))),
    };
    names.iter().map(kind).collect()
}

fn levels(f: &Fields) -> Result<Vec<Level>, ConfigError> {
    let (down, cross_down) = ("DownBlock2D", "CrossAttnDownBlock2D");
    let (up, cross_up) = ("UpBlock2D", "CrossAttnUpBlock2D");
    let downs = attending(f, "down_block_types", down, cross_down, &[cross_down, cross_down, cross_down, down])?;
    let ups = attending(f, "up_block_types", up, cross_up, &[up, cross_up, cross_up, cross_up])?;
    let channels = f.or("block_out_channels", vec![320, 640, 1280, 1280])?;
    let count = channels.len();
    if count == 0 || channels.contains(&0) {
        return Err(f.refuse("block_out_channels", "it must list at least one block, each above zero"));
    }
    for (field, found) in [("down_block_types", downs.len()), ("up_block_types", ups.len())] {
        if found != count {
            return Err(f.refuse(field, format!("it must have {count} entries, as block_out_channels has")));
        }
    }
    let layers = f.each("layers_per_block", 2usize, count)?;
    let context = f.each("cross_attention_dim", 1280usize, count)?;
    // Despite its name it is the number of heads in these families; diffusers keeps the misnomer for their files' sake.
    let heads = f.each("attention_head_dim", 8usize, count)?;
    let only_cross = f.each("only_cross_attention", false, count)?;
    let blocks = f.each("transformer_layers_per_block", 1usize, count)?;
    let mut list = Vec::with_capacity(count);
    for i in 0..count {
        if heads[i] == 0 || channels[i] % heads[i] != 0 {
            let remedy = format!("as a number of heads it must divide the {} channels of block {i}", channels[i]);
            return Err(f.refuse("attention_head_dim", remedy));
        }
        if layers[i] == 0 {
            return Err(f.refuse("layers_per_block", "it must be at least 1"));
        }
        list.push(Level {
            channels: channels[i],
            layers: layers[i],
            heads: heads[i],
            context: context[i],
            only_cross: only_cross[i],
            down: downs[i].then_some(blocks[i]),
            up: ups[count - 1 - i].then_some(blocks[i]),
        });
    }
    if list.iter().any(|level| level.context != list[0].context) {
        return Err(f.refuse("cross_attention_dim", "all blocks must have one width"));
    }
    Ok(list)
}

fn middle(f: &Fields, levels: &[Level]) -> Result<Middle, ConfigError> {
    // An absent field is the default; null is a model without a middle.
    if f.is_null("mid_block_type") {
        return Ok(Middle::Absent);
    }
    let blocks = f.each("transformer_layers_per_block", 1usize, levels.len())?.last().copied().unwrap_or(1);
    match f.or("mid_block_type", "UNetMidBlock2DCrossAttn".to_owned())?.as_str() {
        "UNetMidBlock2DCrossAttn" => Ok(Middle::Attending(blocks)),
        "UNetMidBlock2D" => Ok(Middle::Plain),
        _ => Err(f.refuse("mid_block_type", "supported are UNetMidBlock2DCrossAttn, UNetMidBlock2D and null")),
    }
}

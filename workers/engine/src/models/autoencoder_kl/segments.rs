//! The segments of both halves.

use std::borrow::Cow;

use candle_core::{Result, Tensor};

use super::AutoencoderKlConfig;
use crate::formats::Naming;
use crate::models::layers::{ResnetBlock, ResnetShape, SpatialAttention};
use crate::ops::{Activation, Padding, conv2d, conv2d_upsampled, group_norm, linear};
use crate::residency::{Bindings, ConvId, ConvShape, Declarations, Flow, LinearId, NormId, Role, Segment, UpsampleId};

/// `eps` of every group norm; a constant in diffusers.
const EPS: f64 = 1e-6;

/// Names are those of diffusers; attention layers had others before version 0.12, which the files of Stable Diffusion
/// 1 still have.
pub(super) const NAMING: Naming = Naming {
    canonical: |name| {
        for (old, new) in
            [(".query.", ".to_q."), (".key.", ".to_k."), (".value.", ".to_v."), (".proj_attn.", ".to_out.0.")]
        {
            if name.contains(".attentions.") && name.contains(old) {
                return Cow::Owned(name.replace(old, new));
            }
        }
        Cow::Borrowed(name)
    },
    ignorable: |_| false,
};

/// What flows through either half: a feature map, `[B, H, W, C]`.
#[derive(Debug)]
pub(super) struct ImageState {
    pub(super) hidden: Tensor,
}

type Boxed = Box<dyn Segment<State = ImageState>>;

/// The decoder: latents to images.
pub(super) fn decoder(c: &AutoencoderKlConfig) -> Vec<Boxed> {
    let top = c.channels[c.channels.len() - 1];
    let mut list: Vec<Boxed> = Vec::new();
    let mut d = Declarations::new("decoder.conv_in", Role::Prelude);
    let quant = c.post_quant.then(|| d.linear("post_quant_conv", c.latent_channels, c.latent_channels, true));
    let conv = d.conv3x3("decoder.conv_in", c.latent_channels, top);
    list.push(Box::new(Start { declarations: d, quant, conv, shape: [c.latent_channels, top] }));
    middle(c, "decoder", top, &mut list);
    let mut input = top;
    for (i, &output) in c.channels.iter().rev().enumerate() {
        let block = format!("decoder.up_blocks.{i}");
        for layer in 0..=c.layers {
            list.push(residual(c, &block, layer, input, output));
            input = output;
        }
        if i + 1 < c.channels.len() {
            let mut d = Declarations::new(format!("{block}.upsampler"), Role::Block);
            let conv = d.upsample(format!("{block}.upsamplers.0.conv"), output);
            list.push(Box::new(Double { declarations: d, conv, channels: output }));
        }
    }
    list.push(end(c, "decoder", input, c.out_channels, None));
    list
}

/// The encoder: images to moments of latents.
pub(super) fn encoder(c: &AutoencoderKlConfig) -> Vec<Boxed> {
    let mut input = c.channels[0];
    let mut list: Vec<Boxed> = Vec::new();
    let mut d = Declarations::new("encoder.conv_in", Role::Prelude);
    let conv = d.conv3x3("encoder.conv_in", c.in_channels, input);
    list.push(Box::new(Start { declarations: d, quant: None, conv, shape: [c.in_channels, input] }));
    for (i, &output) in c.channels.iter().enumerate() {
        let block = format!("encoder.down_blocks.{i}");
        for layer in 0..c.layers {
            list.push(residual(c, &block, layer, input, output));
            input = output;
        }
        if i + 1 < c.channels.len() {
            let mut d = Declarations::new(format!("{block}.downsampler"), Role::Block);
            let padding = Padding::BOTTOM_RIGHT;
            let shape = ConvShape { input: output, output, kernel: 3, stride: 2, padding };
            let conv = d.conv(format!("{block}.downsamplers.0.conv"), shape);
            list.push(Box::new(Halve { declarations: d, conv, channels: output }));
        }
    }
    middle(c, "encoder", input, &mut list);
    let moments = 2 * c.latent_channels;
    list.push(end(c, "encoder", input, moments, c.quant.then_some("quant_conv")));
    list
}

fn shape(c: &AutoencoderKlConfig, input: usize, output: usize) -> ResnetShape {
    ResnetShape { input, output, time: None, groups: c.groups, eps: EPS, act: Activation::Silu }
}

fn residual(c: &AutoencoderKlConfig, block: &str, layer: usize, input: usize, output: usize) -> Boxed {
    let mut d = Declarations::new(format!("{block}.layers.{layer}"), Role::Block);
    let resnet = ResnetBlock::declare(&mut d, &format!("{block}.resnets.{layer}"), shape(c, input, output));
    Box::new(Layer { declarations: d, resnet, attention: None })
}

fn middle(c: &AutoencoderKlConfig, half: &str, channels: usize, list: &mut Vec<Boxed>) {
    for i in 0..2 {
        let mut d = Declarations::new(format!("{half}.mid_block.layers.{i}"), Role::Block);
        let name = format!("{half}.mid_block");
        let resnet = ResnetBlock::declare(&mut d, &format!("{name}.resnets.{i}"), shape(c, channels, channels));
        let attention = (i == 0 && c.mid_attention)
            .then(|| SpatialAttention::declare(&mut d, &format!("{name}.attentions.0"), channels, c.groups, EPS));
        list.push(Box::new(Layer { declarations: d, resnet, attention }));
    }
}

fn end(c: &AutoencoderKlConfig, half: &str, input: usize, output: usize, quant: Option<&str>) -> Boxed {
    let mut d = Declarations::new(format!("{half}.conv_out"), Role::Epilogue);
    Box::new(End {
        norm: d.norm(format!("{half}.conv_norm_out"), input),
        conv: d.conv3x3(format!("{half}.conv_out"), input, output),
        quant: quant.map(|name| d.linear(name, output, output, true)),
        declarations: d,
        groups: c.groups,
        shape: [input, output],
    })
}

/// The first convolution, after the 1×1 one of the latents where there is one.
struct Start {
    declarations: Declarations,
    quant: Option<LinearId>,
    conv: ConvId,
    shape: [usize; 2],
}

impl Segment for Start {
    type State = ImageState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut ImageState) -> Result<()> {
        if let Some(quant) = self.quant {
            state.hidden = linear(&state.hidden, p.linear(quant), Activation::None)?;
        }
        state.hidden = conv2d(&state.hidden, p.conv(self.conv))?;
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        flow.peak(2 * self.shape[0] + self.shape[1]);
        flow.set_channels(self.shape[1]);
    }
}

/// A residual block, in the middle with attention.
struct Layer {
    declarations: Declarations,
    resnet: ResnetBlock,
    attention: Option<SpatialAttention>,
}

impl Segment for Layer {
    type State = ImageState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut ImageState) -> Result<()> {
        state.hidden = self.resnet.forward(p, &state.hidden, None)?;
        if let Some(attention) = &self.attention {
            state.hidden = attention.forward(p, &state.hidden)?;
        }
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        self.resnet.flow(flow);
        if let Some(attention) = &self.attention {
            attention.flow(flow);
        }
    }
}

/// Doubles height and width.
struct Double {
    declarations: Declarations,
    conv: UpsampleId,
    channels: usize,
}

impl Segment for Double {
    type State = ImageState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut ImageState) -> Result<()> {
        state.hidden = conv2d_upsampled(&state.hidden, p.upsample(self.conv))?;
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        flow.peak(5 * self.channels);
        flow.double();
    }
}

/// Halves height and width.
struct Halve {
    declarations: Declarations,
    conv: ConvId,
    channels: usize,
}

impl Segment for Halve {
    type State = ImageState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut ImageState) -> Result<()> {
        state.hidden = conv2d(&state.hidden, p.conv(self.conv))?;
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        flow.peak(2 * self.channels);
        flow.halve();
    }
}

/// Normalises and convolves to the result; moments pass a 1×1 convolution where there is one.
struct End {
    declarations: Declarations,
    norm: NormId,
    conv: ConvId,
    quant: Option<LinearId>,
    groups: usize,
    shape: [usize; 2],
}

impl Segment for End {
    type State = ImageState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut ImageState) -> Result<()> {
        let (weight, bias) = p.norm(self.norm);
        let normed = group_norm(&state.hidden, self.groups, weight, bias, EPS, Activation::Silu)?;
        state.hidden = conv2d(&normed, p.conv(self.conv))?;
        if let Some(quant) = self.quant {
            state.hidden = linear(&state.hidden, p.linear(quant), Activation::None)?;
        }
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        // The result is turned channels-first afterwards, which takes a second copy of it.
        flow.peak(2 * self.shape[0] + 2 * self.shape[1]);
        flow.set_channels(self.shape[1]);
    }
}

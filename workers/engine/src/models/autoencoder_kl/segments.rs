//! The segments of both halves.

use std::borrow::Cow;
use std::ops::ControlFlow;

use candle_core::{Result, Tensor, bail};

use super::AutoencoderKlConfig;
use super::attention::SpatialAttention;
use super::map::Map;
use super::pieces::{EPS, Piece, Residual};
use super::sweep;
use super::tiles::Grid;
use crate::formats::Naming;
use crate::ops::{ComputeType, Padding};
use crate::residency::{Bindings, ConvShape, Declarations, Flow, Role, Segment};

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

/// A feature map, in the form in which the next segment takes it.
#[derive(Debug)]
pub(super) enum Hidden {
    /// `[B, H, W, C]`.
    Whole(Tensor),
    /// Of one picture, for tiles.
    Map(Map),
}

/// What flows through either half.
#[derive(Debug)]
pub(super) struct ImageState {
    /// Absent while a segment runs.
    hidden: Option<Hidden>,
    /// The tiles; `None`: whole.
    grid: Option<Grid>,
    compute: ComputeType,
}

impl ImageState {
    pub(super) fn new(x: Tensor, grid: Option<Grid>, compute: ComputeType) -> Self {
        Self { hidden: Some(Hidden::Whole(x)), grid, compute }
    }

    /// The feature map, `[B, H, W, C]`.
    pub(super) fn take(&mut self) -> Result<Tensor> {
        match self.hidden.take() {
            Some(Hidden::Whole(x)) => Ok(x),
            Some(Hidden::Map(map)) => map.into_tensor(),
            None => bail!("vae: a run goes on after it was stopped"),
        }
    }

    fn take_map(&mut self) -> Result<Map> {
        match self.hidden.take() {
            Some(Hidden::Whole(x)) => Map::from_tensor(x),
            Some(Hidden::Map(map)) => Ok(map),
            None => bail!("vae: a run goes on after it was stopped"),
        }
    }
}

/// A piece of either half with its parameters.
pub(super) struct Part {
    declarations: Declarations,
    pub(super) piece: Piece,
    /// Whether it may run in tiles. What is at the latents' size runs whole: attention sees every pixel there.
    pub(super) tiled: bool,
}

/// The decoder: latents to images.
pub(super) fn decoder(c: &AutoencoderKlConfig) -> Vec<Part> {
    let top = c.channels[c.channels.len() - 1];
    let mut list = Vec::new();
    let mut d = Declarations::new("decoder.conv_in", Role::Prelude);
    let quant = c.post_quant.then(|| d.linear("post_quant_conv", c.latent_channels, c.latent_channels, true));
    let conv = d.conv3x3("decoder.conv_in", c.latent_channels, top);
    let channels = [c.latent_channels, top];
    list.push(Part { declarations: d, piece: Piece::Start { quant, conv, channels }, tiled: false });
    middle(c, "decoder", top, &mut list);
    let mut input = top;
    for (i, &output) in c.channels.iter().rev().enumerate() {
        let block = format!("decoder.up_blocks.{i}");
        for layer in 0..=c.layers {
            let mut d = Declarations::new(format!("{block}.layers.{layer}"), Role::Block);
            // The upsampler before a block is a part of its first layer, so that tiles need not keep what it gives.
            let upsample = (i > 0 && layer == 0)
                .then(|| d.upsample(format!("decoder.up_blocks.{}.upsamplers.0.conv", i - 1), input));
            let residual = Residual::declare(&mut d, &format!("{block}.resnets.{layer}"), c.groups, input, output);
            let piece = Piece::Layer { upsample, residual, attention: None };
            list.push(Part { declarations: d, piece, tiled: true });
            input = output;
        }
    }
    list.push(end(c, "decoder", [input, c.out_channels], None));
    list
}

/// The encoder: images to moments of latents.
pub(super) fn encoder(c: &AutoencoderKlConfig) -> Vec<Part> {
    let mut input = c.channels[0];
    let mut list = Vec::new();
    let mut d = Declarations::new("encoder.conv_in", Role::Prelude);
    let conv = d.conv3x3("encoder.conv_in", c.in_channels, input);
    let piece = Piece::Start { quant: None, conv, channels: [c.in_channels, input] };
    list.push(Part { declarations: d, piece, tiled: true });
    for (i, &output) in c.channels.iter().enumerate() {
        let block = format!("encoder.down_blocks.{i}");
        for layer in 0..c.layers {
            let mut d = Declarations::new(format!("{block}.layers.{layer}"), Role::Block);
            let residual = Residual::declare(&mut d, &format!("{block}.resnets.{layer}"), c.groups, input, output);
            let piece = Piece::Layer { upsample: None, residual, attention: None };
            list.push(Part { declarations: d, piece, tiled: true });
            input = output;
        }
        if i + 1 < c.channels.len() {
            let mut d = Declarations::new(format!("{block}.downsampler"), Role::Block);
            let padding = Padding::BOTTOM_RIGHT;
            let shape = ConvShape { input: output, output, kernel: 3, stride: 2, padding };
            let conv = d.conv(format!("{block}.downsamplers.0.conv"), shape);
            list.push(Part { declarations: d, piece: Piece::Halve { conv, channels: output }, tiled: true });
        }
    }
    middle(c, "encoder", input, &mut list);
    list.push(end(c, "encoder", [input, 2 * c.latent_channels], c.quant.then_some("quant_conv")));
    list
}

fn middle(c: &AutoencoderKlConfig, half: &str, channels: usize, list: &mut Vec<Part>) {
    for i in 0..2 {
        let mut d = Declarations::new(format!("{half}.mid_block.layers.{i}"), Role::Block);
        let name = format!("{half}.mid_block");
        let residual = Residual::declare(&mut d, &format!("{name}.resnets.{i}"), c.groups, channels, channels);
        let attention = (i == 0 && c.mid_attention)
            .then(|| SpatialAttention::declare(&mut d, &format!("{name}.attentions.0"), channels, c.groups, EPS));
        list.push(Part { declarations: d, piece: Piece::Layer { upsample: None, residual, attention }, tiled: false });
    }
}

fn end(c: &AutoencoderKlConfig, half: &str, channels: [usize; 2], quant: Option<&str>) -> Part {
    let mut d = Declarations::new(format!("{half}.conv_out"), Role::Epilogue);
    let piece = Piece::End {
        norm: d.norm(format!("{half}.conv_norm_out"), channels[0]),
        conv: d.conv3x3(format!("{half}.conv_out"), channels[0], channels[1]),
        quant: quant.map(|name| d.linear(name, channels[1], channels[1], true)),
        groups: c.groups,
        channels,
    };
    Part { declarations: d, piece, tiled: half == "decoder" }
}

impl Segment for Part {
    type State = ImageState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut ImageState) -> Result<()> {
        self.run_in_parts(p, state, &mut |_| ControlFlow::Continue(())).map(drop)
    }

    /// One part a tile; segments that run whole have as many, so that progress goes up evenly.
    fn parts(&self, state: &ImageState) -> usize {
        state.grid.as_ref().map_or(1, Grid::count)
    }

    fn run_in_parts(
        &self,
        p: &Bindings,
        state: &mut ImageState,
        go_on: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let compute = state.compute;
        match state.grid.filter(|_| self.tiled) {
            Some(grid) => match sweep::run(&self.piece, p, state.take_map()?, &grid, compute, go_on)? {
                ControlFlow::Continue(map) => state.hidden = Some(Hidden::Map(map)),
                ControlFlow::Break(()) => return Ok(ControlFlow::Break(())),
            },
            None => state.hidden = Some(Hidden::Whole(self.piece.whole(p, state.take()?, compute)?)),
        }
        Ok(ControlFlow::Continue(()))
    }

    fn flow(&self, flow: &mut Flow) {
        self.piece.flow(flow);
    }
}

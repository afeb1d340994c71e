//! The segments between prelude and epilogue: one a residual block with its transformer, one a change of resolution.

use candle_core::Result;

use super::config::{Level, Middle, UnetConfig};
use super::state::UnetState;
use crate::models::layers::{ResnetBlock, ResnetShape, SpatialTransformer, TransformerShape, conv2d_upsampled_to};
use crate::ops::{Padding, concat_channels, conv2d, conv2d_upsampled};
use crate::residency::{Bindings, ConvId, ConvShape, Declarations, Flow, Role, Segment, UpsampleId};

type Boxed = Box<dyn Segment<State = UnetState>>;

/// All blocks of the network, in the order in which they run.
pub(super) fn blocks(c: &UnetConfig) -> Vec<Boxed> {
    let mut builder = Builder { config: c, caches: 0, list: Vec::new() };
    let mut channels = c.levels[0].channels;
    // Channels of the skip connections, as the way up will pop them.
    let mut skips = vec![channels];
    for (i, level) in c.levels.iter().enumerate() {
        let name = format!("down_blocks.{i}");
        for layer in 0..level.layers {
            builder.layer(&name, layer, channels, level, level.down, Skip::Push);
            channels = level.channels;
            skips.push(channels);
        }
        if i + 1 < c.levels.len() {
            builder.downsample(&name, channels);
            skips.push(channels);
        }
    }
    let deepest = &c.levels[c.levels.len() - 1];
    builder.middle(deepest, c.middle);
    for (i, level) in c.levels.iter().rev().enumerate() {
        let name = format!("up_blocks.{i}");
        for layer in 0..=level.layers {
            let skip = skips.pop().unwrap_or(0);
            builder.layer(&name, layer, channels + skip, level, level.up, Skip::Join);
            channels = level.channels;
        }
        if i + 1 < c.levels.len() {
            builder.upsample(&name, channels);
        }
    }
    builder.list
}

struct Builder<'a> {
    config: &'a UnetConfig,
    caches: usize,
    list: Vec<Boxed>,
}

impl Builder<'_> {
    fn resnet(&self, d: &mut Declarations, name: &str, input: usize, output: usize) -> ResnetBlock {
        let c = self.config;
        let time = Some((c.time_width, c.time_norm));
        ResnetBlock::declare(d, name, ResnetShape { input, output, time, groups: c.groups, eps: c.eps, act: c.act })
    }

    fn transformer(
        &mut self,
        d: &mut Declarations,
        name: &str,
        level: &Level,
        layers: usize,
        only_cross: bool,
    ) -> SpatialTransformer {
        let shape = TransformerShape {
            channels: level.channels,
            heads: level.heads,
            layers,
            context: level.context,
            groups: self.config.groups,
            only_cross,
        };
        SpatialTransformer::declare(d, name, shape, &mut self.caches)
    }

    fn layer(&mut self, block: &str, layer: usize, input: usize, level: &Level, blocks: Option<usize>, skip: Skip) {
        let mut d = Declarations::new(format!("{block}.layers.{layer}"), Role::Block);
        let resnet = self.resnet(&mut d, &format!("{block}.resnets.{layer}"), input, level.channels);
        let transformer = blocks.map(|blocks| {
            self.transformer(&mut d, &format!("{block}.attentions.{layer}"), level, blocks, level.only_cross)
        });
        self.list.push(Box::new(Layer { declarations: d, resnet, transformer, skip }));
    }

    fn middle(&mut self, level: &Level, middle: Middle) {
        let parts = match middle {
            Middle::Attending(blocks) => vec![Some(blocks), None],
            Middle::Plain => vec![None],
            Middle::Absent => vec![],
        };
        for (i, blocks) in parts.into_iter().enumerate() {
            let mut d = Declarations::new(format!("mid_block.layers.{i}"), Role::Block);
            let resnet = self.resnet(&mut d, &format!("mid_block.resnets.{i}"), level.channels, level.channels);
            let transformer = blocks
                .map(|blocks| self.transformer(&mut d, &format!("mid_block.attentions.{i}"), level, blocks, false));
            self.list.push(Box::new(Layer { declarations: d, resnet, transformer, skip: Skip::None }));
        }
    }

    fn downsample(&mut self, block: &str, channels: usize) {
        let name = format!("{block}.downsamplers.0.conv");
        let mut d = Declarations::new(format!("{block}.downsampler"), Role::Block);
        // diffusers pads on two sides only where the padding is zero.
        let padding = match self.config.downsample_padding {
            0 => Padding::BOTTOM_RIGHT,
            p => Padding::uniform(p),
        };
        let conv = d.conv(name, ConvShape { input: channels, output: channels, kernel: 3, stride: 2, padding });
        self.list.push(Box::new(Downsample { declarations: d, conv }));
    }

    fn upsample(&mut self, block: &str, channels: usize) {
        let mut d = Declarations::new(format!("{block}.upsampler"), Role::Block);
        let conv = d.upsample(format!("{block}.upsamplers.0.conv"), channels);
        self.list.push(Box::new(Upsample { declarations: d, conv }));
    }
}

/// What a layer does with skip connections.
#[derive(Clone, Copy, Debug)]
enum Skip {
    /// Leaves one: the way down.
    Push,
    /// Joins one to its input: the way up.
    Join,
    /// Nothing: the middle.
    None,
}

/// A residual block and, where the level attends to the conditioning, a transformer.
struct Layer {
    declarations: Declarations,
    resnet: ResnetBlock,
    transformer: Option<SpatialTransformer>,
    skip: Skip,
}

impl Segment for Layer {
    type State = UnetState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut UnetState) -> Result<()> {
        if let Skip::Join = self.skip {
            let skip = state.pop_skip()?;
            state.hidden = concat_channels(&[&state.hidden, &skip])?;
        }
        state.hidden = self.resnet.forward(p, &state.hidden, state.time.as_ref())?;
        if let Some(transformer) = &self.transformer {
            state.hidden = transformer.forward(p, &state.hidden, &state.context, &mut state.cross, state.chunks)?;
        }
        if let Skip::Push = self.skip {
            state.skips.push(state.hidden.clone());
        }
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        if let Skip::Join = self.skip {
            let joined = self.resnet.input();
            flow.peak(2 * joined);
            flow.pop_skip(joined - flow.channels());
        }
        self.resnet.flow(flow);
        if let Some(transformer) = &self.transformer {
            transformer.flow(flow);
        }
        if let Skip::Push = self.skip {
            flow.push_skip();
        }
    }
}

/// Halves height and width, rounding up.
struct Downsample {
    declarations: Declarations,
    conv: ConvId,
}

impl Segment for Downsample {
    type State = UnetState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut UnetState) -> Result<()> {
        state.hidden = conv2d(&state.hidden, p.conv(self.conv))?;
        state.skips.push(state.hidden.clone());
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        flow.peak(2 * flow.channels());
        flow.halve();
        flow.push_skip();
    }
}

/// Doubles height and width, or one less where the way down had rounded up.
struct Upsample {
    declarations: Declarations,
    conv: UpsampleId,
}

impl Segment for Upsample {
    type State = UnetState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut UnetState) -> Result<()> {
        let (_, h, w, _) = state.hidden.dims4()?;
        let (height, width) = match state.skips.last() {
            Some(skip) => (skip.dim(1)?, skip.dim(2)?),
            None => (2 * h, 2 * w),
        };
        state.hidden = if (height, width) == (2 * h, 2 * w) {
            conv2d_upsampled(&state.hidden, p.upsample(self.conv))?
        } else {
            conv2d_upsampled_to(&state.hidden, p.upsample(self.conv), height, width)?
        };
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        // Twice the result where it is cut to an odd size.
        flow.peak(9 * flow.channels());
        flow.double();
    }
}

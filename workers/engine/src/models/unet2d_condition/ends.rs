//! Prelude and epilogue.

use candle_core::{Result, Tensor};

use super::config::UnetConfig;
use super::state::UnetState;
use crate::ops::{Activation, Padding, conv2d, group_norm, linear, timestep_embedding};
use crate::residency::{Bindings, ConvId, ConvShape, Declarations, Flow, LinearId, NormId, Role, Segment};

/// A convolution that keeps height and width.
fn same(input: usize, output: usize, kernel: usize) -> ConvShape {
    ConvShape { input, output, kernel, stride: 1, padding: Padding::uniform((kernel - 1) / 2) }
}

/// Embeds the timestep and convolves the latents.
pub(super) struct Prelude {
    declarations: Declarations,
    conv_in: ConvId,
    linear_1: LinearId,
    linear_2: LinearId,
    guidance: Option<LinearId>,
    config: UnetConfig,
}

impl Prelude {
    pub(super) fn new(c: &UnetConfig) -> Self {
        let mut d = Declarations::new("conv_in", Role::Prelude);
        let base = c.levels[0].channels;
        Self {
            conv_in: d.conv("conv_in", same(c.in_channels, base, c.conv_in_kernel)),
            linear_1: d.linear("time_embedding.linear_1", base, c.time_width, true),
            linear_2: d.linear("time_embedding.linear_2", c.time_width, c.time_width, true),
            guidance: c.time_cond_proj_dim.map(|dim| d.linear("time_embedding.cond_proj", dim, base, false)),
            declarations: d,
            config: c.clone(),
        }
    }
}

impl Segment for Prelude {
    type State = UnetState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut UnetState) -> Result<()> {
        let c = &self.config;
        let width = c.levels[0].channels;
        // One row for the whole batch: all its images are at the same step.
        let mut time = timestep_embedding(&[state.timestep], width, c.flip_sin_to_cos, c.freq_shift, 10000.0)?;
        if let (Some(id), Some(guidance)) = (self.guidance, &state.guidance) {
            time = (time + linear(guidance, p.linear(id), Activation::None)?)?;
        }
        let time = linear(&time, p.linear(self.linear_1), c.act)?;
        // Every residual block starts with the activation of this embedding, so it is activated once here.
        state.time = Some(linear(&time, p.linear(self.linear_2), c.act)?);
        let centred: Tensor;
        let latents = if c.center_input {
            centred = ((&state.hidden * 2.0)? - 1.0)?;
            &centred
        } else {
            &state.hidden
        };
        state.hidden = conv2d(latents, p.conv(self.conv_in))?;
        state.skips.push(state.hidden.clone());
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        let base = self.config.levels[0].channels;
        flow.peak(2 * self.config.in_channels + base);
        flow.set_channels(base);
        flow.push_skip();
    }
}

/// Normalises and convolves to the prediction.
pub(super) struct Epilogue {
    declarations: Declarations,
    norm: NormId,
    conv_out: ConvId,
    config: UnetConfig,
}

impl Epilogue {
    pub(super) fn new(c: &UnetConfig) -> Self {
        let mut d = Declarations::new("conv_out", Role::Epilogue);
        let base = c.levels[0].channels;
        Self {
            norm: d.norm("conv_norm_out", base),
            conv_out: d.conv("conv_out", same(base, c.out_channels, c.conv_out_kernel)),
            declarations: d,
            config: c.clone(),
        }
    }
}

impl Segment for Epilogue {
    type State = UnetState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut UnetState) -> Result<()> {
        let (weight, bias) = p.norm(self.norm);
        let normed = group_norm(&state.hidden, self.config.groups, weight, bias, self.config.eps, self.config.act)?;
        state.hidden = conv2d(&normed, p.conv(self.conv_out))?;
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        let (base, out) = (self.config.levels[0].channels, self.config.out_channels);
        flow.peak(2 * base + 2 * out);
        flow.set_channels(out);
    }
}

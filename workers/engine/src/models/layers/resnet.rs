//! Residual blocks of two convolutions.

use candle_core::{D, Result, Tensor};

use crate::ops::{self, Activation, conv2d, conv2d_add, group_norm, linear, linear_add};
use crate::residency::{Bindings, ConvId, Declarations, Flow, LinearId, NormId};

/// How the time embedding enters a residual block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimeNorm {
    /// Added to every pixel before the second normalisation.
    Added,
    /// Scales and shifts the second normalisation.
    ScaleShift,
}

/// The shape of a residual block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResnetShape {
    pub(crate) input: usize,
    pub(crate) output: usize,
    /// Width of the time embedding and how it enters, if it does.
    pub(crate) time: Option<(usize, TimeNorm)>,
    pub(crate) groups: usize,
    pub(crate) eps: f64,
    pub(crate) act: Activation,
}

/// `x + conv(act(norm(conv(act(norm(x))) + time)))`, with a 1×1 convolution on `x` where channels change.
#[derive(Clone, Debug)]
pub(crate) struct ResnetBlock {
    norm1: NormId,
    conv1: ConvId,
    time: Option<(LinearId, TimeNorm)>,
    norm2: NormId,
    conv2: ConvId,
    shortcut: Option<LinearId>,
    shape: ResnetShape,
}

impl ResnetBlock {
    pub(crate) fn declare(d: &mut Declarations, name: &str, shape: ResnetShape) -> Self {
        let ResnetShape { input, output, .. } = shape;
        Self {
            norm1: d.norm(format!("{name}.norm1"), input),
            conv1: d.conv3x3(format!("{name}.conv1"), input, output),
            time: shape.time.map(|(width, how)| {
                let outputs = match how {
                    TimeNorm::Added => output,
                    TimeNorm::ScaleShift => 2 * output,
                };
                (d.linear(format!("{name}.time_emb_proj"), width, outputs, true), how)
            }),
            norm2: d.norm(format!("{name}.norm2"), output),
            conv2: d.conv3x3(format!("{name}.conv2"), output, output),
            shortcut: (input != output).then(|| d.linear(format!("{name}.conv_shortcut"), input, output, true)),
            shape,
        }
    }

    /// Channels of the input.
    pub(crate) fn input(&self) -> usize {
        self.shape.input
    }

    /// `x` `[N, H, W, input]`; `time` `[1, width]`, activated already: all images are at one step.
    pub(crate) fn forward(&self, p: &Bindings, x: &Tensor, time: Option<&Tensor>) -> Result<Tensor> {
        let ResnetShape { groups, eps, act, .. } = self.shape;
        let norm = |id, x: &Tensor, act| {
            let (weight, bias) = p.norm(id);
            group_norm(x, groups, weight, bias, eps, act)
        };
        let normed = norm(self.norm1, x, act)?;
        let conv1 = p.conv(self.conv1);
        let mut h = match (self.time, time) {
            (Some((id, how)), Some(time)) => {
                let t = linear(time, p.linear(id), Activation::None)?;
                match how {
                    TimeNorm::Added => {
                        // One row of time for the whole batch is a part of the bias.
                        let h = conv2d(&normed, &conv1.shifted(&t)?)?;
                        drop(normed);
                        norm(self.norm2, &h, act)?
                    }
                    TimeNorm::ScaleShift => {
                        let t = t.unsqueeze(1)?.unsqueeze(1)?;
                        let half = t.dim(D::Minus1)? / 2;
                        let (scale, shift) = (t.narrow(D::Minus1, 0, half)?, t.narrow(D::Minus1, half, half)?);
                        let h = norm(self.norm2, &conv2d(&normed, conv1)?, Activation::None)?;
                        ops::activate(&h.broadcast_mul(&(scale + 1.0)?)?.broadcast_add(&shift)?, act)?
                    }
                }
            }
            _ => {
                let h = conv2d(&normed, conv1)?;
                drop(normed);
                norm(self.norm2, &h, act)?
            }
        };
        match self.shortcut {
            None => conv2d_add(&h, p.conv(self.conv2), x),
            Some(shortcut) => {
                // The sum goes into the last product, so that neither branch takes a pass of its own.
                h = conv2d(&h, p.conv(self.conv2))?;
                linear_add(x, p.linear(shortcut), &h)
            }
        }
    }

    /// Memory: input, its norm and the first convolution's result; or input and two feature maps of the output.
    pub(crate) fn flow(&self, flow: &mut Flow) {
        let ResnetShape { input, output, time, .. } = self.shape;
        flow.peak(2 * input + output);
        // A scale and shift passes through temporaries of its own, with the first norm alive.
        match time {
            Some((_, TimeNorm::ScaleShift)) => flow.peak(2 * input + 3 * output),
            Some((_, TimeNorm::Added)) | None => flow.peak(input + 2 * output),
        }
        flow.set_channels(output);
    }
}

//! What the segments compute, on a whole feature map or on a part of one.

use candle_core::{Result, Tensor, bail};

use super::attention::SpatialAttention;
use crate::ops::{
    Activation, ComputeType, GroupScale, conv2d, conv2d_add, conv2d_upsampled, group_norm, linear, linear_add, round,
};
use crate::residency::{Bindings, ConvId, Declarations, Flow, LinearId, NormId, UpsampleId};

/// `eps` of every group norm; a constant in diffusers.
pub(super) const EPS: f64 = 1e-6;

/// Where group norms of a run take their statistics from.
pub(super) enum Norms<'a> {
    /// From what they normalise, which is a whole map.
    Own,
    /// From what was gathered over all parts of the map, norm by norm; those of later norms are not known yet.
    Gathered(std::slice::Iter<'a, GroupScale>),
}

impl Norms<'_> {
    /// `silu(norm(x))`; nothing where the statistics are not known yet.
    fn apply(
        &mut self,
        x: &Tensor,
        (weight, bias): (&Tensor, &Tensor),
        groups: usize,
        compute: ComputeType,
    ) -> Result<Option<Tensor>> {
        let normed = match self {
            Norms::Own => group_norm(x, groups, weight, bias, EPS, Activation::Silu)?,
            Norms::Gathered(known) => match known.next() {
                Some(scale) => scale.apply(x, Activation::Silu)?,
                None => return Ok(None),
            },
        };
        round(&normed, compute)?;
        Ok(Some(normed))
    }
}

/// How far a run came.
pub(super) enum Reached {
    /// At a norm whose statistics are not known: what it is to normalise.
    Norm(Tensor),
    /// At the end.
    Output(Tensor),
}

/// Size of a piece's result against that of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Same,
    Double,
    Halve,
}

impl Scale {
    /// A coordinate of the result, from one of the input.
    pub(super) fn of(self, coordinate: usize) -> usize {
        match self {
            Self::Same => coordinate,
            Self::Double => 2 * coordinate,
            Self::Halve => coordinate / 2,
        }
    }
}

/// What one segment computes.
#[derive(Debug)]
pub(super) enum Piece {
    /// The first convolution, after the 1×1 one of the latents where there is one.
    Start { quant: Option<LinearId>, conv: ConvId, channels: [usize; 2] },
    /// A residual block, after an upsampling or, in the middle, before an attention.
    Layer { upsample: Option<UpsampleId>, residual: Residual, attention: Option<SpatialAttention> },
    /// Halves height and width.
    Halve { conv: ConvId, channels: usize },
    /// Normalises and convolves to the result; moments pass a 1×1 convolution where there is one.
    End { norm: NormId, conv: ConvId, quant: Option<LinearId>, groups: usize, channels: [usize; 2] },
}

impl Piece {
    /// Computes on `x` `[N, H, W, C]`. At the borders of a part that are none of the map, as many lines of the result are
    /// wrong as there are convolutions one after another: two at most, one of them of the doubled size.
    pub(super) fn forward(
        &self,
        p: &Bindings,
        x: Tensor,
        norms: &mut Norms<'_>,
        compute: ComputeType,
    ) -> Result<Reached> {
        match self {
            Piece::Start { quant, conv, .. } => {
                let x = pointwise(p, *quant, x, compute)?;
                Ok(Reached::Output(rounded(conv2d(&x, p.conv(*conv))?, compute)?))
            }
            Piece::Layer { upsample, residual, attention } => {
                let x = match upsample {
                    Some(id) => {
                        let doubled = rounded(conv2d_upsampled(&x, p.upsample(*id))?, compute)?;
                        drop(x);
                        doubled
                    }
                    None => x,
                };
                match (residual.forward(p, x, norms, compute)?, attention) {
                    (Reached::Output(x), Some(attention)) => Ok(Reached::Output(attention.forward(p, &x, compute)?)),
                    (reached, _) => Ok(reached),
                }
            }
            Piece::Halve { conv, .. } => Ok(Reached::Output(rounded(conv2d(&x, p.conv(*conv))?, compute)?)),
            Piece::End { norm, conv, quant, groups, .. } => {
                let Some(normed) = norms.apply(&x, p.norm(*norm), *groups, compute)? else {
                    return Ok(Reached::Norm(x));
                };
                drop(x);
                let out = rounded(conv2d(&normed, p.conv(*conv))?, compute)?;
                drop(normed);
                Ok(Reached::Output(pointwise(p, *quant, out, compute)?))
            }
        }
    }

    /// On a whole map.
    pub(super) fn whole(&self, p: &Bindings, x: Tensor, compute: ComputeType) -> Result<Tensor> {
        match self.forward(p, x, &mut Norms::Own, compute)? {
            Reached::Output(out) => Ok(out),
            Reached::Norm(x) => bail!("vae: the statistics of {:?} are missing", x.shape()),
        }
    }

    /// Its norms, in the order in which they are reached, each with its groups.
    pub(super) fn norms(&self) -> Vec<(NormId, usize)> {
        match self {
            Piece::Start { .. } | Piece::Halve { .. } => Vec::new(),
            Piece::Layer { residual, .. } => vec![(residual.norm1, residual.groups), (residual.norm2, residual.groups)],
            Piece::End { norm, groups, .. } => vec![(*norm, *groups)],
        }
    }

    /// Whether its first norm is over its input as it is.
    pub(super) fn starts_with_norm(&self) -> bool {
        match self {
            Piece::Start { .. } | Piece::Halve { .. } => false,
            Piece::Layer { upsample, .. } => upsample.is_none(),
            Piece::End { .. } => true,
        }
    }

    pub(super) fn scale(&self) -> Scale {
        match self {
            Piece::Start { .. } | Piece::End { .. } | Piece::Layer { upsample: None, .. } => Scale::Same,
            Piece::Layer { upsample: Some(_), .. } => Scale::Double,
            Piece::Halve { .. } => Scale::Halve,
        }
    }

    /// Channels of its input and of its result.
    pub(super) fn channels(&self) -> [usize; 2] {
        match self {
            Piece::Start { channels, .. } | Piece::End { channels, .. } => *channels,
            Piece::Layer { residual, .. } => [residual.input, residual.output],
            Piece::Halve { channels, .. } => [*channels; 2],
        }
    }

    /// Follows memory through it.
    pub(super) fn flow(&self, flow: &mut Flow) {
        match self {
            Piece::Start { channels: [input, output], .. } => {
                flow.peak(2 * input + output);
                flow.set_channels(*output);
            }
            Piece::Layer { upsample, residual, attention } => {
                if upsample.is_some() {
                    flow.peak(5 * residual.input);
                    flow.double();
                }
                residual.flow(flow);
                if let Some(attention) = attention {
                    attention.flow(flow);
                }
            }
            Piece::Halve { channels, .. } => {
                flow.peak(2 * channels);
                flow.halve();
            }
            Piece::End { channels: [input, output], .. } => {
                // The result is turned channels-first afterwards, which takes a second copy of it.
                flow.peak(2 * input + 2 * output);
                flow.set_channels(*output);
            }
        }
    }
}

/// A 1×1 convolution where there is one.
fn pointwise(p: &Bindings, id: Option<LinearId>, x: Tensor, compute: ComputeType) -> Result<Tensor> {
    match id {
        Some(id) => rounded(linear(&x, p.linear(id), Activation::None)?, compute),
        None => Ok(x),
    }
}

fn rounded(x: Tensor, compute: ComputeType) -> Result<Tensor> {
    round(&x, compute)?;
    Ok(x)
}

/// `x + conv(silu(norm(conv(silu(norm(x))))))`, with a 1×1 convolution on `x` where channels change.
#[derive(Debug)]
pub(super) struct Residual {
    norm1: NormId,
    conv1: ConvId,
    norm2: NormId,
    conv2: ConvId,
    shortcut: Option<LinearId>,
    groups: usize,
    input: usize,
    output: usize,
}

impl Residual {
    pub(super) fn declare(d: &mut Declarations, name: &str, groups: usize, input: usize, output: usize) -> Self {
        Self {
            norm1: d.norm(format!("{name}.norm1"), input),
            conv1: d.conv3x3(format!("{name}.conv1"), input, output),
            norm2: d.norm(format!("{name}.norm2"), output),
            conv2: d.conv3x3(format!("{name}.conv2"), output, output),
            shortcut: (input != output).then(|| d.linear(format!("{name}.conv_shortcut"), input, output, true)),
            groups,
            input,
            output,
        }
    }

    fn forward(&self, p: &Bindings, x: Tensor, norms: &mut Norms<'_>, compute: ComputeType) -> Result<Reached> {
        let Some(normed) = norms.apply(&x, p.norm(self.norm1), self.groups, compute)? else {
            return Ok(Reached::Norm(x));
        };
        let inner = rounded(conv2d(&normed, p.conv(self.conv1))?, compute)?;
        drop(normed);
        let Some(normed) = norms.apply(&inner, p.norm(self.norm2), self.groups, compute)? else {
            return Ok(Reached::Norm(inner));
        };
        drop(inner);
        let out = match self.shortcut {
            None => conv2d_add(&normed, p.conv(self.conv2), &x)?,
            Some(shortcut) => {
                // The sum goes into the last product, so that neither branch takes a pass of its own.
                let out = rounded(conv2d(&normed, p.conv(self.conv2))?, compute)?;
                drop(normed);
                linear_add(&x, p.linear(shortcut), &out)?
            }
        };
        Ok(Reached::Output(rounded(out, compute)?))
    }

    /// Memory: input, its norm and the first convolution's result; or input and two feature maps of the output.
    fn flow(&self, flow: &mut Flow) {
        flow.peak(2 * self.input + self.output);
        flow.peak(self.input + 2 * self.output);
        flow.set_channels(self.output);
    }
}

//! Self-attention over the pixels of a feature map.

use candle_core::{Result, Tensor};

use crate::ops::{Activation, AttentionMask, ComputeType, attention, group_norm, linear, linear_add, round};
use crate::residency::{Bindings, Declarations, Flow, LinearId, NormId};

/// `x + out(attention(norm(x)))` with one head over all pixels.
#[derive(Clone, Debug)]
pub(super) struct SpatialAttention {
    norm: NormId,
    qkv: LinearId,
    out: LinearId,
    groups: usize,
    eps: f64,
    channels: usize,
}

impl SpatialAttention {
    pub(super) fn declare(d: &mut Declarations, name: &str, channels: usize, groups: usize, eps: f64) -> Self {
        let parts = ["to_q", "to_k", "to_v"].map(|part| format!("{name}.{part}")).to_vec();
        Self {
            norm: d.norm(format!("{name}.group_norm"), channels),
            qkv: d.stacked(parts, channels, &[channels; 3], true),
            out: d.linear(format!("{name}.to_out.0"), channels, channels, true),
            groups,
            eps,
            channels,
        }
    }

    /// `x` `[N, H, W, C]`, a whole map: every pixel sees every other one.
    pub(super) fn forward(&self, p: &Bindings, x: &Tensor, compute: ComputeType) -> Result<Tensor> {
        let (n, h, w, c) = x.dims4()?;
        let (weight, bias) = p.norm(self.norm);
        let normed = group_norm(x, self.groups, weight, bias, self.eps, Activation::None)?;
        round(&normed, compute)?;
        let qkv = linear(&normed, p.linear(self.qkv), Activation::None)?.reshape((n, h * w, 3, 1, c))?;
        drop(normed);
        round(&qkv, compute)?;
        let part = |i| qkv.narrow(2, i, 1)?.squeeze(2);
        let scale = 1.0 / (c as f32).sqrt();
        let mixed = attention(&part(0)?, &part(1)?, &part(2)?, scale, AttentionMask::None)?;
        drop(qkv);
        round(&mixed, compute)?;
        let out = linear_add(&mixed.reshape((n, h, w, c))?, p.linear(self.out), x)?;
        round(&out, compute)?;
        Ok(out)
    }

    /// Memory: input, queries, keys and values, the kernel's copies of the latter two, and the result.
    pub(super) fn flow(&self, flow: &mut Flow) {
        flow.peak(6 * self.channels + self.channels.next_multiple_of(16));
    }
}

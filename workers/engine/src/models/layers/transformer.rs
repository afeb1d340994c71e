//! Transformers over the pixels of a feature map that also attend to the conditioning.

use candle_core::{Result, Tensor};

use crate::ops::{Activation, AttentionMask, attention, group_norm, layer_norm, linear, linear_add, linear_geglu};
use crate::residency::{Bindings, Declarations, Flow, LinearId, NormId};

/// `eps` of every layer norm and of the group norm before the blocks; constants in diffusers.
const LAYER_NORM_EPS: f64 = 1e-5;
const GROUP_NORM_EPS: f64 = 1e-6;

/// Keys and values of the conditioning, one entry a cross-attention of the model. They do not change between steps, so
/// the first pass of a run computes them and later ones reuse them.
#[derive(Clone, Debug, Default)]
pub(crate) struct CrossCache(Vec<Option<Tensor>>);

impl CrossCache {
    fn get(&mut self, index: usize, compute: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        let entry = &mut self.0[index];
        match entry {
            Some(kv) => Ok(kv.clone()),
            None => Ok(entry.insert(compute()?).clone()),
        }
    }
}

/// The shape of a spatial transformer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransformerShape {
    pub(crate) channels: usize,
    pub(crate) heads: usize,
    pub(crate) layers: usize,
    pub(crate) context: usize,
    pub(crate) groups: usize,
    /// Whether the first attention of each block looks at the conditioning too.
    pub(crate) only_cross: bool,
}

/// Where keys and values come from.
#[derive(Clone, Copy, Debug)]
enum Attention {
    /// The pixels themselves: one product gives queries, keys and values.
    Own { qkv: LinearId, out: LinearId },
    /// The conditioning: keys and values are cached under `cache`.
    Context { q: LinearId, kv: LinearId, out: LinearId, cache: usize },
}

#[derive(Clone, Debug)]
struct Block {
    norm1: NormId,
    attn1: Attention,
    norm2: NormId,
    attn2: Attention,
    norm3: NormId,
    up: LinearId,
    down: LinearId,
}

/// Group norm, a projection, blocks of attention and feed-forward, a projection, and the residual around all.
#[derive(Clone, Debug)]
pub(crate) struct SpatialTransformer {
    norm: NormId,
    project_in: LinearId,
    blocks: Vec<Block>,
    project_out: LinearId,
    shape: TransformerShape,
}

impl SpatialTransformer {
    /// `caches` counts the cross-attentions of the whole model.
    pub(crate) fn declare(d: &mut Declarations, name: &str, shape: TransformerShape, caches: &mut usize) -> Self {
        let c = shape.channels;
        let norm = d.norm(format!("{name}.norm"), c);
        let project_in = d.linear(format!("{name}.proj_in"), c, c, true);
        let mut attend = |d: &mut Declarations, name: String, own: bool| {
            let parts = |list: &[&str]| list.iter().map(|part| format!("{name}.{part}")).collect::<Vec<_>>();
            if own {
                let qkv = d.stacked(parts(&["to_q", "to_k", "to_v"]), c, &[c; 3], false);
                return Attention::Own { qkv, out: d.linear(format!("{name}.to_out.0"), c, c, true) };
            }
            *caches += 1;
            Attention::Context {
                q: d.linear(format!("{name}.to_q"), c, c, false),
                kv: d.stacked(parts(&["to_k", "to_v"]), shape.context, &[c; 2], false),
                out: d.linear(format!("{name}.to_out.0"), c, c, true),
                cache: *caches - 1,
            }
        };
        let blocks = (0..shape.layers)
            .map(|i| {
                let name = format!("{name}.transformer_blocks.{i}");
                Block {
                    norm1: d.norm(format!("{name}.norm1"), c),
                    attn1: attend(d, format!("{name}.attn1"), !shape.only_cross),
                    norm2: d.norm(format!("{name}.norm2"), c),
                    attn2: attend(d, format!("{name}.attn2"), false),
                    norm3: d.norm(format!("{name}.norm3"), c),
                    up: d.linear(format!("{name}.ff.net.0.proj"), c, 8 * c, true),
                    down: d.linear(format!("{name}.ff.net.2"), 4 * c, c, true),
                }
            })
            .collect();
        let project_out = d.linear(format!("{name}.proj_out"), c, c, true);
        Self { norm, project_in, blocks, project_out, shape }
    }

    /// `x` `[N, H, W, C]`, `context` `[N, T, W]`.
    pub(crate) fn forward(&self, p: &Bindings, x: &Tensor, context: &Tensor, cache: &mut CrossCache) -> Result<Tensor> {
        let (n, h, w, c) = x.dims4()?;
        let (weight, bias) = p.norm(self.norm);
        let normed = group_norm(x, self.shape.groups, weight, bias, GROUP_NORM_EPS, Activation::None)?;
        let mut t = linear(&normed, p.linear(self.project_in), Activation::None)?.reshape((n, h * w, c))?;
        drop(normed);
        for block in &self.blocks {
            let norm = |id, t: &Tensor| {
                let (weight, bias) = p.norm(id);
                layer_norm(t, Some(weight), Some(bias), LAYER_NORM_EPS)
            };
            t = self.attend(p, block.attn1, &norm(block.norm1, &t)?, &t, context, cache)?;
            t = self.attend(p, block.attn2, &norm(block.norm2, &t)?, &t, context, cache)?;
            let gated = linear_geglu(&norm(block.norm3, &t)?, p.linear(block.up))?;
            t = linear_add(&gated, p.linear(block.down), &t)?;
        }
        linear_add(&t.reshape((n, h, w, c))?, p.linear(self.project_out), x)
    }

    /// Memory: input and running state, and inside the feed-forward its two widths; keys and values are kept.
    pub(crate) fn flow(&self, flow: &mut Flow) {
        let c = self.shape.channels;
        // Input, state, norm, queries with keys and values, the kernel's copies of these two (padded to whole vectors of
        // sixteen a head), and what comes out.
        flow.peak(8 * c + self.shape.heads * (c / self.shape.heads).next_multiple_of(16));
        // Input, state, norm, four gated; or, where channels are not multiples of the kernels' width, eight before gating.
        flow.peak(if c.is_multiple_of(4) { 7 } else { 15 } * c);
        let cross = if self.shape.only_cross { 2 } else { 1 };
        flow.keep_context(self.shape.layers * cross * 2 * c);
    }

    /// `residual + out(attention(x))`.
    fn attend(
        &self,
        p: &Bindings,
        layer: Attention,
        x: &Tensor,
        residual: &Tensor,
        context: &Tensor,
        cache: &mut CrossCache,
    ) -> Result<Tensor> {
        let (n, s, c) = x.dims3()?;
        let heads = self.shape.heads;
        let width = c / heads;
        let scale = 1.0 / (width as f32).sqrt();
        let (mixed, out) = match layer {
            Attention::Own { qkv, out } => {
                let qkv = linear(x, p.linear(qkv), Activation::None)?.reshape((n, s, 3, heads, width))?;
                let part = |i| qkv.narrow(2, i, 1)?.squeeze(2);
                (attention(&part(0)?, &part(1)?, &part(2)?, scale, AttentionMask::None)?, out)
            }
            Attention::Context { q, kv, out, cache: index } => {
                let q = linear(x, p.linear(q), Activation::None)?.reshape((n, s, heads, width))?;
                let (batch, tokens, _) = context.dims3()?;
                let kv = cache.get(index, || {
                    linear(context, p.linear(kv), Activation::None)?.reshape((batch, tokens, 2, heads, width))
                })?;
                let part = |i| kv.narrow(2, i, 1)?.squeeze(2);
                (attention(&q, &part(0)?, &part(1)?, scale, AttentionMask::None)?, out)
            }
        };
        linear_add(&mixed, p.linear(out), residual)
    }
}

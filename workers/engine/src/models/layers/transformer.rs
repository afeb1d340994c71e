//! Transformers over the pixels of a feature map that also attend to the conditioning.

use candle_core::{Result, Tensor};

use crate::ops::{
    Activation, AttentionMask, Chunks, RowsBuilder, attention, by_chunks, group_norm, layer_norm, linear, linear_add,
    linear_geglu,
};
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

/// An attention's layers.
#[derive(Clone, Copy, Debug)]
struct Attention {
    q: LinearId,
    kv: LinearId,
    out: LinearId,
    keys: Keys,
}

/// Where keys and values come from.
#[derive(Clone, Copy, Debug)]
enum Keys {
    /// The pixels themselves.
    Own,
    /// The conditioning; cached under this number.
    Context(usize),
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
            let keys = if own {
                Keys::Own
            } else {
                *caches += 1;
                Keys::Context(*caches - 1)
            };
            Attention {
                q: d.linear(format!("{name}.to_q"), c, c, false),
                kv: d.stacked(parts(&["to_k", "to_v"]), if own { c } else { shape.context }, &[c; 2], false),
                out: d.linear(format!("{name}.to_out.0"), c, c, true),
                keys,
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
    pub(crate) fn forward(
        &self,
        p: &Bindings,
        x: &Tensor,
        context: &Tensor,
        cache: &mut CrossCache,
        chunks: Chunks,
    ) -> Result<Tensor> {
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
            for (attention, id) in [(block.attn1, block.norm1), (block.attn2, block.norm2)] {
                t = self.attend(p, attention, &|t: &Tensor| norm(id, t), &t, context, cache, chunks.tokens)?;
            }
            t = by_chunks(&t, chunks.mlp, c, |t| {
                let gated = linear_geglu(&norm(block.norm3, t)?, p.linear(block.up))?;
                linear_add(&gated, p.linear(block.down), t)
            })?;
        }
        linear_add(&t.reshape((n, h, w, c))?, p.linear(self.project_out), x)
    }

    /// Memory: input and running state, and inside the feed-forward its two widths; keys and values are kept.
    pub(crate) fn flow(&self, flow: &mut Flow) {
        let c = self.shape.channels;
        // What the kernel copies of keys, padded to whole vectors of sixteen a head, and of values.
        let copies = c + self.shape.heads * (c / self.shape.heads).next_multiple_of(16);
        // Input, state, norm, queries, keys, values and their copies, and what comes out.
        flow.peak_of_rows(7 * c + copies);
        // Input, state, norm, four gated; or, where channels are not multiples of the kernels' width, eight before gating.
        flow.peak_of_rows(if c.is_multiple_of(4) { 7 } else { 15 } * c);
        // In chunks: input, state and result, with keys, values and their copies of one image of two.
        flow.peak_in_chunks(3 * c + (2 * c + copies).div_ceil(2));
        let cross = if self.shape.only_cross { 2 } else { 1 };
        flow.keep_context(self.shape.layers * cross * 2 * c);
    }

    /// `t + out(attention(norm(t)))`, for `tokens` rows at a time where there are more.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &self,
        p: &Bindings,
        layer: Attention,
        norm: &dyn Fn(&Tensor) -> Result<Tensor>,
        t: &Tensor,
        context: &Tensor,
        cache: &mut CrossCache,
        tokens: usize,
    ) -> Result<Tensor> {
        let (n, s, c) = t.dims3()?;
        let heads = self.shape.heads;
        let width = c / heads;
        let scale = 1.0 / (width as f32).sqrt();
        let keys_of = |x: &Tensor| linear(x, p.linear(layer.kv), Activation::None);
        let split = |kv: Tensor| -> Result<Tensor> {
            let (batch, count, _) = kv.dims3()?;
            kv.reshape((batch, count, 2, heads, width))
        };
        // Queries of normed rows against keys and values, and the way back to the residual's width.
        let mix = |normed: &Tensor, kv: &Tensor, residual: &Tensor| {
            let (batch, count, _) = normed.dims3()?;
            let q = linear(normed, p.linear(layer.q), Activation::None)?.reshape((batch, count, heads, width))?;
            let part = |i| kv.narrow(2, i, 1)?.squeeze(2);
            let mixed = attention(&q, &part(0)?, &part(1)?, scale, AttentionMask::None)?;
            drop(q);
            linear_add(&mixed, p.linear(layer.out), residual)
        };
        let cached = match layer.keys {
            Keys::Own => None,
            Keys::Context(index) => Some(cache.get(index, || split(keys_of(context)?))?),
        };
        if !Chunks::cut(tokens, n * s) {
            let normed = norm(t)?;
            let kv = match cached {
                Some(kv) => kv,
                None => split(keys_of(&normed)?)?,
            };
            return mix(&normed, &kv, t);
        }
        // Image by image, so that keys and values are those of one; then queries some at a time.
        let mut whole = RowsBuilder::new(n * s, c);
        for image in 0..n {
            let rows = t.narrow(0, image, 1)?;
            let kv = match &cached {
                Some(kv) => kv.narrow(0, image, 1)?,
                None => split(by_chunks(&rows, tokens, 2 * c, |rows| keys_of(&norm(rows)?))?)?,
            };
            for first in (0..s).step_by(tokens) {
                let rows = rows.narrow(1, first, tokens.min(s - first))?;
                whole.push(&mix(&norm(&rows)?, &kv, &rows)?)?;
            }
        }
        whole.finish((n, s, c))
    }
}

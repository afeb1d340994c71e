//! The encoder's segments: embeddings, layers, final norm.

use std::borrow::Cow;

use candle_core::{Result, Tensor};

use super::{ClipTextConfig, ClipTextOutput};
use crate::formats::Naming;
use crate::models::ModelError;
use crate::ops::{Activation, AttentionMask, Chunks, attention, by_chunks, layer_norm, linear, linear_add};
use crate::residency::{Bindings, Declarations, Flow, LinearId, NormId, Role, Segment, TableId};

/// Repositories name tensors with the prefix `text_model.`; transformers 5 drops it.
pub(super) const NAMING: Naming = Naming {
    canonical: |name| match name.strip_prefix("text_model.") {
        Some(rest) => Cow::Borrowed(rest),
        None => Cow::Borrowed(name),
    },
    ignorable: |name| {
        name.ends_with("position_ids")
            || name == "logit_scale"
            || name == "text_projection.weight"
            || name.starts_with("vision_model.")
            || name.starts_with("visual_projection.")
    },
};

/// What flows through the encoder.
#[derive(Debug)]
pub(super) struct TextState {
    tokens: Tensor,
    ends: Vec<u32>,
    clip_skip: usize,
    chunks: Chunks,
    hidden_states: Vec<Tensor>,
    last: Option<Tensor>,
    conditioning: Option<Tensor>,
    pooled: Option<Tensor>,
    projected: Option<Tensor>,
}

impl TextState {
    /// `tokens` `[B, S]`; `ends` the place of each row's end-of-text token.
    pub(super) fn new(tokens: Tensor, ends: Vec<u32>, clip_skip: usize, chunks: Chunks) -> Self {
        let (hidden_states, last, conditioning, pooled, projected) = (Vec::new(), None, None, None, None);
        Self { tokens, ends, clip_skip, chunks, hidden_states, last, conditioning, pooled, projected }
    }

    pub(super) fn finish(self) -> std::result::Result<ClipTextOutput, ModelError> {
        match (self.last, self.conditioning, self.pooled) {
            (Some(last_hidden_state), Some(conditioning), Some(pooled)) => Ok(ClipTextOutput {
                last_hidden_state,
                hidden_states: self.hidden_states,
                conditioning,
                pooled,
                projected: self.projected,
            }),
            _ => Err(ModelError::Input("text encoder: its epilogue did not run".into())),
        }
    }

    fn hidden(&self) -> Result<&Tensor> {
        match self.hidden_states.last() {
            Some(hidden) => Ok(hidden),
            None => candle_core::bail!("text encoder: its prelude did not run"),
        }
    }
}

/// All segments of a model of this configuration.
pub(super) fn segments(config: &ClipTextConfig) -> Vec<Box<dyn Segment<State = TextState>>> {
    let mut list: Vec<Box<dyn Segment<State = TextState>>> = vec![Box::new(Embeddings::new(config))];
    for i in 0..config.layers {
        list.push(Box::new(Layer::new(config, i)));
    }
    list.push(Box::new(Final::new(config)));
    list
}

struct Embeddings {
    declarations: Declarations,
    tokens: TableId,
    positions: TableId,
    width: usize,
}

impl Embeddings {
    fn new(c: &ClipTextConfig) -> Self {
        let mut d = Declarations::new("embeddings", Role::Prelude);
        Self {
            tokens: d.table("embeddings.token_embedding.weight", &[c.vocab_size, c.hidden_size]),
            positions: d.table("embeddings.position_embedding.weight", &[c.max_position_embeddings, c.hidden_size]),
            declarations: d,
            width: c.hidden_size,
        }
    }
}

impl Segment for Embeddings {
    type State = TextState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut TextState) -> Result<()> {
        let (batch, length) = state.tokens.dims2()?;
        let words = p.table(self.tokens).index_select(&state.tokens.flatten_all()?, 0)?;
        let positions = p.table(self.positions).narrow(0, 0, length)?;
        let words = words.reshape((batch, length, ()))?;
        state.hidden_states.push(words.broadcast_add(&positions)?);
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        flow.set_channels(self.width);
        flow.peak(3 * self.width);
        flow.push_skip();
    }
}

struct Layer {
    declarations: Declarations,
    norm1: NormId,
    qkv: LinearId,
    out: LinearId,
    norm2: NormId,
    up: LinearId,
    down: LinearId,
    wide: usize,
    heads: usize,
    eps: f64,
    act: Activation,
}

impl Layer {
    fn new(c: &ClipTextConfig, i: usize) -> Self {
        let name = format!("encoder.layers.{i}");
        let w = c.hidden_size;
        let mut d = Declarations::new(name.clone(), Role::Block);
        let parts = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{name}.self_attn.{part}")).to_vec();
        Self {
            norm1: d.norm(format!("{name}.layer_norm1"), w),
            qkv: d.stacked(parts, w, &[w; 3], true),
            out: d.linear(format!("{name}.self_attn.out_proj"), w, w, true),
            norm2: d.norm(format!("{name}.layer_norm2"), w),
            up: d.linear(format!("{name}.mlp.fc1"), w, c.intermediate_size, true),
            down: d.linear(format!("{name}.mlp.fc2"), c.intermediate_size, w, true),
            declarations: d,
            wide: c.intermediate_size,
            heads: c.heads,
            eps: c.layer_norm_eps,
            act: c.act,
        }
    }
}

impl Segment for Layer {
    type State = TextState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut TextState) -> Result<()> {
        let x = state.hidden()?;
        let (batch, length, width) = x.dims3()?;
        let norm = |id, x: &Tensor| {
            let (weight, bias) = p.norm(id);
            layer_norm(x, Some(weight), Some(bias), self.eps)
        };
        let head = width / self.heads;
        let chunks = state.chunks;
        let qkv = by_chunks(x, chunks.tokens, 3 * width, |x| {
            linear(&norm(self.norm1, x)?, p.linear(self.qkv), Activation::None)
        })?;
        let qkv = qkv.reshape((batch, length, 3, self.heads, head))?;
        let part = |i| qkv.narrow(2, i, 1)?.squeeze(2);
        let scale = 1.0 / (head as f32).sqrt();
        let mixed = attention(&part(0)?, &part(1)?, &part(2)?, scale, AttentionMask::Causal)?;
        let x = linear_add(&mixed, p.linear(self.out), x)?;
        let out = by_chunks(&x, chunks.mlp, width, |x| {
            let wide = linear(&norm(self.norm2, x)?, p.linear(self.up), self.act)?;
            linear_add(&wide, p.linear(self.down), x)
        })?;
        state.hidden_states.push(out);
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        let width = flow.channels();
        // Norm with queries, keys and values, which stay to the end of the layer; then the feed-forward and its result.
        flow.peak(6 * width);
        flow.peak(7 * width + self.wide);
        flow.push_skip();
    }
}

struct Final {
    declarations: Declarations,
    norm: NormId,
    projection: Option<LinearId>,
    eps: f64,
}

impl Final {
    fn new(c: &ClipTextConfig) -> Self {
        let mut d = Declarations::new("final_layer_norm", Role::Epilogue);
        Self {
            norm: d.norm("final_layer_norm", c.hidden_size),
            projection: c.projection.map(|width| d.linear("text_projection", c.hidden_size, width, false)),
            declarations: d,
            eps: c.layer_norm_eps,
        }
    }
}

impl Segment for Final {
    type State = TextState;

    fn declarations(&self) -> &Declarations {
        &self.declarations
    }

    fn run(&self, p: &Bindings, state: &mut TextState) -> Result<()> {
        let (weight, bias) = p.norm(self.norm);
        let norm = |x: &Tensor| layer_norm(x, Some(weight), Some(bias), self.eps);
        let last = norm(state.hidden()?)?;
        let conditioning = match state.hidden_states.len().checked_sub(1 + state.clip_skip) {
            Some(_) if state.clip_skip == 0 => last.clone(),
            Some(at) => norm(&state.hidden_states[at])?,
            None => candle_core::bail!("text encoder: clip skip {} is above its layers", state.clip_skip),
        };
        let mut rows = Vec::with_capacity(state.ends.len());
        for (row, &end) in state.ends.iter().enumerate() {
            rows.push(last.get(row)?.get(end as usize)?);
        }
        let pooled = Tensor::stack(&rows, 0)?;
        state.projected = match self.projection {
            Some(id) => Some(linear(&pooled, p.linear(id), Activation::None)?),
            None => None,
        };
        (state.last, state.conditioning, state.pooled) = (Some(last), Some(conditioning), Some(pooled));
        Ok(())
    }

    fn flow(&self, flow: &mut Flow) {
        flow.peak(3 * flow.channels());
    }
}

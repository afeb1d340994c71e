//! CLIP's text encoder (Radford et al. 2021), as `CLIPTextModel` and `CLIPTextModelWithProjection` of transformers.

mod config;
mod segments;

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};

pub use config::ClipTextConfig;
use segments::{NAMING, TextState};

use super::{LoadProgress, ModelError};
use crate::formats::WeightSet;
use crate::ops::Chunks;
use crate::residency::{Declarations, Executor, Flow, Observer, Residency};

/// What the encoder gives for a batch of token sequences; widths are the model's `hidden_size`.
#[derive(Clone, Debug)]
pub struct ClipTextOutput {
    /// The last layer after the final layer norm, `[B, S, W]`.
    pub last_hidden_state: Tensor,
    /// The embeddings and then each layer's output, all before the final layer norm, `[B, S, W]` each; the penultimate
    /// layer is the last but one.
    pub hidden_states: Vec<Tensor>,
    /// The final layer norm over the output `clip_skip` layers before the last, as Stable Diffusion conditions on it:
    /// [`Self::last_hidden_state`] for 0.
    pub conditioning: Tensor,
    /// [`Self::last_hidden_state`] at the end-of-text token, `[B, W]`.
    pub pooled: Tensor,
    /// [`Self::pooled`] through the text projection, `[B, P]`, where the model has one.
    pub projected: Option<Tensor>,
}

/// A CLIP text encoder, loaded or not.
#[derive(Debug)]
pub struct ClipTextModel {
    config: ClipTextConfig,
    chunks: Chunks,
    executor: Executor<TextState>,
}

impl ClipTextModel {
    /// Opens `folder` (`config.json` and weights called `model*.safetensors`) without reading any weight.
    ///
    /// # Errors
    /// If the configuration is not supported or the files lie.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let config = ClipTextConfig::read(&folder.join("config.json"))?;
        let weights = Arc::new(Self::weights(folder)?);
        let executor = Executor::new(segments::segments(&config), weights);
        Ok(Self { config, chunks: Chunks::default(), executor })
    }

    /// Opens `folder` and loads all of it.
    ///
    /// # Errors
    /// As [`Self::open`], if weights do not fit, or if `progress` cancels.
    pub fn load(folder: &Path, progress: &mut LoadProgress<'_>) -> Result<Self, ModelError> {
        let model = Self::open(folder)?;
        model.residency().set_limit(u64::MAX);
        model.residency().load(progress)?;
        Ok(model)
    }

    /// The weights in `folder`, by declared names.
    ///
    /// # Errors
    /// If the files lie.
    pub fn weights(folder: &Path) -> Result<WeightSet, ModelError> {
        Ok(WeightSet::open(folder, "model", NAMING)?)
    }

    /// What each segment of a model of this configuration declares.
    pub fn declarations(config: &ClipTextConfig) -> Vec<Declarations> {
        segments::segments(config).iter().map(|s| s.declarations().clone()).collect()
    }

    /// How memory goes through a model of this configuration; see [`Flow`]. The unit is a token.
    pub fn flow(config: &ClipTextConfig) -> Flow {
        let mut flow = Flow::new(1);
        for segment in segments::segments(config) {
            segment.flow(&mut flow);
        }
        flow
    }

    /// Its configuration.
    pub fn config(&self) -> &ClipTextConfig {
        &self.config
    }

    /// Sets how many rows go through at once from the next run on. Changes no byte of a result.
    pub fn set_chunks(&mut self, chunks: Chunks) {
        self.chunks = chunks;
    }

    /// Its memory.
    pub fn residency(&self) -> &Arc<Residency> {
        self.executor.residency()
    }

    /// Bytes that its weights hold now.
    pub fn bytes(&self) -> u64 {
        self.executor.resident_bytes()
    }

    /// Encodes `ids`: sequences of one length, at most `max_position_embeddings`. `clip_skip` is how many layers before
    /// the last the conditioning is taken from, counted as in diffusers.
    ///
    /// # Errors
    /// If an id or a length is outside of what the model knows, or `observer` cancels.
    pub fn forward(
        &self,
        ids: &[Vec<u32>],
        clip_skip: usize,
        observer: &mut dyn Observer,
    ) -> Result<ClipTextOutput, ModelError> {
        let length = ids.first().map_or(0, Vec::len);
        let (vocabulary, positions) = (self.config.vocab_size, self.config.max_position_embeddings);
        if length == 0 || ids.iter().any(|row| row.len() != length) {
            return Err(ModelError::Input("text encoder: token sequences must have one length above zero".into()));
        }
        if length > positions {
            let text =
                format!("text encoder: {length} tokens are above the limit of {positions}; encode them in chunks");
            return Err(ModelError::Input(text));
        }
        if let Some(id) = ids.iter().flatten().find(|&&id| id as usize >= vocabulary) {
            let text = format!(
                "text encoder: token {id} is outside the vocabulary of {vocabulary}; the tokenizer belongs to another model"
            );
            return Err(ModelError::Input(text));
        }
        if clip_skip >= self.config.layers {
            let text = format!("text encoder: clip skip {clip_skip} must be below the {} layers", self.config.layers);
            return Err(ModelError::Input(text));
        }
        let tokens = Tensor::from_vec(ids.concat(), (ids.len(), length), &Device::Cpu)?;
        let ends = ids.iter().map(|row| self.config.end_of_text(row) as u32).collect();
        let mut state = TextState::new(tokens, ends, clip_skip, self.chunks);
        self.executor.run(&mut state, observer)?;
        state.finish()
    }
}

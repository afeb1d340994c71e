//! `config.json` of CLIP's text encoder.

use std::path::Path;

use crate::models::config::{ConfigError, Fields};
use crate::ops::Activation;

/// The fields that decide the encoder's result.
#[derive(Clone, Debug)]
pub struct ClipTextConfig {
    /// How many tokens there are.
    pub vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// How many layers.
    pub layers: usize,
    /// Heads of each attention.
    pub heads: usize,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// `eps` of layer norms.
    pub layer_norm_eps: f64,
    /// Activation of the feed-forward layers.
    pub act: Activation,
    /// The end-of-text token; 2 means the largest id of a sequence.
    pub eos_token_id: u32,
    /// Width of the text projection, where the class has one.
    pub projection: Option<usize>,
}

impl ClipTextConfig {
    /// Reads `path`.
    ///
    /// # Errors
    /// If a field that changes the result is not supported.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let f = Fields::read(path)?;
        if f.value("model_type").is_some_and(|t| t != "clip_text_model") {
            return Err(f.refuse("model_type", "the supported value is \"clip_text_model\""));
        }
        let class = match f.optional::<Vec<String>>("architectures")?.as_deref() {
            None | Some([]) => "CLIPTextModel".to_owned(),
            Some([class, ..]) => class.clone(),
        };
        let with_projection = match class.as_str() {
            "CLIPTextModel" | "CLIPModel" => false,
            "CLIPTextModelWithProjection" => true,
            _ => return Err(f.refuse("architectures", "supported are CLIPTextModel and CLIPTextModelWithProjection")),
        };
        let act = match f.or("hidden_act", "quick_gelu".to_owned())?.as_str() {
            "quick_gelu" => Activation::QuickGelu,
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluTanh,
            _ => return Err(f.refuse("hidden_act", "supported are quick_gelu, gelu and gelu_new")),
        };
        let hidden_size = f.count("hidden_size", 512)?;
        let heads = f.count("num_attention_heads", 8)?;
        if hidden_size % heads != 0 {
            return Err(f.refuse("num_attention_heads", format!("it must divide hidden_size = {hidden_size}")));
        }
        Ok(Self {
            vocab_size: f.count("vocab_size", 49408)?,
            hidden_size,
            intermediate_size: f.count("intermediate_size", 2048)?,
            layers: f.count("num_hidden_layers", 12)?,
            heads,
            max_position_embeddings: f.count("max_position_embeddings", 77)?,
            layer_norm_eps: f.or("layer_norm_eps", 1e-5)?,
            act,
            eos_token_id: f.or("eos_token_id", 49407)?,
            projection: if with_projection { Some(f.count("projection_dim", 512)?) } else { None },
        })
    }

    /// The place of the token that the pooled output is taken from. Configurations older than transformers 4.31 say
    /// that the end-of-text token is 2, which it is not: there it is the largest id of the sequence.
    pub(super) fn end_of_text(&self, row: &[u32]) -> usize {
        let first = |wanted: u32| row.iter().position(|&id| id == wanted).unwrap_or(0);
        match self.eos_token_id {
            2 => first(row.iter().copied().max().unwrap_or(0)),
            eos => first(eos),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_text_is_found_by_either_rule() {
        let config = |eos_token_id| ClipTextConfig {
            vocab_size: 10,
            hidden_size: 1,
            intermediate_size: 1,
            layers: 1,
            heads: 1,
            max_position_embeddings: 8,
            layer_norm_eps: 1e-5,
            act: Activation::Gelu,
            eos_token_id,
            projection: None,
        };
        let row = [8, 3, 2, 9, 7, 9];
        assert_eq!(config(2).end_of_text(&row), 3, "the first of the largest ids");
        assert_eq!(config(7).end_of_text(&row), 4);
        assert_eq!(config(6).end_of_text(&row), 0, "argmax of nothing found is the first place");
    }
}

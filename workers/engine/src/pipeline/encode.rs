//! Prompts to conditioning.

use candle_core::Tensor;

use super::{PipelineError, StageObserver};
use crate::models::ClipTextModel;
use crate::residency::SegmentEvent;
use crate::text::{self, Chunk, Emphasis, TextError, Tokenizer};

/// What is encoded, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodeRequest {
    /// The prompt.
    pub prompt: String,
    /// The negative prompt; `None` without guidance.
    pub negative_prompt: Option<String>,
    /// Whether `(word:1.2)` and `[word]` weigh.
    pub emphasis: Emphasis,
    /// Which layer conditions, counted from the end as the web UIs do: 1 the last, 2 the penultimate; 0 as the model's
    /// configuration says, which in this family is the last that its file has.
    pub clip_skip: usize,
}

/// Conditioning, and what it came from.
#[derive(Debug, Clone)]
pub struct Encoded {
    /// `[1, chunks × 77, width]`, or with a negative prompt `[2, chunks × 77, width]`, that one's row first.
    pub conditioning: Tensor,
    /// Windows of the prompt (and of the negative one, which is filled up to as many, or the other way round).
    pub chunks: usize,
}

/// Encodes a prompt, and its negative.
///
/// # Errors
/// A prompt that is too long or a clip skip that the model does not have, or a cancelled run.
pub fn encode(
    tokenizer: &Tokenizer,
    model: &ClipTextModel,
    request: &EncodeRequest,
    observer: &mut dyn StageObserver,
) -> Result<Encoded, PipelineError> {
    let mut prompt = text::chunks(tokenizer, &request.prompt, request.emphasis)?;
    let clip_skip = request.clip_skip.saturating_sub(1);
    let mut encoder = Encoder { model, clip_skip, observer, calls: 0 };
    let Some(negative) = &request.negative_prompt else {
        let conditioning = encoder.encode(&prompt)?;
        return Ok(Encoded { conditioning, chunks: prompt.len() });
    };
    let mut negative = text::chunks(tokenizer, negative, request.emphasis)?;
    text::equalize(tokenizer, &mut prompt, &mut negative);
    model.residency().expect(2);
    let positive_rows = encoder.encode(&prompt)?;
    let negative_rows = encoder.encode(&negative)?;
    Ok(Encoded { conditioning: Tensor::cat(&[&negative_rows, &positive_rows], 0)?, chunks: prompt.len() })
}

struct Encoder<'a> {
    model: &'a ClipTextModel,
    clip_skip: usize,
    observer: &'a mut dyn StageObserver,
    calls: usize,
}

impl Encoder<'_> {
    /// One prompt's windows as one row, `[1, windows × 77, width]`.
    fn encode(&mut self, chunks: &[Chunk]) -> Result<Tensor, PipelineError> {
        let ids: Vec<Vec<u32>> = chunks.iter().map(|chunk| chunk.ids.to_vec()).collect();
        let observer = &mut *self.observer;
        let output =
            self.model.forward(&ids, self.clip_skip, &mut |event: &SegmentEvent<'_>| observer.on_block(event))?;
        let call = self.calls;
        self.calls += 1;
        self.observer.on_tensor(&format!("text_encoder.{call}.out.last_hidden_state"), &output.last_hidden_state);
        self.observer.on_tensor(&format!("text_encoder.{call}.out.pooler_output"), &output.pooled);
        let weighed = text::weigh(&output.conditioning, chunks)?;
        let (windows, tokens, width) = weighed.dims3()?;
        Ok(weighed.reshape((1, windows * tokens, width))?)
    }
}

impl From<TextError> for PipelineError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Read { .. } | TextError::Malformed { .. } | TextError::Missing { .. } => {
                Self::Model(error.to_string())
            }
            TextError::TooLong { .. } | TextError::Encode(_) | TextError::UnknownEmphasis(_) => {
                Self::Request(error.to_string())
            }
            TextError::Weights(_) => Self::Internal(error.to_string()),
        }
    }
}

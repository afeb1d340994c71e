//! Why a stage did not finish.

use crate::formats::{WeightSet, scan_non_finite};
use crate::models::ModelError;
use crate::sampling::SamplingError;

/// Why a stage did not finish, by who can do something about it.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// The caller stopped it.
    #[error("cancelled")]
    Cancelled,
    /// The request cannot be met by this model; the text says why and what can.
    #[error("{0}")]
    Request(String),
    /// The model's files cannot be used.
    #[error("{0}")]
    Model(String),
    /// An output has values that are not numbers.
    #[error("{what} has values that are not finite")]
    NonFinite {
        /// Which output. What is to blame, [`blame`] finds out.
        what: &'static str,
    },
    /// A computation failed that should not.
    #[error("{0}")]
    Internal(String),
}

impl From<ModelError> for PipelineError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Cancelled { .. } => Self::Cancelled,
            ModelError::Config(_) | ModelError::Weights(_) => Self::Model(error.to_string()),
            ModelError::Input(text) => Self::Request(text),
            ModelError::Tensor(_) => Self::Internal(error.to_string()),
        }
    }
}

impl From<SamplingError> for PipelineError {
    fn from(error: SamplingError) -> Self {
        match error {
            SamplingError::UnknownSampler { .. }
            | SamplingError::UnknownSchedule { .. }
            | SamplingError::OutOfRange(_)
            | SamplingError::Unsupported(_) => Self::Request(error.to_string()),
            SamplingError::Config(_) => Self::Model(error.to_string()),
            SamplingError::State(_) | SamplingError::Tensor(_) => Self::Internal(error.to_string()),
        }
    }
}

impl From<candle_core::Error> for PipelineError {
    fn from(error: candle_core::Error) -> Self {
        Self::Internal(format!("computation failed: {error}"))
    }
}

/// After an output that was not finite: names the weights to blame. Reads every byte of the model's files, which is why
/// it is not done when they are loaded.
pub fn blame(weights: &WeightSet) -> String {
    match scan_non_finite(weights).as_slice() {
        [] => "the model's weights are finite: try another sampler, more steps or less guidance".into(),
        [first, others @ ..] => {
            let more = if others.is_empty() { String::new() } else { format!(" and {} more tensors", others.len()) };
            format!(
                "tensor `{}` in {} has {} such values{more}: get the file anew",
                first.tensor,
                first.path.display(),
                first.count
            )
        }
    }
}

//! What can go wrong with a model.

use std::ops::ControlFlow;

use thiserror::Error;

use super::ConfigError;
use crate::formats::WeightsError;
use crate::residency::{ExecutorError, LoadEvent};

/// Told after each segment that is loaded, with bytes done and to do; [`ControlFlow::Break`] cancels.
pub type LoadProgress<'a> = dyn FnMut(&LoadEvent<'_>) -> ControlFlow<()> + 'a;

/// Why a model was not loaded or gave no result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// Its configuration is not one that is supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its weights do not fit.
    #[error(transparent)]
    Weights(WeightsError),
    /// A computation failed.
    #[error("computation failed: {0}")]
    Tensor(candle_core::Error),
    /// The caller stopped it.
    #[error("cancelled at segment {segment}")]
    Cancelled {
        /// The segment that was not run or loaded.
        segment: String,
    },
    /// An input does not fit the model.
    #[error("{0}")]
    Input(String),
}

impl From<WeightsError> for ModelError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl From<candle_core::Error> for ModelError {
    fn from(error: candle_core::Error) -> Self {
        Self::Tensor(error)
    }
}

impl From<ExecutorError> for ModelError {
    fn from(error: ExecutorError) -> Self {
        match error {
            ExecutorError::Weights(error) => Self::Weights(error),
            ExecutorError::Tensor(error) => Self::Tensor(error),
            ExecutorError::Cancelled { segment } => Self::Cancelled { segment },
        }
    }
}

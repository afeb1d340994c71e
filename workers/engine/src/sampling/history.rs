//! What a checkpoint keeps of a sampler, besides the sample, the index of the call and the generator.

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::SamplingError;

/// A tensor's shape and values in f32, row-major.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedTensor {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// As many as the shape's product.
    pub values: Vec<f32>,
}

impl SavedTensor {
    /// Copies a tensor out of its device.
    pub fn save(tensor: &Tensor) -> Result<Self, SamplingError> {
        let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(Self { shape: tensor.dims().to_vec(), values })
    }

    /// Copies it back.
    pub fn load(&self, device: &Device) -> Result<Tensor, SamplingError> {
        let wanted = self.shape.iter().product::<usize>();
        if wanted != self.values.len() {
            return Err(SamplingError::State(format!(
                "a tensor of shape {:?} has {} values, it is damaged",
                self.shape,
                self.values.len()
            )));
        }
        Ok(Tensor::from_slice(&self.values, self.shape.as_slice(), device)?)
    }
}

/// A sampler's memory of earlier calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum History {
    /// Samplers of one step remember nothing.
    None,
    /// Heun between its two calls of a step: where the step began and its first derivative.
    Heun {
        /// The sample at the step's beginning.
        sample: SavedTensor,
        /// The derivative there.
        derivative: SavedTensor,
    },
    /// DPM++: the latest predicted originals, oldest first, at most as many as the solver's order.
    Multistep {
        /// Predicted originals.
        originals: Vec<SavedTensor>,
    },
    /// UniPC: like DPM++, and the last sample for the corrector.
    Unipc {
        /// Converted model outputs, oldest first.
        outputs: Vec<SavedTensor>,
        /// The sample that the last prediction started from.
        last_sample: Option<SavedTensor>,
        /// The order of the last prediction.
        last_order: usize,
    },
}

impl History {
    /// The error of a state that belongs to another sampler.
    pub(super) fn mismatch(&self, expected: &str) -> SamplingError {
        let found = match self {
            Self::None => "no memory",
            Self::Heun { .. } => "Heun's memory",
            Self::Multistep { .. } => "DPM++'s memory",
            Self::Unipc { .. } => "UniPC's memory",
        };
        SamplingError::State(format!("{found} was given to {expected}"))
    }
}

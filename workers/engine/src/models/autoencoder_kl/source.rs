//! Where the weights come from, in the type that is computed in.

use std::sync::{Mutex, PoisonError};

use crate::formats::{WeightSet, WeightsError};
use crate::ops::ComputeType;
use crate::residency::{Numbers, Parameter, ParameterSource};

/// Files of weights, whose numbers are rounded to what is computed in.
#[derive(Debug)]
pub(super) struct Source {
    weights: WeightSet,
    /// A plain value: read or replaced at once.
    compute: Mutex<ComputeType>,
}

impl Source {
    pub(super) fn new(weights: WeightSet) -> Self {
        Self { weights, compute: Mutex::default() }
    }

    pub(super) fn compute(&self) -> ComputeType {
        *self.compute.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn compute_in(&self, compute: ComputeType) {
        *self.compute.lock().unwrap_or_else(PoisonError::into_inner) = compute;
    }
}

impl ParameterSource for Source {
    fn open(&self, parameter: &Parameter) -> Result<Box<dyn Numbers + '_>, WeightsError> {
        Ok(Box::new(Rounded { numbers: self.weights.open(parameter)?, compute: self.compute() }))
    }

    fn let_go(&self, parameter: &Parameter) {
        ParameterSource::let_go(&self.weights, parameter);
    }
}

/// Numbers as the type that is computed in has them.
struct Rounded<'a> {
    numbers: Box<dyn Numbers + 'a>,
    compute: ComputeType,
}

impl Numbers for Rounded<'_> {
    fn read(&self, at: usize, out: &mut [f32]) {
        self.numbers.read(at, out);
        self.compute.round(out);
    }
}

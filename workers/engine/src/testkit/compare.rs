//! Comparing tensors.

use candle_core::Tensor;

use super::{FixtureError, SlicedTensor};

/// The largest difference between `found` and `expected`, relative to the largest magnitude that was expected.
///
/// # Errors
/// If shapes differ or a number of `found` is not finite.
pub fn compare(found: &Tensor, expected: &Tensor) -> Result<f64, FixtureError> {
    if found.dims() != expected.dims() {
        let text = format!("shape {:?} where {:?} was expected", found.dims(), expected.dims());
        return Err(FixtureError::Invalid(text));
    }
    difference(&numbers(found)?, &numbers(expected)?)
}

/// As [`compare`], for the numbers that `expected` has.
///
/// # Errors
/// As [`compare`].
pub fn compare_sliced(found: &Tensor, expected: &SlicedTensor, step: usize) -> Result<f64, FixtureError> {
    if found.dims() != expected.shape {
        let text = format!("shape {:?} where {:?} was expected", found.dims(), expected.shape);
        return Err(FixtureError::Invalid(text));
    }
    let found: Vec<f32> = numbers(found)?.into_iter().step_by(step).collect();
    difference(&found, &expected.values)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>, FixtureError> {
    Ok(tensor.flatten_all()?.to_vec1::<f32>()?)
}

fn difference(found: &[f32], expected: &[f32]) -> Result<f64, FixtureError> {
    if found.len() != expected.len() || found.is_empty() {
        return Err(FixtureError::Invalid(format!("{} numbers where {} were expected", found.len(), expected.len())));
    }
    if let Some(i) = found.iter().position(|v| !v.is_finite()) {
        return Err(FixtureError::Invalid(format!("number {i} is {}", found[i])));
    }
    let largest = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    let worst = found.iter().zip(expected).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    Ok(f64::from(worst) / f64::from(largest.max(f32::MIN_POSITIVE)))
}

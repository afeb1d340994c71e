//! Arithmetic on samples: scalar coefficients in double precision, tensors in single.

use candle_core::{DType, Tensor};

use super::settings::Limit;
use super::{PredictionType, SamplingError};

/// The sum of tensors with coefficients; a coefficient of zero leaves its tensor out.
pub(super) fn combine(terms: &[(f64, &Tensor)]) -> Result<Tensor, SamplingError> {
    let mut sum: Option<Tensor> = None;
    for &(coefficient, tensor) in terms {
        if coefficient == 0.0 && (sum.is_some() || terms.len() > 1) {
            continue;
        }
        let term = if coefficient == 1.0 { tensor.clone() } else { tensor.affine(coefficient, 0.0)? };
        sum = Some(match sum {
            None => term,
            Some(sum) => (sum + term)?,
        });
    }
    match (sum, terms.first()) {
        (Some(sum), _) => Ok(sum),
        (None, Some((_, tensor))) => Ok(tensor.zeros_like()?),
        (None, None) => Err(SamplingError::State("a sum of nothing was asked for".into())),
    }
}

/// The model's output in single precision, of the sample's shape.
pub(super) fn output_like(output: &Tensor, sample: &Tensor) -> Result<Tensor, SamplingError> {
    if output.dims() != sample.dims() {
        return Err(SamplingError::State(format!(
            "the model's output has shape {:?}, the sample {:?}",
            output.dims(),
            sample.dims()
        )));
    }
    Ok(output.to_dtype(DType::F32)?)
}

/// The original that the model predicts for a sample `alpha x0 + sigma noise` (the two roots of a variance of 1).
pub(super) fn predicted_original(
    prediction: PredictionType,
    output: &Tensor,
    sample: &Tensor,
    alpha: f64,
    sigma: f64,
) -> Result<Tensor, SamplingError> {
    match prediction {
        PredictionType::Epsilon => combine(&[(1.0 / alpha, sample), (-sigma / alpha, output)]),
        PredictionType::Velocity => combine(&[(alpha, sample), (-sigma, output)]),
        PredictionType::Sample => Ok(output.clone()),
        PredictionType::Flow => Err(flow()),
    }
}

/// The noise that the model predicts for the same sample.
pub(super) fn predicted_noise(
    prediction: PredictionType,
    output: &Tensor,
    sample: &Tensor,
    alpha: f64,
    sigma: f64,
) -> Result<Tensor, SamplingError> {
    match prediction {
        PredictionType::Epsilon => Ok(output.clone()),
        PredictionType::Velocity => combine(&[(alpha, output), (sigma, sample)]),
        PredictionType::Sample => combine(&[(1.0 / sigma, sample), (-alpha / sigma, output)]),
        PredictionType::Flow => Err(flow()),
    }
}

fn flow() -> SamplingError {
    SamplingError::Unsupported("flow prediction is not of this family of samplers".into())
}

/// Keeps a predicted original in range.
pub(super) fn limited(original: Tensor, limit: Limit) -> Result<Tensor, SamplingError> {
    match limit {
        Limit::None => Ok(original),
        Limit::Clip(range) => Ok(original.clamp(-range as f32, range as f32)?),
        Limit::Quantile(ratio, most) => {
            let images = (0..original.dim(0)?)
                .map(|i| {
                    let image = original.narrow(0, i, 1)?;
                    let mut sizes = image.abs()?.flatten_all()?.to_vec1::<f32>()?;
                    sizes.sort_by(f32::total_cmp);
                    let bound = (quantile(&sizes, ratio).max(1.0).min(most)) as f32;
                    Ok(image.clamp(-bound, bound)?.affine(1.0 / f64::from(bound), 0.0)?)
                })
                .collect::<Result<Vec<_>, SamplingError>>()?;
            Ok(Tensor::cat(&images, 0)?)
        }
    }
}

/// The quantile of ascending values, interpolated linearly.
fn quantile(ascending: &[f32], ratio: f64) -> f64 {
    let position = ratio * (ascending.len() - 1) as f64;
    let below = position.floor() as usize;
    let (low, high) = (f64::from(ascending[below]), f64::from(ascending[(below + 1).min(ascending.len() - 1)]));
    low + (high - low) * (position - below as f64)
}

//! Normalisations.

use candle_core::{D, Result, Tensor, bail};

use super::pointwise::{Activation, activate};
use super::tensor::{from_vec, with_slice};

/// Group normalisation of `x` `[N, .., C]` over each image and each of `groups` runs of channels, scaled by `weight`
/// `[C]`, shifted by `bias` `[C]`, then `act`.
///
/// # Errors
/// If `groups` does not divide `C` or shapes do not fit.
pub fn group_norm(
    x: &Tensor,
    groups: usize,
    weight: &Tensor,
    bias: &Tensor,
    eps: f64,
    act: Activation,
) -> Result<Tensor> {
    let c = x.dim(D::Minus1)?;
    let n = x.dim(0)?;
    if groups == 0 || c % groups != 0 || weight.dims() != [c] || bias.dims() != [c] {
        bail!(
            "group norm: {groups} groups, weight {:?}, bias {:?} do not fit {c} channels",
            weight.shape(),
            bias.shape()
        );
    }
    let y = with_slice(x, |x| {
        with_slice(weight, |weight| {
            with_slice(bias, |bias| {
                let mut out = vec![0f32; x.len()];
                let per = c / groups;
                for (x, out) in x.chunks_exact(x.len() / n).zip(out.chunks_exact_mut(x.len() / n)) {
                    for g in 0..groups {
                        let range = g * per..(g + 1) * per;
                        let values = || x.chunks_exact(c).flat_map(|p| p[range.clone()].iter().map(|&v| f64::from(v)));
                        let count = (x.len() / groups) as f64;
                        let mean = values().sum::<f64>() / count;
                        let var = values().map(|v| (v - mean) * (v - mean)).sum::<f64>() / count;
                        let scale = 1.0 / (var + eps).sqrt();
                        for (p, o) in x.chunks_exact(c).zip(out.chunks_exact_mut(c)) {
                            for i in range.clone() {
                                let v = (f64::from(p[i]) - mean) * scale;
                                o[i] = (v * f64::from(weight[i]) + f64::from(bias[i])) as f32;
                            }
                        }
                    }
                }
                Ok(out)
            })
        })
    })?;
    activate(&from_vec(y, x.shape())?, act)
}

/// Layer normalisation over the last axis, scaled by `weight` `[C]` and shifted by `bias` `[C]` where given.
///
/// # Errors
/// If shapes do not fit.
pub fn layer_norm(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let mean = x.mean_keepdim(D::Minus1)?;
    let centred = x.broadcast_sub(&mean)?;
    let scale = (centred.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    let mut y = centred.broadcast_div(&scale)?;
    if let Some(w) = weight {
        y = y.broadcast_mul(w)?;
    }
    if let Some(b) = bias {
        y = y.broadcast_add(b)?;
    }
    Ok(y)
}

/// `x / √(mean(x²) + eps) · weight` over the last axis, without the weight if `None`.
///
/// # Errors
/// If shapes do not fit.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    let y = x.broadcast_div(&scale)?;
    match weight {
        Some(w) => y.broadcast_mul(w),
        None => Ok(y),
    }
}

//! Moving elements without computing.

use candle_core::{Result, Tensor};

/// `[N, C, H, W]` to `[N, H, W, C]`, contiguous.
///
/// # Errors
/// If `x` has not four axes.
pub fn nchw_to_nhwc(x: &Tensor) -> Result<Tensor> {
    x.permute((0, 2, 3, 1))?.contiguous()
}

/// `[N, H, W, C]` to `[N, C, H, W]`, contiguous.
///
/// # Errors
/// If `x` has not four axes.
pub fn nhwc_to_nchw(x: &Tensor) -> Result<Tensor> {
    x.permute((0, 3, 1, 2))?.contiguous()
}

/// Joins along the last axis; all other axes must be equal.
///
/// # Errors
/// If shapes do not fit or `xs` is empty.
pub fn concat_channels(xs: &[&Tensor]) -> Result<Tensor> {
    Tensor::cat(xs, candle_core::D::Minus1)
}

/// Doubles height and width of `[N, H, W, C]`, each pixel four times.
///
/// # Errors
/// If `x` has not four axes.
pub fn upsample_nearest2x(x: &Tensor) -> Result<Tensor> {
    let (n, h, w, c) = x.dims4()?;
    x.reshape((n, h, 1, w, 1, c))?.broadcast_as((n, h, 2, w, 2, c))?.contiguous()?.reshape((n, 2 * h, 2 * w, c))
}

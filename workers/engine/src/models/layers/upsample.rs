//! Upsampling to a size that is not exactly twice the input's.

use candle_core::{Result, Tensor, bail};

use crate::ops::{UpsampleConv2d, conv2d_upsampled};

/// Nearest-neighbour upsampling of `x` `[N, h, w, C]` to `height` × `width`, each twice the input's or one less, then the
/// 3×3 convolution with padding 1: `[N, height, width, C']`. That is what diffusers does where the way down had rounded
/// up, since nearest neighbours of `2n − 1` are those of `2n` without the last.
///
/// The convolution over the doubled image sees, beyond the last line that is kept, one line where it should see zeros.
/// Its share is linear, so it is computed alone, by the same kernels on an image that is zero but for that line, and
/// taken off.
///
/// # Errors
/// If the size is neither.
pub(crate) fn conv2d_upsampled_to(x: &Tensor, conv: &UpsampleConv2d, height: usize, width: usize) -> Result<Tensor> {
    let (_, h, w, _) = x.dims4()?;
    let (odd_h, odd_w) = (height + 1 == 2 * h, width + 1 == 2 * w);
    if !(odd_h || height == 2 * h) || !(odd_w || width == 2 * w) {
        bail!("upsample: {h} × {w} cannot become {height} × {width}; only doubling, or one less, is possible");
    }
    let mut y = conv2d_upsampled(x, conv)?.narrow(1, 0, height)?.narrow(2, 0, width)?.contiguous()?;
    if odd_h {
        // The last kept line is 2h − 2 of the doubled image; line 1 of the doubled pair (zeros, last) sees only `last`.
        let share = beyond(&x.narrow(1, h - 1, 1)?, conv, 1)?.narrow(2, 0, width)?;
        y = subtract_last(&y, &share, 1)?;
    }
    if odd_w {
        let share = beyond(&x.narrow(2, w - 1, 1)?, conv, 2)?.narrow(1, 0, height)?;
        y = subtract_last(&y, &share, 2)?;
    }
    if odd_h && odd_w {
        // The corner was taken off twice.
        let corner = x.narrow(1, h - 1, 1)?.narrow(2, w - 1, 1)?;
        let padded = Tensor::cat(&[&corner.zeros_like()?, &corner], 1)?;
        let padded = Tensor::cat(&[&padded.zeros_like()?, &padded], 2)?;
        let share = conv2d_upsampled(&padded, conv)?.narrow(1, 1, 1)?.narrow(2, 1, 1)?;
        let share = share.broadcast_sub(&bias(x, conv)?)?.neg()?;
        let (last, rest) = (y.narrow(1, height - 1, 1)?, y.narrow(1, 0, height - 1)?);
        y = Tensor::cat(&[&rest, &subtract_last(&last, &share, 2)?], 1)?;
    }
    y.contiguous()
}

/// The convolution of the doubled `line` as seen from the line before it along `axis`, without the bias.
fn beyond(line: &Tensor, conv: &UpsampleConv2d, axis: usize) -> Result<Tensor> {
    let pair = Tensor::cat(&[&line.zeros_like()?, line], axis)?;
    let share = conv2d_upsampled(&pair, conv)?.narrow(axis, 1, 1)?;
    share.broadcast_sub(&bias(line, conv)?)
}

/// The convolution's bias, `[1, 1, 1, C]`.
fn bias(x: &Tensor, conv: &UpsampleConv2d) -> Result<Tensor> {
    let zero = Tensor::zeros((1, 1, 1, conv.in_channels()), x.dtype(), x.device())?;
    conv2d_upsampled(&zero, conv)?.narrow(1, 0, 1)?.narrow(2, 0, 1)
}

/// `y` with `share` taken off its last line along `axis`.
fn subtract_last(y: &Tensor, share: &Tensor, axis: usize) -> Result<Tensor> {
    let n = y.dim(axis)?;
    let last = (y.narrow(axis, n - 1, 1)? - share)?;
    if n == 1 { Ok(last) } else { Tensor::cat(&[&y.narrow(axis, 0, n - 1)?, &last], axis) }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::ops::{Conv2d, Padding, conv2d, upsample_nearest2x};

    #[test]
    fn cut_sizes_equal_cutting_before_the_convolution() -> Result<()> {
        let (cin, cout) = (5, 7);
        let weight = Tensor::randn(0f32, 1.0, (cout, cin, 3, 3), &Device::Cpu)?;
        let bias = Tensor::randn(0f32, 1.0, cout, &Device::Cpu)?;
        let fused = UpsampleConv2d::new(weight.clone(), Some(bias.clone()))?;
        let plain = Conv2d::new(weight, Some(bias), 1, Padding::uniform(1))?;
        for (h, w) in [(1, 1), (1, 4), (3, 1), (2, 2), (5, 4)] {
            let x = Tensor::randn(0f32, 1.0, (2, h, w, cin), &Device::Cpu)?;
            for (height, width) in [(2 * h, 2 * w), (2 * h - 1, 2 * w), (2 * h, 2 * w - 1), (2 * h - 1, 2 * w - 1)] {
                let cut = upsample_nearest2x(&x)?.narrow(1, 0, height)?.narrow(2, 0, width)?.contiguous()?;
                let expected = conv2d(&cut, &plain)?;
                let found = conv2d_upsampled_to(&x, &fused, height, width)?;
                assert_eq!(found.dims(), expected.dims());
                let error = (found - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
                let scale = expected.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(error <= 1e-5 * scale, "{h}×{w} to {height}×{width}: {error} of {scale}");
            }
        }
        Ok(())
    }

    #[test]
    fn other_sizes_are_refused() -> Result<()> {
        let conv = UpsampleConv2d::new(Tensor::zeros((1, 1, 3, 3), candle_core::DType::F32, &Device::Cpu)?, None)?;
        let x = Tensor::zeros((1, 4, 4, 1), candle_core::DType::F32, &Device::Cpu)?;
        for (height, width) in [(9, 8), (8, 6), (4, 8)] {
            assert!(conv2d_upsampled_to(&x, &conv, height, width).is_err());
        }
        Ok(())
    }
}

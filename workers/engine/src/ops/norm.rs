//! Normalisations.

use std::mem::MaybeUninit;

use candle_core::{D, Result, Shape, Tensor, bail};

use super::pointwise::{Activation, by_activation};
use super::simd::{self, fma, simd, sum_by};
use super::tensor::{Shared, build_rows, to_vec, with_slice};
use super::threads::parallel;

/// Pixels whose statistics are summed in f32 before they are added up in f64. Fixed, so that threads do not change sums.
pub(super) const STATS_BLOCK: usize = 64;

/// Elements that an inner loop should have.
const WIDE_ROW: usize = 256;

/// Group normalisation of `x` `[N, .., C]` over each image and each of `groups` runs of channels, scaled by `weight`
/// `[C]`, shifted by `bias` `[C]`, then `act`.
///
/// Moments are taken about each channel's first value, per channel and [`STATS_BLOCK`] pixels in f32, and joined in f64:
/// a mean that is large against the deviation costs no precision.
///
/// Working set: `2 · C · ⌈H · W / 64⌉ · N` floats.
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
    let (n, c) = (x.dim(0)?, x.dim(D::Minus1)?);
    if groups == 0 || c % groups != 0 || weight.dims() != [c] || bias.dims() != [c] || x.rank() < 2 {
        bail!(
            "group norm: {groups} groups, weight {:?} and bias {:?} do not fit {:?}",
            weight.shape(),
            bias.shape(),
            x.shape()
        );
    }
    if x.elem_count() == 0 {
        return x.contiguous();
    }
    let (weight, bias) = (to_vec(weight)?, to_vec(bias)?);
    let pixels = x.elem_count() / (n * c);
    with_slice(x, |xs| {
        let (scale, shift) = affine(xs, n, pixels, c, groups, &weight, &bias, eps)?;
        normalise_groups(xs, x.shape(), n, c, (&scale, &shift), act)
    })
}

/// `act(x · scale + shift)` for `n` images of `c` channels, each with its own scale and shift of each channel.
pub(super) fn normalise_groups(
    xs: &[f32],
    shape: &Shape,
    n: usize,
    c: usize,
    (scale, shift): (&[f32], &[f32]),
    act: Activation,
) -> Result<Tensor> {
    let pixels = xs.len() / (n * c);
    // Of few channels several pixels are taken as one, for loops that are worth their start.
    let wide = c * WIDE_ROW.div_ceil(c);
    let repeat = |v: &[f32]| -> Vec<f32> { v.chunks_exact(c).flat_map(|v| v.repeat(wide / c)).collect() };
    let (scale, shift) = (repeat(scale), repeat(shift));
    // SAFETY: each pixel of the output is written from its pixel of the input.
    unsafe {
        build_rows(n * pixels, c, 1200, shape, |first, out| {
            let mut done = 0;
            // A piece may reach from one image into the next.
            while done < out.len() {
                let row = first + done / c;
                let image = row / pixels;
                let len = ((image + 1) * pixels - row).min((out.len() - done) / c) * c;
                let affine = (&scale[image * wide..][..wide], &shift[image * wide..][..wide]);
                scale_shift(&xs[row * c..][..len], affine, &mut out[done..done + len], act);
                done += len;
            }
        })
    }
}

/// For each image and channel, what to multiply by and then to add.
#[allow(clippy::too_many_arguments)]
fn affine(
    xs: &[f32],
    n: usize,
    pixels: usize,
    c: usize,
    groups: usize,
    weight: &[f32],
    bias: &[f32],
    eps: f64,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let blocks = pixels.div_ceil(STATS_BLOCK);
    let mut sums = vec![0f32; n * blocks * 2 * c];
    let shared = Shared::of(&mut sums);
    parallel(n * blocks, xs.len() / 4, |i| {
        let (image, block) = (i / blocks, i % blocks);
        let image = &xs[image * pixels * c..(image + 1) * pixels * c];
        let part = &image[block * STATS_BLOCK * c..((block + 1) * STATS_BLOCK).min(pixels) * c];
        // SAFETY: block `i` has its own range of the sums, which hold zeros already.
        let sums = unsafe { std::slice::from_raw_parts_mut(shared.at(i * 2 * c), 2 * c) };
        let (sum, squares) = sums.split_at_mut(c);
        moments(part, &image[..c], sum, squares);
    })?;
    let (mut scale, mut shift) = (vec![0f32; n * c], vec![0f32; n * c]);
    for image in 0..n {
        let origin = &xs[image * pixels * c..][..c];
        let mut total = vec![(0f64, 0f64); c];
        for block in sums[image * blocks * 2 * c..(image + 1) * blocks * 2 * c].chunks_exact(2 * c) {
            for (i, total) in total.iter_mut().enumerate() {
                total.0 += f64::from(block[i]);
                total.1 += f64::from(block[c + i]);
            }
        }
        let of = image * c..(image + 1) * c;
        finish(origin, &total, pixels, groups, (weight, bias), eps, (&mut scale[of.clone()], &mut shift[of]));
    }
    Ok((scale, shift))
}

/// From what was summed up over `pixels` about `origin`, per channel, to what each channel is multiplied by and what is added.
pub(super) fn finish(
    origin: &[f32],
    total: &[(f64, f64)],
    pixels: usize,
    groups: usize,
    (weight, bias): (&[f32], &[f32]),
    eps: f64,
    (scale, shift): (&mut [f32], &mut [f32]),
) {
    let per = origin.len() / groups;
    let count = pixels as f64;
    for g in 0..groups {
        let range = g * per..(g + 1) * per;
        let mean_of = |i: usize| f64::from(origin[i]) + total[i].0 / count;
        let mean = range.clone().map(mean_of).sum::<f64>() / per as f64;
        let spread: f64 = range
            .clone()
            .map(|i| total[i].1 - total[i].0 * total[i].0 / count + count * (mean_of(i) - mean).powi(2))
            .sum();
        let inverse = 1.0 / (spread / (count * per as f64) + eps).sqrt();
        for i in range {
            let s = inverse * f64::from(weight[i]);
            scale[i] = s as f32;
            shift[i] = (f64::from(bias[i]) - mean * s) as f32;
        }
    }
}

/// Channels whose moments are taken together.
const COLUMN: usize = 16;

#[inline(always)]
fn moments_body<const FMA: bool>(xs: &[f32], origin: &[f32], sum: &mut [f32], squares: &mut [f32]) {
    let c = origin.len();
    let mut from = 0;
    // Some channels at a time, down all pixels, so that their sums stay in registers.
    while from + COLUMN <= c {
        let mut acc = [[0f32; COLUMN]; 2];
        for x in xs.chunks_exact(c) {
            let x = &x[from..from + COLUMN];
            for l in 0..COLUMN {
                let d = x[l] - origin[from + l];
                acc[0][l] += d;
                acc[1][l] = fma::<FMA>(d, d, acc[1][l]);
            }
        }
        sum[from..from + COLUMN].copy_from_slice(&acc[0]);
        squares[from..from + COLUMN].copy_from_slice(&acc[1]);
        from += COLUMN;
    }
    for i in from..c {
        for x in xs.chunks_exact(c) {
            let d = x[i] - origin[i];
            sum[i] += d;
            squares[i] = fma::<FMA>(d, d, squares[i]);
        }
    }
}

simd! {
    /// Sums up, per channel, the differences from `origin` and their squares.
    fn moments(xs: &[f32], origin: &[f32], sum: &mut [f32], squares: &mut [f32]) = moments_body
}

#[inline(always)]
fn scale_shift_body<const FMA: bool>(
    xs: &[f32],
    affine: (&[f32], &[f32]),
    out: &mut [MaybeUninit<f32>],
    act: Activation,
) {
    by_activation!(act, FMA, |f| scale_shift_map::<FMA>(xs, affine, out, f));
}

#[inline(always)]
fn scale_shift_map<const FMA: bool>(
    xs: &[f32],
    (scale, shift): (&[f32], &[f32]),
    out: &mut [MaybeUninit<f32>],
    f: impl Fn(f32) -> f32,
) {
    for (x, out) in xs.chunks(scale.len()).zip(out.chunks_mut(scale.len())) {
        for (((out, &x), &scale), &shift) in out.iter_mut().zip(x).zip(scale).zip(shift) {
            out.write(f(fma::<FMA>(x, scale, shift)));
        }
    }
}

simd! {
    /// Writes `act(x · scale + shift)`, per channel of one or several pixels.
    fn scale_shift(xs: &[f32], affine: (&[f32], &[f32]), out: &mut [MaybeUninit<f32>], act: Activation)
        = scale_shift_body
}

/// Layer normalisation over the last axis, scaled by `weight` `[C]` and shifted by `bias` `[C]` where given.
///
/// Working set: none.
///
/// # Errors
/// If shapes do not fit.
pub fn layer_norm(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    by_rows(x, weight, bias, eps, true)
}

/// `x / √(mean(x²) + eps) · weight` over the last axis, without the weight if `None`.
///
/// Working set: none.
///
/// # Errors
/// If shapes do not fit.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    by_rows(x, weight, None, eps, false)
}

fn by_rows(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64, centre: bool) -> Result<Tensor> {
    let c = x.dim(D::Minus1)?;
    let vector = |v: Option<&Tensor>, default: f32| match v {
        Some(v) if v.dims() == [c] => to_vec(v),
        Some(v) => bail!("norm: a parameter {:?} does not fit {:?}", v.shape(), x.shape()),
        None => Ok(vec![default; c]),
    };
    let (weight, bias) = (vector(weight, 1.0)?, vector(bias, 0.0)?);
    with_slice(x, |xs| {
        // SAFETY: each row of the output is written from its row of the input.
        unsafe {
            build_rows(xs.len() / c.max(1), c, 500, x.shape(), |row, out| {
                normalise(&xs[row * c..][..out.len()], (&weight, &bias), eps as f32, centre, out);
            })
        }
    })
}

#[inline(always)]
fn normalise_body<const FMA: bool>(
    xs: &[f32],
    (weight, bias): (&[f32], &[f32]),
    eps: f32,
    centre: bool,
    out: &mut [MaybeUninit<f32>],
) {
    let c = weight.len();
    let bias = &bias[..c];
    for (x, out) in xs.chunks_exact(c).zip(out.chunks_exact_mut(c)) {
        let mean = if centre { sum_by(x, |acc, v| acc + v) / c as f32 } else { 0.0 };
        let squares = sum_by(x, |acc, v| fma::<FMA>(v - mean, v - mean, acc));
        let scale = 1.0 / (squares / c as f32 + eps).sqrt();
        for i in 0..c {
            out[i].write(fma::<FMA>((x[i] - mean) * scale, weight[i], bias[i]));
        }
    }
}

simd! {
    /// Normalises rows as wide as the parameters.
    fn normalise(xs: &[f32], params: (&[f32], &[f32]), eps: f32, centre: bool, out: &mut [MaybeUninit<f32>])
        = normalise_body
}

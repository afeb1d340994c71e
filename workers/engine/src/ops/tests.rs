//! Every operation against a plain loop in f64, and against itself with other threads and other company.

use candle_core::{Device, Result, Tensor};

use super::*;

/// Uniform in −1 .. 1, by a linear congruential generator.
fn random(dims: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f32> = (0..dims.iter().product())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu).expect("as many values as elements")
}

fn values(x: &Tensor) -> Vec<f32> {
    x.flatten_all().and_then(|x| x.to_vec1()).expect("an f32 tensor")
}

fn wide(x: &Tensor) -> Vec<f64> {
    values(x).into_iter().map(f64::from).collect()
}

/// Compares with `want`: the largest difference is at most `tolerance` of the largest value.
fn close(got: &Tensor, want: &[f64], tolerance: f64, what: &str) {
    let got = values(got);
    assert_eq!(got.len(), want.len(), "{what}: elements");
    let size = want.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*g) - w).abs() / size;
        assert!(error <= tolerance, "{what}: element {i} is {g}, expected {w} (relative error {error:e})");
    }
}

fn bits(x: &Tensor) -> Vec<u32> {
    values(x).into_iter().map(f32::to_bits).collect()
}

fn erf_gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / 2f64.sqrt()))
}

/// By its series, which converges everywhere; exact to 1e-13 for |x| < 4, and 1 beyond that to 1.6e-8.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.5 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn activation(act: Activation, x: f64) -> f64 {
    match act {
        Activation::None => x,
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => erf_gelu(x),
        Activation::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
    }
}

const ACTIVATIONS: [Activation; 5] =
    [Activation::None, Activation::Silu, Activation::Gelu, Activation::QuickGelu, Activation::GeluTanh];

#[test]
fn exponential_stays_within_its_bound() {
    let mut worst = 0f64;
    for i in -873_000..883_000 {
        let x = i as f32 * 1e-4;
        let want = f64::from(x).exp();
        // The compiled path, reached through an operation, is tested below; here the formula itself.
        worst = worst.max((f64::from(simd::exp::<true>(x)) - want).abs() / want);
    }
    assert!(worst < 1.5 * 2f64.powi(-23), "{worst:e}");
    assert!(simd::exp::<true>(f32::NAN).is_nan());
    assert!(simd::exp::<true>(f32::NEG_INFINITY) < 1.3e-38);
    assert_eq!(simd::exp::<true>(0.0), 1.0);
}

#[test]
fn activations_equal_their_formulas() -> Result<()> {
    let x: Vec<f32> = (-60_000..60_001).map(|i| i as f32 * 1.7e-4).collect();
    let t = Tensor::new(x.as_slice(), &Device::Cpu)?;
    for act in ACTIVATIONS {
        let got = values(&activate(&t, act)?);
        for (&x, &y) in x.iter().zip(&got) {
            let want = activation(act, f64::from(x));
            // Left of −4 the reference for erf itself is not exact.
            let bound = 6e-7 * want.abs() * (1.0 + f64::from(x * x) / 4.0) + 1e-7;
            assert!((f64::from(y) - want).abs() <= bound, "{act:?}({x}) is {y}, expected {want}");
        }
        assert!(values(&activate(&Tensor::new(&[f32::NAN], &Device::Cpu)?, act)?)[0].is_nan(), "{act:?} hides NaN");
    }
    Ok(())
}

fn linear_reference(x: &[f64], w: &[f64], b: Option<&[f64]>, k: usize) -> Vec<f64> {
    x.chunks(k)
        .flat_map(|x| {
            w.chunks(k)
                .enumerate()
                .map(move |(n, w)| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>() + b.map_or(0.0, |b| b[n]))
        })
        .collect()
}

#[test]
fn linears_equal_plain_loops() -> Result<()> {
    for (m, k, n) in [(1, 7, 3), (2, 64, 48), (7, 33, 17), (13, 700, 5), (200, 40, 100), (97, 520, 33)] {
        let (x, w, b) = (random(&[m, k], 1), random(&[n, k], 2), random(&[n], 3));
        let residual = random(&[m, n], 4);
        let layer = Linear::new(w.clone(), Some(b.clone()))?;
        assert_eq!((layer.in_features(), layer.out_features()), (k, n));
        assert_eq!(layer.bytes(), Linear::bytes_of(n, k));
        let want = linear_reference(&wide(&x), &wide(&w), Some(&wide(&b)), k);
        for act in ACTIVATIONS {
            let want: Vec<f64> = want.iter().map(|&v| activation(act, v)).collect();
            close(&linear(&x, &layer, act)?, &want, 1e-5, &format!("{m}×{k}×{n} {act:?}"));
        }
        let plus: Vec<f64> = want.iter().zip(wide(&residual)).map(|(v, r)| v + r).collect();
        close(&linear_add(&x, &layer, &residual)?, &plus, 1e-5, "with residual");
        let bare = Linear::new(w.clone(), None)?;
        close(&linear(&x, &bare, Activation::None)?, &linear_reference(&wide(&x), &wide(&w), None, k), 1e-5, "bare");
    }
    Ok(())
}

#[test]
fn gated_linears_equal_linear_then_gate() -> Result<()> {
    for (m, k, n) in [(1, 20, 32), (7, 300, 64), (200, 40, 96), (97, 33, 10), (400, 64, 512)] {
        let x = random(&[2, m, k], 1);
        let layer = Linear::new(random(&[n, k], 2), Some(random(&[n], 3)))?;
        let got = linear_geglu(&x, &layer)?;
        assert_eq!(got.dims(), [2, m, n / 2]);
        assert_eq!(bits(&got), bits(&geglu(&linear(&x, &layer, Activation::None)?)?), "{m} × {k} × {n}");
    }
    Ok(())
}

#[test]
fn linears_take_views_and_keep_leading_axes() -> Result<()> {
    let x = random(&[2, 9, 5], 1).transpose(1, 2)?;
    let w = random(&[4, 9], 2);
    let y = linear(&x, &Linear::new(w.clone(), None)?, Activation::None)?;
    assert_eq!(y.dims(), [2, 5, 4]);
    close(&y, &linear_reference(&wide(&x), &wide(&w), None, 9), 1e-5, "transposed");
    let transposed = random(&[9, 4], 3).t()?;
    let y = linear(&x, &Linear::new(transposed.clone(), None)?, Activation::None)?;
    close(&y, &linear_reference(&wide(&x), &wide(&transposed), None, 9), 1e-5, "transposed weight");
    Ok(())
}

#[test]
fn a_row_has_the_same_bytes_alone_and_among_others() -> Result<()> {
    let (x, layer) = (random(&[300, 600], 1), Linear::new(random(&[70, 600], 2), Some(random(&[70], 3)))?);
    let all = linear(&x, &layer, Activation::Silu)?;
    for row in [0, 5, 299] {
        let one = linear(&x.narrow(0, row, 1)?, &layer, Activation::Silu)?;
        assert_eq!(bits(&one), bits(&all.narrow(0, row, 1)?), "row {row}");
    }
    Ok(())
}

struct ConvCase {
    image: [usize; 4],
    cout: usize,
    kernel: (usize, usize),
    stride: usize,
    padding: Padding,
}

fn conv_reference(x: &Tensor, w: &Tensor, b: &Tensor, case: &ConvCase) -> (Vec<f64>, [usize; 4]) {
    let ([n, h, wd, c], (kh, kw), p) = (case.image, case.kernel, case.padding);
    let (x, w, b) = (wide(x), wide(w), wide(b));
    let oh = (h + p.top + p.bottom - kh) / case.stride + 1;
    let ow = (wd + p.left + p.right - kw) / case.stride + 1;
    let mut out = Vec::new();
    for i in 0..n {
        for y in 0..oh {
            for xx in 0..ow {
                for o in 0..case.cout {
                    let mut sum = b[o];
                    for ky in 0..kh {
                        for kx in 0..kw {
                            let (iy, ix) = (y * case.stride + ky, xx * case.stride + kx);
                            if iy < p.top || ix < p.left || iy - p.top >= h || ix - p.left >= wd {
                                continue;
                            }
                            let pixel = ((i * h + iy - p.top) * wd + ix - p.left) * c;
                            for d in 0..c {
                                sum += x[pixel + d] * w[((o * c + d) * kh + ky) * kw + kx];
                            }
                        }
                    }
                    out.push(sum);
                }
            }
        }
    }
    (out, [n, oh, ow, case.cout])
}

fn conv_cases() -> Vec<ConvCase> {
    let same = Padding::uniform(1);
    let case = |image, cout, kernel, stride, padding| ConvCase { image, cout, kernel, stride, padding };
    vec![
        case([1, 8, 8, 16], 16, (3, 3), 1, same),
        case([2, 7, 5, 13], 9, (3, 3), 1, same),
        case([1, 1, 9, 20], 33, (3, 3), 1, same),
        case([1, 9, 1, 20], 3, (3, 3), 1, same),
        case([1, 1, 1, 5], 4, (3, 3), 1, same),
        case([2, 9, 11, 24], 40, (3, 3), 2, same),
        case([2, 8, 10, 24], 17, (3, 3), 2, Padding::BOTTOM_RIGHT),
        case([1, 7, 9, 4], 20, (3, 3), 2, Padding::BOTTOM_RIGHT),
        case([2, 6, 6, 3], 32, (3, 3), 1, same),
        case([1, 6, 5, 37], 3, (1, 1), 1, Padding::NONE),
        case([1, 9, 8, 24], 5, (1, 1), 2, Padding::NONE),
        case([1, 12, 10, 300], 18, (3, 3), 1, same),
        case([1, 9, 7, 8], 6, (5, 2), 3, Padding { top: 2, bottom: 0, left: 1, right: 3 }),
        case([1, 30, 30, 32], 4, (3, 3), 1, same),
        case([1, 30, 30, 32], 32, (3, 3), 1, same),
        case([2, 7, 9, 40], 50, (3, 3), 1, same),
        case([1, 1, 5, 32], 33, (3, 3), 1, same),
        case([2, 8, 1, 64], 48, (3, 3), 1, same),
        case([1, 6, 7, 320], 40, (3, 3), 1, Padding::NONE),
        case([1, 5, 6, 32], 32, (3, 3), 1, Padding { top: 2, bottom: 1, left: 0, right: 3 }),
    ]
}

#[test]
fn convolutions_equal_plain_loops() -> Result<()> {
    for case in conv_cases() {
        let what = format!("{:?} to {}, {:?}, stride {}", case.image, case.cout, case.kernel, case.stride);
        let x = random(&case.image, 1);
        let w = random(&[case.cout, case.image[3], case.kernel.0, case.kernel.1], 2);
        let b = random(&[case.cout], 3);
        let conv = Conv2d::new(w.clone(), Some(b.clone()), case.stride, case.padding)?;
        let (want, dims) = conv_reference(&x, &w, &b, &case);
        let got = conv2d(&x, &conv)?;
        assert_eq!(got.dims(), dims, "{what}");
        assert_eq!(conv.bytes(), Conv2d::bytes_of(case.cout, case.image[3], case.kernel, case.stride), "{what}");
        close(&got, &want, 1e-5, &what);
        let residual = random(&dims, 4);
        let plus: Vec<f64> = want.iter().zip(wide(&residual)).map(|(v, r)| v + r).collect();
        close(&conv2d_add(&x, &conv, &residual)?, &plus, 1e-5, &what);
        let view = nhwc_to_nchw(&x)?.permute((0, 2, 3, 1))?;
        assert_eq!(bits(&conv2d(&view, &conv)?), bits(&got), "{what}, from a view");
    }
    Ok(())
}

#[test]
fn upsampling_convolutions_equal_upsampling_then_convolving() -> Result<()> {
    for (image, cout) in [([1, 4, 4, 16], 16), ([2, 5, 3, 7], 10), ([1, 1, 6, 20], 3), ([1, 9, 1, 33], 18)] {
        let (x, w, b) = (random(&image, 1), random(&[cout, image[3], 3, 3], 2), random(&[cout], 3));
        let big = upsample_nearest2x(&x)?;
        let size = [image[0], 2 * image[1], 2 * image[2], image[3]];
        let case = ConvCase { image: size, cout, kernel: (3, 3), stride: 1, padding: Padding::uniform(1) };
        let (want, dims) = conv_reference(&big, &w, &b, &case);
        let conv = UpsampleConv2d::new(w, Some(b))?;
        assert_eq!(conv.bytes(), UpsampleConv2d::bytes_of(cout, image[3]));
        let got = conv2d_upsampled(&x, &conv)?;
        assert_eq!(got.dims(), dims);
        close(&got, &want, 1e-5, &format!("{image:?}"));
    }
    Ok(())
}

#[test]
fn attention_equals_plain_loops() -> Result<()> {
    let sizes = [
        (1, 1, 1, 1, 1),
        (2, 7, 7, 3, 8),
        (1, 130, 130, 2, 40),
        (1, 100, 77, 2, 20),
        (2, 5, 77, 2, 64),
        (1, 50, 900, 1, 33),
        (1, 70, 300, 1, 512),
    ];
    for (b, sq, skv, h, d) in sizes {
        for mask in [AttentionMask::None, AttentionMask::Causal] {
            if mask == AttentionMask::Causal && sq > skv {
                continue;
            }
            let (q, k, v) = (random(&[b, sq, h, d], 1), random(&[b, skv, h, d], 2), random(&[b, skv, h, d], 3));
            let scale = 4.0 / (d as f32).sqrt();
            let (qs, ks, vs) = (wide(&q), wide(&k), wide(&v));
            let mut want = Vec::new();
            for i in 0..b * sq {
                for head in 0..h {
                    let row = |x: &[f64], b: usize, s: usize, len: usize| {
                        let at = ((b * len + s) * h + head) * d;
                        x[at..at + d].to_vec()
                    };
                    let q = row(&qs, i / sq, i % sq, sq);
                    let seen = match mask {
                        AttentionMask::None => skv,
                        AttentionMask::Causal => i % sq + 1 + skv - sq,
                    };
                    let weights: Vec<f64> = (0..seen)
                        .map(|j| row(&ks, i / sq, j, skv).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>())
                        .map(|s| (s * f64::from(scale)).exp())
                        .collect();
                    let total: f64 = weights.iter().sum();
                    let mut out = vec![0f64; d];
                    for (j, w) in weights.iter().enumerate() {
                        for (out, v) in out.iter_mut().zip(row(&vs, i / sq, j, skv)) {
                            *out += w / total * v;
                        }
                    }
                    want.extend(out);
                }
            }
            let what = format!("{b} × {sq} × {skv}, {h} heads of {d}, {mask:?}");
            let got = attention(&q, &k, &v, scale, mask)?;
            assert_eq!(got.dims(), [b, sq, h * d]);
            close(&got, &want, 1e-5, &what);
            // Views: heads first, and halves of a joint projection.
            let swap = |x: &Tensor| x.transpose(1, 2)?.contiguous()?.transpose(1, 2);
            let joint = Tensor::cat(&[&k, &v], 3)?;
            let view = attention(&swap(&q)?, &joint.narrow(3, 0, d)?, &joint.narrow(3, d, d)?, scale, mask)?;
            assert_eq!(bits(&view), bits(&got), "{what}, from views");
            let strided = q.transpose(2, 3)?.contiguous()?.transpose(2, 3)?;
            assert_eq!(bits(&attention(&strided, &k, &v, scale, mask)?), bits(&got), "{what}, last axis strided");
        }
    }
    Ok(())
}

#[test]
fn attention_keeps_large_scores_apart_and_passes_nan_on() -> Result<()> {
    let (q, k, v) = (random(&[1, 20, 1, 8], 1), random(&[1, 700, 1, 8], 2), random(&[1, 700, 1, 8], 3));
    let y = values(&attention(&q, &k, &v, 1000.0, AttentionMask::None)?);
    assert!(y.iter().all(|v| v.abs() <= 1.0));
    let bad = (q * f64::NAN)?;
    assert!(values(&attention(&bad, &k, &v, 1.0, AttentionMask::None)?).iter().all(|v| v.is_nan()));
    Ok(())
}

#[test]
fn group_norms_equal_plain_loops() -> Result<()> {
    for (dims, groups) in [([2, 8, 8, 32], 8), ([1, 1, 1, 6], 3), ([2, 13, 11, 30], 5), ([3, 4, 1, 7], 7)] {
        for offset in [0.0, 100.0] {
            let c = dims[3];
            let x = (random(&dims, 1) + offset)?;
            let (w, b) = (random(&[c], 2), random(&[c], 3));
            let (xs, ws, bs) = (wide(&x), wide(&w), wide(&b));
            let (image, per) = (dims[1] * dims[2] * c, c / groups);
            let plain: Vec<f64> = (0..xs.len())
                .map(|i| {
                    let (n, g) = (i / image, i % c / per);
                    let group: Vec<f64> = (0..image).filter(|j| j % c / per == g).map(|j| xs[n * image + j]).collect();
                    let mean = group.iter().sum::<f64>() / group.len() as f64;
                    let var = group.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / group.len() as f64;
                    (xs[i] - mean) / (var + 1e-5).sqrt() * ws[i % c] + bs[i % c]
                })
                .collect();
            for act in [Activation::None, Activation::Silu] {
                let want: Vec<f64> = plain.iter().map(|&v| activation(act, v)).collect();
                // An offset of 100 costs the result two digits whoever computes it: x · scale + shift cancels.
                let tolerance = if offset == 0.0 { 1e-5 } else { 1e-4 };
                close(&group_norm(&x, groups, &w, &b, 1e-5, act)?, &want, tolerance, &format!("{dims:?} {act:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn row_norms_equal_plain_loops() -> Result<()> {
    for (rows, c) in [(1, 5), (7, 64), (300, 100), (3, 1)] {
        let (x, w, b) = ((random(&[rows, c], 1) + 0.5)?, random(&[c], 2), random(&[c], 3));
        let (ws, bs) = (wide(&w), wide(&b));
        let (mut layer, mut rms) = (Vec::new(), Vec::new());
        for row in wide(&x).chunks(c) {
            let mean = row.iter().sum::<f64>() / c as f64;
            let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / c as f64;
            let square = row.iter().map(|v| v * v).sum::<f64>() / c as f64;
            layer.extend((0..c).map(|i| (row[i] - mean) / (var + 1e-5).sqrt() * ws[i] + bs[i]));
            rms.extend((0..c).map(|i| row[i] / (square + 1e-6).sqrt() * ws[i]));
        }
        close(&layer_norm(&x, Some(&w), Some(&b), 1e-5)?, &layer, 1e-5, "layer norm");
        close(&rms_norm(&x, Some(&w), 1e-6)?, &rms, 1e-5, "rms norm");
    }
    let x = random(&[4, 30], 1);
    let ones = Tensor::ones(30, candle_core::DType::F32, &Device::Cpu)?;
    assert_eq!(bits(&layer_norm(&x, None, None, 1e-5)?), bits(&layer_norm(&x, Some(&ones), None, 1e-5)?));
    Ok(())
}

#[test]
fn element_wise_operations_equal_plain_loops() -> Result<()> {
    let (x, y) = (random(&[3, 70, 26], 1), random(&[3, 70, 26], 2));
    let sums: Vec<f64> = wide(&x).iter().zip(wide(&y)).map(|(x, y)| x + y).collect();
    close(&add(&x, &y)?, &sums, 1e-7, "add");
    let silus: Vec<f64> = wide(&x).iter().map(|&v| activation(Activation::Silu, v)).collect();
    close(&silu(&x)?, &silus, 1e-6, "silu");
    let gated: Vec<f64> =
        wide(&x).chunks(26).flat_map(|r| (0..13).map(|i| r[i] * erf_gelu(r[13 + i])).collect::<Vec<_>>()).collect();
    let got = geglu(&x)?;
    assert_eq!(got.dims(), [3, 70, 13]);
    close(&got, &gated, 1e-6, "geglu");
    Ok(())
}

#[test]
fn layouts_move_every_element() -> Result<()> {
    let x = random(&[2, 5, 7, 19], 1);
    let nchw = nhwc_to_nchw(&x)?;
    assert_eq!(nchw.dims(), [2, 19, 5, 7]);
    assert_eq!(bits(&nchw), bits(&x.permute((0, 3, 1, 2))?.contiguous()?));
    assert_eq!(bits(&nchw_to_nhwc(&nchw)?), bits(&x));
    let (y, z) = (random(&[2, 5, 7, 3], 2), random(&[2, 5, 7, 1], 3));
    let joined = concat_channels(&[&x, &y, &z])?;
    assert_eq!(bits(&joined), bits(&Tensor::cat(&[&x, &y, &z], 3)?));
    let big = upsample_nearest2x(&x)?;
    assert_eq!(big.dims(), [2, 10, 14, 19]);
    assert_eq!(bits(&nhwc_to_nchw(&big)?), bits(&nchw.upsample_nearest2d(10, 14)?));
    Ok(())
}

#[test]
fn timesteps_become_sines_and_cosines() -> Result<()> {
    for (flip, shift) in [(true, 0.0), (false, 1.0)] {
        let y = timestep_embedding(&[0.0, 981.0], 9, flip, shift, 10_000.0)?;
        assert_eq!(y.dims(), [2, 9]);
        let y = values(&y);
        for (i, t) in [0.0, 981.0f64].into_iter().enumerate() {
            for j in 0..4 {
                let angle = t * 10_000f64.powf(-(j as f64) / (4.0 - f64::from(shift)));
                let (s, c) = if flip { (4 + j, j) } else { (j, 4 + j) };
                // An angle of 981 has an error of 3e-5 in f32.
                assert!((f64::from(y[i * 9 + s]) - angle.sin()).abs() < 1e-4);
                assert!((f64::from(y[i * 9 + c]) - angle.cos()).abs() < 1e-4);
            }
            assert_eq!(y[i * 9 + 8], 0.0);
        }
    }
    assert!(timestep_embedding(&[1.0], 1, true, 0.0, 10_000.0).is_err());
    Ok(())
}

#[test]
fn threads_and_batches_do_not_change_a_byte() -> Result<()> {
    let x = random(&[2, 40, 36, 48], 1);
    let conv = Conv2d::new(random(&[50, 48, 3, 3], 2), Some(random(&[50], 3)), 1, Padding::uniform(1))?;
    let up = UpsampleConv2d::new(random(&[50, 48, 3, 3], 2), None)?;
    let layer = Linear::new(random(&[300, 48], 4), None)?;
    let (w, b) = (random(&[48], 5), random(&[48], 6));
    let all = |x: &Tensor| -> Result<Vec<Tensor>> {
        let (n, h, wd, c) = x.dims4()?;
        let tokens = x.reshape((n, h * wd, 4, c / 4))?;
        Ok(vec![
            conv2d(x, &conv)?,
            conv2d_upsampled(x, &up)?,
            linear(x, &layer, Activation::Gelu)?,
            group_norm(x, 8, &w, &b, 1e-5, Activation::Silu)?,
            layer_norm(x, Some(&w), Some(&b), 1e-5)?,
            attention(&tokens, &tokens, &tokens, 0.3, AttentionMask::Causal)?,
            geglu(x)?,
        ])
    };
    let run = |n: usize| -> Result<Vec<Tensor>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool");
        pool.install(|| all(&x))
    };
    let one = run(1)?;
    for n in [2, 3, 7] {
        for (i, (a, b)) in one.iter().zip(run(n)?).enumerate() {
            assert_eq!(bits(a), bits(&b), "operation {i} with {n} threads");
        }
    }
    let second = all(&x.narrow(0, 1, 1)?)?;
    for (i, (a, b)) in one.iter().zip(second).enumerate() {
        assert_eq!(bits(&a.narrow(0, 1, 1)?), bits(&b), "operation {i} alone");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let x = random(&[1, 4, 4, 8], 1);
    let conv = Conv2d::new(random(&[4, 8, 3, 3], 2), None, 1, Padding::NONE)?;
    let message = |r: Result<Tensor>| r.expect_err("shapes do not fit").to_string();
    assert!(message(conv2d(&random(&[1, 4, 4, 7], 1), &conv)).contains("7 channels"));
    assert!(message(conv2d(&random(&[1, 2, 4, 8], 1), &conv)).contains("smaller than the kernel"));
    assert!(message(conv2d_add(&x, &conv, &x)).contains("residual"));
    assert!(message(linear(&x, &Linear::new(random(&[3, 9], 1), None)?, Activation::None)).contains("3 × 9"));
    assert!(
        message(group_norm(&x, 3, &random(&[8], 1), &random(&[8], 1), 1e-5, Activation::None)).contains("3 groups")
    );
    assert!(message(geglu(&random(&[2, 3], 1))).contains("even"));
    assert!(message(add(&x, &random(&[8], 1))).contains("differ"));
    let half = x.to_dtype(candle_core::DType::F64)?;
    assert!(message(silu(&half)).contains("F64"));
    assert!(Linear::new(random(&[3, 9], 1), Some(random(&[9], 1))).is_err());
    assert!(Conv2d::new(random(&[3, 9, 3, 3], 1), None, 0, Padding::NONE).is_err());
    assert!(UpsampleConv2d::new(random(&[3, 9, 1, 1], 1), None).is_err());
    let (q, k) = (random(&[1, 5, 1, 4], 1), random(&[1, 3, 1, 4], 1));
    assert!(message(attention(&q, &k, &k, 1.0, AttentionMask::Causal)).contains("as many keys"));
    assert!(set_threads(0).is_err());
    Ok(())
}

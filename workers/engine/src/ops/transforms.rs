//! The transforms of Winograd's F(2×2, 3×3): additions only, over lanes of channels.

use super::kernel::NR;

/// Products per tile.
pub(super) const POINTS: usize = 16;
/// Channels that a transform takes at a time; it takes whole multiples.
pub(super) const WIDE: usize = 8;

/// `Bᵀ d B` of one tile of pixels of equal width; points are `stride` apart in `out`.
///
/// # Panics
/// If the pixels' width is no multiple of [`WIDE`], they differ, or the output is short.
pub(super) fn to_points(pixels: &[&[f32]; POINTS], out: &mut [f32], stride: usize) {
    let c = pixels[0].len();
    assert!(c.is_multiple_of(WIDE) && pixels.iter().all(|p| p.len() == c) && out.len() >= (POINTS - 1) * stride + c);
    let pixels = pixels.map(|p| p.as_ptr());
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        // SAFETY: the processor has AVX2; lengths were compared above.
        return unsafe { avx2::to_points(&pixels, c, out.as_mut_ptr(), stride) };
    }
    // SAFETY: lengths were compared above.
    unsafe { base::to_points(&pixels, c, out.as_mut_ptr(), stride) }
}

/// `Aᵀ m A + bias` of one tile of products with a panel; points are `stride` apart.
///
/// # Panics
/// If there are too few points.
pub(super) fn from_points(points: &[f32], stride: usize, bias: &[f32; NR], out: &mut [[f32; NR]; 4]) {
    assert!(points.len() >= (POINTS - 1) * stride + NR);
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        // SAFETY: the processor has AVX2; the length was compared above.
        return unsafe { avx2::from_points(points.as_ptr(), stride, bias, out) };
    }
    // SAFETY: the length was compared above.
    unsafe { base::from_points(points.as_ptr(), stride, bias, out) }
}

/// Defines both transforms by the module's `Lanes`, `load`, `store`, `plus` and `minus`.
macro_rules! transforms {
    ($(#[$feature:meta])?) => {
        /// `Bᵀ d` of one line: `d0 − d2, d1 + d2, d2 − d1, d1 − d3`.
        #[inline]
        $(#[$feature])?
        fn ahead(d: [Lanes; 4]) -> [Lanes; 4] {
            [minus(d[0], d[2]), plus(d[1], d[2]), minus(d[2], d[1]), minus(d[1], d[3])]
        }

        /// `Aᵀ m` of one line: `m0 + m1 + m2, m1 − m2 − m3`.
        #[inline]
        $(#[$feature])?
        fn back(m: [Lanes; 4]) -> [Lanes; 2] {
            [plus(plus(m[0], m[1]), m[2]), minus(minus(m[1], m[2]), m[3])]
        }

        /// # Safety
        /// Pixels have `c` floats, a multiple of the lanes, and so has each point in `out`.
        $(#[$feature])?
        pub(super) unsafe fn to_points(pixels: &[*const f32; POINTS], c: usize, out: *mut f32, stride: usize) {
            for at in (0..c).step_by(WIDE) {
                // SAFETY: the caller's promise.
                unsafe {
                    let mut lines = [[zero(); 4]; 4];
                    for (y, line) in lines.iter_mut().enumerate() {
                        let mut d = [zero(); 4];
                        for (x, d) in d.iter_mut().enumerate() {
                            *d = load(pixels[4 * y + x].add(at));
                        }
                        *line = ahead(d);
                    }
                    for x in 0..4 {
                        let column = ahead([lines[0][x], lines[1][x], lines[2][x], lines[3][x]]);
                        for (y, lanes) in column.into_iter().enumerate() {
                            store(out.add((4 * y + x) * stride + at), lanes);
                        }
                    }
                }
            }
        }

        /// # Safety
        /// Points have a panel's floats each.
        $(#[$feature])?
        pub(super) unsafe fn from_points(
            points: *const f32,
            stride: usize,
            bias: &[f32; NR],
            out: &mut [[f32; NR]; 4],
        ) {
            for at in (0..NR).step_by(WIDE) {
                // SAFETY: the caller's promise; a panel is a multiple of the lanes.
                unsafe {
                    let mut lines = [[zero(); 2]; 4];
                    for (y, line) in lines.iter_mut().enumerate() {
                        let mut m = [zero(); 4];
                        for (x, m) in m.iter_mut().enumerate() {
                            *m = load(points.add((4 * y + x) * stride + at));
                        }
                        *line = back(m);
                    }
                    let bias = load(bias.as_ptr().add(at));
                    for x in 0..2 {
                        let column = back([lines[0][x], lines[1][x], lines[2][x], lines[3][x]]);
                        for (y, lanes) in column.into_iter().enumerate() {
                            store(out[2 * y + x].as_mut_ptr().add(at), plus(lanes, bias));
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{NR, POINTS, WIDE};

    type Lanes = __m256;

    #[inline]
    #[target_feature(enable = "avx2")]
    fn zero() -> Lanes {
        _mm256_setzero_ps()
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn plus(a: Lanes, b: Lanes) -> Lanes {
        _mm256_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn minus(a: Lanes, b: Lanes) -> Lanes {
        _mm256_sub_ps(a, b)
    }

    /// # Safety
    /// There are eight floats.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const f32) -> Lanes {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }

    /// # Safety
    /// There is room for eight floats.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(to: *mut f32, lanes: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(to, lanes) }
    }

    transforms!(#[target_feature(enable = "avx2")]);
}

mod base {
    use super::{NR, POINTS, WIDE};

    type Lanes = [f32; WIDE];

    #[inline]
    fn zero() -> Lanes {
        [0.0; WIDE]
    }

    #[inline]
    fn plus(a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|l| a[l] + b[l])
    }

    #[inline]
    fn minus(a: Lanes, b: Lanes) -> Lanes {
        std::array::from_fn(|l| a[l] - b[l])
    }

    /// # Safety
    /// There are eight floats.
    #[inline]
    unsafe fn load(from: *const f32) -> Lanes {
        // SAFETY: the caller's promise; arrays of floats need no other alignment than floats.
        unsafe { from.cast::<Lanes>().read() }
    }

    /// # Safety
    /// There is room for eight floats.
    #[inline]
    unsafe fn store(to: *mut f32, lanes: Lanes) {
        // SAFETY: the caller's promise, as above.
        unsafe { to.cast::<Lanes>().write(lanes) }
    }

    transforms!();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths agree to the bit: they add the same numbers in the same order.
    #[test]
    fn transforms_are_the_same_on_every_processor() {
        let c = 24;
        let pixels: Vec<f32> = (0..POINTS * c).map(|i| (i as f32 * 0.37).sin()).collect();
        let slices: [&[f32]; POINTS] = std::array::from_fn(|p| &pixels[p * c..(p + 1) * c]);
        let (mut a, mut b) = (vec![0f32; POINTS * c], vec![0f32; POINTS * c]);
        to_points(&slices, &mut a, c);
        // SAFETY: pixels and points have `c` floats each.
        unsafe { base::to_points(&slices.map(|p| p.as_ptr()), c, b.as_mut_ptr(), c) };
        assert_eq!(a, b);
        // A corner by hand: (d0 − d2) of lines 0 and 2.
        let d = |y: usize, x: usize| pixels[(4 * y + x) * c];
        assert_eq!(a[0], (d(0, 0) - d(0, 2)) - (d(2, 0) - d(2, 2)));
        let bias = std::array::from_fn(|n| n as f32);
        let (mut x, mut y) = ([[0f32; NR]; 4], [[1f32; NR]; 4]);
        from_points(&a, c, &bias, &mut x);
        // SAFETY: points have 24 floats each.
        unsafe { base::from_points(a.as_ptr(), c, &bias, &mut y) };
        assert_eq!(x, y);
    }
}

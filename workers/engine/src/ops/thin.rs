//! Products with at most four outputs: sums run over eight lanes of the depth instead of sixteen outputs.

use super::kernel::MR;
use super::packed::{THIN, THIN_LANES};
use super::simd::{fma, simd};

/// Rows that are computed together, so that twelve sums are in registers.
const fn rows_at_once(n: usize) -> usize {
    match n {
        4 => 3,
        3 => 4,
        _ => 6,
    }
}

/// What a thin product reads and writes.
pub(super) struct Thin<'a> {
    /// For each tile of [`MR`] rows, for each tap, the rows' addresses.
    pub(super) table: &'a [*const f32],
    pub(super) taps: usize,
    pub(super) depth: usize,
    /// `n` rows of `taps · depth`.
    pub(super) weight: &'a [f32],
    pub(super) n: usize,
    pub(super) bias: [f32; THIN],
    /// `count` rows of [`THIN`], of which the first `n` are written.
    pub(super) sums: &'a mut [f32],
    pub(super) count: usize,
}

simd! {
    /// Computes `sums`.
    ///
    /// The table's addresses must be those of `depth` floats each.
    fn thin_product(thin: &mut Thin<'_>) = body
}

#[inline(always)]
fn body<const FMA: bool>(thin: &mut Thin<'_>) {
    match thin.n {
        1 => all::<FMA, 1, 6>(thin),
        2 => all::<FMA, 2, 6>(thin),
        3 => all::<FMA, 3, 4>(thin),
        _ => all::<FMA, 4, 3>(thin),
    }
}

#[inline(always)]
fn all<const FMA: bool, const N: usize, const M: usize>(thin: &mut Thin<'_>) {
    const { assert!(M == rows_at_once(N)) };
    let mut row = 0;
    while row + M <= thin.count {
        some::<FMA, N, M>(thin, row);
        row += M;
    }
    while row < thin.count {
        some::<FMA, N, 1>(thin, row);
        row += 1;
    }
}

#[inline(always)]
fn some<const FMA: bool, const N: usize, const M: usize>(thin: &mut Thin<'_>, row: usize) {
    let (taps, depth) = (thin.taps, thin.depth);
    let mut acc = [[[0f32; THIN_LANES]; N]; M];
    for tap in 0..taps {
        let x: [&[f32]; M] = std::array::from_fn(|i| {
            let at = thin.table[(row + i) / MR * taps * MR + tap * MR + (row + i) % MR];
            // SAFETY: the table's addresses are those of `depth` floats.
            unsafe { std::slice::from_raw_parts(at, depth) }
        });
        let w: [&[f32]; N] = std::array::from_fn(|n| &thin.weight[(n * taps + tap) * depth..][..depth]);
        for k in (0..depth / THIN_LANES).map(|k| k * THIN_LANES) {
            let w: [&[f32]; N] = std::array::from_fn(|n| &w[n][k..k + THIN_LANES]);
            for i in 0..M {
                let x = &x[i][k..k + THIN_LANES];
                for n in 0..N {
                    for l in 0..THIN_LANES {
                        acc[i][n][l] = fma::<FMA>(x[l], w[n][l], acc[i][n][l]);
                    }
                }
            }
        }
    }
    for i in 0..M {
        for n in 0..N {
            let mut lanes = acc[i][n];
            let mut width = THIN_LANES / 2;
            while width > 0 {
                for l in 0..width {
                    lanes[l] += lanes[l + width];
                }
                width /= 2;
            }
            thin.sums[(row + i) * THIN + n] = lanes[0] + thin.bias[n];
        }
    }
}

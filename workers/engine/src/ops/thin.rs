//! Products with at most four outputs: sums run over eight lanes of the depth instead of sixteen outputs.

#[cfg(test)]
use super::kernel::MR;
use super::packed::{THIN, THIN_LANES};
use super::product::slot;
use super::simd::{BASE_FMA, fma};

// Twelve sums at a time stay in registers: 6 rows × 1 or 2 outputs, 4 × 3, 3 × 4.

/// What a thin product reads and writes.
pub(super) struct Thin<'a> {
    /// Addresses of the rows, in the order of [`slot`].
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

/// Computes `sums`.
///
/// # Safety
/// The table's addresses are those of `depth` floats each, a multiple of [`THIN_LANES`].
pub(super) unsafe fn thin_product(thin: &mut Thin<'_>) {
    assert!(thin.depth.is_multiple_of(THIN_LANES) && thin.weight.len() == thin.n * thin.taps * thin.depth);
    macro_rules! by_outputs {
        ($f:ident) => {
            // SAFETY: the caller's promise, and the processor has what `$f` needs.
            unsafe {
                match thin.n {
                    1 => all(thin, $f::<1, 6>, 6, $f::<1, 1>),
                    2 => all(thin, $f::<2, 6>, 6, $f::<2, 1>),
                    3 => all(thin, $f::<3, 4>, 4, $f::<3, 1>),
                    _ => all(thin, $f::<4, 3>, 3, $f::<4, 1>),
                }
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        return by_outputs!(some_avx2);
    }
    by_outputs!(some_base)
}

/// # Safety
/// As [`thin_product`]; `some` computes `at_once` rows from the one given, `one` computes one.
unsafe fn all(
    thin: &mut Thin<'_>,
    some: unsafe fn(&mut Thin<'_>, usize),
    at_once: usize,
    one: unsafe fn(&mut Thin<'_>, usize),
) {
    let mut row = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while row + at_once <= thin.count {
            some(thin, row);
            row += at_once;
        }
        while row < thin.count {
            one(thin, row);
            row += 1;
        }
    }
}

impl Thin<'_> {
    /// Addresses of tap `tap` of `M` rows from `row` on.
    fn rows<const M: usize>(&self, row: usize, tap: usize) -> [*const f32; M] {
        std::array::from_fn(|i| self.table[slot(row + i, tap, self.taps)])
    }

    /// Weights of tap `tap` of each output.
    fn weights<const N: usize>(&self, tap: usize) -> [*const f32; N] {
        std::array::from_fn(|n| self.weight[(n * self.taps + tap) * self.depth..][..self.depth].as_ptr())
    }

    /// Adds up lanes, pairwise, and the bias.
    fn store<const N: usize, const M: usize>(&mut self, row: usize, acc: [[[f32; THIN_LANES]; N]; M]) {
        for (i, acc) in acc.iter().enumerate() {
            for (n, l) in acc.iter().enumerate() {
                let sum = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
                self.sums[(row + i) * THIN + n] = sum + self.bias[n];
            }
        }
    }
}

/// # Safety
/// As [`thin_product`], on a processor with AVX2 and FMA, for `M` rows from `row` on.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn some_avx2<const N: usize, const M: usize>(thin: &mut Thin<'_>, row: usize) {
    use std::arch::x86_64::*;
    let mut acc = [[_mm256_setzero_ps(); N]; M];
    for tap in 0..thin.taps {
        let (x, w) = (thin.rows::<M>(row, tap), thin.weights::<N>(tap));
        for k in (0..thin.depth).step_by(THIN_LANES) {
            // SAFETY: rows and weights have `depth` elements, a multiple of the lanes.
            unsafe {
                let x: [__m256; M] = std::array::from_fn(|i| _mm256_loadu_ps(x[i].add(k)));
                for n in 0..N {
                    let w = _mm256_loadu_ps(w[n].add(k));
                    for i in 0..M {
                        acc[i][n] = _mm256_fmadd_ps(x[i], w, acc[i][n]);
                    }
                }
            }
        }
    }
    let mut lanes = [[[0f32; THIN_LANES]; N]; M];
    for i in 0..M {
        for n in 0..N {
            // SAFETY: eight floats have room for eight lanes.
            unsafe { _mm256_storeu_ps(lanes[i][n].as_mut_ptr(), acc[i][n]) };
        }
    }
    thin.store(row, lanes);
}

/// # Safety
/// As [`thin_product`], for `M` rows from `row` on.
unsafe fn some_base<const N: usize, const M: usize>(thin: &mut Thin<'_>, row: usize) {
    let mut acc = [[[0f32; THIN_LANES]; N]; M];
    for tap in 0..thin.taps {
        let (x, w) = (thin.rows::<M>(row, tap), thin.weights::<N>(tap));
        for k in (0..thin.depth).step_by(THIN_LANES) {
            for i in 0..M {
                for n in 0..N {
                    for (l, acc) in acc[i][n].iter_mut().enumerate() {
                        // SAFETY: rows and weights have `depth` elements, a multiple of the lanes.
                        let (x, w) = unsafe { (*x[i].add(k + l), *w[n].add(k + l)) };
                        *acc = fma::<BASE_FMA>(x, w, *acc);
                    }
                }
            }
        }
    }
    thin.store(row, acc);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both paths, every number of outputs and rows at once, against plain loops.
    #[test]
    fn thin_products_equal_plain_loops() {
        let (taps, depth, count) = (3, 16, 8);
        for n in 1..=THIN {
            let x: Vec<f32> = (0..count * taps * depth).map(|i| ((i * 7) % 11) as f32 - 5.0).collect();
            let weight: Vec<f32> = (0..n * taps * depth).map(|i| ((i * 5) % 7) as f32 - 3.0).collect();
            let mut table = vec![std::ptr::null(); count.div_ceil(MR) * MR * taps];
            for (i, row) in x.chunks_exact(taps * depth).enumerate() {
                for (t, part) in row.chunks_exact(depth).enumerate() {
                    table[slot(i, t, taps)] = part.as_ptr();
                }
            }
            let check = |f: &dyn Fn(&mut Thin<'_>)| {
                let mut sums = vec![0f32; count * THIN];
                let bias = std::array::from_fn(|n| n as f32);
                f(&mut Thin { table: &table, taps, depth, weight: &weight, n, bias, sums: &mut sums, count });
                for (i, x) in x.chunks_exact(taps * depth).enumerate() {
                    for (o, w) in weight.chunks_exact(taps * depth).enumerate() {
                        let want = x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>() + o as f32;
                        assert_eq!(sums[i * THIN + o], want, "row {i}, output {o} of {n}");
                    }
                }
            };
            // SAFETY: the table holds addresses of `depth` floats.
            check(&|thin| unsafe { thin_product(thin) });
            check(&|thin| {
                for row in 0..count {
                    // SAFETY: as above.
                    unsafe {
                        match n {
                            1 => some_base::<1, 1>(thin, row),
                            2 => some_base::<2, 1>(thin, row),
                            3 => some_base::<3, 1>(thin, row),
                            _ => some_base::<4, 1>(thin, row),
                        }
                    }
                }
            });
        }
    }
}

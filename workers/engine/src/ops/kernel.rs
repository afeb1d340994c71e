//! The innermost product: six rows of A times a panel of sixteen columns of B, added to C in registers.
//!
//! Each element of C is one chain `c = a · b + c` over ascending `k`, whatever the tile or the instruction set's width.

/// Rows of a tile.
pub(super) const MR: usize = 6;
/// Columns of a panel: one cache line.
pub(super) const NR: usize = 16;

/// One cache line of a packed matrix: sixteen columns at one `k`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [f32; NR]);

/// What one call of the kernel reads and writes.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// For each tap, the addresses of [`MR`] rows of A.
    pub(super) rows: *const *const f32,
    /// How many taps.
    pub(super) taps: usize,
    /// The first element of each row.
    pub(super) from: usize,
    /// How many elements of each row.
    pub(super) len: usize,
    /// `taps · len` lines of B.
    pub(super) b: *const Line,
    /// The first of the rows of C.
    pub(super) c: *mut f32,
    /// Elements between rows of C.
    pub(super) ldc: usize,
}

/// Adds the product to the first `m` rows of C, or with `zero` replaces them by it.
///
/// # Safety
/// For `i < m` and `t < taps`, `rows[t · MR + i]` points to at least `from + len` floats; `b` to `taps · len` lines; `c` to
/// `m` rows of [`NR`] floats, `ldc` apart, which nobody else uses.
#[inline]
pub(super) unsafe fn multiply(m: usize, zero: bool, tile: Tile) {
    macro_rules! by_rows {
        ($f:ident) => {
            // SAFETY: the caller's promise, and the processor has what `$f` needs.
            unsafe {
                match (m, zero) {
                    (6, false) => $f::<6, false>(tile),
                    (6, true) => $f::<6, true>(tile),
                    (5, false) => $f::<5, false>(tile),
                    (5, true) => $f::<5, true>(tile),
                    (4, false) => $f::<4, false>(tile),
                    (4, true) => $f::<4, true>(tile),
                    (3, false) => $f::<3, false>(tile),
                    (3, true) => $f::<3, true>(tile),
                    (2, false) => $f::<2, false>(tile),
                    (2, true) => $f::<2, true>(tile),
                    (1, false) => $f::<1, false>(tile),
                    (1, true) => $f::<1, true>(tile),
                    _ => unreachable!("a tile has 1 to {MR} rows, not {m}"),
                }
            }
        };
    }
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        return by_rows!(multiply_avx2);
    }
    by_rows!(multiply_base)
}

/// # Safety
/// As [`multiply`], on a processor with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_avx2<const M: usize, const ZERO: bool>(t: Tile) {
    use std::arch::x86_64::*;
    let mut acc = [[_mm256_setzero_ps(); 2]; M];
    let mut b = t.b.cast::<f32>();
    // SAFETY: addresses are within what the caller promised.
    unsafe {
        if !ZERO {
            for (i, acc) in acc.iter_mut().enumerate() {
                let c = t.c.add(i * t.ldc);
                *acc = [_mm256_loadu_ps(c), _mm256_loadu_ps(c.add(8))];
            }
        }
        for tap in 0..t.taps {
            let rows: [*const f32; M] = std::array::from_fn(|i| (*t.rows.add(tap * MR + i)).add(t.from));
            for k in 0..t.len {
                let (b0, b1) = (_mm256_load_ps(b), _mm256_load_ps(b.add(8)));
                b = b.add(NR);
                for i in 0..M {
                    let a = _mm256_broadcast_ss(&*rows[i].add(k));
                    acc[i][0] = _mm256_fmadd_ps(a, b0, acc[i][0]);
                    acc[i][1] = _mm256_fmadd_ps(a, b1, acc[i][1]);
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            let c = t.c.add(i * t.ldc);
            _mm256_storeu_ps(c, acc[0]);
            _mm256_storeu_ps(c.add(8), acc[1]);
        }
    }
}

/// # Safety
/// As [`multiply`].
unsafe fn multiply_base<const M: usize, const ZERO: bool>(t: Tile) {
    let mut acc = [[0f32; NR]; M];
    let mut b = t.b;
    // SAFETY: addresses are within what the caller promised.
    unsafe {
        if !ZERO {
            for (i, acc) in acc.iter_mut().enumerate() {
                t.c.add(i * t.ldc).copy_to_nonoverlapping(acc.as_mut_ptr(), NR);
            }
        }
        for tap in 0..t.taps {
            let rows: [*const f32; M] = std::array::from_fn(|i| (*t.rows.add(tap * MR + i)).add(t.from));
            for k in 0..t.len {
                let line = &(*b).0;
                b = b.add(1);
                for i in 0..M {
                    let a = *rows[i].add(k);
                    for (acc, &b) in acc[i].iter_mut().zip(line) {
                        *acc = super::simd::fma::<{ super::simd::BASE_FMA }>(a, b, *acc);
                    }
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            acc.as_ptr().copy_to_nonoverlapping(t.c.add(i * t.ldc), NR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both paths, every tile height, against a plain loop.
    #[test]
    fn products_equal_plain_loops() {
        let (taps, len, from, ldc) = (3, 7, 2, 20);
        let a: Vec<Vec<f32>> =
            (0..taps * MR).map(|r| (0..from + len).map(|k| ((r * 13 + k * 7) % 11) as f32 - 5.0).collect()).collect();
        let rows: Vec<*const f32> = a.iter().map(|r| r.as_ptr()).collect();
        let b: Vec<Line> =
            (0..taps * len).map(|k| Line(std::array::from_fn(|n| ((k * 5 + n * 3) % 7) as f32 - 3.0))).collect();
        let expect = |i: usize, n: usize, start: f32| {
            let product = |t: usize, k: usize| a[t * MR + i][from + k] * b[t * len + k].0[n];
            (0..taps).flat_map(|t| (0..len).map(move |k| (t, k))).fold(start, |s, (t, k)| s + product(t, k))
        };
        let check = |m: usize, zero: bool, f: &dyn Fn(Tile)| {
            let mut c = vec![2f32; MR * ldc];
            f(Tile { rows: rows.as_ptr(), taps, from, len, b: b.as_ptr(), c: c.as_mut_ptr(), ldc });
            for i in 0..MR {
                for n in 0..ldc {
                    let want = if i < m && n < NR { expect(i, n, if zero { 0.0 } else { 2.0 }) } else { 2.0 };
                    assert_eq!(c[i * ldc + n], want, "row {i} column {n} of {m}, zero {zero}");
                }
            }
        };
        for m in 1..=MR {
            for zero in [false, true] {
                // SAFETY: the tile describes the vectors above.
                check(m, zero, &|t| unsafe { multiply(m, zero, t) });
            }
        }
        // SAFETY: as above.
        check(6, false, &|t| unsafe { multiply_base::<6, false>(t) });
        // SAFETY: as above.
        check(5, true, &|t| unsafe { multiply_base::<5, true>(t) });
    }
}

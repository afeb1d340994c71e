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

/// What C holds before the product is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// What lies there.
    Load,
    /// Zeros, whatever lies there.
    Zero,
    /// The line at [`Tile::bias`] in every row, whatever lies there.
    Bias,
}

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
    /// The addresses of the rows of C.
    pub(super) c: *const *mut f32,
    /// The first element of each row of C.
    pub(super) at: usize,
    /// Read by [`Start::Bias`] only.
    pub(super) bias: *const Line,
}

/// The kernel for one number of rows and one start.
///
/// # Safety
/// With `m` rows: for `i < m` and `t < taps`, `rows[t · MR + i]` points to at least `from + len` floats, `b` to `taps · len`
/// lines, and `c[i]` to at least `at +` [`NR`] floats, which nobody else uses.
pub(super) type Kernel = unsafe fn(&Tile);

/// The kernel for `m` rows (1 to [`MR`]) on this processor.
pub(super) fn kernel(m: usize, start: Start) -> Kernel {
    macro_rules! by_rows {
        ($f:ident) => {{
            const LOAD: u8 = Start::Load as u8;
            const ZERO: u8 = Start::Zero as u8;
            const BIAS: u8 = Start::Bias as u8;
            const KERNELS: [[Kernel; 3]; MR] = [
                [$f::<1, LOAD>, $f::<1, ZERO>, $f::<1, BIAS>],
                [$f::<2, LOAD>, $f::<2, ZERO>, $f::<2, BIAS>],
                [$f::<3, LOAD>, $f::<3, ZERO>, $f::<3, BIAS>],
                [$f::<4, LOAD>, $f::<4, ZERO>, $f::<4, BIAS>],
                [$f::<5, LOAD>, $f::<5, ZERO>, $f::<5, BIAS>],
                [$f::<6, LOAD>, $f::<6, ZERO>, $f::<6, BIAS>],
            ];
            KERNELS[m - 1][start as usize]
        }};
    }
    #[cfg(target_arch = "x86_64")]
    if super::simd::has_avx2_fma() {
        return by_rows!(multiply_avx2);
    }
    by_rows!(multiply_base)
}

/// # Safety
/// As [`Kernel`], on a processor with AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_avx2<const M: usize, const START: u8>(t: &Tile) {
    use std::arch::x86_64::*;
    let mut acc = [[_mm256_setzero_ps(); 2]; M];
    let mut b = t.b.cast::<f32>();
    // SAFETY: addresses are within what the caller promised.
    unsafe {
        if START != Start::Zero as u8 {
            for (i, acc) in acc.iter_mut().enumerate() {
                let c = if START == Start::Bias as u8 { t.bias.cast() } else { (*t.c.add(i)).add(t.at).cast_const() };
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
            let c = (*t.c.add(i)).add(t.at);
            _mm256_storeu_ps(c, acc[0]);
            _mm256_storeu_ps(c.add(8), acc[1]);
        }
    }
}

/// # Safety
/// As [`Kernel`].
unsafe fn multiply_base<const M: usize, const START: u8>(t: &Tile) {
    let mut acc = [[0f32; NR]; M];
    let mut b = t.b;
    // SAFETY: addresses are within what the caller promised.
    unsafe {
        if START != Start::Zero as u8 {
            for (i, acc) in acc.iter_mut().enumerate() {
                let c = if START == Start::Bias as u8 { t.bias.cast() } else { (*t.c.add(i)).add(t.at).cast_const() };
                c.copy_to_nonoverlapping(acc.as_mut_ptr(), NR);
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
            acc.as_ptr().copy_to_nonoverlapping((*t.c.add(i)).add(t.at), NR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both paths, every tile height and start, against a plain loop.
    #[test]
    fn products_equal_plain_loops() {
        let (taps, len, from, ldc, at) = (3, 7, 2, 20, 3);
        let a: Vec<Vec<f32>> =
            (0..taps * MR).map(|r| (0..from + len).map(|k| ((r * 13 + k * 7) % 11) as f32 - 5.0).collect()).collect();
        let rows: Vec<*const f32> = a.iter().map(|r| r.as_ptr()).collect();
        let b: Vec<Line> =
            (0..taps * len).map(|k| Line(std::array::from_fn(|n| ((k * 5 + n * 3) % 7) as f32 - 3.0))).collect();
        let bias = Line(std::array::from_fn(|n| n as f32));
        let expect = |i: usize, n: usize, start: f32| {
            let product = |t: usize, k: usize| a[t * MR + i][from + k] * b[t * len + k].0[n];
            (0..taps).flat_map(|t| (0..len).map(move |k| (t, k))).fold(start, |s, (t, k)| s + product(t, k))
        };
        let check = |m: usize, start: Start, f: Kernel| {
            let mut c = vec![2f32; MR * ldc];
            let c_rows: Vec<*mut f32> = c.chunks_exact_mut(ldc).map(|row| row.as_mut_ptr()).collect();
            let tile =
                Tile { rows: rows.as_ptr(), taps, from, len, b: b.as_ptr(), c: c_rows.as_ptr(), at, bias: &bias };
            // SAFETY: the tile describes the vectors above.
            unsafe { f(&tile) };
            for i in 0..MR {
                for n in 0..ldc {
                    let before = |n: usize| match start {
                        Start::Load => 2.0,
                        Start::Zero => 0.0,
                        Start::Bias => bias.0[n],
                    };
                    let inside = i < m && (at..at + NR).contains(&n);
                    let want = if inside { expect(i, n - at, before(n - at)) } else { 2.0 };
                    assert_eq!(c[i * ldc + n], want, "row {i} column {n} of {m}, {start:?}");
                }
            }
        };
        for start in [Start::Load, Start::Zero, Start::Bias] {
            for m in 1..=MR {
                check(m, start, kernel(m, start));
            }
        }
        check(6, Start::Load, multiply_base::<6, { Start::Load as u8 }>);
        check(5, Start::Zero, multiply_base::<5, { Start::Zero as u8 }>);
        check(1, Start::Bias, multiply_base::<1, { Start::Bias as u8 }>);
    }
}

//! Moving elements without computing.

use candle_core::{D, Result, Tensor, bail};

use super::tensor::{build_rows, with_slice};

/// `[N, C, H, W]` to `[N, H, W, C]`, contiguous.
///
/// # Errors
/// If `x` has not four axes.
pub fn nchw_to_nhwc(x: &Tensor) -> Result<Tensor> {
    let (n, c, h, w) = x.dims4()?;
    transpose(x, n, c, h * w, vec![n, h, w, c])
}

/// `[N, H, W, C]` to `[N, C, H, W]`, contiguous.
///
/// # Errors
/// If `x` has not four axes.
pub fn nhwc_to_nchw(x: &Tensor) -> Result<Tensor> {
    let (n, h, w, c) = x.dims4()?;
    transpose(x, n, h * w, c, vec![n, c, h, w])
}

/// `[n, rows, cols]` to `[n, cols, rows]`.
fn transpose(x: &Tensor, n: usize, rows: usize, cols: usize, shape: Vec<usize>) -> Result<Tensor> {
    with_slice(x, |x| {
        // SAFETY: the inner loops visit every row of the output and every element of it.
        unsafe {
            build_rows(n * cols, rows, 1000, shape, |first, out| {
                let lines = out.len() / rows.max(1);
                // Sixteen elements of the input share a cache line, so that many rows of it are taken at a time.
                for r in (0..rows).step_by(16) {
                    for line in 0..lines {
                        let (image, col) = ((first + line) / cols, (first + line) % cols);
                        let x = &x[image * rows * cols + col..];
                        for r in r..rows.min(r + 16) {
                            out[line * rows + r].write(x[r * cols]);
                        }
                    }
                }
            })
        }
    })
}

/// Joins along the last axis; all other axes must be equal.
///
/// # Errors
/// If shapes do not fit or `xs` is empty.
pub fn concat_channels(xs: &[&Tensor]) -> Result<Tensor> {
    match xs {
        [] => bail!("concat channels: needs at least one tensor"),
        [x] => x.contiguous(),
        [a, b] => join(a, b),
        [first, rest @ ..] => join(first, &concat_channels(rest)?),
    }
}

fn join(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (wa, wb) = (a.dim(D::Minus1)?, b.dim(D::Minus1)?);
    let lead = |x: &Tensor| x.dims()[..x.rank() - 1].to_vec();
    if lead(a) != lead(b) {
        bail!("concat channels: {:?} and {:?} differ in more than the last axis", a.shape(), b.shape());
    }
    let width = wa + wb;
    let mut shape = lead(a);
    let rows = shape.iter().product();
    shape.push(width);
    with_slice(a, |a| {
        with_slice(b, |b| {
            // SAFETY: each row of the output is one row of each input.
            unsafe {
                build_rows(rows, width, 300, shape, |first, out| {
                    for (i, out) in out.chunks_exact_mut(width).enumerate() {
                        let row = first + i;
                        let (to_a, to_b) = out.split_at_mut(wa);
                        to_a.write_copy_of_slice(&a[row * wa..(row + 1) * wa]);
                        to_b.write_copy_of_slice(&b[row * wb..(row + 1) * wb]);
                    }
                })
            }
        })
    })
}

/// Doubles height and width of `[N, H, W, C]`, each pixel four times.
///
/// # Errors
/// If `x` has not four axes.
pub fn upsample_nearest2x(x: &Tensor) -> Result<Tensor> {
    let (n, h, w, c) = x.dims4()?;
    with_slice(x, |x| {
        // SAFETY: each pixel of the output is one pixel of the input.
        unsafe {
            build_rows(n * 2 * h * 2 * w, c, 300, (n, 2 * h, 2 * w, c), |first, out| {
                for (i, out) in out.chunks_exact_mut(c.max(1)).enumerate() {
                    // Lines of all images count on, so halving them stays within an image.
                    let (line, col) = ((first + i) / (2 * w), (first + i) % (2 * w));
                    let from = (line / 2 * w + col / 2) * c;
                    out.write_copy_of_slice(&x[from..from + c]);
                }
            })
        }
    })
}

//! Weights as the kernels read them.

use std::mem::MaybeUninit;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::kernel::{Line, NR};
use super::tensor::{to_vec, with_slice};
use super::threads::parallel;

/// Outputs up to which a matrix is thin: a panel would be mostly padding.
pub(super) const THIN: usize = 4;
/// Elements that a thin product takes at a time.
pub(super) const THIN_LANES: usize = 8;

/// A matrix `[N, K]` with a bias, in the order in which a kernel reads it. `K` runs over the depth within each tap.
#[derive(Clone)]
pub(super) struct Packed {
    order: Order,
    bias: Option<Arc<[f32]>>,
    n: usize,
    taps: usize,
    depth: usize,
}

#[derive(Clone)]
pub(super) enum Order {
    /// Panels of sixteen rows, `k` by `k`, padded with zeros to whole panels.
    Panels(Arc<[Line]>),
    /// Row by row: at most [`THIN`] rows, and a depth of whole [`THIN_LANES`].
    Thin(Arc<[f32]>),
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Packed {} × {} × {}", self.n, self.taps, self.depth)
    }
}

/// Writes row `.0` of a weight, its numbers in the order of weight files; called by several threads. So a weight is packed a
/// panel at a time, and never lies in memory twice.
pub type WeightRows<'a> = dyn Fn(usize, &mut [f32]) + Sync + 'a;

/// Calls `f` with the rows of a weight in memory that has `n` of them.
pub(super) fn with_rows<R>(weight: &Tensor, n: usize, f: impl FnOnce(&WeightRows<'_>) -> Result<R>) -> Result<R> {
    with_slice(weight, |w| {
        let k = w.len() / n.max(1);
        f(&|row, out| out.copy_from_slice(&w[row * k..(row + 1) * k]))
    })
}

impl Packed {
    /// From `n` rows of `[depth, taps]`, the order of weight files.
    ///
    /// Working set: a panel's sixteen rows a thread.
    pub(super) fn new(
        weight: &WeightRows<'_>,
        bias: Option<&Tensor>,
        n: usize,
        taps: usize,
        depth: usize,
    ) -> Result<Self> {
        let k = taps * depth;
        if n == 0 || k == 0 {
            bail!("ops: a weight of {n} × {depth} × {taps} has no elements");
        }
        let bias = match bias {
            Some(b) if b.dims() == [n] => Some(to_vec(b)?.into()),
            Some(b) => bail!("ops: bias {:?} does not fit {n} outputs", b.shape()),
            None => None,
        };
        let order = if is_thin(n, taps, depth) {
            let (mut rows, mut from) = (vec![0f32; n * k], vec![0f32; k]);
            for (row, to) in rows.chunks_exact_mut(k).enumerate() {
                weight(row, &mut from);
                for d in 0..depth {
                    for t in 0..taps {
                        to[t * depth + d] = from[d * taps + t];
                    }
                }
            }
            Order::Thin(rows.into())
        } else {
            Order::Panels(panels(weight, n, taps, depth)?)
        };
        Ok(Self { order, bias, n, taps, depth })
    }

    /// The same matrix, shared, with `shift` added to its bias.
    pub(super) fn shifted(&self, shift: &[f32]) -> Result<Self> {
        if shift.len() != self.n {
            bail!("ops: a shift of {} elements does not fit {} outputs", shift.len(), self.n);
        }
        let bias: Arc<[f32]> = match &self.bias {
            Some(bias) => bias.iter().zip(shift).map(|(b, s)| b + s).collect(),
            None => shift.into(),
        };
        Ok(Self { bias: Some(bias), ..self.clone() })
    }

    pub(super) fn order(&self) -> &Order {
        &self.order
    }

    /// The bias of outputs `from ..`, with zeros where there is none.
    pub(super) fn bias_line(&self, from: usize) -> Line {
        let mut line = Line([0.0; NR]);
        if let Some(bias) = &self.bias {
            let part = &bias[from..self.n.min(from + NR)];
            line.0[..part.len()].copy_from_slice(part);
        }
        line
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn k(&self) -> usize {
        self.taps * self.depth
    }

    pub(super) fn taps(&self) -> usize {
        self.taps
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// What [`Self::bytes`] of such a matrix with a bias will be.
    pub(super) fn bytes_of(n: usize, taps: usize, depth: usize) -> usize {
        let rows = if is_thin(n, taps, depth) { n } else { n.next_multiple_of(NR) };
        (rows * taps * depth + n) * size_of::<f32>()
    }

    pub(super) fn bytes(&self) -> usize {
        let weight = match &self.order {
            Order::Panels(lines) => size_of_val(&**lines),
            Order::Thin(rows) => size_of_val(&**rows),
        };
        weight + self.bias.as_ref().map_or(0, |b| size_of_val(&**b))
    }
}

fn is_thin(n: usize, taps: usize, depth: usize) -> bool {
    n <= THIN && depth.is_multiple_of(THIN_LANES) && taps * depth >= 64
}

fn panels(weight: &WeightRows<'_>, n: usize, taps: usize, depth: usize) -> Result<Arc<[Line]>> {
    let k = taps * depth;
    let count = n.div_ceil(NR) * k;
    let mut lines = Arc::<[Line]>::new_uninit_slice(count);
    let Some(whole) = Arc::get_mut(&mut lines) else {
        bail!("ops: a new weight is shared already");
    };
    let shared = SharedLines(whole.as_mut_ptr().cast());
    parallel(n.div_ceil(NR), n * k, |panel| {
        // SAFETY: panels are disjoint ranges of `lines`.
        let lines = unsafe { shared.slice(panel * k, k) };
        let mut rows = vec![0f32; (n - panel * NR).min(NR) * k];
        rows.chunks_exact_mut(k).enumerate().for_each(|(at, row)| weight(panel * NR + at, row));
        for d in 0..depth {
            for t in 0..taps {
                let line = &mut lines[t * depth + d];
                let mut values = rows.chunks_exact(k).map(|row| row[d * taps + t]);
                for to in line {
                    to.write(values.next().unwrap_or(0.0));
                }
            }
        }
    })?;
    // SAFETY: every line of every panel was written.
    Ok(unsafe { lines.assume_init() })
}

/// A pointer to lines that several threads write, each its own range.
#[derive(Clone, Copy)]
pub(super) struct SharedLines(pub(super) *mut Line);
// SAFETY: a plain address; users take disjoint lines.
unsafe impl Send for SharedLines {}
// SAFETY: as above.
unsafe impl Sync for SharedLines {}

impl SharedLines {
    /// Lines `at .. at + len`, as their floats.
    ///
    /// # Safety
    /// The lines are within the memory, outlive `'a`, and nobody else uses them meanwhile.
    pub(super) unsafe fn slice<'a>(self, at: usize, len: usize) -> &'a mut [[MaybeUninit<f32>; NR]] {
        // SAFETY: the caller's promise; a line is its floats, which need no initial value.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at).cast(), len) }
    }
}

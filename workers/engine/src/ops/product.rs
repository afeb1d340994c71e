//! Products of rows, read where they lie, with a packed matrix: all linear layers and convolutions.

use std::cell::RefCell;

use candle_core::{Result, Tensor, bail};

use super::kernel::{Line, MR, NR, Tile, multiply};
use super::pointwise::{Activation, activate_in_place};
use super::tensor::{Output, Shared, to_vec};
use super::threads::{parallel, threads};

/// A matrix `[N, K]` in panels of sixteen rows, `k` by `k`, padded with zeros to whole panels.
#[derive(Clone)]
pub(super) struct Packed {
    lines: std::sync::Arc<[Line]>,
    bias: Option<std::sync::Arc<[f32]>>,
    n: usize,
    k: usize,
}

impl std::fmt::Debug for Packed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packed").field("n", &self.n).field("k", &self.k).field("bias", &self.bias.is_some()).finish()
    }
}

impl Packed {
    /// Packs `[n, taps, depth]` given in the order `[n, depth, taps]` (the order of weight files), so that `k` runs over
    /// depth within taps.
    pub(super) fn new(weight: &[f32], bias: Option<&Tensor>, n: usize, taps: usize, depth: usize) -> Result<Self> {
        let k = taps * depth;
        if weight.len() != n * k || n == 0 || k == 0 {
            bail!("ops: a weight of {} elements is not {n} × {depth} × {taps}", weight.len());
        }
        let bias = match bias {
            Some(b) if b.dims() == [n] => Some(to_vec(b)?.into()),
            Some(b) => bail!("ops: bias {:?} does not fit {n} outputs", b.shape()),
            None => None,
        };
        let mut lines = vec![Line([0.0; NR]); n.div_ceil(NR) * k];
        let shared = SharedLines(lines.as_mut_ptr());
        parallel(n.div_ceil(NR), n * k, |panel| {
            // SAFETY: panels are disjoint ranges of `lines`.
            let lines = unsafe { shared.panel(panel, k) };
            let rows = &weight[panel * NR * k..(n * k).min((panel + 1) * NR * k)];
            for d in 0..depth {
                for t in 0..taps {
                    for (out, row) in lines[t * depth + d].0.iter_mut().zip(rows.chunks_exact(k)) {
                        *out = row[d * taps + t];
                    }
                }
            }
        })?;
        Ok(Self { lines: lines.into(), bias, n, k })
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines) + self.bias.as_ref().map_or(0, |b| size_of_val(&**b))
    }
}

#[derive(Clone, Copy)]
struct SharedLines(*mut Line);
// SAFETY: a plain address; users take disjoint panels.
unsafe impl Send for SharedLines {}
// SAFETY: as above.
unsafe impl Sync for SharedLines {}

impl SharedLines {
    /// # Safety
    /// The panel is within the memory and nobody else uses it.
    unsafe fn panel<'a>(self, panel: usize, k: usize) -> &'a mut [Line] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(panel * k), k) }
    }
}

/// Where the rows of A lie.
///
/// # Safety
/// `locate` writes `taps` addresses of `depth` readable floats that live as long as `self` borrows them.
pub(super) unsafe trait Rows: Sync {
    /// How many pieces a row has.
    fn taps(&self) -> usize;
    /// How many elements each piece has.
    fn depth(&self) -> usize;
    /// Writes the address of piece `t` of row `row` to `to[t · step]`.
    fn locate(&self, row: usize, to: &mut [*const f32], step: usize);
}

/// Rows one behind the other.
pub(super) struct Dense<'a> {
    data: &'a [f32],
    width: usize,
}

impl<'a> Dense<'a> {
    pub(super) fn new(data: &'a [f32], width: usize) -> Self {
        Self { data, width }
    }
}

// SAFETY: the address is that of a checked slice of `width` elements.
unsafe impl Rows for Dense<'_> {
    fn taps(&self) -> usize {
        1
    }

    fn depth(&self) -> usize {
        self.width
    }

    fn locate(&self, row: usize, to: &mut [*const f32], _step: usize) {
        to[0] = self.data[row * self.width..(row + 1) * self.width].as_ptr();
    }
}

/// What happens to a product before it is stored: bias first, then `act`, then `+ residual`.
#[derive(Clone, Copy, Default)]
pub(super) struct Epilogue<'a> {
    pub(super) act: Activation,
    pub(super) residual: Option<&'a [f32]>,
}

/// Rows that are computed together: they share a pass over the packed matrix, and their inputs stay in the second cache.
const ROW_BLOCK: usize = 96;
/// How much of `k` is multiplied at a time, so that a panel's part (16 KiB) stays in the first cache.
const K_BLOCK: usize = 256;

/// Pieces shorter than this are copied together first, so that the kernel does not start anew every few elements.
const SHALLOW: usize = 16;

#[derive(Default)]
struct Scratch {
    table: Vec<*const f32>,
    gathered: Vec<f32>,
    sums: Vec<f32>,
}

impl Scratch {
    /// Copies the pieces of each row behind each other and points the table there. Gives the new taps and depth.
    ///
    /// # Safety
    /// The table holds `taps` addresses of `depth` floats for each of `count` rows.
    unsafe fn gather(&mut self, count: usize, taps: usize, depth: usize) -> (usize, usize) {
        let k = taps * depth;
        self.gathered.clear();
        self.gathered.reserve(count * k);
        for row in 0..count {
            for tap in 0..taps {
                let at = self.table[row / MR * taps * MR + tap * MR + row % MR];
                // SAFETY: the caller's promise.
                self.gathered.extend_from_slice(unsafe { std::slice::from_raw_parts(at, depth) });
            }
        }
        for row in 0..count {
            self.table[row] = self.gathered[row * k..(row + 1) * k].as_ptr();
        }
        (1, k)
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Writes `rows · packedᵀ` to `out`; `place(row)` is the index in `out` of the first element of a row's result.
///
/// Working set: per thread 96 rows × (64 bytes + 8 bytes per tap).
///
/// # Safety
/// For every row, `out` from `place(row)` on holds `n` elements that nobody else uses, and so does the residual.
pub(super) unsafe fn product(
    rows: &dyn Rows,
    count: usize,
    packed: &Packed,
    epilogue: Epilogue<'_>,
    out: Shared,
    place: &(dyn Fn(usize) -> usize + Sync),
) -> Result<()> {
    debug_assert_eq!(rows.taps() * rows.depth(), packed.k);
    if count == 0 {
        return Ok(());
    }
    let panels = packed.n.div_ceil(NR);
    let threads = threads()?;
    // Whole passes over the matrix while rows are many; else its panels are divided too, each read by one thread.
    let row_block = count.div_ceil(threads).next_multiple_of(MR).min(ROW_BLOCK);
    let row_blocks = count.div_ceil(row_block);
    let (row_block, row_blocks, splits) = if row_blocks >= 4 * threads || threads == 1 {
        (row_block, row_blocks, 1)
    } else {
        let blocks = count.div_ceil(2 * ROW_BLOCK);
        let block = count.div_ceil(blocks).next_multiple_of(MR);
        (block, count.div_ceil(block), (4 * threads).min(panels))
    };
    let cost = count * packed.n * packed.k / 40;
    parallel(row_blocks * splits, cost, |task| {
        let (block, split) = (task % row_blocks, task / row_blocks);
        let first = block * row_block;
        let range = first..count.min(first + row_block);
        SCRATCH.with_borrow_mut(|scratch| {
            // SAFETY: blocks are disjoint in rows or panels, and the caller's promise.
            unsafe {
                let panels = split * panels / splits..(split + 1) * panels / splits;
                multiply_block(rows, range, packed, panels, epilogue, out, place, scratch);
            }
        });
    })
}

/// # Safety
/// As [`product`], for the rows and panels given.
#[allow(clippy::too_many_arguments)]
unsafe fn multiply_block(
    rows: &dyn Rows,
    range: std::ops::Range<usize>,
    packed: &Packed,
    panels: std::ops::Range<usize>,
    epilogue: Epilogue<'_>,
    out: Shared,
    place: &(dyn Fn(usize) -> usize + Sync),
    scratch: &mut Scratch,
) {
    let (taps, depth, count) = (rows.taps(), rows.depth(), range.len());
    let tiles = count.div_ceil(MR);
    scratch.table.clear();
    scratch.table.resize(tiles * taps * MR, std::ptr::null());
    for (i, row) in range.clone().enumerate() {
        rows.locate(row, &mut scratch.table[i / MR * taps * MR + i % MR..(i / MR + 1) * taps * MR], MR);
    }
    let (taps, depth) = if taps > 1 && depth < SHALLOW {
        // SAFETY: the table was filled by `locate` just now.
        unsafe { scratch.gather(count, taps, depth) }
    } else {
        (taps, depth)
    };
    scratch.sums.resize(scratch.sums.len().max(count * NR), 0.0);
    let sums = &mut scratch.sums[..count * NR];
    for panel in panels {
        let n = panel * NR;
        let width = NR.min(packed.n - n);
        let mut start = [0f32; NR];
        if let Some(bias) = &packed.bias {
            start[..width].copy_from_slice(&bias[n..n + width]);
        }
        for row in sums.chunks_exact_mut(NR) {
            row.copy_from_slice(&start);
        }
        let lines = &packed.lines[panel * packed.k..(panel + 1) * packed.k];
        let mut multiply_part = |tap: usize, taps_now: usize, from: usize, len: usize| {
            let b = lines[tap * depth + from..(tap + taps_now - 1) * depth + from + len].as_ptr();
            for tile in 0..tiles {
                let table = &scratch.table[tile * taps * MR + tap * MR..];
                // SAFETY: `locate` gave `depth` floats for each of these taps; `b` and the sums were sliced above.
                unsafe {
                    let c = sums.as_mut_ptr().add(tile * MR * NR);
                    let tile_rows = MR.min(count - tile * MR);
                    let part = Tile { rows: table.as_ptr(), taps: taps_now, from, len, b, c, ldc: NR };
                    multiply(tile_rows, false, part);
                }
            }
        };
        if depth <= K_BLOCK {
            let at_once = (K_BLOCK / depth).max(1);
            for tap in (0..taps).step_by(at_once) {
                multiply_part(tap, at_once.min(taps - tap), 0, depth);
            }
        } else {
            let len = depth.div_ceil(depth.div_ceil(K_BLOCK));
            for tap in 0..taps {
                for from in (0..depth).step_by(len) {
                    multiply_part(tap, 1, from, len.min(depth - from));
                }
            }
        }
        activate_in_place(sums, epilogue.act);
        for (i, row) in range.clone().enumerate() {
            let at = place(row) + n;
            let sums = &sums[i * NR..i * NR + width];
            // SAFETY: the caller's promise.
            let to = unsafe { out.slice(at, width) };
            match epilogue.residual {
                None => {
                    for (to, &v) in to.iter_mut().zip(sums) {
                        to.write(v);
                    }
                }
                Some(residual) => {
                    for ((to, &v), &r) in to.iter_mut().zip(sums).zip(&residual[at..at + width]) {
                        to.write(v + r);
                    }
                }
            }
        }
    }
}

/// A tensor of `count` rows of `rows · packedᵀ`.
pub(super) fn product_tensor(
    rows: &dyn Rows,
    count: usize,
    packed: &Packed,
    epilogue: Epilogue<'_>,
    shape: Vec<usize>,
) -> Result<Tensor> {
    let n = packed.n;
    if let Some(r) = epilogue.residual
        && r.len() != count * n
    {
        bail!("ops: a residual of {} elements does not fit a result of {count} × {n}", r.len());
    }
    let mut out = Output::new(count * n);
    // SAFETY: rows are `n` apart in an output of `count · n` elements, and so is the residual.
    unsafe {
        product(rows, count, packed, epilogue, out.shared(), &|row| row * n)?;
        out.finish(shape)
    }
}

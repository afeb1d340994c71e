//! Products of rows, read where they lie, with a packed matrix: all linear layers and convolutions.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::kernel::{Line, MR, NR, Start, Tile, kernel};
use super::packed::{Order, Packed, THIN};
use super::pointwise::{Activation, activate_in_place, gate_in_place};
use super::tensor::{Output, Shared};
use super::thin::{Thin, thin_product};
use super::threads::{parallel, threads};

/// Where the rows of A lie.
///
/// # Safety
/// `locate` fills the table with addresses of `depth` readable floats that live as long as `self` borrows them.
pub(super) unsafe trait Rows: Sync {
    /// How many pieces a row has.
    fn taps(&self) -> usize;
    /// How many elements each piece has.
    fn depth(&self) -> usize;
    /// Writes the address of piece `t` of row `range.start + i` to `table[slot(i, t, taps)]`.
    fn locate(&self, range: Range<usize>, table: &mut [*const f32]);
}

/// Where the address of tap `t` of row `i` stands in a table: by tiles of [`MR`] rows, then taps, then rows.
#[inline(always)]
pub(super) fn slot(i: usize, t: usize, taps: usize) -> usize {
    (i / MR * taps + t) * MR + i % MR
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

// SAFETY: addresses are those of whole rows of a checked slice.
unsafe impl Rows for Dense<'_> {
    fn taps(&self) -> usize {
        1
    }

    fn depth(&self) -> usize {
        self.width
    }

    fn locate(&self, range: Range<usize>, table: &mut [*const f32]) {
        let rows = self.data[range.start * self.width..range.end * self.width].chunks_exact(self.width);
        for (to, row) in table.iter_mut().zip(rows) {
            *to = row.as_ptr();
        }
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
/// How much of `k` is multiplied at a time, so that a panel's part (24 KiB) stays in the first cache.
pub(super) const K_BLOCK: usize = 384;
/// Pieces shorter than this are copied together first, so that the kernel does not start anew every few elements.
const SHALLOW: usize = 16;

#[derive(Default)]
struct Scratch {
    table: Vec<*const f32>,
    targets: Vec<*mut f32>,
    gathered: Vec<f32>,
    sums: Vec<f32>,
    sum_rows: Vec<*mut f32>,
    /// One panel of each half, for [`gated_tensor`].
    pair: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

impl Scratch {
    /// Copies the pieces of each row behind each other and points the table there. Gives the new taps and depth.
    ///
    /// # Safety
    /// The table holds `taps` addresses of `depth` floats for each of `count` rows.
    unsafe fn gather(&mut self, count: usize, taps: usize, depth: usize) -> (usize, usize) {
        let k = taps * depth;
        self.gathered.resize(self.gathered.len().max(count * k), 0.0);
        for (i, row) in self.gathered.chunks_exact_mut(k).take(count).enumerate() {
            for (t, to) in row.chunks_exact_mut(depth).enumerate() {
                let from = self.table[slot(i, t, taps)];
                for (d, to) in to.iter_mut().enumerate() {
                    // SAFETY: the caller's promise.
                    *to = unsafe { *from.add(d) };
                }
            }
        }
        for (to, row) in self.table.iter_mut().zip(self.gathered.chunks_exact(k)).take(count) {
            *to = row.as_ptr();
        }
        (1, k)
    }
}

/// Writes `rows · packedᵀ` to `out`; `place(row)` is the index in `out` of the first element of a row's result.
///
/// Working set: per thread up to 192 rows × (80 bytes + 8 bytes per tap), and `192 · 4 · k` if the depth is below 16.
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
    if (rows.taps(), rows.depth()) != (packed.taps(), packed.depth()) {
        bail!("ops: rows of {} × {} do not fit {packed:?}", rows.taps(), rows.depth());
    }
    if count == 0 {
        return Ok(());
    }
    let panels = packed.n().div_ceil(NR);
    let threads = threads()?;
    // Whole passes over the matrix while rows are many; else its panels are divided too, each read by one thread.
    let row_block = count.div_ceil(threads).next_multiple_of(MR).min(ROW_BLOCK);
    let row_blocks = count.div_ceil(row_block);
    let (row_block, row_blocks, splits) = if row_blocks >= 4 * threads || threads == 1 || panels == 1 {
        (row_block, row_blocks, 1)
    } else {
        let blocks = count.div_ceil(2 * ROW_BLOCK);
        let block = count.div_ceil(blocks).next_multiple_of(MR);
        (block, count.div_ceil(block), (4 * threads).min(panels))
    };
    let cost = count * packed.n() * packed.k() / 40;
    parallel(row_blocks * splits, cost, |task| {
        let (block, split) = (task % row_blocks, task / row_blocks);
        let first = block * row_block;
        let range = first..count.min(first + row_block);
        let panels = split * panels / splits..(split + 1) * panels / splits;
        // SAFETY: blocks are disjoint in rows or panels, and the caller's promise.
        SCRATCH.with_borrow_mut(|s| unsafe { block_product(rows, range, packed, panels, epilogue, out, place, s) });
    })
}

/// # Safety
/// As [`product`], for the rows and panels given.
#[allow(clippy::too_many_arguments)]
unsafe fn block_product(
    rows: &dyn Rows,
    range: Range<usize>,
    packed: &Packed,
    panels: Range<usize>,
    epilogue: Epilogue<'_>,
    out: Shared,
    place: &(dyn Fn(usize) -> usize + Sync),
    scratch: &mut Scratch,
) {
    let (taps, depth, count) = (rows.taps(), rows.depth(), range.len());
    let tiles = count.div_ceil(MR);
    scratch.table.clear();
    scratch.table.resize(tiles * taps * MR, std::ptr::null());
    rows.locate(range.clone(), &mut scratch.table);
    scratch.targets.clear();
    // SAFETY: the caller's promise.
    scratch.targets.extend(range.clone().map(|row| unsafe { out.at(place(row)) }));
    match packed.order() {
        Order::Thin(weight) => {
            scratch.sums.resize(scratch.sums.len().max(count * NR), 0.0);
            let line = packed.bias_line(0);
            let mut thin = Thin {
                table: &scratch.table,
                taps,
                depth,
                weight,
                n: packed.n(),
                bias: std::array::from_fn(|n| line.0[n]),
                sums: &mut scratch.sums,
                count,
            };
            // SAFETY: the table was filled by `locate` just now, and the depth of thin weights is a multiple of lanes.
            unsafe { thin_product(&mut thin) };
            copy_out(&scratch.sums, THIN, &scratch.targets, 0, packed.n());
        }
        Order::Panels(lines) => {
            let (taps, depth) = if taps > 1 && depth < SHALLOW {
                // SAFETY: the table was filled by `locate` just now.
                unsafe { scratch.gather(count, taps, depth) }
            } else {
                (taps, depth)
            };
            for panel in panels.clone() {
                let lines = &lines[panel * packed.k()..(panel + 1) * packed.k()];
                let bias = packed.bias_line(panel * NR);
                // SAFETY: the table and the targets hold this block's rows.
                unsafe { panel_product(scratch, lines, &bias, panel * NR, packed.n(), taps, depth) };
            }
        }
    }
    if epilogue.act == Activation::None && epilogue.residual.is_none() {
        return;
    }
    let columns = panels.start * NR..packed.n().min(panels.end * NR);
    for row in range {
        let at = place(row) + columns.start;
        // SAFETY: these elements were written just now, and the caller's promise.
        let values = unsafe { std::slice::from_raw_parts_mut(out.at(at), columns.len()) };
        activate_in_place(values, epilogue.act);
        if let Some(residual) = epilogue.residual {
            for (v, r) in values.iter_mut().zip(&residual[at..at + columns.len()]) {
                *v += r;
            }
        }
    }
}

/// One panel of sixteen columns from `at` on, for all rows in the scratch.
///
/// # Safety
/// The table holds `taps` addresses of `depth` floats for each target, and each target `n` floats.
unsafe fn panel_product(
    scratch: &mut Scratch,
    lines: &[Line],
    bias: &Line,
    at: usize,
    n: usize,
    taps: usize,
    depth: usize,
) {
    let count = scratch.targets.len();
    // A panel that is wider than what is left goes through memory of its own.
    let aside = n - at < NR;
    if aside {
        scratch.sums.resize(scratch.sums.len().max(count * NR), 0.0);
        scratch.sum_rows.clear();
        scratch.sum_rows.extend(scratch.sums.chunks_exact_mut(NR).take(count).map(|row| row.as_mut_ptr()));
    }
    let (targets, at_target) = if aside { (&scratch.sum_rows, 0) } else { (&scratch.targets, at) };
    let multiply = |tap: usize, taps_now: usize, from: usize, len: usize| {
        let b = lines[tap * depth + from..(tap + taps_now - 1) * depth + from + len].as_ptr();
        let start = if tap == 0 && from == 0 { Start::Bias } else { Start::Load };
        let whole = kernel(MR, start);
        let mut tile =
            Tile { rows: std::ptr::null(), taps: taps_now, from, len, b, c: std::ptr::null(), at: at_target, bias };
        for (i, targets) in targets.chunks(MR).enumerate() {
            tile.rows = scratch.table[(i * taps + tap) * MR..].as_ptr();
            tile.c = targets.as_ptr();
            // SAFETY: the caller's promise for rows and targets; `b` and the sums were sliced above.
            unsafe {
                match targets.len() {
                    MR => whole(&tile),
                    m => kernel(m, start)(&tile),
                }
            }
        }
    };
    if depth <= K_BLOCK {
        let at_once = (K_BLOCK / depth).max(1);
        for tap in (0..taps).step_by(at_once) {
            multiply(tap, at_once.min(taps - tap), 0, depth);
        }
    } else {
        let len = depth.div_ceil(depth.div_ceil(K_BLOCK));
        for tap in 0..taps {
            for from in (0..depth).step_by(len) {
                multiply(tap, 1, from, len.min(depth - from));
            }
        }
    }
    if aside {
        copy_out(&scratch.sums, NR, &scratch.targets, at, n - at);
    }
}

/// Copies the first `width` of each `stride` sums to its target from `at` on.
fn copy_out(sums: &[f32], stride: usize, targets: &[*mut f32], at: usize, width: usize) {
    for (sums, target) in sums.chunks_exact(stride).zip(targets) {
        for (i, &v) in sums[..width].iter().enumerate() {
            // SAFETY: callers have targets of at least `at + width` elements.
            unsafe { target.add(at + i).write(v) };
        }
    }
}

/// A tensor of `count` rows of `n / 2`: of each row's product the first half times the gelu of the second. Panels of both
/// halves are computed side by side, so that the product itself is never in memory.
///
/// Working set: as [`product`], and 12 KiB a thread.
pub(super) fn gated_tensor(rows: &dyn Rows, count: usize, packed: &Packed, shape: Vec<usize>) -> Result<Tensor> {
    let half = packed.n() / 2;
    let Order::Panels(lines) = packed.order() else {
        bail!("ops: {packed:?} is not packed in panels");
    };
    if packed.n() != 2 * half || !half.is_multiple_of(NR) || rows.taps() != 1 || rows.depth() != packed.k() {
        bail!("ops: rows of {} × {} do not fit the halves of {packed:?}", rows.taps(), rows.depth());
    }
    let panels = half / NR;
    let threads = threads()?;
    let block = count.div_ceil(threads).next_multiple_of(MR).clamp(MR, ROW_BLOCK);
    let blocks = count.div_ceil(block);
    let splits = if blocks >= 4 * threads { 1 } else { (4 * threads).min(panels) };
    let mut out = Output::new(count * half);
    let shared = out.shared();
    parallel(blocks * splits, count * packed.n() * packed.k() / 40, |task| {
        let (at, split) = (task % blocks, task / blocks);
        let range = at * block..count.min((at + 1) * block);
        SCRATCH.with_borrow_mut(|scratch| {
            let len = range.len() * NR;
            scratch.table.clear();
            scratch.table.resize(range.len().next_multiple_of(MR), std::ptr::null());
            rows.locate(range.clone(), &mut scratch.table);
            scratch.pair.resize(scratch.pair.len().max(2 * ROW_BLOCK * NR), 0.0);
            for panel in split * panels / splits..(split + 1) * panels / splits {
                for (i, panel) in [panel, panels + panel].into_iter().enumerate() {
                    scratch.targets.clear();
                    let targets = scratch.pair[i * len..(i + 1) * len].chunks_exact_mut(NR);
                    scratch.targets.extend(targets.map(|row| row.as_mut_ptr()));
                    let lines = &lines[panel * packed.k()..(panel + 1) * packed.k()];
                    // SAFETY: the table was filled by `locate` just now, and targets have one panel each.
                    unsafe { panel_product(scratch, lines, &packed.bias_line(panel * NR), 0, NR, 1, packed.k()) };
                }
                let (hidden, gate) = scratch.pair.split_at_mut(len);
                gate_in_place(hidden, &gate[..len]);
                for (row, values) in range.clone().zip(hidden.chunks_exact(NR)) {
                    // SAFETY: tasks have different rows or panels of an output of `count · half` elements.
                    unsafe { shared.slice(row * half + panel * NR, NR) }.write_copy_of_slice(values);
                }
            }
        });
    })?;
    // SAFETY: tasks are all panels of all rows.
    unsafe { out.finish(shape) }
}

/// A tensor of `count` rows of `rows · packedᵀ`.
pub(super) fn product_tensor(
    rows: &dyn Rows,
    count: usize,
    packed: &Packed,
    epilogue: Epilogue<'_>,
    shape: Vec<usize>,
) -> Result<Tensor> {
    let n = packed.n();
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

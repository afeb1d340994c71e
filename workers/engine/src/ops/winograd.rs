//! 3×3 convolutions of stride one by Winograd's minimal filtering F(2×2, 3×3): 16 multiplications for four outputs
//! instead of 36, for 16/9 of the weight's bytes.
//!
//! `Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A` for tiles `d` of 4×4 pixels that overlap by two (Lavin and Gray 2015). All constants
//! are 0, ±1 and ½, so that rounding grows little: 2e-6 of the largest output where the plain sum has 5e-7.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::conv::Padding;
use super::kernel::{Line, MR, NR, Start, Tile, kernel};
use super::packed::{Order, Packed, WeightRows};
use super::pointwise::activate_in_place;
use super::product::{Epilogue, K_BLOCK};
use super::tensor::{Output, Shared};
use super::threads::{parallel, threads};
use super::transforms::{POINTS, from_points, to_points};

/// Tiles that are computed together; a multiple of the kernel's rows.
const TILES: usize = 36;

/// `G g Gᵀ` of `n` rows of `[cin, 3, 3]`, packed.
pub(super) fn pack(weight: &WeightRows<'_>, bias: Option<&Tensor>, n: usize, cin: usize) -> Result<Packed> {
    // Of each line of three: g0, (g0 + g1 + g2) / 2, (g0 − g1 + g2) / 2, g2.
    let line = |g: [f64; 3]| [g[0], (g[0] + g[1] + g[2]) / 2.0, (g[0] - g[1] + g[2]) / 2.0, g[2]];
    let points = |row: usize, points: &mut [f32]| {
        let mut filters = vec![0f32; cin * 9];
        weight(row, &mut filters);
        for (points, g) in points.chunks_exact_mut(POINTS).zip(filters.chunks_exact(9)) {
            let rows: [[f64; 4]; 3] = std::array::from_fn(|y| line(std::array::from_fn(|x| f64::from(g[3 * y + x]))));
            let columns: [[f64; 4]; 4] = std::array::from_fn(|x| line([rows[0][x], rows[1][x], rows[2][x]]));
            points.iter_mut().enumerate().for_each(|(p, to)| *to = columns[p % 4][p / 4] as f32);
        }
    };
    Packed::new(&points, bias, n, POINTS, cin)
}

/// A convolution of one image size.
pub(super) struct Winograd<'a> {
    pub(super) image: &'a [f32],
    /// Images, height, width, channels.
    pub(super) size: (usize, usize, usize, usize),
    pub(super) padding: Padding,
    pub(super) packed: &'a Packed,
    /// At least as many zeros as channels.
    pub(super) zeros: &'a [f32],
    pub(super) epilogue: Epilogue<'a>,
}

#[derive(Default)]
struct Scratch {
    /// Transformed pixels: for each point, tile and channel.
    pixels: Vec<f32>,
    rows: Vec<*const f32>,
    /// Products with one panel: for each point, tile and column.
    products: Vec<f32>,
    targets: Vec<*mut f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Tiles of an image, across and down.
#[derive(Clone, Copy)]
struct Grid {
    oh: usize,
    ow: usize,
    down: usize,
    across: usize,
}

impl Winograd<'_> {
    /// The result, `[N, H', W', Cout]`.
    ///
    /// Working set: per thread `16 · 36 · (Cin + 16)` floats.
    pub(super) fn run(&self) -> Result<Tensor> {
        let (n, h, w, c) = self.size;
        let p = self.padding;
        let (oh, ow) = (h + p.top + p.bottom - 2, w + p.left + p.right - 2);
        let grid = Grid { oh, ow, down: oh.div_ceil(2), across: ow.div_ceil(2) };
        let cout = self.packed.n();
        let Order::Panels(lines) = self.packed.order() else {
            bail!("conv2d: {:?} is not packed in panels", self.packed);
        };
        if self.image.len() != n * h * w * c || (self.packed.taps(), self.packed.depth()) != (POINTS, c) {
            bail!("conv2d: images {:?} do not fit {:?}", self.size, self.packed);
        }
        if let Some(r) = self.epilogue.residual
            && r.len() != n * oh * ow * cout
        {
            bail!("conv2d: a residual of {} elements does not fit {n} × {oh} × {ow} × {cout}", r.len());
        }
        let tiles = n * grid.down * grid.across;
        let threads = threads()?;
        let block = tiles.div_ceil(2 * threads).next_multiple_of(MR).clamp(2 * MR, TILES);
        let blocks = tiles.div_ceil(block);
        let panels = cout.div_ceil(NR);
        // Too few tiles for all threads: they share out the panels, and transform the same pixels each.
        let splits = if blocks < 2 * threads { threads.min(panels) } else { 1 };
        let mut out = Output::new(n * oh * ow * cout);
        let shared = out.shared();
        let cost = tiles * POINTS * c * cout / 40;
        parallel(blocks * splits, cost, |task| {
            let (at, split) = (task % blocks, task / blocks);
            let range = at * block..tiles.min((at + 1) * block);
            let panels = split * panels / splits..(split + 1) * panels / splits;
            SCRATCH.with_borrow_mut(|scratch| {
                self.transform(grid, range.clone(), scratch);
                for panel in panels {
                    let lines = &lines[panel * POINTS * c..(panel + 1) * POINTS * c];
                    multiply(scratch, lines, range.len(), c);
                    // SAFETY: tasks have different pixels or panels.
                    unsafe { self.store(grid, range.clone(), panel, scratch, shared) };
                }
            });
        })?;
        // SAFETY: tasks are all panels of all tiles, which cover all pixels.
        unsafe { out.finish((n, oh, ow, cout)) }
    }

    /// Fills `scratch.pixels` for the tiles of `range`.
    fn transform(&self, grid: Grid, range: Range<usize>, scratch: &mut Scratch) {
        let (_, h, w, c) = self.size;
        let count = range.len();
        let len = POINTS * count * c;
        let zeros = &self.zeros[..c];
        scratch.pixels.resize(scratch.pixels.len().max(len), 0.0);
        for (i, tile) in range.enumerate() {
            let (image, ty, tx) = (tile / grid.across / grid.down, tile / grid.across % grid.down, tile % grid.across);
            let image = &self.image[image * h * w * c..(image + 1) * h * w * c];
            let pixels: [&[f32]; POINTS] = std::array::from_fn(|p| {
                // Underflow wraps to a large number, which is as far outside as it should be.
                let y = (2 * ty + p / 4).wrapping_sub(self.padding.top);
                let x = (2 * tx + p % 4).wrapping_sub(self.padding.left);
                if y < h && x < w { &image[(y * w + x) * c..][..c] } else { zeros }
            });
            to_points(&pixels, &mut scratch.pixels[i * c..], count * c);
        }
        scratch.rows.clear();
        for point in 0..POINTS {
            let rows = scratch.pixels[point * count * c..(point + 1) * count * c].chunks_exact(c);
            scratch.rows.extend(rows.map(|row| row.as_ptr()));
        }
    }

    /// Transforms the products of one panel back and writes them.
    ///
    /// # Safety
    /// Nobody else uses this panel of these tiles' pixels in `out`, which has all of them.
    unsafe fn store(&self, grid: Grid, range: Range<usize>, panel: usize, scratch: &Scratch, out: Shared) {
        let (n, count) = (self.packed.n(), range.len());
        let at = panel * NR;
        let width = NR.min(n - at);
        let bias = self.packed.bias_line(at).0;
        for (i, tile) in range.enumerate() {
            let mut pixels = [[0f32; NR]; 4];
            from_points(&scratch.products[i * NR..], count * NR, &bias, &mut pixels);
            let (line, tx) = (tile / grid.across, tile % grid.across);
            let (image, ty) = (line / grid.down, line % grid.down);
            for (p, values) in pixels.iter_mut().enumerate() {
                let (y, x) = (2 * ty + p / 2, 2 * tx + p % 2);
                if y >= grid.oh || x >= grid.ow {
                    continue;
                }
                activate_in_place(values, self.epilogue.act);
                let start = ((image * grid.oh + y) * grid.ow + x) * n + at;
                if let Some(residual) = self.epilogue.residual {
                    for (v, r) in values.iter_mut().zip(&residual[start..start + width]) {
                        *v += r;
                    }
                }
                // SAFETY: the caller's promise.
                unsafe { out.slice(start, width) }.write_copy_of_slice(&values[..width]);
            }
        }
    }
}

/// Multiplies all points of `count` tiles with one panel.
fn multiply(scratch: &mut Scratch, lines: &[Line], count: usize, c: usize) {
    scratch.products.resize(scratch.products.len().max(POINTS * count * NR), 0.0);
    scratch.targets.clear();
    let targets = scratch.products.chunks_exact_mut(NR).take(POINTS * count);
    scratch.targets.extend(targets.map(|row| row.as_mut_ptr()));
    let len = c.div_ceil(c.div_ceil(K_BLOCK));
    for point in 0..POINTS {
        let rows = &scratch.rows[point * count..(point + 1) * count];
        let targets = &scratch.targets[point * count..(point + 1) * count];
        for from in (0..c).step_by(len) {
            let len = len.min(c - from);
            let start = if from == 0 { Start::Zero } else { Start::Load };
            let b = lines[point * c + from..][..len].as_ptr();
            for (rows, targets) in rows.chunks(MR).zip(targets.chunks(MR)) {
                let (rows, c) = (rows.as_ptr(), targets.as_ptr());
                let tile = Tile { rows, taps: 1, from, len, b, c, at: 0, bias: std::ptr::null() };
                // SAFETY: rows have `c` floats, of which `from + len` are read; `b` was sliced; targets have a panel.
                unsafe { kernel(targets.len(), start)(&tile) };
            }
        }
    }
}

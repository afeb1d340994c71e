//! How a picture is cut into tiles.

use std::ops::Range;

/// How a picture is encoded or decoded.
///
/// A tile gives the pixels of its *core*; cores lie side by side, `tile − overlap` pixels apart. What a layer computes of a core
/// depends on at most two lines around it of the layer's input, and these every tile reads, whatever the overlap: so a
/// tile's core equals the same pixels of a neighbour that is cut otherwise, to the byte, and there is nothing to blend. Only the
/// statistics of group norms, summed up over all cores, differ from those of a whole picture, in the last bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TilePlan {
    /// Edge of a tile in pixels of the picture, the overlap included; 0: whole. A picture that is no larger is whole, too.
    pub tile: usize,
    /// How much of a tile its neighbours cover as well, in pixels; what is more than half a tile counts as half.
    pub overlap: usize,
    /// Tiles that go through each layer together; 0: one. Changes no byte.
    pub batch: usize,
}

impl TilePlan {
    /// In one piece.
    pub const WHOLE: Self = Self { tile: 0, overlap: 0, batch: 1 };

    /// Pixels from one core to the next: a multiple of `unit` (twice the autoencoder's factor), at least one. Multiples keep
    /// every core's first line even on every level, as kernels of two lines at a time see it.
    pub(super) fn step(&self, unit: usize) -> usize {
        let step = self.tile - self.overlap.min(self.tile / 2);
        (step / unit * unit).max(unit)
    }

    /// Whether a picture of this size is cut.
    pub fn cuts(&self, width: u64, height: u64) -> bool {
        self.tile > 0 && width.max(height) > self.tile as u64
    }
}

/// Lines around a core that a tile reads of each layer's input: two convolutions of 3×3 see two lines; after an upsampling, their
/// two lines are one of the input, and the upsampling's own convolution sees one more.
pub(super) const MARGIN: usize = 2;

/// A part of a feature map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl Part {
    pub(super) fn size(&self) -> (usize, usize) {
        (self.rows.len(), self.columns.len())
    }

    /// With [`MARGIN`] lines on each side, as far as the map reaches.
    pub(super) fn with_margin(&self, height: usize, width: usize) -> Self {
        let widen =
            |range: &Range<usize>, end: usize| range.start.saturating_sub(MARGIN)..(range.end + MARGIN).min(end);
        Self { rows: widen(&self.rows, height), columns: widen(&self.columns, width) }
    }
}

/// The tiles of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    step: usize,
    batch: usize,
    /// Pixels of the picture.
    height: usize,
    width: usize,
}

impl Grid {
    /// The tiles of a picture; none where it is whole.
    pub(super) fn new(plan: &TilePlan, factor: usize, height: usize, width: usize) -> Option<Self> {
        let grid = Self { step: plan.step(2 * factor), batch: plan.batch.max(1), height, width };
        plan.cuts(width as u64, height as u64).then_some(grid)
    }

    /// How many tiles there are.
    pub(super) fn count(&self) -> usize {
        self.height.div_ceil(self.step) * self.width.div_ceil(self.step)
    }

    /// Tiles that go together.
    pub(super) fn batch(&self) -> usize {
        self.batch
    }

    /// The cores on a map of this height, line by line from the top.
    pub(super) fn cores(&self, height: usize) -> Vec<Part> {
        let scale = self.height / height;
        let lines = |edge: usize| {
            let (edge, step) = (edge / scale, self.step / scale);
            (0..edge).step_by(step).map(move |at| at..edge.min(at + step))
        };
        let row = |rows: Range<usize>| lines(self.width).map(move |columns| Part { rows: rows.clone(), columns });
        lines(self.height).flat_map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_cover_every_pixel_once_and_the_last_are_there() {
        for (height, width, tile, overlap) in [(72, 104, 32, 0), (8, 200, 48, 10), (264, 8, 64, 64), (40, 40, 16, 3)] {
            let plan = TilePlan { tile, overlap, batch: 1 };
            let grid = Grid::new(&plan, 8, height, width).unwrap();
            for scale in [1, 2, 4, 8] {
                let (h, w) = (height / scale, width / scale);
                let mut seen = vec![0; h * w];
                let cores = grid.cores(h);
                assert_eq!(cores.len(), grid.count());
                for core in cores {
                    assert!(core.rows.start % 2 == 0 && core.columns.start % 2 == 0, "{core:?}");
                    for y in core.rows {
                        seen[y * w + core.columns.start..y * w + core.columns.end].iter_mut().for_each(|n| *n += 1);
                    }
                }
                assert!(seen.iter().all(|&n| n == 1), "{height}×{width} in {plan:?} at 1/{scale}");
            }
        }
    }

    #[test]
    fn a_tile_with_its_overlap_is_no_larger_than_asked_for() {
        let step = |tile, overlap| TilePlan { tile, overlap, batch: 1 }.step(16);
        assert_eq!(step(256, 0), 256);
        assert_eq!(step(256, 64), 192);
        assert_eq!(step(256, 200), 128, "half a tile at most");
        assert_eq!(step(100, 10), 80);
        assert_eq!(step(5, 0), 16, "no tile is smaller than its unit");
    }

    #[test]
    fn a_picture_no_larger_than_a_tile_is_whole() {
        let plan = TilePlan { tile: 64, overlap: 16, batch: 1 };
        assert_eq!(Grid::new(&plan, 8, 64, 64), None);
        assert_eq!(Grid::new(&TilePlan::WHOLE, 8, 512, 512), None);
        assert!(Grid::new(&plan, 8, 72, 64).is_some());
    }
}

//! A feature map in memory, and the parts of it that tiles take.

use candle_core::{Device, Result, Tensor, bail};

use super::tiles::{MARGIN, Part};

/// The feature map of one picture, `[height, width, channels]`.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) data: Vec<f32>,
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
}

impl Map {
    pub(super) fn zeros(height: usize, width: usize, channels: usize) -> Self {
        Self { data: vec![0.0; height * width * channels], height, width, channels }
    }

    /// From `[1, H, W, C]`.
    pub(super) fn from_tensor(x: Tensor) -> Result<Self> {
        let (n, height, width, channels) = x.dims4()?;
        if n != 1 {
            bail!("vae: tiles are of one picture, got {n}");
        }
        Ok(Self { data: x.flatten_all()?.to_vec1()?, height, width, channels })
    }

    /// To `[1, H, W, C]`.
    pub(super) fn into_tensor(self) -> Result<Tensor> {
        Tensor::from_vec(self.data, (1, self.height, self.width, self.channels), &Device::Cpu)
    }

    /// Numbers `columns` of line `row`.
    fn line(&self, row: usize, columns: std::ops::Range<usize>) -> &[f32] {
        let at = row * self.width;
        &self.data[(at + columns.start) * self.channels..(at + columns.end) * self.channels]
    }

    /// Appends the numbers of `part` to `out`.
    pub(super) fn read(&self, part: &Part, out: &mut Vec<f32>) {
        for row in part.rows.clone() {
            out.extend_from_slice(self.line(row, part.columns.clone()));
        }
    }

    /// Writes `core` from picture `n` of `tiles` `[N, h, w, C]`, in which it starts at line and column `from`.
    pub(super) fn write(&mut self, core: &Part, tiles: &[f32], [n, h, w]: [usize; 3], from: (usize, usize)) {
        let c = self.channels;
        let len = core.columns.len() * c;
        for (i, row) in core.rows.clone().enumerate() {
            let to = (row * self.width + core.columns.start) * c;
            let from = ((n * h + from.0 + i) * w + from.1) * c;
            self.data[to..to + len].copy_from_slice(&tiles[from..from + len]);
        }
    }
}

/// Reads the parts of a map whose earlier parts are being overwritten, line by line of cores: it keeps the lines that a later
/// core's margin needs of those.
#[derive(Debug, Default)]
pub(super) struct Overwritten {
    /// The [`MARGIN`] lines above the present line of cores, as wide as the map.
    above: Vec<f32>,
    /// Those above the next line of cores, as far as they are read.
    next: Vec<f32>,
    /// The [`MARGIN`] columns before the present core.
    left: Vec<f32>,
}

impl Overwritten {
    /// Appends the numbers of `part`, which is `core` with its margin, to `out`, as they were. Cores come in their order, each
    /// before it is written.
    pub(super) fn read(&mut self, map: &Map, core: &Part, part: &Part, out: &mut Vec<f32>) {
        let c = map.channels;
        if core.columns.start == 0 {
            std::mem::swap(&mut self.above, &mut self.next);
            self.next.clear();
            self.next.resize(MARGIN * map.width * c, 0.0);
        }
        let before = core.columns.start - part.columns.start;
        for row in part.rows.clone() {
            if row < core.rows.start {
                let at = (MARGIN + row - core.rows.start) * map.width;
                out.extend_from_slice(&self.above[(at + part.columns.start) * c..(at + part.columns.end) * c]);
            } else if row < core.rows.end {
                if before > 0 {
                    let at = (row - core.rows.start) * MARGIN + MARGIN - before;
                    out.extend_from_slice(&self.left[at * c..(at + before) * c]);
                }
                out.extend_from_slice(map.line(row, core.columns.start..part.columns.end));
            } else {
                out.extend_from_slice(map.line(row, part.columns.clone()));
            }
        }
        self.keep(map, core);
    }

    fn keep(&mut self, map: &Map, core: &Part) {
        let c = map.channels;
        self.left.clear();
        // The last core of a line may be narrower than the margin, and so may be the last line; nobody reads what is kept of them.
        if core.columns.end < map.width {
            for row in core.rows.clone() {
                self.left.extend_from_slice(map.line(row, core.columns.end - MARGIN..core.columns.end));
            }
        }
        if core.rows.end < map.height {
            for i in 0..MARGIN {
                let from = map.line(core.rows.end - MARGIN + i, core.columns.clone());
                let to = (i * map.width + core.columns.start) * c;
                self.next[to..to + from.len()].copy_from_slice(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tiles::{Grid, TilePlan};
    use super::*;

    #[test]
    fn parts_are_read_as_they_were_while_earlier_ones_are_overwritten() {
        for (height, width) in [(9, 9), (5, 13), (3, 21), (17, 2), (4, 4)] {
            let plan = TilePlan { tile: 4, overlap: 0, batch: 1 };
            let Some(grid) = Grid::new(&plan, 1, height, width) else { continue };
            let mut map = Map::zeros(height, width, 3);
            map.data.iter_mut().enumerate().for_each(|(i, v)| *v = i as f32);
            let original = Map { data: map.data.clone(), ..map };
            let mut reader = Overwritten::default();
            for core in grid.cores(height) {
                let part = core.with_margin(height, width);
                let (mut found, mut expected) = (Vec::new(), Vec::new());
                reader.read(&map, &core, &part, &mut found);
                original.read(&part, &mut expected);
                assert_eq!(found, expected, "{core:?} of {height}×{width}");
                let (h, w) = core.size();
                map.write(&core, &vec![-1.0; h * w * 3], [0, h, w], (0, 0));
            }
            assert!(map.data.iter().all(|v| *v == -1.0), "all was overwritten");
        }
    }
}

//! One piece of the network over all tiles of a feature map.
//!
//! The whole map goes from piece to piece; what a piece needs beside it is bounded by the tiles that go together. A group norm
//! needs the statistics of the whole map, so there is one sweep over the tiles for each norm of the piece, which gathers them, and
//! one that writes the result. Sweeps compute the same again: a residual block takes three convolutions instead of two. Where
//! the result is of the input's shape it overwrites it.

use std::ops::ControlFlow;

use candle_core::{Device, Result, Tensor, bail};

use super::map::{Map, Overwritten};
use super::pieces::{EPS, Norms, Piece, Reached, Scale};
use super::tiles::{Grid, Part};
use crate::ops::{ChannelMoments, ComputeType, GroupScale, with_values};
use crate::residency::Bindings;

/// Tiles that go together: their cores, and what they read, which has one size.
struct Batch<'a> {
    cores: &'a [Part],
    parts: Vec<Part>,
}

impl<'a> Batch<'a> {
    /// Neighbours in order, at most `most`. Tiles at the map's border read less than others and go without them.
    fn all(cores: &'a [Part], map: &Map, most: usize) -> Vec<Self> {
        let part = |core: &Part| core.with_margin(map.height, map.width);
        let alike = cores.chunk_by(|a, b| part(a).size() == part(b).size());
        let batch = |cores: &'a [Part]| Self { cores, parts: cores.iter().map(part).collect() };
        alike.flat_map(|cores| cores.chunks(most)).map(batch).collect()
    }

    /// The tiles, `[N, h, w, C]`, each read by `read` from its core and part.
    fn tensor(&self, channels: usize, mut read: impl FnMut(&Part, &Part, &mut Vec<f32>)) -> Result<Tensor> {
        let (h, w) = self.parts[0].size();
        let mut data = Vec::with_capacity(self.parts.len() * h * w * channels);
        for (core, part) in self.cores.iter().zip(&self.parts) {
            read(core, part, &mut data);
        }
        Tensor::from_vec(data, (self.parts.len(), h, w, channels), &Device::Cpu)
    }

    /// Each core in coordinates of a result of this scale: on the map, and its first line and column in its tile.
    fn scaled(&self, scale: Scale) -> impl Iterator<Item = (Part, (usize, usize))> {
        self.cores.iter().zip(&self.parts).map(move |(core, part)| {
            let of = |range: &std::ops::Range<usize>| scale.of(range.start)..scale.of(range.end);
            let from = |core: &std::ops::Range<usize>, part: &std::ops::Range<usize>| scale.of(core.start - part.start);
            let to = Part { rows: of(&core.rows), columns: of(&core.columns) };
            (to, (from(&core.rows, &part.rows), from(&core.columns, &part.columns)))
        })
    }
}

/// Counts tiles over all sweeps of a piece, in tiles of one sweep.
struct Progress<'a> {
    sweeps: usize,
    tiles: usize,
    done: usize,
    go_on: &'a mut dyn FnMut(usize) -> ControlFlow<()>,
}

impl Progress<'_> {
    /// Asks whether `tiles` more are to be computed.
    fn go_on(&mut self, tiles: usize) -> ControlFlow<()> {
        let part = self.done / self.sweeps;
        self.done += tiles;
        debug_assert!(self.done <= self.sweeps * self.tiles, "{} tiles of {} × {}", self.done, self.sweeps, self.tiles);
        (self.go_on)(part)
    }
}

/// Takes `map` through `piece`. `go_on` is asked before each batch of tiles, with the share of the work that is done in tiles.
///
/// # Errors
/// If a computation fails.
pub(super) fn run(
    piece: &Piece,
    p: &Bindings,
    mut map: Map,
    grid: &Grid,
    compute: ComputeType,
    go_on: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<ControlFlow<(), Map>> {
    let cores = grid.cores(map.height);
    let batches = Batch::all(&cores, &map, grid.batch());
    let norms = piece.norms();
    let mut progress = Progress { sweeps: norms.len() + 1, tiles: grid.count(), done: 0, go_on };
    let mut known: Vec<GroupScale> = Vec::new();
    for (at, (norm, groups)) in norms.into_iter().enumerate() {
        let mut moments = ChannelMoments::default();
        for batch in &batches {
            if progress.go_on(batch.cores.len()).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if at == 0 && piece.starts_with_norm() {
                for core in batch.cores {
                    moments.add(&map.data, [map.width, map.channels], core.rows.clone(), core.columns.clone())?;
                }
            } else {
                let tiles = batch.tensor(map.channels, |_, part, out| map.read(part, out))?;
                match piece.forward(p, tiles, &mut Norms::Gathered(known.iter()), compute)? {
                    Reached::Norm(x) => gather(&mut moments, &x, batch, piece.scale())?,
                    Reached::Output(_) => bail!("vae: a norm was passed without its statistics"),
                }
            }
        }
        let (weight, bias) = p.norm(norm);
        known.push(moments.scale(groups, weight, bias, EPS)?);
    }
    let (scale, channels) = (piece.scale(), piece.channels()[1]);
    let (height, width) = (scale.of(map.height), scale.of(map.width));
    let in_place = (height, width, channels) == (map.height, map.width, map.channels);
    let mut result = (!in_place).then(|| Map::zeros(height, width, channels));
    let mut overwritten = Overwritten::default();
    for batch in &batches {
        if progress.go_on(batch.cores.len()).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let tiles = batch.tensor(map.channels, |core, part, out| match result {
            None => overwritten.read(&map, core, part, out),
            Some(_) => map.read(part, out),
        })?;
        let Reached::Output(out) = piece.forward(p, tiles, &mut Norms::Gathered(known.iter()), compute)? else {
            bail!("vae: the statistics of a norm are missing");
        };
        let (_, h, w, _) = out.dims4()?;
        let to = result.as_mut().unwrap_or(&mut map);
        with_values(&out, |values| {
            for (n, (core, from)) in batch.scaled(scale).enumerate() {
                to.write(&core, values, [n, h, w], from);
            }
            Ok(())
        })?;
    }
    Ok(ControlFlow::Continue(result.unwrap_or(map)))
}

/// Adds the cores of what a norm is to normalise.
fn gather(moments: &mut ChannelMoments, x: &Tensor, batch: &Batch<'_>, scale: Scale) -> Result<()> {
    for (n, (core, (top, left))) in batch.scaled(scale).enumerate() {
        let (height, width) = core.size();
        moments.add_of(x, n, top..top + height, left..left + width)?;
    }
    Ok(())
}

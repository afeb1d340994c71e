//! What tiles cost.

use serde::{Deserialize, Serialize};

use super::segments::Part;
use super::tiles::{MARGIN, TilePlan};
use super::{AutoencoderKlConfig, VaeHalf, parts};
use crate::residency::{Flow, Segment as _};

/// Memory that a half takes in tiles, beside weights: `bytes_per_pixel` for each pixel of the picture (the feature maps that go
/// from layer to layer), and `bytes_per_tile_pixel` for each pixel of the tiles that go together, `margin` around each counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileCost {
    /// The distance of tiles is a multiple of so many pixels; see [`TilePlan`].
    pub unit: u64,
    /// Pixels around a tile that are computed with it.
    pub margin: u64,
    /// For each pixel of a tile.
    pub bytes_per_tile_pixel: u64,
    /// For each pixel of the picture.
    pub bytes_per_pixel: u64,
}

impl TileCost {
    /// Of one half of an autoencoder.
    pub(super) fn new(config: &AutoencoderKlConfig, half: VaeHalf) -> Self {
        let factor = config.factor();
        let unit = 2 * factor;
        // Pixels of the picture, along an edge, for one of the map.
        let (mut scale, given) = match half {
            VaeHalf::Encoder => (1.0, config.in_channels as f64),
            VaeHalf::Decoder => (factor as f64, config.latent_channels as f64 / (factor * factor) as f64),
        };
        let (mut kept, mut tiles) = (0f64, Vec::new());
        for part in parts(config, half) {
            let [input, output] = part.piece.channels();
            let after = scale / part.piece.scale().of(2) as f64 * 2.0;
            let at = |channels: usize, scale: f64| 4.0 * channels as f64 / (scale * scale);
            let bytes = bytes(&part, input) / (scale * scale);
            if part.tiled {
                let in_place = (input, scale) == (output, after);
                kept = kept.max(at(input, scale) + if in_place { 0.0 } else { at(output, after) });
                tiles.push((scale, bytes));
            } else {
                kept = kept.max(bytes);
            }
            scale = after;
        }
        let most = tiles.iter().fold(0f64, |most, (_, bytes)| most.max(*bytes));
        // A map of a smaller size has a wider margin, in pixels of the picture, but takes less for each: so wide a margin at the
        // most expensive size covers all, for the smallest tiles and so for larger ones.
        let margin = tiles.iter().map(|(scale, bytes)| {
            let edge = (unit as f64 + 2.0 * MARGIN as f64 * scale) * (bytes / most).sqrt();
            ((edge - unit as f64) / 2.0).ceil().max(0.0) as u64
        });
        // What the caller gave stays; of maps, the lines are kept that tiles overwrite and their neighbours need.
        let kept = 4.0 * given + kept * (1.0 + 1.0 / 16.0);
        Self {
            unit: unit as u64,
            margin: margin.max().unwrap_or(0),
            bytes_per_tile_pixel: most.ceil() as u64,
            bytes_per_pixel: kept.ceil() as u64,
        }
    }

    /// Bytes for a picture of `width` × `height` that `plan` cuts.
    pub fn bytes(&self, plan: &TilePlan, width: u64, height: u64) -> u64 {
        let step = plan.step(self.unit as usize) as u64;
        let edge = |edge: u64| edge.min(step + 2 * self.margin);
        let tiles = (plan.batch.max(1) as u64).min(width.div_ceil(step).saturating_mul(height.div_ceil(step)));
        let tile = edge(width).saturating_mul(edge(height)).saturating_mul(self.bytes_per_tile_pixel);
        width.saturating_mul(height).saturating_mul(self.bytes_per_pixel).saturating_add(tiles.saturating_mul(tile))
    }
}

/// Bytes for each pixel of a part's input, at most at once.
fn bytes(part: &Part, input: usize) -> f64 {
    let mut flow = Flow::new(input);
    part.flow(&mut flow);
    flow.bytes_per_pixel() as f64
}

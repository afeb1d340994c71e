//! How much memory goes through a model, from its shape alone.

use std::collections::BTreeMap;

/// Follows the feature map through the segments of a convolutional model, in numbers (f32) for each pixel of the model's
/// input, and keeps the largest sum that is alive at once.
///
/// Operations hold nothing beside inputs and outputs that grows with the image (attention is blocked), so memory is
/// linear in pixels. A side that is halved is rounded up; the bound is for inputs of at least eight pixels a side.
///
/// Every sum is also kept by the halvings of the maps it is made of, so that [`Self::bytes_at`] can say exactly what one size
/// takes.
#[derive(Clone, Debug)]
pub struct Flow {
    /// How often the input has been halved, less how often doubled.
    depth: i32,
    channels: usize,
    skips: f64,
    peak: f64,
    context: usize,
    /// Numbers a pixel that are kept, by halvings.
    kept: BTreeMap<i32, usize>,
    /// All that is alive at once, by halvings: each different sum once.
    alive: Vec<BTreeMap<i32, usize>>,
    /// Whether rows go through some at a time, so that what lies between two products does not grow with the picture.
    chunked: bool,
    /// Most numbers a row of what does not.
    row: usize,
}

impl Flow {
    /// At the input, which has `channels`.
    pub fn new(channels: usize) -> Self {
        // The input comes channels-first and is turned.
        let (kept, alive) = (BTreeMap::new(), vec![BTreeMap::from([(0, 2 * channels)])]);
        let peak = 2.0 * channels as f64;
        Self { depth: 0, channels, skips: 0.0, peak, context: 0, kept, alive, chunked: false, row: 0 }
    }

    /// The same model, computed in chunks of rows; [`Self::bytes_per_row`] is to be added for each row of a chunk.
    pub fn in_chunks(self) -> Self {
        Self { chunked: true, ..self }
    }

    /// Pixels of the feature map for each pixel of the input, at most.
    fn scale(&self) -> f64 {
        let exact = 0.25f64.powi(self.depth);
        // ceil(n / 2^d) · 2^d / n for n ≥ 8 is largest at n = 9, and 2^d / 9 from where the side is one pixel.
        let worst = |d: i32| (9f64 / 2f64.powi(d)).ceil() * 2f64.powi(d) / 9.0;
        if self.depth > 0 { exact * worst(self.depth).powi(2) } else { exact }
    }

    /// Channels of the feature map now.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The feature map has other channels from here on.
    pub fn set_channels(&mut self, channels: usize) {
        self.channels = channels;
    }

    /// Notes that `numbers` a pixel of the feature map, itself included, are alive at once.
    pub fn peak(&mut self, numbers: usize) {
        self.peak = self.peak.max(self.skips + self.scale() * numbers as f64);
        let mut alive = self.kept.clone();
        *alive.entry(self.depth).or_default() += numbers;
        if !self.alive.contains(&alive) {
            self.alive.push(alive);
        }
    }

    /// As [`Self::peak`], of what is computed in chunks of rows where there are chunks.
    pub fn peak_of_rows(&mut self, numbers: usize) {
        self.row = self.row.max(numbers);
        if !self.chunked {
            self.peak(numbers);
        }
    }

    /// As [`Self::peak`], of what is alive beside a chunk of rows.
    pub fn peak_in_chunks(&mut self, numbers: usize) {
        if self.chunked {
            self.peak(numbers);
        }
    }

    /// The feature map is kept for later.
    pub fn push_skip(&mut self) {
        self.skips += self.scale() * self.channels as f64;
        *self.kept.entry(self.depth).or_default() += self.channels;
    }

    /// One of `channels` that was kept is taken up.
    pub fn pop_skip(&mut self, channels: usize) {
        self.skips -= self.scale() * channels as f64;
        if let Some(kept) = self.kept.get_mut(&self.depth) {
            *kept = kept.saturating_sub(channels);
        }
    }

    /// Notes that `numbers` a token of the conditioning are kept to the end.
    pub fn keep_context(&mut self, numbers: usize) {
        self.context += numbers;
    }

    /// Halves height and width.
    pub fn halve(&mut self) {
        self.depth += 1;
    }

    /// Doubles height and width.
    pub fn double(&mut self) {
        self.depth -= 1;
    }

    /// Bytes for each pixel of the input, rounded up.
    pub fn bytes_per_pixel(&self) -> u64 {
        (4.0 * self.peak).ceil() as u64
    }

    /// Bytes for one input of `height` × `width` pixels, the halved sides rounded up as they are. Saturates.
    pub fn bytes_at(&self, height: u64, width: u64) -> u64 {
        let side = |side: u64, depth: i32| match depth {
            0.. => side.div_ceil(1 << depth.min(62)),
            _ => side.saturating_mul(1 << (-depth).min(62)),
        };
        let pixels = |depth| side(height, depth).saturating_mul(side(width, depth));
        let sum = |alive: &BTreeMap<i32, usize>| {
            alive.iter().fold(0u64, |sum, (&depth, &numbers)| {
                sum.saturating_add(pixels(depth).saturating_mul(4 * numbers as u64))
            })
        };
        self.alive.iter().map(sum).max().unwrap_or(0)
    }

    /// Bytes for each row that goes through at once, in chunks; 0 where nothing is computed that way.
    pub fn bytes_per_row(&self) -> u64 {
        if self.chunked { 4 * self.row as u64 } else { 0 }
    }

    /// Bytes for each token of the conditioning.
    pub fn bytes_per_token(&self) -> u64 {
        4 * self.context as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_size_takes_what_its_maps_take_and_no_more_than_the_bound() {
        let mut flow = Flow::new(4);
        flow.set_channels(32);
        flow.peak(64);
        flow.push_skip();
        flow.halve();
        flow.peak(300);
        flow.double();
        flow.pop_skip(32);
        flow.peak(96);
        // The halved map: 300 numbers for 2 × 3 pixels, beside a skip of 32 for 4 × 5: more than 96 for 4 × 5.
        assert_eq!(flow.bytes_at(4, 5), 4 * (300 * 2 * 3 + 32 * 20));
        for (height, width) in [(8, 8), (9, 31), (64, 64), (17, 100)] {
            let exact = flow.bytes_at(height, width);
            let bound = flow.bytes_per_pixel() * height * width;
            assert!(exact <= bound && 2 * exact > bound, "{height} × {width}: {exact} of {bound}");
        }
        let mut upwards = Flow::new(4);
        upwards.double();
        upwards.peak(10);
        assert_eq!(upwards.bytes_at(3, 5), 4 * 10 * 6 * 10);
        assert_eq!(upwards.bytes_at(u64::MAX, 8), u64::MAX, "saturates");
    }
}

//! How much memory goes through a model, from its shape alone.

/// Follows the feature map through the segments of a convolutional model, in numbers (f32) for each pixel of the model's
/// input, and keeps the largest sum that is alive at once.
///
/// Operations hold nothing beside inputs and outputs that grows with the image (attention is blocked), so memory is
/// linear in pixels. A side that is halved is rounded up; the bound is for inputs of at least eight pixels a side.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// How often the input has been halved, less how often doubled.
    depth: i32,
    channels: usize,
    skips: f64,
    peak: f64,
    context: usize,
}

impl Flow {
    /// At the input, which has `channels`.
    pub fn new(channels: usize) -> Self {
        // The input comes channels-first and is turned.
        Self { depth: 0, channels, skips: 0.0, peak: 2.0 * channels as f64, context: 0 }
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
    }

    /// The feature map is kept for later.
    pub fn push_skip(&mut self) {
        self.skips += self.scale() * self.channels as f64;
    }

    /// One of `channels` that was kept is taken up.
    pub fn pop_skip(&mut self, channels: usize) {
        self.skips -= self.scale() * channels as f64;
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

    /// Bytes for each token of the conditioning.
    pub fn bytes_per_token(&self) -> u64 {
        4 * self.context as u64
    }
}

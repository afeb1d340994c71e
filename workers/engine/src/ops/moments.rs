//! Group normalisation of a picture that is seen in pieces: moments are gathered first, then each piece is normalised with them.

use std::ops::Range;

use candle_core::{D, Result, Tensor, bail};

use super::norm::{STATS_BLOCK, finish, moments, normalise_groups};
use super::pointwise::Activation;
use super::tensor::{Shared, to_vec, with_slice};
use super::threads::parallel;

/// Sums over the pixels of one picture, per channel: of the differences from the first pixel that was added, and of their
/// squares. At most [`STATS_BLOCK`] pixels are summed in f32, everything else in f64, so that the cut into pieces shows
/// in no more than the last bits. The order of the pieces decides these; threads do not.
#[derive(Clone, Debug, Default)]
pub struct ChannelMoments {
    origin: Vec<f32>,
    total: Vec<(f64, f64)>,
    pixels: usize,
}

impl ChannelMoments {
    /// Adds `rows` × `columns` of a picture `[height, width, channels]`, of which `data` holds the numbers.
    ///
    /// Working set: `2 · channels` floats for each [`STATS_BLOCK`] pixels of a row that are added.
    ///
    /// # Errors
    /// If the part is not within the picture or pictures have different channels.
    pub fn add(
        &mut self,
        data: &[f32],
        [width, channels]: [usize; 2],
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<()> {
        if rows.is_empty() || columns.is_empty() {
            return Ok(());
        }
        if channels == 0 || columns.end > width || rows.end * width * channels > data.len() {
            bail!("moments: rows {rows:?}, columns {columns:?} are not in {} numbers of width {width}", data.len());
        }
        if self.origin.is_empty() {
            let first = (rows.start * width + columns.start) * channels;
            self.origin = data[first..first + channels].to_vec();
            self.total = vec![(0.0, 0.0); channels];
        }
        if self.origin.len() != channels {
            bail!("moments: a picture of {channels} channels does not fit one of {}", self.origin.len());
        }
        let blocks = columns.len().div_ceil(STATS_BLOCK);
        let mut sums = vec![0f32; rows.len() * blocks * 2 * channels];
        let (shared, origin) = (Shared::of(&mut sums), &self.origin);
        parallel(rows.len() * blocks, rows.len() * columns.len() * channels / 4, |i| {
            let (row, from) = (rows.start + i / blocks, columns.start + i % blocks * STATS_BLOCK);
            let to = columns.end.min(from + STATS_BLOCK);
            let part = &data[(row * width + from) * channels..(row * width + to) * channels];
            // SAFETY: block `i` has its own range of the sums, which hold zeros already.
            let sums = unsafe { std::slice::from_raw_parts_mut(shared.at(i * 2 * channels), 2 * channels) };
            let (sum, squares) = sums.split_at_mut(channels);
            moments(part, origin, sum, squares);
        })?;
        for block in sums.chunks_exact(2 * channels) {
            for (i, total) in self.total.iter_mut().enumerate() {
                total.0 += f64::from(block[i]);
                total.1 += f64::from(block[channels + i]);
            }
        }
        self.pixels += rows.len() * columns.len();
        Ok(())
    }

    /// Adds `rows` × `columns` of picture `n` of `x` `[N, H, W, C]`.
    ///
    /// # Errors
    /// As [`Self::add`], and if there is no such picture.
    pub fn add_of(&mut self, x: &Tensor, n: usize, rows: Range<usize>, columns: Range<usize>) -> Result<()> {
        let (_, h, w, c) = x.dims4()?;
        with_slice(x, |data| match data.get(n * h * w * c..(n + 1) * h * w * c) {
            Some(picture) => self.add(picture, [w, c], rows, columns),
            None => bail!("moments: there is no picture {n} in {:?}", x.shape()),
        })
    }

    /// What [`super::group_norm`] over all that was added multiplies by and adds: `weight` and `bias` `[C]`.
    ///
    /// # Errors
    /// If nothing was added or shapes do not fit.
    pub fn scale(&self, groups: usize, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<GroupScale> {
        let c = self.origin.len();
        if c == 0 || groups == 0 || !c.is_multiple_of(groups) || weight.dims() != [c] || bias.dims() != [c] {
            bail!("moments: {groups} groups, weight {:?} do not fit {c} channels", weight.shape());
        }
        let (weight, bias) = (to_vec(weight)?, to_vec(bias)?);
        let (mut scale, mut shift) = (vec![0f32; c], vec![0f32; c]);
        let channels = (&*weight, &*bias);
        finish(&self.origin, &self.total, self.pixels, groups, channels, eps, (&mut scale, &mut shift));
        Ok(GroupScale { scale, shift })
    }
}

/// What a normalisation multiplies each channel by and then adds.
#[derive(Clone, Debug)]
pub struct GroupScale {
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl GroupScale {
    /// `act(x · scale + shift)` per channel, for `x` `[N, .., C]`.
    ///
    /// Working set: none.
    ///
    /// # Errors
    /// If `x` has other channels.
    pub fn apply(&self, x: &Tensor, act: Activation) -> Result<Tensor> {
        let c = self.scale.len();
        if x.dim(D::Minus1)? != c {
            bail!("group norm: a scale of {c} channels does not fit {:?}", x.shape());
        }
        with_slice(x, |xs| normalise_groups(xs, x.shape(), 1, c, (&self.scale, &self.shift), act))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::ops::group_norm;

    #[test]
    fn pieces_are_normalised_as_the_whole_is() -> Result<()> {
        let (h, w, c, groups) = (37, 150, 24, 4);
        let x = (Tensor::randn(0f32, 1.0, (1, h, w, c), &Device::Cpu)? + 30.0)?;
        let weight = Tensor::randn(1f32, 0.1, c, &Device::Cpu)?;
        let bias = Tensor::randn(0f32, 0.1, c, &Device::Cpu)?;
        let whole = group_norm(&x, groups, &weight, &bias, 1e-6, Activation::Silu)?;
        let mut moments = ChannelMoments::default();
        for rows in [0..16, 16..32, 32..37] {
            for columns in [0..100, 100..150] {
                moments.add_of(&x, 0, rows.clone(), columns)?;
            }
        }
        let pieces = moments.scale(groups, &weight, &bias, 1e-6)?.apply(&x, Activation::Silu)?;
        let worst = (whole - pieces)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(worst <= 1e-5, "{worst}");
        Ok(())
    }

    #[test]
    fn parts_that_are_not_there_are_refused() -> Result<()> {
        let x = Tensor::zeros((1, 4, 4, 2), candle_core::DType::F32, &Device::Cpu)?;
        let mut moments = ChannelMoments::default();
        assert!(moments.add_of(&x, 1, 0..1, 0..1).is_err());
        assert!(moments.add_of(&x, 0, 0..5, 0..1).is_err());
        assert!(moments.add_of(&x, 0, 0..1, 0..5).is_err());
        let weight = Tensor::zeros(2, candle_core::DType::F32, &Device::Cpu)?;
        assert!(moments.scale(1, &weight, &weight, 1e-6).is_err(), "nothing was added");
        Ok(())
    }
}

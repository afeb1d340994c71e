//! Rows that are computed some at a time, so that what lies between two products never grows with the picture.

use candle_core::{Result, Shape, Tensor, bail};

use super::tensor::{Output, with_slice};

/// How many rows go through at once. Changes no byte: every element of a result is one sum in one order, whatever rows are
/// computed beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunks {
    /// Rows of a matrix product, tokens; 0: all.
    pub tokens: usize,
    /// Rows of a feed-forward layer; 0: all.
    pub mlp: usize,
}

impl Chunks {
    /// Whether `rows` are more than go through at once.
    pub fn cut(at_once: usize, rows: usize) -> bool {
        at_once > 0 && rows > at_once
    }
}

/// A tensor that is put together from pieces of rows, in order.
pub struct RowsBuilder {
    data: Output,
    rows: usize,
    width: usize,
    filled: usize,
}

impl RowsBuilder {
    /// For `rows` rows of `width` elements.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { data: Output::new(rows * width), rows, width, filled: 0 }
    }

    /// Appends a piece, whose last axis is the width.
    ///
    /// # Errors
    /// If it does not fit or is not `f32`.
    pub fn push(&mut self, piece: &Tensor) -> Result<()> {
        let count = piece.elem_count();
        if self.width == 0 || !count.is_multiple_of(self.width) || self.filled + count > self.rows * self.width {
            bail!("rows: a piece {:?} does not fit {} × {}", piece.shape(), self.rows, self.width);
        }
        with_slice(piece, |values| {
            // SAFETY: the range lies within the memory, as was checked, and nobody else has it.
            unsafe { self.data.shared().slice(self.filled, count) }.write_copy_of_slice(values);
            Ok(())
        })?;
        self.filled += count;
        Ok(())
    }

    /// The whole.
    ///
    /// # Errors
    /// If rows are missing, or `shape` has another number of elements.
    pub fn finish(self, shape: impl Into<Shape>) -> Result<Tensor> {
        if self.filled != self.rows * self.width {
            bail!("rows: {} of {} × {} elements were given", self.filled, self.rows, self.width);
        }
        // SAFETY: every element was written, piece by piece.
        unsafe { self.data.finish(shape) }
    }
}

/// `f` of `x` `[.., K]`, which gives `[.., width]` row by row: all at once, or `at_once` rows `[rows, K]` at a time.
///
/// Working set: what `f` takes for so many rows.
///
/// # Errors
/// If `f` fails or gives another width.
pub fn by_chunks(x: &Tensor, at_once: usize, width: usize, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let Some(k) = shape.pop() else { bail!("rows: a tensor without axes") };
    let rows = shape.iter().product();
    if !Chunks::cut(at_once, rows) {
        return f(x);
    }
    let flat = x.reshape((rows, k))?;
    let mut whole = RowsBuilder::new(rows, width);
    for first in (0..rows).step_by(at_once) {
        whole.push(&f(&flat.narrow(0, first, at_once.min(rows - first))?)?)?;
    }
    shape.push(width);
    whole.finish(shape)
}

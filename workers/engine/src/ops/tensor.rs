//! Between candle's tensors and plain slices.

use std::mem::MaybeUninit;

use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};

use super::threads::{parallel, threads};

/// Calls `f` with the elements of `x` in row-major order; copies only when `x` is not contiguous.
pub(super) fn with_slice<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let x = x.contiguous()?;
    with_storage(&x, |data| f(&data[..x.elem_count()]))
}

/// Calls `f` with the storage of `x` from its first element on, whatever its strides.
pub(super) fn with_storage<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    if x.dtype() != DType::F32 {
        bail!("ops on the CPU take f32, got {:?} {:?}; convert the tensor when it is loaded", x.dtype(), x.shape());
    }
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => f(&cpu.as_slice::<f32>()?[layout.start_offset()..]),
        _ => bail!("ops: a tensor on {:?} reached the CPU path", x.device().location()),
    }
}

/// Calls `f` with the elements of `x` in row-major order, where they lie.
///
/// # Errors
/// If `x` is not f32 on the CPU, and what `f` gives.
pub fn with_values<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    with_slice(x, f)
}

/// The elements of `x` in row-major order, copied.
pub(super) fn to_vec(x: &Tensor) -> Result<Vec<f32>> {
    with_slice(x, |x| Ok(x.to_vec()))
}

/// A CPU tensor that owns `data`.
pub(super) fn from_vec(data: Vec<f32>, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_vec(data, shape.into(), &Device::Cpu)
}

/// Memory for a result whose elements are all still to be written.
pub(super) struct Output {
    data: Vec<f32>,
    len: usize,
}

impl Output {
    pub(super) fn new(len: usize) -> Self {
        Self { data: Vec::with_capacity(len), len }
    }

    /// The elements, for several threads that each write others.
    pub(super) fn shared(&mut self) -> Shared {
        Shared(self.data.as_mut_ptr())
    }

    /// The finished tensor.
    ///
    /// # Safety
    /// Every element has been written.
    pub(super) unsafe fn finish(mut self, shape: impl Into<Shape>) -> Result<Tensor> {
        // SAFETY: the capacity is at least `len`, and the caller has written every element.
        unsafe { self.data.set_len(self.len) };
        from_vec(self.data, shape)
    }
}

/// A pointer to floats that several threads write, each its own range.
#[derive(Clone, Copy)]
pub(super) struct Shared(*mut f32);

// SAFETY: a plain address; `slice` and `at` leave it to their callers that ranges of different threads are disjoint.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn of(data: &mut [f32]) -> Self {
        Self(data.as_mut_ptr())
    }

    /// The address of element `i`.
    ///
    /// # Safety
    /// `i` is within the memory.
    #[inline]
    pub(super) unsafe fn at(self, i: usize) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(i) }
    }

    /// Elements `start .. start + len`.
    ///
    /// # Safety
    /// The range is within the memory, outlives `'a`, and nothing else reads or writes it meanwhile.
    #[inline]
    pub(super) unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [MaybeUninit<f32>] {
        // SAFETY: the caller's promise; `MaybeUninit` needs no initial value.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start).cast(), len) }
    }
}

/// Builds a tensor of `rows` rows of `width` elements: `f(first row, rows' output)` fills the rows it is given. `cost` is
/// the rough time of one element in picoseconds.
///
/// # Safety
/// `f` writes every element of what it is given.
pub(super) unsafe fn build_rows(
    rows: usize,
    width: usize,
    cost: usize,
    shape: impl Into<Shape>,
    f: impl Fn(usize, &mut [MaybeUninit<f32>]) + Sync + Send,
) -> Result<Tensor> {
    let mut out = Output::new(rows * width);
    let shared = out.shared();
    // Pieces of at most 64 KiB stay in the first caches from one pass of `f` to the next.
    let per_thread = rows.div_ceil(threads()?);
    let piece = (16_384 / width.max(1)).clamp(1, per_thread.max(1));
    parallel(rows.div_ceil(piece), rows * width * cost / 1000, |i| {
        let first = i * piece;
        let count = piece.min(rows - first);
        // SAFETY: pieces are disjoint ranges of rows within the output, which lives until `finish`.
        f(first, unsafe { shared.slice(first * width, count * width) });
    })?;
    // SAFETY: `f` has written the rows of every piece.
    unsafe { out.finish(shape) }
}

//! Fully connected layers.

use candle_core::{D, Result, Tensor, bail};

use super::kernel::NR;
use super::packed::{Packed, WeightRows, with_rows};
use super::pointwise::{Activation, geglu};
use super::product::{Dense, Epilogue, gated_tensor, product_tensor};
use super::tensor::with_slice;

/// The parameters of `y = x Wᵀ + b`, packed for the CPU: as many bytes as in the file, rounded up to 16 outputs.
#[derive(Clone, Debug)]
pub struct Linear {
    packed: Packed,
    k: usize,
}

impl Linear {
    /// From `weight` `[N, K]` as in weight files and `bias` `[N]`. The weight is read once and not kept.
    ///
    /// # Errors
    /// If the shapes do not fit each other.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (n, k) = weight.dims2()?;
        with_rows(&weight, n, |rows| Self::of_rows(rows, bias.as_ref(), [n, k]))
    }

    /// From the rows of a weight `[N, K]`, wherever they come from, and `bias` `[N]`.
    ///
    /// # Errors
    /// If the shapes do not fit each other.
    pub fn of_rows(weight: &WeightRows<'_>, bias: Option<&Tensor>, [n, k]: [usize; 2]) -> Result<Self> {
        Ok(Self { packed: Packed::new(weight, bias, n, 1, k)?, k })
    }

    /// `K`, the width of the input.
    pub fn in_features(&self) -> usize {
        self.k
    }

    /// `N`, the width of the output.
    pub fn out_features(&self) -> usize {
        self.packed.n()
    }

    /// Bytes that the parameters hold.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    /// Bytes that a layer with a bias will hold, before it is loaded.
    pub fn bytes_of(out_features: usize, in_features: usize) -> usize {
        Packed::bytes_of(out_features, 1, in_features)
    }
}

/// `act(x Wᵀ + b)` for `x` `[.., K]`, giving `[.., N]`. One row gives the same bytes alone as among others.
///
/// Working set: at most 20 KiB a thread; a copy of `x` if it is not contiguous.
///
/// # Errors
/// If the last axis of `x` is not `K`.
pub fn linear(x: &Tensor, w: &Linear, act: Activation) -> Result<Tensor> {
    run(x, w, Epilogue { act, residual: None })
}

/// `x Wᵀ + b + residual`; `residual` has the shape of the result.
///
/// Working set: as [`linear`].
///
/// # Errors
/// If shapes do not fit.
pub fn linear_add(x: &Tensor, w: &Linear, residual: &Tensor) -> Result<Tensor> {
    with_slice(residual, |r| run(x, w, Epilogue { act: Activation::None, residual: Some(r) }))
}

/// [`geglu`] of `x Wᵀ + b`, giving `[.., N / 2]`, to the byte, without the `[.., N]` in between where `N` is a multiple of
/// 32.
///
/// Working set: as [`linear`] and 12 KiB a thread; else `N` floats a row.
///
/// # Errors
/// If the last axis of `x` is not `K`, or `N` is odd.
pub fn linear_geglu(x: &Tensor, w: &Linear) -> Result<Tensor> {
    let (k, n) = (x.dim(D::Minus1)?, w.out_features());
    if !n.is_multiple_of(2 * NR) || k != w.k || x.elem_count() == 0 {
        return geglu(&linear(x, w, Activation::None)?);
    }
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = n / 2;
    }
    with_slice(x, |x| gated_tensor(&Dense::new(x, k), x.len() / k, &w.packed, shape))
}

fn run(x: &Tensor, w: &Linear, epilogue: Epilogue<'_>) -> Result<Tensor> {
    let k = x.dim(D::Minus1)?;
    if k != w.k {
        bail!("linear: input {:?} does not fit a weight of {} × {}", x.shape(), w.out_features(), w.k);
    }
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = w.out_features();
    }
    with_slice(x, |x| product_tensor(&Dense::new(x, k), x.len() / k, &w.packed, epilogue, shape))
}

//! Fully connected layers.

use candle_core::{D, Result, Tensor, bail};

use super::pointwise::{Activation, activate};

/// The parameters of `y = x Wᵀ + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// From `weight` `[N, K]` as in weight files and `bias` `[N]`.
    ///
    /// # Errors
    /// If the shapes do not fit each other.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (n, _) = weight.dims2()?;
        if let Some(b) = &bias
            && b.dims() != [n]
        {
            bail!("linear: bias {:?} does not fit weight {:?}", b.shape(), weight.shape());
        }
        Ok(Self { weight, bias })
    }

    /// `K`, the width of the input.
    pub fn in_features(&self) -> usize {
        self.weight.dims()[1]
    }

    /// `N`, the width of the output.
    pub fn out_features(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Bytes that the parameters hold.
    pub fn bytes(&self) -> usize {
        4 * (self.weight.elem_count() + self.bias.as_ref().map_or(0, |b| b.elem_count()))
    }
}

/// `act(x Wᵀ + b)` for `x` `[.., K]`, giving `[.., N]`.
///
/// # Errors
/// If the last axis of `x` is not `K`.
pub fn linear(x: &Tensor, w: &Linear, act: Activation) -> Result<Tensor> {
    let k = x.dim(D::Minus1)?;
    if k != w.in_features() {
        bail!("linear: input {:?} does not fit weight {:?}", x.shape(), w.weight.shape());
    }
    let rows = x.elem_count() / k;
    let mut x2 = x.contiguous()?.reshape((rows, k))?;
    if rows == 1 {
        x2 = Tensor::cat(&[&x2, &x2], 0)?;
    }
    let mut y = x2.matmul(&w.weight.t()?)?.narrow(0, 0, rows)?;
    if let Some(b) = &w.bias {
        y = y.broadcast_add(b)?;
    }
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = w.out_features();
    }
    activate(&y, act)?.reshape(dims)
}

/// `x Wᵀ + b + residual`; `residual` has the shape of the result.
///
/// # Errors
/// If shapes do not fit.
pub fn linear_add(x: &Tensor, w: &Linear, residual: &Tensor) -> Result<Tensor> {
    linear(x, w, Activation::None)? + residual
}

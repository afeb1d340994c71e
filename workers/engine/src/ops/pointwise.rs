//! Element-wise operations.

use candle_core::{D, Result, Tensor, bail};

/// What is applied to each element of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `x · σ(x)`.
    Silu,
    /// `x · Φ(x)`, exact (by erf).
    Gelu,
    /// `x · σ(1.702 x)`, as in CLIP.
    QuickGelu,
    /// `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
}

/// Applies `act` to every element; any shape.
///
/// # Errors
/// If `x` is not `f32`.
pub fn activate(x: &Tensor, act: Activation) -> Result<Tensor> {
    match act {
        Activation::None => Ok(x.clone()),
        Activation::Silu => x.silu(),
        Activation::Gelu => x.gelu_erf(),
        Activation::QuickGelu => x / ((x * -1.702)?.exp()? + 1.0)?,
        Activation::GeluTanh => x.gelu(),
    }
}

/// `x · σ(x)`; any shape.
///
/// # Errors
/// If `x` is not `f32`.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    activate(x, Activation::Silu)
}

/// `a + b` of equal shapes.
///
/// # Errors
/// If shapes differ.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.shape() != b.shape() {
        bail!("add: shapes {:?} and {:?} differ", a.shape(), b.shape());
    }
    a + b
}

/// `hidden · gelu(gate)` of `[.., 2C]`, where hidden is the first half of the last axis and gate the second; gelu is
/// exact. Gives `[.., C]`.
///
/// # Errors
/// If the last axis is odd.
pub fn geglu(x: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if width % 2 != 0 {
        bail!("geglu: the last axis must be even, got {width}");
    }
    let hidden = x.narrow(D::Minus1, 0, width / 2)?;
    let gate = x.narrow(D::Minus1, width / 2, width / 2)?;
    hidden * gate.gelu_erf()?
}

//! Element-wise operations.

use std::mem::MaybeUninit;

use candle_core::{D, Result, Tensor, bail};

use super::simd::{self, simd};
use super::tensor::{build_rows, with_slice};

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

/// Applies `act` in a way that the compiler sees one loop per activation. `$map` takes a function of one element.
macro_rules! by_activation {
    ($act:expr, $fma:ident, $map:expr) => {
        match $act {
            Activation::None => $map(|x: f32| x),
            Activation::Silu => $map(|x: f32| x * simd::sigmoid::<$fma>(x)),
            Activation::Gelu => $map(|x: f32| simd::gelu::<$fma>(x)),
            Activation::QuickGelu => $map(|x: f32| x * simd::sigmoid::<$fma>(1.702 * x)),
            Activation::GeluTanh => $map(|x: f32| simd::gelu_tanh::<$fma>(x)),
        }
    };
}
pub(super) use by_activation;

#[inline(always)]
fn map_in_place(xs: &mut [f32], f: impl Fn(f32) -> f32) {
    for x in xs {
        *x = f(*x);
    }
}

#[inline(always)]
fn map_to(xs: &[f32], out: &mut [MaybeUninit<f32>], f: impl Fn(f32) -> f32) {
    for (out, &x) in out.iter_mut().zip(xs) {
        out.write(f(x));
    }
}

#[inline(always)]
fn in_place_body<const FMA: bool>(xs: &mut [f32], act: Activation) {
    match act {
        Activation::None => {}
        act => by_activation!(act, FMA, |f| map_in_place(xs, f)),
    }
}

simd! {
    /// Applies `act` to every element.
    fn activate_in_place(xs: &mut [f32], act: Activation) = in_place_body
}

#[inline(always)]
fn to_body<const FMA: bool>(xs: &[f32], out: &mut [MaybeUninit<f32>], act: Activation) {
    by_activation!(act, FMA, |f| map_to(xs, out, f));
}

simd! {
    /// Writes `act` of every element of `xs`.
    fn activate_to(xs: &[f32], out: &mut [MaybeUninit<f32>], act: Activation) = to_body
}

#[inline(always)]
fn geglu_body<const FMA: bool>(xs: &[f32], out: &mut [MaybeUninit<f32>], width: usize) {
    for (x, out) in xs.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
        let (hidden, gate) = x.split_at(width);
        for ((out, &h), &g) in out.iter_mut().zip(hidden).zip(gate) {
            out.write(h * simd::gelu::<FMA>(g));
        }
    }
}

simd! {
    /// Writes `hidden · gelu(gate)` of rows of `2 · width` elements.
    fn geglu_to(xs: &[f32], out: &mut [MaybeUninit<f32>], width: usize) = geglu_body
}

#[inline(always)]
fn gate_body<const FMA: bool>(hidden: &mut [f32], gate: &[f32]) {
    for (h, &g) in hidden.iter_mut().zip(gate) {
        *h *= simd::gelu::<FMA>(g);
    }
}

simd! {
    /// Multiplies each element of `hidden` by the gelu of its `gate`.
    fn gate_in_place(hidden: &mut [f32], gate: &[f32]) = gate_body
}

/// Applies `act` to every element; any shape.
///
/// # Errors
/// If `x` is not `f32`.
pub fn activate(x: &Tensor, act: Activation) -> Result<Tensor> {
    match act {
        Activation::None => Ok(x.clone()),
        act => with_slice(x, |xs| {
            // SAFETY: as many elements are written as read, and each piece has both.
            unsafe { elementwise(x, 1000, |at, out| activate_to(&xs[at..at + out.len()], out, act)) }
        }),
    }
}

/// A tensor like `x` of which `f(first element, output)` writes pieces. `cost` is as in [`build_rows`].
///
/// # Safety
/// `f` writes every element of what it is given.
unsafe fn elementwise(
    x: &Tensor,
    cost: usize,
    f: impl Fn(usize, &mut [MaybeUninit<f32>]) + Sync + Send,
) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    unsafe { build_rows(x.elem_count(), 1, cost, x.shape(), f) }
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
    with_slice(a, |x| {
        with_slice(b, |y| {
            // SAFETY: as many elements are written as read, and each piece has both.
            unsafe {
                elementwise(a, 300, |at, out| {
                    let (x, y) = (&x[at..at + out.len()], &y[at..at + out.len()]);
                    for ((out, &x), &y) in out.iter_mut().zip(x).zip(y) {
                        out.write(x + y);
                    }
                })
            }
        })
    })
}

/// `hidden · gelu(gate)` of `[.., 2C]`, where hidden is the first half of the last axis and gate the second; gelu is
/// exact. Gives `[.., C]`.
///
/// # Errors
/// If the last axis is odd or empty.
pub fn geglu(x: &Tensor) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if width % 2 != 0 || width == 0 {
        bail!("geglu: the last axis must be even and not empty, got {width}");
    }
    let (half, rows) = (width / 2, x.elem_count() / width);
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = half;
    }
    with_slice(x, |xs| {
        // SAFETY: each row of the output is written from its row of the input.
        unsafe {
            build_rows(rows, half, 2000, shape, |row, out| {
                geglu_to(&xs[row * width..][..out.len() * 2], out, half);
            })
        }
    })
}

//! Scaled dot-product attention.

use candle_core::{D, Result, Tensor, bail};

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AttentionMask {
    /// All.
    #[default]
    None,
    /// Those not after it: query `i` sees keys `0..=i + (Skv − Sq)`.
    Causal,
}

/// `softmax(scale · Q Kᵀ + mask) V` per head: `q` `[B, Sq, H, D]`, `k` and `v` `[B, Skv, H, D]`, strided views allowed;
/// gives `[B, Sq, H·D]`.
///
/// # Errors
/// If shapes do not fit, or a causal mask has more queries than keys.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, mask: AttentionMask) -> Result<Tensor> {
    let (b, sq, h, d) = q.dims4()?;
    let skv = k.dim(1)?;
    if k.dims() != [b, skv, h, d] || v.dims() != k.dims() {
        bail!("attention: q {:?}, k {:?} and v {:?} do not fit", q.shape(), k.shape(), v.shape());
    }
    let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
    let mut s = (q.contiguous()?.matmul(&k.transpose(2, 3)?.contiguous()?)? * f64::from(scale))?;
    match mask {
        AttentionMask::None => {}
        AttentionMask::Causal => {
            if skv < sq {
                bail!("attention: a causal mask needs at least as many keys as queries, got {skv} and {sq}");
            }
            let bias: Vec<f32> =
                (0..sq * skv).map(|i| if i % skv <= i / skv + skv - sq { 0.0 } else { f32::NEG_INFINITY }).collect();
            s = s.broadcast_add(&Tensor::from_vec(bias, (sq, skv), s.device())?)?;
        }
    }
    let e = s.broadcast_sub(&s.max_keepdim(D::Minus1)?)?.exp()?;
    let p = e.broadcast_div(&e.sum_keepdim(D::Minus1)?)?;
    p.matmul(&v.contiguous()?)?.transpose(1, 2)?.contiguous()?.reshape((b, sq, h * d))
}

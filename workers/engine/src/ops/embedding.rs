//! Sinusoidal embeddings of timesteps.

use candle_core::{Result, Tensor, bail};

use super::tensor::from_vec;

/// `[t.len(), dim]`: sine and cosine of `t · max_period^(−i / (half − downscale_freq_shift))`, `half = dim / 2`. Cosines
/// come first if `flip_sin_to_cos`; an odd `dim` ends with a zero. The formula of Ho et al. 2020 as diffusers'
/// `get_timestep_embedding` parameterises it; frequencies are rounded to f32 as there.
///
/// # Errors
/// If `dim` is below 2 or `downscale_freq_shift` equals `half`.
pub fn timestep_embedding(
    t: &[f32],
    dim: usize,
    flip_sin_to_cos: bool,
    downscale_freq_shift: f32,
    max_period: f32,
) -> Result<Tensor> {
    let half = dim / 2;
    if half == 0 || half as f32 == downscale_freq_shift {
        bail!("timestep embedding: width {dim} is too small for a frequency shift of {downscale_freq_shift}");
    }
    let mut out = vec![0f32; t.len() * dim];
    for (&t, row) in t.iter().zip(out.chunks_exact_mut(dim)) {
        for i in 0..half {
            let exponent = -max_period.ln() * i as f32 / (half as f32 - downscale_freq_shift);
            let angle = t * exponent.exp();
            let (sin_at, cos_at) = if flip_sin_to_cos { (half + i, i) } else { (i, half + i) };
            row[sin_at] = angle.sin();
            row[cos_at] = angle.cos();
        }
    }
    from_vec(out, (t.len(), dim))
}

//! Weights on what the encoder made of a prompt.

use candle_core::{DType, Tensor};

use super::{Chunk, TextError, WINDOW};

/// Multiplies each token's encoding by its weight and brings each window's mean back to what it was, as the web UIs'
/// original implementation does. `hidden` is `[windows, 77, width]`; windows without weights stay bit for bit.
///
/// # Errors
/// Another number of windows or of tokens.
pub fn weigh(hidden: &Tensor, chunks: &[Chunk]) -> Result<Tensor, TextError> {
    let shape = hidden.dims();
    if shape.len() != 3 || shape[0] != chunks.len() || shape[1] != WINDOW {
        return Err(TextError::Weights(format!(
            "an encoding of shape {shape:?} does not belong to {} windows of {WINDOW} tokens",
            chunks.len()
        )));
    }
    if chunks.iter().all(Chunk::is_plain) {
        return Ok(hidden.clone());
    }
    let windows: Result<Vec<Tensor>, candle_core::Error> = chunks
        .iter()
        .enumerate()
        .map(|(i, chunk)| {
            let window = hidden.narrow(0, i, 1)?;
            if chunk.is_plain() { Ok(window) } else { weighed(&window, chunk) }
        })
        .collect();
    windows.and_then(|windows| Tensor::cat(&windows, 0)).map_err(|error| TextError::Weights(error.to_string()))
}

fn weighed(window: &Tensor, chunk: &Chunk) -> Result<Tensor, candle_core::Error> {
    let dtype = window.dtype();
    let window = window.to_dtype(DType::F32)?;
    let weights = Tensor::from_slice(&chunk.weights, (1, WINDOW, 1), window.device())?;
    let before = window.mean_all()?.to_scalar::<f32>()?;
    let window = window.broadcast_mul(&weights)?;
    let after = window.mean_all()?.to_scalar::<f32>()?;
    // Weights of zero can leave no mean to scale.
    let scale = if after == 0.0 { 1.0 } else { f64::from(before / after) };
    window.affine(scale, 0.0)?.to_dtype(dtype)
}

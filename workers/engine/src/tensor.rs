//! Tensors at the engine's border: plain f32 values in and out, so that a caller need not know the tensor library.

use candle_core::{Device, Result};

pub use candle_core::Tensor;

/// A tensor of row-major values on the CPU.
///
/// # Errors
/// The number of values is not the shape's product.
pub fn from_f32(values: Vec<f32>, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// A tensor's values, row-major, from any device.
///
/// # Errors
/// It does not hold f32, or the device fails.
pub fn to_f32(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1::<f32>()
}

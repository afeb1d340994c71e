//! Between candle's tensors and plain slices.

use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};

/// Calls `f` with the elements of `x` in row-major order; copies only when `x` is not contiguous.
pub(super) fn with_slice<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    if x.dtype() != DType::F32 {
        bail!("ops on the CPU take f32, got {:?} {:?}; convert the tensor when it is loaded", x.dtype(), x.shape());
    }
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => {
            let data = cpu.as_slice::<f32>()?;
            let start = layout.start_offset();
            f(&data[start..start + layout.shape().elem_count()])
        }
        _ => bail!("ops: a tensor on {:?} reached the CPU path", x.device().location()),
    }
}

/// A CPU tensor that owns `data`.
pub(super) fn from_vec(data: Vec<f32>, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_vec(data, shape.into(), &Device::Cpu)
}

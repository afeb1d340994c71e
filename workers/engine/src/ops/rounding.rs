//! Computing in a short type: f32 numbers that are rounded to what the type can hold.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use super::tensor::Shared;
use super::threads::parallel;

/// What a network computes in. The CPU's kernels sum in f32 whatever it is; a short type is computed as its numbers: weights
/// and the outputs of layers are rounded to it, so that what it cannot hold becomes infinite as it would on a device that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ComputeType {
    /// 32-bit floats: nothing is rounded.
    #[default]
    F32,
    /// 16-bit IEEE floats, up to 65,504.
    F16,
    /// 16-bit brain floats: the range of f32 with eight bits of precision.
    Bf16,
}

impl ComputeType {
    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Rounds each number, half to even; what is too large for the type becomes infinite.
    pub fn round(self, values: &mut [f32]) {
        match self {
            Self::F32 => {}
            Self::F16 => {
                let mut short = [f16::ZERO; BLOCK];
                for part in values.chunks_mut(BLOCK) {
                    let short = &mut short[..part.len()];
                    short.convert_from_f32_slice(part);
                    short.convert_to_f32_slice(part);
                }
            }
            Self::Bf16 => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
        }
    }
}

/// Numbers that are converted together.
const BLOCK: usize = 512;
/// Numbers that one thread rounds at a time.
const PIECE: usize = 1 << 14;

struct Round(ComputeType);

impl InplaceOp1 for Round {
    fn name(&self) -> &'static str {
        "round"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("round: the tensor must be contiguous, its layout is {layout:?}");
        };
        let CpuStorage::F32(data) = storage else {
            bail!("round: the tensor must hold f32");
        };
        let values = &mut data[start..end];
        let (len, shared) = (values.len(), Shared::of(values));
        parallel(len.div_ceil(PIECE), len / 2, |i| {
            let start = i * PIECE;
            // SAFETY: pieces are disjoint ranges of `values`, which hold numbers and are borrowed until all are done.
            let part = unsafe { std::slice::from_raw_parts_mut(shared.at(start), PIECE.min(len - start)) };
            self.0.round(part);
        })
    }
}

/// Rounds the numbers of `x` in place, those of every tensor that shares its memory.
///
/// Working set: none.
///
/// # Errors
/// If `x` is not contiguous f32 and there is something to round.
pub fn round(x: &Tensor, compute: ComputeType) -> Result<()> {
    match compute {
        ComputeType::F32 => Ok(()),
        ComputeType::F16 | ComputeType::Bf16 => x.inplace_op1(&Round(compute)),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn numbers_become_those_of_the_type() -> Result<()> {
        let values: Vec<f32> =
            (0..40_000).map(|i| (i as f32 - 20_000.0) * 3.7).chain([65_519.0, 65_520.0, 1e-9]).collect();
        for compute in [ComputeType::F32, ComputeType::F16, ComputeType::Bf16] {
            let x = Tensor::from_vec(values.clone(), values.len(), &Device::Cpu)?;
            round(&x, compute)?;
            let expected: Vec<f32> = values
                .iter()
                .map(|&v| match compute {
                    ComputeType::F32 => v,
                    ComputeType::F16 => f16::from_f32(v).to_f32(),
                    ComputeType::Bf16 => bf16::from_f32(v).to_f32(),
                })
                .collect();
            assert_eq!(x.to_vec1::<f32>()?, expected, "{}", compute.name());
        }
        Ok(())
    }

    #[test]
    fn what_is_too_large_for_f16_becomes_infinite() {
        let mut values = [65_519.0f32, 65_520.0, -1e6];
        ComputeType::F16.round(&mut values);
        assert_eq!(values, [65_504.0, f32::INFINITY, f32::NEG_INFINITY]);
        let mut values = [65_520.0f32, -1e6];
        ComputeType::Bf16.round(&mut values);
        assert!(values.iter().all(|v| v.is_finite()));
    }
}

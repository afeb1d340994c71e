//! Writing weight files.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};

use super::{FixtureError, seeded};

/// A tensor to be written, with the values that its seed gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name in the file.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The name that seeds it.
    pub seed: String,
}

impl NewTensor {
    /// Seeded by its own name.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        let name = name.into();
        Self { seed: name.clone(), name, shape: shape.to_vec() }
    }
}

/// How weights are laid out in files.
#[derive(Clone, Copy, Debug)]
pub enum Layout {
    /// One file of this type of numbers (F32, F16 or BF16).
    Single(Dtype),
    /// One file with the variant's name, `fp16`.
    Fp16Variant,
    /// This many shards and an index, F32.
    Shards(usize),
}

fn bytes(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Writes `tensors` to one safetensors file.
///
/// # Errors
/// If the file cannot be written.
pub fn write_safetensors(path: &Path, tensors: &[NewTensor], dtype: Dtype) -> Result<(), FixtureError> {
    let mut data = BTreeMap::new();
    for tensor in tensors {
        data.insert(&tensor.name, (bytes(&seeded(&tensor.seed, &tensor.shape), dtype), &tensor.shape));
    }
    let views: Result<Vec<_>, _> = data
        .iter()
        .map(|(name, (bytes, shape))| Ok((name, TensorView::new(dtype, (*shape).clone(), bytes)?)))
        .collect();
    let invalid = |e: safetensors::SafeTensorError| FixtureError::Invalid(format!("{}: {e}", path.display()));
    serialize_to_file(views.map_err(invalid)?, None, path).map_err(invalid)
}

/// Writes `tensors` to `folder` as `{stem}.safetensors` or as `layout` says.
///
/// # Errors
/// If files cannot be written.
pub fn write_weights(folder: &Path, stem: &str, tensors: &[NewTensor], layout: Layout) -> Result<(), FixtureError> {
    std::fs::create_dir_all(folder)?;
    match layout {
        Layout::Single(dtype) => write_safetensors(&folder.join(format!("{stem}.safetensors")), tensors, dtype),
        Layout::Fp16Variant => write_safetensors(&folder.join(format!("{stem}.fp16.safetensors")), tensors, Dtype::F16),
        Layout::Shards(count) => {
            let mut map = serde_json::Map::new();
            for (i, part) in tensors.chunks(tensors.len().div_ceil(count)).enumerate() {
                let name = format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1);
                write_safetensors(&folder.join(&name), part, Dtype::F32)?;
                map.extend(part.iter().map(|t| (t.name.clone(), name.clone().into())));
            }
            let index = serde_json::json!({ "metadata": {}, "weight_map": map });
            std::fs::write(folder.join(format!("{stem}.safetensors.index.json")), index.to_string())?;
            Ok(())
        }
    }
}

/// Multiplies the numbers of the tensors that `by` gives a factor for, in the safetensors file `path`, which holds F32 or F16
/// and comes to hold F32: for weights that a test needs out of the ordinary.
///
/// # Errors
/// If the file cannot be read or written.
pub fn scale_weights(path: &Path, by: impl Fn(&str) -> Option<f32>) -> Result<(), FixtureError> {
    let invalid = |e: safetensors::SafeTensorError| FixtureError::Invalid(format!("{}: {e}", path.display()));
    let file = std::fs::read(path)?;
    let mut data = BTreeMap::new();
    for (name, view) in SafeTensors::deserialize(&file).map_err(invalid)?.tensors() {
        let factor = by(&name).unwrap_or(1.0);
        let values: Vec<f32> = match view.dtype() {
            Dtype::F32 => view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::F16 => view.data().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            other => return Err(FixtureError::Invalid(format!("{}: {name} is {other:?}", path.display()))),
        };
        let scaled: Vec<f32> = values.iter().map(|v| v * factor).collect();
        data.insert(name, (bytes(&scaled, Dtype::F32), view.shape().to_vec()));
    }
    let views: Result<Vec<_>, _> = data
        .iter()
        .map(|(name, (bytes, shape))| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect();
    serialize_to_file(views.map_err(invalid)?, None, path).map_err(invalid)
}

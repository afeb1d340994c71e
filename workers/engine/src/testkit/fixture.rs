//! Recorded pipelines.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use flate2::read::GzDecoder;
use serde::Deserialize;
use thiserror::Error;

use super::write::{Layout, NewTensor, write_weights};

/// A fixture that is missing or broken, or a folder that cannot be written.
#[derive(Debug, Error)]
pub enum FixtureError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Not what was expected.
    #[error("fixture: {0}")]
    Invalid(String),
    /// A tensor that cannot be made.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// The folder of all fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// The decompressed bytes of a file in [`fixtures`].
pub(super) fn read_gz(name: &str) -> Result<Vec<u8>, FixtureError> {
    let path = fixtures().join(name);
    let file = File::open(&path).map_err(|e| FixtureError::Invalid(format!("{}: {e}", path.display())))?;
    let mut bytes = Vec::new();
    GzDecoder::new(file).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[derive(Deserialize)]
struct Folder {
    oracle: serde_json::Value,
    files: BTreeMap<String, String>,
    weights: Vec<Weight>,
}

/// File, tensor, shape, and the seed where it is not the tensor's own name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Weight {
    Own(String, String, Vec<usize>),
    Seeded(String, String, Vec<usize>, Option<String>),
}

/// A recorded pipeline: its folder without weights, their names, and what every part of it took and gave.
#[derive(Clone, Debug)]
pub struct Fixture {
    /// Its name, as in `sd15`.
    pub name: String,
    /// How the pipeline was called: `arch`, `args`, `scheduler`, `versions`.
    pub oracle: serde_json::Value,
    files: BTreeMap<String, String>,
    weights: BTreeMap<PathBuf, Vec<NewTensor>>,
    tensors: HashMap<String, Tensor>,
}

/// Type, shape, file and offset of a recorded tensor.
type Place = (String, Vec<usize>, String, usize);

/// Where each key's numbers are, and the numbers of one file, four bytes each.
type Recording = (BTreeMap<String, Place>, Vec<[u8; 4]>);

/// Reads a file of tensors.
fn read_tensors(name: &str) -> Result<Recording, FixtureError> {
    let invalid = |what: &str| FixtureError::Invalid(format!("{name}: {what}"));
    let bytes = read_gz(name)?;
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| invalid("no length"))?;
    let (header, data) =
        rest.split_at_checked(u64::from_le_bytes(*length) as usize).ok_or_else(|| invalid("no header"))?;
    let header = serde_json::from_slice(header).map_err(|e| invalid(&e.to_string()))?;
    let count = data.len() / 4;
    let numbers = (0..count).map(|i| [data[i], data[count + i], data[2 * count + i], data[3 * count + i]]).collect();
    Ok((header, numbers))
}

impl Fixture {
    /// Reads the fixture called `name`.
    ///
    /// # Errors
    /// If it is missing or broken.
    pub fn open(name: &str) -> Result<Self, FixtureError> {
        let invalid = |e: &dyn std::fmt::Display| FixtureError::Invalid(format!("{name}: {e}"));
        let folder: Folder =
            serde_json::from_slice(&read_gz(&format!("{name}.folder.json.gz"))?).map_err(|e| invalid(&e))?;
        let mut weights: BTreeMap<PathBuf, Vec<NewTensor>> = BTreeMap::new();
        for weight in folder.weights {
            let (file, tensor, shape, seed) = match weight {
                Weight::Own(file, tensor, shape) => (file, tensor.clone(), shape, Some(tensor)),
                Weight::Seeded(file, tensor, shape, seed) => (file, tensor, shape, seed),
            };
            let seed = seed.ok_or_else(|| invalid(&format!("tensor {tensor} has no seed")))?;
            weights.entry(file.into()).or_default().push(NewTensor { name: tensor, shape, seed });
        }
        let (places, numbers) = read_tensors(&format!("{name}.oracle.gz"))?;
        let mut pools = HashMap::from([(name.to_owned(), numbers)]);
        let mut tensors = HashMap::new();
        for (key, (kind, shape, file, offset)) in places {
            if !pools.contains_key(&file) {
                pools.insert(file.clone(), read_tensors(&format!("{file}.oracle.gz"))?.1);
            }
            let count = shape.iter().product::<usize>();
            let numbers =
                pools[&file].get(offset..offset + count).ok_or_else(|| invalid(&format!("{key} is cut off")))?;
            let tensor = if kind == "i32" {
                let ids: Vec<u32> = numbers.iter().map(|&b| u32::from_le_bytes(b)).collect();
                Tensor::from_vec(ids, shape, &Device::Cpu)?
            } else {
                let values: Vec<f32> = numbers.iter().map(|&b| f32::from_le_bytes(b)).collect();
                Tensor::from_vec(values, shape, &Device::Cpu)?
            };
            tensors.insert(key, tensor);
        }
        // Not stored, since it follows: diffusers' picture is its decoder's output moved to 0..1.
        if let Some(decoded) = tensors.get("vae.0.out") {
            tensors.insert("image".into(), decoded.affine(0.5, 0.5)?.clamp(0f32, 1f32)?);
        }
        Ok(Self { name: name.into(), oracle: folder.oracle, files: folder.files, weights, tensors })
    }

    /// What was recorded under `key`: f32, or u32 for integers.
    ///
    /// # Errors
    /// If there is no such key.
    pub fn tensor(&self, key: &str) -> Result<&Tensor, FixtureError> {
        self.tensors.get(key).ok_or_else(|| FixtureError::Invalid(format!("{}: nothing under {key}", self.name)))
    }

    /// The single number under `key`.
    ///
    /// # Errors
    /// If there is no such key or more than one number.
    pub fn number(&self, key: &str) -> Result<f64, FixtureError> {
        let values = self.tensor(key)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        match values.as_slice() {
            [one] => Ok(*one),
            _ => Err(FixtureError::Invalid(format!("{}: {key} is not one number", self.name))),
        }
    }

    /// The token ids under `key`, `[B, S]`.
    ///
    /// # Errors
    /// If there is no such key.
    pub fn ids(&self, key: &str) -> Result<Vec<Vec<u32>>, FixtureError> {
        Ok(self.tensor(key)?.to_dtype(DType::U32)?.to_vec2::<u32>()?)
    }

    /// Whether something was recorded under `key`.
    pub fn has(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    /// The tensors of one weight file of the folder, as in `unet/diffusion_pytorch_model.safetensors`.
    pub fn weights(&self, file: &str) -> &[NewTensor] {
        self.weights.get(Path::new(file)).map_or(&[], Vec::as_slice)
    }

    /// Writes the whole model folder, weights in f32.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_model(&self, folder: &Path) -> Result<(), FixtureError> {
        self.write_model_as(folder, Layout::Single(safetensors::Dtype::F32))
    }

    /// Writes the whole model folder, each component's weights in `layout`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_model_as(&self, folder: &Path, layout: Layout) -> Result<(), FixtureError> {
        for (path, text) in &self.files {
            let path = folder.join(path);
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(path, text)?;
        }
        for (file, tensors) in &self.weights {
            let path = folder.join(file);
            match (path.parent(), path.file_stem()) {
                (Some(parent), Some(stem)) => write_weights(parent, &stem.to_string_lossy(), tensors, layout)?,
                _ => return Err(FixtureError::Invalid(format!("{} is no file", file.display()))),
            }
        }
        Ok(())
    }
}

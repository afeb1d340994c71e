//! The tensors of one component, wherever its files put them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::{SafetensorsFile, TensorEntry, WeightsError, component_files};

/// How names in files become the names that an architecture declares: the files of one model have been written by
/// several generations of libraries.
#[derive(Clone, Copy, Debug)]
pub struct Naming {
    /// From a file's name to the declared one.
    pub canonical: fn(&str) -> Cow<'_, str>,
    /// Whether a tensor of this declared name may be there without a use (buffers, heads of other tasks).
    pub ignorable: fn(&str) -> bool,
}

/// The type of the numbers in a set of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// 16-bit brain floats.
    Bf16,
    /// More than one of them.
    Mixed,
}

/// A tensor that holds numbers which are not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The file.
    pub path: PathBuf,
    /// The tensor's name in it.
    pub tensor: String,
    /// How many of its numbers are infinite or not a number.
    pub count: usize,
}

/// All tensors of one component by declared name.
#[derive(Clone, Debug)]
pub struct WeightSet {
    root: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Declared name to file and name in it.
    names: BTreeMap<String, (usize, String)>,
    naming: Naming,
}

impl WeightSet {
    /// Opens the weights in `folder`; see [`component_files`] for which files those are.
    ///
    /// # Errors
    /// As [`component_files`], and if two tensors have one declared name.
    pub fn open(folder: &Path, stem: &str, naming: Naming) -> Result<Self, WeightsError> {
        Self::from_files(folder.to_path_buf(), component_files(folder, stem)?, naming)
    }

    /// From opened files; `root` is named in errors that belong to no single file.
    ///
    /// # Errors
    /// If two tensors have one declared name.
    pub fn from_files(root: PathBuf, files: Vec<SafetensorsFile>, naming: Naming) -> Result<Self, WeightsError> {
        let mut names = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for tensor in file.tensors() {
                let declared = (naming.canonical)(tensor.name).into_owned();
                if names.insert(declared, (index, tensor.name.to_owned())).is_some() {
                    return Err(WeightsError::Duplicate { path: file.path().into(), tensor: tensor.name.into() });
                }
            }
        }
        Ok(Self { root, files, names, naming })
    }

    /// The folder that the weights came from.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The files, in order of their names.
    pub fn files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(SafetensorsFile::len).sum()
    }

    /// Declared names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// Whether a tensor of this declared name may be there without a use.
    pub fn is_ignorable(&self, declared: &str) -> bool {
        (self.naming.ignorable)(declared)
    }

    /// The tensor declared as `name`, and the file that has it.
    pub fn tensor(&self, name: &str) -> Option<(&Path, TensorEntry<'_>)> {
        let (file, own) = self.names.get(name)?;
        let file = &self.files[*file];
        file.tensor(own).map(|entry| (file.path(), entry))
    }

    /// Lets the pages of the tensor declared as `name` go; they are read again when it is.
    pub fn let_go(&self, name: &str) {
        if let Some((file, own)) = self.names.get(name) {
            self.files[*file].let_go(own);
        }
    }

    /// The error for a tensor of this declared name that has no place; `None` if there is no such tensor.
    pub fn unexpected(&self, declared: &str) -> Option<WeightsError> {
        self.tensor(declared).map(|(path, tensor)| WeightsError::Unexpected {
            path: path.into(),
            tensor: tensor.name.into(),
            found: tensor.shape.to_vec(),
        })
    }

    /// The type of the numbers of all tensors; `None` if there is none of a supported type.
    pub fn precision(&self) -> Option<Precision> {
        let mut seen = None;
        for tensor in self.files.iter().flat_map(SafetensorsFile::tensors) {
            let this = match tensor.dtype {
                Dtype::F32 => Precision::F32,
                Dtype::F16 => Precision::F16,
                Dtype::BF16 => Precision::Bf16,
                _ => continue,
            };
            match seen {
                None => seen = Some(this),
                Some(before) if before == this => {}
                Some(_) => return Some(Precision::Mixed),
            }
        }
        seen
    }

    /// Checks that the tensor declared as `name` is there, has one of the `shapes` and a supported type.
    ///
    /// # Errors
    /// If one of these does not hold.
    pub fn check(&self, name: &str, shapes: &[&[usize]]) -> Result<TensorEntry<'_>, WeightsError> {
        let expected = || shapes.first().map(|s| s.to_vec()).unwrap_or_default();
        let Some((path, tensor)) = self.tensor(name) else {
            return Err(WeightsError::Missing { path: self.root.clone(), tensor: name.into(), expected: expected() });
        };
        if !shapes.contains(&tensor.shape) {
            return Err(WeightsError::WrongShape {
                path: path.into(),
                tensor: tensor.name.into(),
                expected: expected(),
                found: tensor.shape.to_vec(),
            });
        }
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(WeightsError::UnsupportedDtype {
                path: path.into(),
                tensor: tensor.name.into(),
                dtype: tensor.dtype.to_string(),
            });
        }
        Ok(tensor)
    }

    /// The numbers of the tensor declared as `name`, which must have one of the `shapes`, appended to `out` as f32.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn append_f32(&self, name: &str, shapes: &[&[usize]], out: &mut Vec<f32>) -> Result<(), WeightsError> {
        let tensor = self.check(name, shapes)?;
        let before = out.len();
        out.resize(before + tensor.shape.iter().product::<usize>(), 0.0);
        read_f32(&tensor, 0, &mut out[before..]);
        Ok(())
    }

    /// The tensor declared as `name` of exactly `shape`, as f32 on the CPU.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Tensor, WeightsError> {
        let mut data = Vec::with_capacity(shape.iter().product());
        self.append_f32(name, &[shape], &mut data)?;
        Tensor::from_vec(data, shape, &Device::Cpu).map_err(|e| WeightsError::BadRange {
            path: self.root.clone(),
            tensor: name.into(),
            reason: e.to_string(),
        })
    }
}

/// Reads numbers of `tensor` from number `at` on into all of `out`, as f32. Its type must be F32, F16 or BF16.
///
/// # Panics
/// If the tensor ends before.
pub(crate) fn read_f32(tensor: &TensorEntry<'_>, at: usize, out: &mut [f32]) {
    /// Numbers converted at a time, so that the conversion works on a buffer in the cache.
    const CHUNK: usize = 4096;
    let bytes = |size: usize| &tensor.bytes[at * size..(at + out.len()) * size];
    match tensor.dtype {
        Dtype::F16 => {
            let mut buffer = [f16::ZERO; CHUNK];
            for (bytes, out) in bytes(2).chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
                let halves = &mut buffer[..out.len()];
                for (half, pair) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
                    *half = f16::from_le_bytes([pair[0], pair[1]]);
                }
                halves.convert_to_f32_slice(out);
            }
        }
        Dtype::BF16 => {
            let pairs = bytes(2).chunks_exact(2);
            out.iter_mut().zip(pairs).for_each(|(to, b)| *to = bf16::from_le_bytes([b[0], b[1]]).to_f32());
        }
        _ => {
            let words = bytes(4).chunks_exact(4);
            out.iter_mut().zip(words).for_each(|(to, b)| *to = f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        }
    }
}

/// Finds the tensors that hold infinities or NaNs. It reads every byte, so it is asked only after a stage gave a
/// non-finite result.
pub fn scan_non_finite(weights: &WeightSet) -> Vec<NonFinite> {
    let mut found = Vec::new();
    for file in &weights.files {
        for tensor in file.tensors() {
            let mut numbers = vec![0f32; tensor.shape.iter().product()];
            match tensor.dtype {
                Dtype::F32 | Dtype::F16 | Dtype::BF16 => read_f32(&tensor, 0, &mut numbers),
                _ => continue,
            }
            let count = numbers.iter().filter(|v| !v.is_finite()).count();
            if count > 0 {
                found.push(NonFinite { path: file.path().into(), tensor: tensor.name.into(), count });
            }
        }
    }
    found
}

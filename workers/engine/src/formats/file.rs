//! One safetensors file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::Dtype;

use super::WeightsError;
use super::header::{HeaderEntry, parse};
use super::mapping::{let_go, map_shared};

/// A checked safetensors file, mapped read-only and shared; its pages are read when a tensor is.
#[derive(Clone, Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: Arc<Mmap>,
    /// Kept for advice about its pages.
    file: Arc<File>,
    entries: Arc<BTreeMap<String, HeaderEntry>>,
}

/// One tensor of a file.
#[derive(Clone, Copy, Debug)]
pub struct TensorEntry<'a> {
    /// The name in the file.
    pub name: &'a str,
    /// The type of its numbers.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its bytes, little-endian, row-major; not aligned.
    pub bytes: &'a [u8],
}

impl SafetensorsFile {
    /// Maps `path` and checks its header against its length.
    ///
    /// # Errors
    /// For anything that the header claims and the file does not have; see [`WeightsError`].
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let (map, file) = map_shared(path)?;
        let entries = parse(path, &map)?;
        Ok(Self { path: path.to_path_buf(), map: Arc::new(map), file: Arc::new(file), entries: Arc::new(entries) })
    }

    /// The file's path as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the whole file.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Whether it holds no tensor.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The header, as the file has it.
    pub fn header_bytes(&self) -> &[u8] {
        &self.map[..self.data_start()]
    }

    /// Everything behind the header.
    pub fn data_bytes(&self) -> &[u8] {
        &self.map[self.data_start()..]
    }

    fn data_start(&self) -> usize {
        self.entries.values().map(|e| e.bytes.start).min().unwrap_or(self.map.len())
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<TensorEntry<'_>> {
        self.entries.get_key_value(name).map(|(name, entry)| self.entry(name, entry))
    }

    /// All tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorEntry<'_>> {
        self.entries.iter().map(|(name, entry)| self.entry(name, entry))
    }

    /// Lets the pages of the tensor called `name` go; they are read again when it is.
    pub fn let_go(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            let_go(&self.map, &self.file, entry.bytes.clone());
        }
    }

    fn entry<'a>(&'a self, name: &'a str, entry: &'a HeaderEntry) -> TensorEntry<'a> {
        TensorEntry { name, dtype: entry.dtype, shape: &entry.shape, bytes: &self.map[entry.bytes.clone()] }
    }
}

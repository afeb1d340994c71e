//! Weight files: safetensors mapped read-only, single or in shards, in the folders that diffusers writes.
//!
//! A file is checked whole when it is opened, headers against length, before any tensor is read: whatever it claims, the
//! answer is a [`WeightsError`] that names file, tensor and remedy.

mod component;
mod error;
mod file;
mod header;
mod mapping;
mod weights;

pub use component::{component_files, weight_files_in};
pub use error::WeightsError;
pub use file::{SafetensorsFile, TensorEntry};
pub use header::MAX_HEADER_BYTES;
pub(crate) use weights::read_f32;
pub use weights::{Naming, NonFinite, Precision, WeightSet, scan_non_finite};

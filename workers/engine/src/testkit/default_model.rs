//! The default model's networks as diffusers runs them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::SlicedTensor;
use super::fixture::{FixtureError, read_gz};

/// Outputs of the default model, on inputs that are [`super::noise`] of names.
#[derive(Clone, Debug, Deserialize)]
pub struct DefaultModel {
    /// Large outputs hold every `step`-th number.
    pub step: usize,
    /// Small ones every `small_step`-th.
    pub small_step: usize,
    /// Token ids for the text encoder.
    pub ids: Vec<Vec<u32>>,
    /// What was given, by name.
    pub outputs: BTreeMap<String, SlicedTensor>,
}

impl DefaultModel {
    /// Reads them.
    ///
    /// # Errors
    /// If the file is missing or broken.
    pub fn open() -> Result<Self, FixtureError> {
        serde_json::from_slice(&read_gz("default.json.gz")?)
            .map_err(|e| FixtureError::Invalid(format!("default.json.gz: {e}")))
    }

    /// The model's folder in the repository.
    pub fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/default")
    }
}

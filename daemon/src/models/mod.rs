//! Models: which there are, where they lie, what the worker program says about them.
//!
//! * [`report`]: what `sd-worker inspect` prints, as far as the daemon needs it.
//! * [`stamp`]: when a folder counts as changed.
//! * [`registry`]: names, the default model, the cache of reports.

pub mod registry;
pub mod report;
pub mod stamp;

use std::path::PathBuf;

pub use registry::{Inspector, Listed, ModelError, ModelRef, Registry, RegistryConfig};
pub use report::ModelReport;

/// A model that can be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Registered name; for a model given by path, the folder's name.
    pub name: String,
    /// Its folder.
    pub dir: PathBuf,
    /// What its inspection said.
    pub report: ModelReport,
}

//! What a model folder holds, from configurations and headers alone: no weight is read beyond a few samples, nothing runs.

mod assemble;
mod components;
mod error;
mod estimate;
mod family;
mod fingerprint;
mod report;

use std::path::Path;

use components::Collected;
pub use error::InspectError;
pub use estimate::{Shape, TaskEstimate, estimate};
use family::Pipeline;
pub use report::{
    ComponentReport, Defaults, DiffusionReport, Family, FileReport, ModelReport, NUMERICS_VERSION, Stage, Task,
    TaskReport, TextReport, VaeReport, WorkingSet,
};

/// Describes the model in `folder`.
///
/// # Errors
/// If the folder is not a model, is one of another architecture, or is one whose files do not fit together; every
/// problem is listed, the first eight in words.
pub fn inspect(folder: &Path) -> Result<ModelReport, InspectError> {
    let pipeline = Pipeline::read(folder)?;
    let collected = Collected::read(folder);
    assemble::assemble(folder, &pipeline, collected)
}

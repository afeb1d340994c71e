//! Why a folder is no model that can be run.

use std::path::PathBuf;

use thiserror::Error;

/// How many problems are told in words.
const TOLD: usize = 8;

/// A folder that cannot be used as a model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Nothing at that path.
    #[error("no model at {}: it does not exist", path.display())]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A single file.
    #[error(
        "{} is a file; give a folder in diffusers layout (model_index.json, unet, vae, text_encoder, tokenizer, scheduler). \
         A single-file checkpoint becomes one with diffusers: StableDiffusionPipeline.from_single_file(file).save_pretrained(folder)",
        path.display()
    )]
    SingleFile {
        /// The path.
        path: PathBuf,
    },
    /// A folder without `model_index.json`.
    #[error("{} has no model_index.json, so it is not a model in diffusers layout{hint}", path.display())]
    NotAPipeline {
        /// The path.
        path: PathBuf,
        /// What it seems to be.
        hint: String,
    },
    /// `model_index.json` cannot be read.
    #[error("{}: not a pipeline's index: {reason}", path.display())]
    BadIndex {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A model of an architecture that is not supported.
    #[error("{} is a {class}{}; supported are {supported}", path.display(), name.map(|n| format!(" ({n})")).unwrap_or_default())]
    Architecture {
        /// The folder.
        path: PathBuf,
        /// The pipeline's class.
        class: String,
        /// The architecture's usual name, if known.
        name: Option<&'static str>,
        /// What is supported.
        supported: String,
    },
    /// Files that are missing, broken or do not fit together.
    #[error("{} cannot be used: {}", path.display(), told(problems))]
    Problems {
        /// The folder.
        path: PathBuf,
        /// All of them, in words.
        problems: Vec<String>,
    },
}

/// The first problems, and how many more there are.
fn told(problems: &[String]) -> String {
    let list = problems.iter().take(TOLD).cloned().collect::<Vec<_>>().join("; ");
    match problems.len().checked_sub(TOLD) {
        Some(more) if more > 0 => format!("{list}; and {more} more"),
        _ => list,
    }
}

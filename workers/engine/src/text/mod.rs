//! Text: from a prompt to the token ids and weights that CLIP's encoder takes.
//!
//! [`Tokenizer`] gives transformers' `CLIPTokenizer` ids, [`parse`] reads the web UIs' emphasis, [`chunks`] cuts a prompt of
//! any length into windows of 77 ids, and [`weigh`] applies the weights to what the encoder made of them.

mod chunk;
mod emphasis;
mod tokenizer;
mod weigh;

use std::path::PathBuf;

pub use chunk::{CHUNK_TOKENS, Chunk, MAX_CHUNKS, WINDOW, chunks, equalize};
pub use emphasis::{Emphasis, Fragment, parse};
pub use tokenizer::Tokenizer;
pub use weigh::weigh;

/// Why a prompt cannot be made into ids.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A tokenizer's file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A tokenizer's file is not what it should be.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No tokenizer in a folder.
    #[error("no tokenizer in {folder}: it needs vocab.json and merges.txt, or tokenizer.json")]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// More text than is sensible.
    #[error("the prompt has {found} {unit}, more than the {limit} that are taken: shorten it")]
    TooLong {
        /// How many there are.
        found: usize,
        /// How many may be.
        limit: usize,
        /// Of what.
        unit: &'static str,
    },
    /// The text cannot be tokenized.
    #[error("the prompt cannot be tokenized: {0}")]
    Encode(String),
    /// An emphasis mode that nobody knows.
    #[error("unknown emphasis `{0}`: choose web_ui or off")]
    UnknownEmphasis(String),
    /// Weights and encoder output do not belong together, or a tensor operation failed.
    #[error("prompt weights: {0}")]
    Weights(String),
}

//! What can be wrong with weight files.

use std::path::PathBuf;

use thiserror::Error;

/// A weight file, or a set of them, that cannot be used; every message names the file and a remedy.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The operating system refused.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Its reason.
        source: std::io::Error,
    },
    /// A folder, socket or device where a file was expected.
    #[error("{} is not a regular file; give a .safetensors file", path.display())]
    NotAFile {
        /// What was found.
        path: PathBuf,
    },
    /// A file of no bytes.
    #[error("{} is empty; download or copy it again", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Python's pickle format, which runs code when it is read.
    #[error(
        "{} is a pickle file (.bin, .ckpt, .pt), which can run code when it is read and is not supported; convert it to \
         safetensors, for example with diffusers: load the pipeline, then save_pretrained(folder, safe_serialization=True)",
        path.display()
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A pointer that git-lfs left in place of the data.
    #[error("{} is a git-lfs pointer and not the file itself; run `git lfs pull` in its repository", path.display())]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// No safetensors header.
    #[error("{} is not a safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What gave it away.
        reason: String,
    },
    /// The header claims more bytes than there are.
    #[error(
        "{}: its header claims {header} bytes, but the file has {file}; it is truncated or not a safetensors file, \
         download it again",
        path.display()
    )]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// Bytes the header claims.
        header: u64,
        /// Bytes of the whole file.
        file: u64,
    },
    /// The header is longer than any honest one.
    #[error("{}: its header of {header} bytes is above the limit of {limit} bytes", path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes the header claims.
        header: u64,
        /// [`super::MAX_HEADER_BYTES`].
        limit: u64,
    },
    /// The header is no JSON object of tensors.
    #[error("{}: its header cannot be read: {reason}", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Two tensors of one name.
    #[error("{}: tensor {tensor} appears twice", path.display())]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The name.
        tensor: String,
    },
    /// The tensors need more bytes than the file has.
    #[error(
        "{} is truncated: tensor {tensor} ends at byte {needed}, but the file has {file}; download it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first tensor that ends outside.
        tensor: String,
        /// Where it ends.
        needed: u64,
        /// Bytes of the whole file.
        file: u64,
    },
    /// A tensor's byte range is not one that its neighbours and its shape allow.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    BadRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with its range.
        reason: String,
    },
    /// More bytes than the tensors describe.
    #[error("{}: {extra} bytes after the last tensor belong to none; download it again", path.display())]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// How many.
        extra: u64,
    },
    /// A type of number that is not read.
    #[error("{}: tensor {tensor} has dtype {dtype}; supported are F32, F16 and BF16", path.display())]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type, as the file names it.
        dtype: String,
    },
    /// A tensor that the architecture needs.
    #[error("{}: tensor {tensor} of shape {expected:?} is missing; the files do not belong to this configuration", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor that the architecture has no place for.
    #[error(
        "{}: tensor {tensor} of shape {found:?} has no place in this configuration; the files do not belong to it",
        path.display()
    )]
    Unexpected {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
    },
    /// A tensor of another shape than the configuration says.
    #[error(
        "{}: tensor {tensor} has shape {found:?}, but the configuration says {expected:?}; the two do not belong together",
        path.display()
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that the configuration says.
        expected: Vec<usize>,
        /// The shape that the file has.
        found: Vec<usize>,
    },
    /// An index that cannot be read.
    #[error("{}: not a safetensors index: {reason}", path.display())]
    BadIndex {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A shard that the index names is not there.
    #[error("{} names the shard {shard}, which is missing; download it", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The shard's name.
        shard: String,
    },
    /// The index says that a tensor is in a shard, and it is not.
    #[error("{} says that tensor {tensor} is in {shard}, but it is not; download both again", index.display())]
    IndexMismatch {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard's name.
        shard: String,
    },
    /// Nothing to load.
    #[error("{} has no weights; expected {expected} (or a variant of it, or shards with an index)", path.display())]
    NoWeights {
        /// The component's folder.
        path: PathBuf,
        /// The name that was looked for first.
        expected: String,
    },
    /// Several candidates and no rule that prefers one.
    #[error("{} has several weight files ({}) and none is named {expected}; keep or rename one", path.display(), found.join(", "))]
    Ambiguous {
        /// The component's folder.
        path: PathBuf,
        /// The name that was looked for first.
        expected: String,
        /// The candidates.
        found: Vec<String>,
    },
}

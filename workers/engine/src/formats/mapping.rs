//! Files mapped into memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use super::WeightsError;

/// Maps the whole of `path` read-only and shared, so that every process which has it open holds one copy of its pages.
pub(super) fn map_shared(path: &Path) -> Result<Mmap, WeightsError> {
    let io = |source| WeightsError::Io { path: path.to_path_buf(), source };
    let file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    if !metadata.is_file() {
        return Err(WeightsError::NotAFile { path: path.to_path_buf() });
    }
    if metadata.len() == 0 {
        return Err(WeightsError::Empty { path: path.to_path_buf() });
    }
    // SAFETY: the mapping is only ever read, as bytes, for which every value is valid. A file that another program
    // shortens while it is mapped raises SIGBUS on access; weight files are replaced by renaming, not rewritten in
    // place, and the worker that dies of it is one stage of one job.
    unsafe { Mmap::map(&file) }.map_err(io)
}

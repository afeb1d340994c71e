//! Files mapped into memory.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use memmap2::Mmap;

use super::WeightsError;

/// Maps the whole of `path` read-only and shared, so that every process which has it open holds one copy of its pages.
pub(super) fn map_shared(path: &Path) -> Result<(Mmap, File), WeightsError> {
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
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    Ok((map, file))
}

/// Lets the pages of `range` go: from this process, and from the page cache as far as nobody else has them mapped. They are
/// read again when they are touched. Only advice: what the system does not take is no error.
pub(super) fn let_go(map: &Mmap, file: &File, range: Range<usize>) {
    // SAFETY: sysconf reads a constant.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let start = range.start.min(map.len()) / page * page;
    let length = range.end.min(map.len()).saturating_sub(start);
    if length == 0 {
        return;
    }
    // SAFETY: the range lies within the mapping, which is shared and read-only: dropped pages come back with the same bytes.
    unsafe {
        libc::madvise(map.as_ptr().add(start).cast_mut().cast(), length, libc::MADV_DONTNEED);
        // Whole pages only: a page that is shared with a neighbour may stay cached.
        libc::posix_fadvise(file.as_raw_fd(), start as libc::off_t, length as libc::off_t, libc::POSIX_FADV_DONTNEED);
    }
}

//! The allocator of this program: the system's heap, mappings of their own for packed weights, and an end as *out of memory*
//! where there is no more.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write as _;

use sd_proto::exit::WorkerExit;

/// Ends this process with [`WorkerExit::OutOfMemory`] where memory cannot be had. Rust would abort, which the daemon could not
/// tell from a bug; and there is nothing to go on with: tensors are allocated by code that takes memory for granted.
struct ExitWhenExhausted;

#[global_allocator]
static ALLOCATOR: ExitWhenExhausted = ExitWhenExhausted;

/// Says how much was wanted, without allocating, and ends. No destructor runs: they might allocate.
#[cold]
fn exhausted(bytes: usize) -> ! {
    let mut text = [0u8; 96];
    let room = text.len();
    let mut rest = &mut text[..];
    let _ = writeln!(rest, "out of memory: the system does not give {bytes} more bytes");
    let length = room - rest.len();
    // SAFETY: the buffer has `length` bytes; what cannot be written is lost.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), length) };
    // SAFETY: ends the process and does not return.
    unsafe { libc::_exit(WorkerExit::OutOfMemory.code()) }
}

fn checked(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() { exhausted(bytes) } else { pointer }
}

/// Packed weights are aligned to the lines of the cache, and nothing else that is large is.
const WEIGHTS_ALIGN: usize = 64;
/// From so many bytes on weights have a mapping of their own.
const MAPPED_FROM: usize = 128 << 10;
/// From so many bytes on it pays to ask for huge pages: a page of 4 KiB at a time costs 0.25 ms a MiB.
const HUGE_FROM: usize = 4 << 20;

/// Whether an allocation has a mapping of its own: what a lease of weights counts comes and goes block by block, and must be gone
/// when a block is. In the heap it would leave holes between what stays: a model that streamed through 16 MiB held 43.
fn is_mapped(layout: Layout) -> bool {
    layout.align() == WEIGHTS_ALIGN && layout.size() >= MAPPED_FROM
}

fn map(bytes: usize) -> *mut u8 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping of nobody's memory; whole pages, so aligned to more than a line.
    let mapping = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if mapping == libc::MAP_FAILED {
        exhausted(bytes);
    }
    if bytes >= HUGE_FROM {
        // SAFETY: advice about the mapping made above; a system that knows no huge pages refuses it, and that is all.
        unsafe { libc::madvise(mapping, bytes, libc::MADV_HUGEPAGE) };
    }
    mapping.cast()
}

// SAFETY: every call goes to the system's allocator as it is, or to a mapping that is as large as asked for, zeroed, and unmapped
// with the layout that it was made with; where either fails, the process ends.
unsafe impl GlobalAlloc for ExitWhenExhausted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_mapped(layout) {
            return map(layout.size());
        }
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_mapped(layout) {
            return map(layout.size());
        }
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise: `size` rounded up to the alignment does not overflow.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_mapped(layout) && !is_mapped(new) {
            // SAFETY: the caller's promise.
            return checked(unsafe { System.realloc(pointer, layout, size) }, size);
        }
        // SAFETY: both are allocations of this allocator, and what is copied lies within both.
        unsafe {
            let moved = self.alloc(new);
            std::ptr::copy_nonoverlapping(pointer, moved, layout.size().min(size));
            self.dealloc(pointer, layout);
            moved
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_mapped(layout) {
            // SAFETY: made by `map` with these bytes, and not used any more.
            unsafe { libc::munmap(pointer.cast(), layout.size()) };
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_leave_the_process_when_they_are_freed_and_keep_their_bytes_when_they_grow() {
        let resident = || crate::memory::resident().unwrap().anonymous;
        let layout = Layout::from_size_align(64 << 20, WEIGHTS_ALIGN).unwrap();
        // SAFETY: allocated, written, grown and freed with the layouts that belong to them.
        unsafe {
            let before = resident();
            let pointer = ALLOCATOR.alloc(layout);
            std::ptr::write_bytes(pointer, 7, layout.size());
            assert!(resident() >= before + (48 << 20));
            let pointer = ALLOCATOR.realloc(pointer, layout, 96 << 20);
            assert_eq!((*pointer, *pointer.add((64 << 20) - 1), *pointer.add(64 << 20)), (7, 7, 0));
            let small = ALLOCATOR.realloc(pointer, Layout::from_size_align(96 << 20, WEIGHTS_ALIGN).unwrap(), 64);
            assert_eq!(*small.add(63), 7);
            assert!(resident() < before + (16 << 20), "nothing is kept of what was freed");
            ALLOCATOR.dealloc(small, Layout::from_size_align(64, WEIGHTS_ALIGN).unwrap());
        }
    }
}

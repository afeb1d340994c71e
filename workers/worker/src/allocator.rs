//! The allocator of this program: the system's, and an end as *out of memory* where it has no more.
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

// SAFETY: every call goes to the system's allocator as it is; where that fails, the process ends.
unsafe impl GlobalAlloc for ExitWhenExhausted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        checked(unsafe { System.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

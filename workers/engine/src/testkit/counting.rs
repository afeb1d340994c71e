//! An allocator that counts: what a piece of work has allocated at once, to compare with what is estimated.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counted. To be a program's `#[global_allocator]`; the count is of everything in the process, so a
/// test that uses it has a program of its own.
#[derive(Debug)]
pub struct CountingAllocator {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl CountingAllocator {
    /// One that has counted nothing.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self { now: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// What `work` gives, and the most bytes that it had allocated at once, beyond what was there before.
    pub fn peak_of<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        let before = self.now.load(Ordering::Relaxed);
        self.peak.store(before, Ordering::Relaxed);
        let result = work();
        (result, (self.peak.load(Ordering::Relaxed) - before) as u64)
    }
}

// SAFETY: every call goes to the system's allocator as it is; counting touches atomics alone.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = self.now.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        self.peak.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

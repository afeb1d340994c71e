//! Keeps the daemon's own memory small: it serves megabytes of pictures now and then and is idle otherwise.
#![allow(unsafe_code)]

/// Two threads need no more than two heaps; the C library would make eight for each core.
pub fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt changes a parameter of the allocator; called once, before any other thread runs.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        // Pictures and requests come as mappings of their own and go back at once.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10);
    }
}

/// Gives freed memory back to the system.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim is thread-safe and only releases memory that nothing uses.
    unsafe {
        libc::malloc_trim(0);
    }
}

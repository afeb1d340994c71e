//! What this process holds, as the device's accounting sees it.
//!
//! On the CPU device that is anonymous and shared memory of the process (`RssAnon + RssShmem` of `/proc/self/status`);
//! mapped weight files are reported by the system as `RssFile` and are not charged.

use std::io;

/// Bytes of this process by kind, as the kernel counts resident pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Resident {
    /// Anonymous pages: heap, stacks, converted weights.
    pub(crate) anonymous: u64,
    /// Pages of shared memory that this process has touched: its segments.
    pub(crate) shared: u64,
}

impl Resident {
    /// What a lease on the CPU device is charged with.
    pub(crate) fn charged(self) -> u64 {
        self.anonymous + self.shared
    }
}

/// Reads the counters of this process.
pub(crate) fn resident() -> io::Result<Resident> {
    parse(&std::fs::read_to_string("/proc/self/status")?)
}

fn parse(status: &str) -> io::Result<Resident> {
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .map(|kib| kib << 10)
            .ok_or_else(|| io::Error::other(format!("/proc/self/status has no field {name}")))
    };
    Ok(Resident { anonymous: field("RssAnon:")?, shared: field("RssShmem:")? })
}

/// Sets the allocator up for tensors: activations of one step are allocated again and again at the same sizes, so
/// the heap keeps them (a fresh mapping costs about 0.25 ms a MiB of page faults) until [`trim`] gives all back.
pub(crate) fn configure_allocator() {
    // SAFETY: mallopt only sets parameters of the allocator and is called before other threads exist.
    unsafe {
        // Never a mapping of its own for a large tensor, which would be unmapped when it is freed. A second arena
        // could not hold one: its heaps are limited to 64 MiB.
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}

/// Gives free heap pages back to the system.
pub(crate) fn trim() {
    // SAFETY: malloc_trim takes the allocator's own locks and only releases pages that hold no live allocation.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_pages_are_counted_and_trimmed() {
        let before = resident().unwrap();
        let touched = vec![1u8; 64 << 20];
        let during = resident().unwrap();
        assert!(during.anonymous >= before.anonymous + (60 << 20), "{before:?} {during:?}");
        drop(touched);
        trim();
        let after = resident().unwrap();
        assert!(after.anonymous < during.anonymous - (50 << 20), "{during:?} {after:?}");
        assert_eq!(after.charged(), after.anonymous + after.shared);
    }

    #[test]
    fn a_status_without_the_fields_is_an_error_not_a_zero() {
        assert!(parse("Name:\tx\nRssFile:\t 5 kB\n").is_err());
        let ok = parse("RssAnon:\t    12 kB\nRssShmem:\t 3 kB\n").unwrap();
        assert_eq!(ok, Resident { anonymous: 12 << 10, shared: 3 << 10 });
    }
}

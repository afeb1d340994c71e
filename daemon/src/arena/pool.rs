//! How many bytes of shared memory may be used, are used, and are promised.

use std::sync::Arc;

use super::Shared;

/// The account of shared memory: plain numbers, so that the ledger can grant from it in one pure step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedPool {
    limit: u64,
    used: u64,
}

impl SharedPool {
    /// An empty account of at most `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self { limit, used: 0 }
    }

    /// Bytes that may be used together.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes of segments and of promises.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Bytes that can still be taken.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    /// Takes `bytes`, or nothing and returns false where they are not free.
    pub fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.free();
        if fits {
            self.used += bytes;
        }
        fits
    }

    /// Gives `bytes` back.
    pub fn give_back(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used, "{bytes} bytes given back of {} used", self.used);
        self.used = self.used.saturating_sub(bytes);
    }
}

/// Bytes promised to one task for segments that it has yet to create. What is not used goes back when this is dropped.
#[derive(Debug)]
pub struct Reservation {
    pub(super) shared: Arc<Shared>,
    pub(super) bytes: u64,
}

impl Reservation {
    /// Bytes that are left of it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shared.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_gives_no_byte_twice() {
        let mut pool = SharedPool::new(100);
        assert!(pool.take(60));
        assert!(!pool.take(41));
        assert_eq!((pool.used(), pool.free()), (60, 40));
        pool.give_back(60);
        assert!(pool.take(100));
    }
}

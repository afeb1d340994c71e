//! The owner of every shared-memory segment.
//!
//! One segment holds one tensor ([`sd_proto::segment`]). The daemon creates it, reserves its pages before anybody hears of
//! it (so that a full `/dev/shm` is a refusal here and never a SIGBUS there), counts its handles and unlinks it when the last
//! one goes. Workers open segments by name and write or read them; what they claim of a segment is checked here
//! before it is believed.
//!
//! Segments are never used twice (R8): a new one is a new file of zeroed pages under a new number, so what an old process still
//! has mapped writable is not what a later one reads, and no tenant finds another's bytes. The price is the first
//! touch of fresh pages, about 1.4 ms per MiB.
//!
//! A killed daemon's segments are removed by [`sd_proto::instance::sweep`]; their names carry the instance's id.

mod pool;
mod segment;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_proto::instance::{SHM_DIR, segment_name};
use sd_proto::segment::{HEADER_BYTES, SegmentError};
use sd_proto::worker::v1::ElementType;
use tokio::sync::Notify;

pub use self::pool::{Reservation, SharedPool};
pub use self::segment::SegmentHandle;
use crate::residency::Bytes;

/// Why a segment cannot be had, written or believed.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Over the arena's own limit.
    #[error(
        "segment {label:?} needs {} of shared memory, but {} of the {} allowed are in use: \
         wait for running jobs, or raise the limit (container: --shm-size)",
        Bytes(*need), Bytes(*used), Bytes(*limit)
    )]
    Limit {
        /// What the segment is for.
        label: String,
        /// Its bytes.
        need: u64,
        /// Bytes in use or promised.
        used: u64,
        /// Bytes that may be in use.
        limit: u64,
    },
    /// The host has no room.
    #[error(
        "segment {label:?} needs {} of shared memory, but {SHM_DIR} has only {} free: \
         give the host (container: --shm-size) a larger one",
        Bytes(*need), Bytes(*free)
    )]
    Full {
        /// What the segment is for.
        label: String,
        /// Its bytes.
        need: u64,
        /// Bytes that the file system has left.
        free: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} segment {name}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The segment.
        name: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A message names another segment than the one it answers.
    #[error("message names {field} {found} where segment {name} has {expected}")]
    Identity {
        /// The segment.
        name: String,
        /// Which field.
        field: &'static str,
        /// In the message.
        found: String,
        /// As handed out.
        expected: String,
    },
    /// The segment's header does not hold.
    #[error("segment {name}: {source}")]
    Segment {
        /// The segment.
        name: String,
        /// What is wrong.
        source: SegmentError,
    },
    /// A payload of another length than its shape says, or a write by the daemon to a worker's segment.
    #[error("cannot write segment {name}: {what}")]
    Write {
        /// The segment.
        name: String,
        /// What is wrong.
        what: String,
    },
}

/// Bounds of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaLimits {
    /// Bytes that segments may take together, their header pages included.
    pub bytes: u64,
}

impl ArenaLimits {
    /// What the host's shared-memory file system has free now.
    ///
    /// # Errors
    /// The file system cannot be examined.
    pub fn of_host() -> std::io::Result<Self> {
        Ok(Self { bytes: host_free()? })
    }
}

/// Bytes that the host's shared-memory file system has free now.
///
/// # Errors
/// The file system cannot be examined.
pub fn host_free() -> std::io::Result<u64> {
    let stat = nix::sys::statvfs::statvfs(SHM_DIR)?;
    Ok((stat.blocks_available() as u64).saturating_mul(stat.fragment_size() as u64))
}

/// What an arena holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaUsage {
    /// Segments that exist.
    pub segments: usize,
    /// Their bytes, and those promised to tasks.
    pub bytes: u64,
    /// Bytes that may be used together.
    pub limit: u64,
    /// Bytes that can still be taken: by the limit, and by what the host has free.
    pub free: u64,
}

/// State behind every handle. The mutex guards a few additions and is never held over I/O or an await.
#[derive(Debug)]
struct Shared {
    instance: String,
    pool: Mutex<SharedPool>,
    segments: AtomicUsize,
    next: AtomicU64,
    freed: Notify,
}

impl Shared {
    fn pool(&self) -> MutexGuard<'_, SharedPool> {
        // The pool is two numbers that are changed in one statement each: valid even if a holder panicked.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, bytes: u64) {
        if bytes > 0 {
            self.pool().give_back(bytes);
            self.freed.notify_one();
        }
    }
}

/// The arena. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

impl Arena {
    /// An arena whose segments carry the id of `instance` (the id of the daemon's instance lock) in their names.
    pub fn new(instance: &str, limits: ArenaLimits) -> Self {
        Self {
            shared: Arc::new(Shared {
                instance: instance.into(),
                pool: Mutex::new(SharedPool::new(limits.bytes)),
                segments: AtomicUsize::new(0),
                next: AtomicU64::new(1),
                freed: Notify::new(),
            }),
        }
    }

    /// Bytes that a segment of `capacity` payload bytes takes: header page and payload, in whole pages.
    pub fn segment_bytes(capacity: u64) -> u64 {
        let page = HEADER_BYTES as u64;
        capacity.checked_next_multiple_of(page).and_then(|bytes| bytes.checked_add(page)).unwrap_or(u64::MAX)
    }

    /// Creates a segment that incarnation `writer` (0: the daemon) will write: one tensor of `element_type` in at most
    /// `capacity` payload bytes. Its pages are reserved when this returns. `label` is for people.
    ///
    /// # Errors
    /// [`ArenaError::Limit`] or [`ArenaError::Full`] with the numbers, or what the system says.
    pub fn create(
        &self,
        element_type: ElementType,
        capacity: u64,
        writer: u64,
        label: &str,
    ) -> Result<SegmentHandle, ArenaError> {
        let bytes = Self::segment_bytes(capacity);
        {
            let mut pool = self.shared.pool();
            if !pool.take(bytes) {
                let (used, limit) = (pool.used(), pool.limit());
                return Err(ArenaError::Limit { label: label.into(), need: bytes, used, limit });
            }
        }
        let charge = Reservation { shared: self.shared.clone(), bytes };
        self.build(charge, element_type, capacity, writer, label)
    }

    /// Like [`Arena::create`], out of bytes that were promised with a granted request.
    ///
    /// # Errors
    /// As [`Arena::create`]; [`ArenaError::Limit`] where the promise does not cover the segment.
    pub fn create_reserved(
        &self,
        reservation: &mut Reservation,
        element_type: ElementType,
        capacity: u64,
        writer: u64,
        label: &str,
    ) -> Result<SegmentHandle, ArenaError> {
        let bytes = Self::segment_bytes(capacity);
        if bytes > reservation.bytes {
            let limit = reservation.bytes;
            return Err(ArenaError::Limit { label: label.into(), need: bytes, used: 0, limit });
        }
        reservation.bytes -= bytes;
        let charge = Reservation { shared: self.shared.clone(), bytes };
        self.build(charge, element_type, capacity, writer, label)
    }

    fn build(
        &self,
        charge: Reservation,
        element_type: ElementType,
        capacity: u64,
        writer: u64,
        label: &str,
    ) -> Result<SegmentHandle, ArenaError> {
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let name = segment_name(&self.shared.instance, number);
        SegmentHandle::create(name, number, charge, element_type, capacity, writer, label)
    }

    /// What the arena holds now.
    pub fn usage(&self) -> ArenaUsage {
        let pool = *self.shared.pool();
        ArenaUsage {
            segments: self.shared.segments.load(Ordering::Relaxed),
            bytes: pool.used(),
            limit: pool.limit(),
            free: host_free().map_or(pool.free(), |free| free.min(pool.free())),
        }
    }

    /// The account, for the ledger's step.
    pub(crate) fn pool(&self) -> MutexGuard<'_, SharedPool> {
        self.shared.pool()
    }

    /// A promise of bytes that the ledger has already taken from the account.
    pub(crate) fn promise(&self, bytes: u64) -> Reservation {
        Reservation { shared: self.shared.clone(), bytes }
    }

    /// Completes when bytes have gone back to the account since the last call.
    pub(crate) async fn freed(&self) {
        self.shared.freed.notified().await;
    }
}

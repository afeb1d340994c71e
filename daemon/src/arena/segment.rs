//! One segment: created, reserved, written, believed, unlinked.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, posix_fallocate};
use nix::sys::mman::shm_open;
use nix::sys::stat::Mode;
use sd_proto::segment::{FIELDS_BYTES, HEADER_BYTES, Header, SEQUENCE_OFFSET, SegmentError};
use sd_proto::worker::v1::{ElementType, Segment};
use shared_memory::{Shmem, ShmemConf, ShmemError};

use super::{ArenaError, Reservation, host_free};

/// A counted handle of a segment. The last one that is dropped unlinks it; processes that have it mapped keep their
/// pages until they unmap them.
#[derive(Debug, Clone)]
pub struct SegmentHandle {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    label: String,
    element_type: ElementType,
    capacity: u64,
    writer: u64,
    sequence: u64,
    mapping: Mapping,
    /// A descriptor of our own: reading through it cannot fault, whatever a worker does to the segment's length.
    file: File,
    charge: Reservation,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segment").field("name", &self.name).field("label", &self.label).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.charge.shared.segments.fetch_sub(1, Ordering::Relaxed);
        // `mapping` unlinks the segment and `charge` gives its bytes back when they are dropped after this.
    }
}

/// The crate's mapping, which unmaps and unlinks when it is dropped.
struct Mapping(Shmem);

// SAFETY: `Shmem` is not Send only because it has a raw pointer to the mapping. The mapping belongs to the process and
// not to a thread, and nothing in it refers to thread-local state.
unsafe impl Send for Mapping {}
// SAFETY: through a shared `Mapping` only `publish` touches the mapped bytes, and its caller guarantees that it is the only
// writer in this process; the other methods read fields that never change after creation.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Writes payload and header fields, the sequence last and with release ordering: who sees the sequence sees
    /// the rest.
    ///
    /// # Safety
    /// Nothing else in this process writes or reads the mapping meanwhile, and its pages are reserved and have not been
    /// truncated by another process.
    unsafe fn publish(&self, fields: &[u8; FIELDS_BYTES], payload: &[u8]) {
        assert!(HEADER_BYTES + payload.len() <= self.0.len(), "the payload's length was checked against the capacity");
        let base = self.0.as_ptr();
        let sequence = u64::from_le_bytes(fields[SEQUENCE_OFFSET..].try_into().expect("eight bytes"));
        // SAFETY: both copies lie within the mapping by the assertion above, the sources are other memory, and by the
        // caller's word nobody else uses these bytes. The sequence's address is 8-byte aligned (the mapping is
        // page-aligned, 120 is a multiple of 8) and only ever accessed as an atomic or by other processes.
        unsafe {
            std::ptr::copy_nonoverlapping(payload.as_ptr(), base.add(HEADER_BYTES), payload.len());
            std::ptr::copy_nonoverlapping(fields.as_ptr(), base, SEQUENCE_OFFSET);
            AtomicU64::from_ptr(base.add(SEQUENCE_OFFSET).cast()).store(sequence.to_le(), Ordering::Release);
        }
    }
}

impl SegmentHandle {
    pub(super) fn create(
        name: String,
        sequence: u64,
        charge: Reservation,
        element_type: ElementType,
        capacity: u64,
        writer: u64,
        label: &str,
    ) -> Result<Self, ArenaError> {
        let system = |action, source| ArenaError::System { action, name: name.clone(), source };
        let too_large =
            || ArenaError::Limit { label: label.into(), need: charge.bytes, used: 0, limit: i64::MAX as u64 };
        let size = usize::try_from(charge.bytes).map_err(|_| too_large())?;
        let length = i64::try_from(charge.bytes).map_err(|_| too_large())?;
        // The crate creates exclusively with mode 0600, sets the length and maps; it reserves no page.
        let shmem = ShmemConf::new().os_id(&name).size(size).create().map_err(|e| system("create", shmem_error(e)))?;
        let mapping = Mapping(shmem);
        let file = shm_open(name.as_str(), OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|errno| system("open", errno.into()))?;
        loop {
            match posix_fallocate(file.as_fd(), 0, length) {
                Ok(()) => break,
                Err(Errno::EINTR) => {}
                // `mapping` is dropped on return: the half-made segment is unlinked.
                Err(Errno::ENOSPC | Errno::ENOMEM | Errno::EFBIG) => {
                    let free = host_free().unwrap_or(0);
                    return Err(ArenaError::Full { label: label.into(), need: charge.bytes, free });
                }
                Err(errno) => return Err(system("reserve", errno.into())),
            }
        }
        charge.shared.segments.fetch_add(1, Ordering::Relaxed);
        let (label, file) = (label.into(), File::from(file));
        let inner = Inner { name, label, element_type, capacity, writer, sequence, mapping, file, charge };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The operating system's name of it, without the slash.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// What it is for.
    pub fn label(&self) -> &str {
        &self.inner.label
    }

    /// Incarnation that writes it; 0 is the daemon.
    pub fn writer(&self) -> u64 {
        self.inner.writer
    }

    /// Payload bytes reserved.
    pub fn capacity(&self) -> u64 {
        self.inner.capacity
    }

    /// Bytes it takes of the arena.
    pub fn bytes(&self) -> u64 {
        self.inner.charge.bytes
    }

    /// As it is named to its writer: `shape` is what the writer must write, or empty where the writer chooses.
    pub fn message(&self, shape: &[u64]) -> Segment {
        Segment {
            name: self.inner.name.clone(),
            element_type: self.inner.element_type as i32,
            shape: shape.to_vec(),
            capacity: self.inner.capacity,
            writer: self.inner.writer,
            sequence: self.inner.sequence,
        }
    }

    /// The header as it stands in shared memory, checked in itself and against what this segment was made for.
    ///
    /// # Errors
    /// [`ArenaError::Segment`] for every way in which it does not describe a sealed tensor of this segment.
    pub fn read_header(&self) -> Result<Header, ArenaError> {
        self.check(&self.message(&[]))
    }

    /// The header of a slot that its writer fills again and again: the sequence is the writer's own count.
    ///
    /// # Errors
    /// [`ArenaError::Segment`] for every way in which it does not describe a tensor of this segment.
    pub fn read_slot(&self) -> Result<Header, ArenaError> {
        let (header, length) = self.decode()?;
        let message = Segment { sequence: header.sequence, ..self.message(&[]) };
        let wrong = |source| ArenaError::Segment { name: self.inner.name.clone(), source };
        header.check(&message, length).map_err(wrong)?;
        Ok(header)
    }

    /// Checks a writer's claim that it has sealed this segment: the message names this segment as it was handed out, the
    /// header holds in itself and repeats the message, and the file is still long enough for both.
    ///
    /// # Errors
    /// [`ArenaError::Identity`] or [`ArenaError::Segment`]: the writer lies or is broken.
    pub fn validate(&self, claim: &Segment) -> Result<Header, ArenaError> {
        let identity = |field, found: String, expected: String| {
            Err(ArenaError::Identity { name: self.inner.name.clone(), field, found, expected })
        };
        let own = &self.inner;
        if claim.name != own.name {
            return identity("segment", claim.name.clone(), own.name.clone());
        }
        if claim.element_type() != own.element_type {
            return identity("element type", claim.element_type.to_string(), (own.element_type as i32).to_string());
        }
        if claim.capacity != own.capacity {
            return identity("capacity", claim.capacity.to_string(), own.capacity.to_string());
        }
        if claim.writer != own.writer {
            return identity("writer", claim.writer.to_string(), own.writer.to_string());
        }
        if claim.sequence != own.sequence {
            return identity("sequence", claim.sequence.to_string(), own.sequence.to_string());
        }
        let header = self.check(claim)?;
        if header.shape != claim.shape {
            return identity("shape", format!("{:?}", claim.shape), format!("{:?}", header.shape));
        }
        Ok(header)
    }

    fn check(&self, message: &Segment) -> Result<Header, ArenaError> {
        let (header, length) = self.decode()?;
        let wrong = |source| ArenaError::Segment { name: self.inner.name.clone(), source };
        header.check(message, length).map_err(wrong)?;
        Ok(header)
    }

    /// The header as it stands, checked in itself alone, and the bytes of the file.
    fn decode(&self) -> Result<(Header, u64), ArenaError> {
        let wrong = |source| ArenaError::Segment { name: self.inner.name.clone(), source };
        let length = self.length()?;
        let mut fields = [0u8; FIELDS_BYTES];
        if length < HEADER_BYTES as u64 {
            return Err(wrong(SegmentError::Truncated { mapped: length, needed: HEADER_BYTES as u64 }));
        }
        // One copy out of shared memory, then only the copy is looked at. The read goes through the descriptor: a
        // segment that its worker truncates meanwhile reads short instead of raising SIGBUS in the daemon.
        self.read_at(&mut fields, 0)?;
        Ok((Header::decode(&fields).map_err(wrong)?, length))
    }

    /// Copies the payload that `header` (from [`SegmentHandle::validate`]) describes.
    ///
    /// # Errors
    /// The segment was truncated after its header was checked, or the system refuses to read.
    pub fn read_payload(&self, header: &Header) -> Result<Vec<u8>, ArenaError> {
        let length = header.length();
        let wrong = |source| ArenaError::Segment { name: self.inner.name.clone(), source };
        let capacity = self.inner.capacity;
        if length > capacity {
            return Err(wrong(SegmentError::Capacity { length, capacity }));
        }
        let mut payload = vec![0u8; length as usize];
        self.read_at(&mut payload, HEADER_BYTES as u64)?;
        Ok(payload)
    }

    fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), ArenaError> {
        self.inner.file.read_exact_at(bytes, offset).map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => ArenaError::Segment {
                name: self.inner.name.clone(),
                source: SegmentError::Truncated {
                    mapped: self.length().unwrap_or(0),
                    needed: offset + bytes.len() as u64,
                },
            },
            _ => ArenaError::System { action: "read", name: self.inner.name.clone(), source },
        })
    }

    fn length(&self) -> Result<u64, ArenaError> {
        let metadata = self.inner.file.metadata();
        metadata.map(|m| m.len()).map_err(|source| ArenaError::System {
            action: "examine",
            name: self.inner.name.clone(),
            source,
        })
    }

    /// Writes a tensor that the daemon itself provides (writer 0) and seals it. Call it once, before the segment is
    /// named to a worker.
    ///
    /// # Errors
    /// [`ArenaError::Write`]: the segment is a worker's, is sealed already, or the payload is not of the shape's length;
    /// [`ArenaError::Segment`]: the tensor does not fit the capacity.
    pub fn write(&self, shape: &[u64], payload: &[u8]) -> Result<Header, ArenaError> {
        let refuse = |what: String| Err(ArenaError::Write { name: self.inner.name.clone(), what });
        if self.inner.writer != 0 {
            return refuse(format!("it belongs to incarnation {}", self.inner.writer));
        }
        let header = Header {
            element_type: self.inner.element_type,
            shape: shape.to_vec(),
            capacity: self.inner.capacity,
            writer: 0,
            sequence: self.inner.sequence,
        };
        let fields = header.encode().map_err(|source| ArenaError::Segment { name: self.inner.name.clone(), source })?;
        if header.length() != payload.len() as u64 {
            return refuse(format!("shape {shape:?} has {} bytes, the payload {}", header.length(), payload.len()));
        }
        if !matches!(self.read_header(), Err(ArenaError::Segment { source: SegmentError::Unsealed, .. })) {
            return refuse("it is sealed already".into());
        }
        // SAFETY: the segment was created by this process with its pages reserved, is unsealed, and is named to no worker
        // before it is sealed; no other method touches the mapping (reads go through the descriptor).
        unsafe { self.inner.mapping.publish(&fields, payload) };
        Ok(header)
    }
}

fn shmem_error(error: ShmemError) -> std::io::Error {
    let os = |code: u32| std::io::Error::from_raw_os_error(code as i32);
    match error {
        ShmemError::MapCreateFailed(code) | ShmemError::MapOpenFailed(code) | ShmemError::UnknownOsError(code) => {
            os(code)
        }
        ShmemError::MappingIdExists => os(libc::EEXIST as u32),
        other => std::io::Error::other(other.to_string()),
    }
}

//! The arena with real segments: made, reserved, written by both sides, lied about, truncated, freed.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::fcntl::OFlag;
use nix::sys::mman::shm_open;
use nix::sys::stat::Mode;
use sd_proto::segment::{FIELDS_BYTES, HEADER_BYTES, Header, SEQUENCE_OFFSET, SegmentError};
use sd_proto::worker::v1::{ElementType, Segment};
use sdd::arena::{Arena, ArenaError, ArenaLimits, SegmentHandle, host_free};
use shared_memory::ShmemConf;

const PAGE: u64 = HEADER_BYTES as u64;

/// An arena under a name that no other test and no other run uses.
fn arena(bytes: u64) -> Arena {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let id = format!("test{:08x}{:04x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    Arena::new(&id, ArenaLimits { bytes })
}

fn path(segment: &SegmentHandle) -> PathBuf {
    PathBuf::from("/dev/shm").join(segment.name())
}

/// What a worker does: maps the segment and writes payload, fields, and the sequence last.
fn write_as_worker(message: &Segment, header: &Header, payload: &[u8]) {
    let shmem = ShmemConf::new().os_id(&message.name).open().unwrap();
    let fields = header.encode().unwrap();
    assert!(HEADER_BYTES + payload.len() <= shmem.len());
    // SAFETY: the mapping is that long by the assertion, page-aligned, and used by this thread alone.
    unsafe {
        std::ptr::copy_nonoverlapping(payload.as_ptr(), shmem.as_ptr().add(HEADER_BYTES), payload.len());
        std::ptr::copy_nonoverlapping(fields.as_ptr(), shmem.as_ptr(), SEQUENCE_OFFSET);
        AtomicU64::from_ptr(shmem.as_ptr().add(SEQUENCE_OFFSET).cast()).store(header.sequence, Ordering::Release);
    }
}

fn header(message: &Segment, shape: &[u64]) -> Header {
    Header {
        element_type: message.element_type(),
        shape: shape.to_vec(),
        capacity: message.capacity,
        writer: message.writer,
        sequence: message.sequence,
    }
}

#[test]
fn a_segment_has_its_pages_when_it_is_announced_and_none_when_its_last_handle_goes() {
    let arena = arena(1 << 20);
    let segment = arena.create(ElementType::F32, 10_000, 7, "latents").unwrap();
    assert_eq!((segment.bytes(), segment.capacity()), (4 * PAGE, 10_000));
    let stat = nix::sys::stat::stat(&path(&segment)).unwrap();
    assert_eq!(stat.st_size as u64, 4 * PAGE);
    assert_eq!(stat.st_blocks as u64 * 512, 4 * PAGE, "every page is reserved");
    assert_eq!(stat.st_mode & 0o777, 0o600);
    let usage = arena.usage();
    assert_eq!((usage.segments, usage.bytes, usage.limit), (1, 4 * PAGE, 1 << 20));
    assert!(usage.free <= (1 << 20) - 4 * PAGE);

    let (second, file) = (segment.clone(), path(&segment));
    drop(segment);
    assert!(file.exists(), "a handle is left");
    drop(second);
    assert!(!file.exists());
    assert_eq!((arena.usage().segments, arena.usage().bytes), (0, 0));
}

#[test]
fn names_and_sequences_are_never_used_twice() {
    let arena = arena(1 << 20);
    let mut seen = Vec::new();
    for _ in 0..20 {
        let message = arena.create(ElementType::U8, 1, 3, "x").unwrap().message(&[]);
        seen.push((message.name, message.sequence));
    }
    let (mut names, mut sequences): (Vec<_>, Vec<_>) = seen.into_iter().unzip();
    names.sort();
    names.dedup();
    sequences.sort_unstable();
    sequences.dedup();
    assert_eq!((names.len(), sequences.len()), (20, 20), "what an old writer still maps is not what is read later");
}

#[test]
fn what_a_worker_seals_is_read_and_fresh_segments_are_zero() {
    let arena = arena(1 << 20);
    let segment = arena.create(ElementType::F32, 64, 7, "latents").unwrap();
    assert_eq!(fs::read(path(&segment)).unwrap(), vec![0; 2 * HEADER_BYTES]);
    let message = segment.message(&[]);
    assert!(matches!(segment.validate(&message), Err(ArenaError::Segment { source: SegmentError::Unsealed, .. })));
    let payload: Vec<u8> = (0..48).collect();
    write_as_worker(&message, &header(&message, &[3, 4]), &payload);
    let claim = Segment { shape: vec![3, 4], ..message };
    let header = segment.validate(&claim).unwrap();
    assert_eq!(segment.read_header().unwrap(), header);
    assert_eq!(segment.read_payload(&header).unwrap(), payload);
}

#[test]
fn every_lie_of_a_message_is_found() {
    let arena = arena(1 << 20);
    let segment = arena.create(ElementType::F32, 64, 7, "latents").unwrap();
    let message = segment.message(&[4]);
    write_as_worker(&message, &header(&message, &[4]), &[1; 16]);
    segment.validate(&message).unwrap();
    let other = arena.create(ElementType::F32, 64, 7, "latents").unwrap();
    let lies: [(&str, Segment); 6] = [
        ("segment", Segment { name: other.name().into(), ..message.clone() }),
        ("element type", Segment { element_type: ElementType::F16 as i32, ..message.clone() }),
        ("capacity", Segment { capacity: 65, ..message.clone() }),
        ("writer", Segment { writer: 8, ..message.clone() }),
        ("sequence", Segment { sequence: message.sequence + 1, ..message.clone() }),
        ("shape", Segment { shape: vec![], ..message.clone() }),
    ];
    for (field, lie) in lies {
        let error = segment.validate(&lie).unwrap_err();
        assert!(matches!(error, ArenaError::Identity { field: f, .. } if f == field), "{field}: {error}");
    }
    // A shape that the header contradicts is the header's lie.
    let lie = Segment { shape: vec![5], ..message };
    assert!(matches!(segment.validate(&lie), Err(ArenaError::Segment { .. })));
}

#[test]
fn every_lie_of_a_header_is_found() {
    let arena = arena(1 << 20);
    let make = || arena.create(ElementType::F32, 64, 7, "latents").unwrap();
    let truth = |segment: &SegmentHandle| header(&segment.message(&[]), &[4]);
    type Lie = fn(Header) -> Header;
    let lies: [(&str, Lie); 5] = [
        ("element type", |h| Header { element_type: ElementType::U8, ..h }),
        ("capacity", |h| Header { capacity: 1 << 40, ..h }),
        ("capacity", |h| Header { capacity: 1 << 40, shape: vec![1 << 30], ..h }),
        ("writer", |h| Header { writer: 0, ..h }),
        ("sequence", |h| Header { sequence: h.sequence + 9, ..h }),
    ];
    for (field, lie) in lies {
        let segment = make();
        let message = segment.message(&[4]);
        write_as_worker(&message, &lie(truth(&segment)), &[1; 16]);
        let error = segment.validate(&message).unwrap_err();
        let found = match &error {
            ArenaError::Segment { source: SegmentError::Mismatch { field, .. }, .. } => *field,
            other => panic!("{field}: {other}"),
        };
        // The shape is compared before the capacity.
        assert!(found == field || found == "shape", "{field}: {error}");
    }
    // One byte of noise anywhere in the fields.
    let segment = make();
    let message = segment.message(&[4]);
    write_as_worker(&message, &truth(&segment), &[1; 16]);
    let sealed = fs::read(path(&segment)).unwrap();
    for at in 0..FIELDS_BYTES {
        let mut noisy = sealed.clone();
        noisy[at] ^= 0x40;
        fs::write(path(&segment), &noisy).unwrap();
        assert!(segment.validate(&message).is_err(), "byte {at}");
    }
    fs::write(path(&segment), &sealed).unwrap();
    segment.validate(&message).unwrap();
}

#[test]
fn a_truncated_segment_is_an_error_and_not_a_signal() {
    let arena = arena(1 << 20);
    let segment = arena.create(ElementType::U8, 3 * PAGE, 7, "pixels").unwrap();
    let message = segment.message(&[3 * PAGE]);
    write_as_worker(&message, &header(&message, &[3 * PAGE]), &[9; 3 * HEADER_BYTES]);
    let checked = segment.validate(&message).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path(&segment)).unwrap();
    let truncated = |error: ArenaError| {
        assert!(matches!(error, ArenaError::Segment { source: SegmentError::Truncated { .. }, .. }), "{error}");
    };
    // Between the check and the copy of the payload, then before the check.
    file.set_len(2 * PAGE).unwrap();
    truncated(segment.read_payload(&checked).unwrap_err());
    truncated(segment.validate(&message).unwrap_err());
    file.set_len(64).unwrap();
    truncated(segment.validate(&message).unwrap_err());
    file.set_len(0).unwrap();
    truncated(segment.read_header().unwrap_err());
    // Grown again, its pages are zero: unsealed.
    file.set_len(4 * PAGE).unwrap();
    assert!(matches!(segment.read_header(), Err(ArenaError::Segment { source: SegmentError::Unsealed, .. })));
}

#[test]
fn the_daemon_writes_its_own_segments_once() {
    let arena = arena(1 << 20);
    let segment = arena.create(ElementType::U8, 100, 0, "init image").unwrap();
    let wrong = segment.write(&[99], &[1; 100]).unwrap_err();
    assert!(matches!(wrong, ArenaError::Write { .. }), "{wrong}");
    let large = segment.write(&[101], &[1; 101]).unwrap_err();
    assert!(matches!(large, ArenaError::Segment { source: SegmentError::Capacity { .. }, .. }), "{large}");
    let header = segment.write(&[100], &[5; 100]).unwrap();
    assert_eq!(segment.validate(&segment.message(&[100])).unwrap(), header);
    assert_eq!(segment.read_payload(&header).unwrap(), [5; 100]);
    // A worker reads it by its mapping.
    let shmem = ShmemConf::new().os_id(segment.name()).open().unwrap();
    // SAFETY: nobody writes the segment any more.
    assert_eq!(unsafe { &shmem.as_slice()[HEADER_BYTES..HEADER_BYTES + 100] }, [5; 100]);
    let again = segment.write(&[1], &[6]).unwrap_err();
    assert!(again.to_string().contains("sealed already"), "{again}");
    let foreign = arena.create(ElementType::U8, 100, 7, "pixels").unwrap();
    assert!(matches!(foreign.write(&[1], &[1]), Err(ArenaError::Write { .. })));
}

#[test]
fn over_the_limit_is_refused_with_the_numbers_and_leaves_nothing() {
    let arena = arena(4 * PAGE);
    let held = arena.create(ElementType::U8, 1, 7, "conditioning").unwrap();
    let error = arena.create(ElementType::U8, 2 * PAGE, 7, "pixels").unwrap_err();
    assert!(matches!(error, ArenaError::Limit { need: 12_288, used: 8192, limit: 16_384, .. }), "{error}");
    assert!(error.to_string().contains("--shm-size"), "{error}");
    assert_eq!((arena.usage().segments, arena.usage().bytes), (1, held.bytes()));
    let absurd = arena.create(ElementType::U8, u64::MAX, 7, "pixels").unwrap_err();
    assert!(matches!(absurd, ArenaError::Limit { .. }), "{absurd}");
    drop(held);
    arena.create(ElementType::U8, 2 * PAGE, 7, "pixels").unwrap();
}

#[test]
fn a_full_host_is_a_refusal_and_leaves_nothing() {
    // The limit allows it, the file system does not have it: more by far than it has in all.
    let total = nix::sys::statvfs::statvfs("/dev/shm").unwrap();
    let total = total.blocks() as u64 * total.fragment_size() as u64;
    let arena = arena(u64::MAX);
    let free = host_free().unwrap();
    let error = arena.create(ElementType::U8, 2 * total, 7, "pixels").unwrap_err();
    match &error {
        ArenaError::Full { need, .. } => assert!(*need > 2 * total),
        other => panic!("{other}"),
    }
    let text = error.to_string();
    assert!(text.contains("/dev/shm") && text.contains("--shm-size"), "{text}");
    assert_eq!((arena.usage().segments, arena.usage().bytes), (0, 0));
    // What the attempt had reserved is free again (others use the host meanwhile).
    assert!(host_free().unwrap() > free / 2);
}

#[test]
fn the_system_s_other_refusals_are_told_with_the_name() {
    let arena = Arena::new("no/such/folder", ArenaLimits { bytes: 1 << 20 });
    let error = arena.create(ElementType::U8, 1, 7, "pixels").unwrap_err();
    match &error {
        ArenaError::System { action: "create", name, .. } => assert!(name.starts_with("sdd-no/such/folder-")),
        other => panic!("{other}"),
    }
    assert_eq!(arena.usage().bytes, 0);
    // A name that exists already is not taken over.
    let id = format!("taken{:08x}", std::process::id());
    let _squatter = ShmemConf::new().os_id(sd_proto::instance::segment_name(&id, 1)).size(1).create().unwrap();
    let arena = Arena::new(&id, ArenaLimits { bytes: 1 << 20 });
    let error = arena.create(ElementType::U8, 1, 7, "pixels").unwrap_err();
    assert!(error.to_string().contains("File exists"), "{error}");
    arena.create(ElementType::U8, 1, 7, "pixels").expect("the next number is free");
}

#[test]
fn a_mapping_outlives_the_name() {
    let arena = arena(1 << 20);
    let segment = arena.create(ElementType::U8, 4, 0, "init image").unwrap();
    segment.write(&[4], &[1, 2, 3, 4]).unwrap();
    let shmem = ShmemConf::new().os_id(segment.name()).open().unwrap();
    let name = segment.name().to_owned();
    drop(segment);
    assert!(shm_open(name.as_str(), OFlag::O_RDONLY, Mode::empty()).is_err());
    // SAFETY: nobody writes the segment any more.
    assert_eq!(unsafe { &shmem.as_slice()[HEADER_BYTES..HEADER_BYTES + 4] }, [1, 2, 3, 4]);
}

//! The layout of a tensor in shared memory.
//!
//! One segment holds one tensor: a header page of [`HEADER_BYTES`], of which the first [`FIELDS_BYTES`] are used, then the
//! payload, row-major and little-endian. The writer fills the payload, then writes the header's fields, the
//! sequence last: a header that decodes and has the expected sequence is *sealed*. A reader copies the fields out of
//! shared memory before it decodes them, so that nothing changes between check and use.
//!
//! | offset | field |
//! |---|---|
//! | 0 | magic `SDTENSOR` |
//! | 8 | version, u32 |
//! | 12 | element type, u32 ([`ElementType`]) |
//! | 16 | rank, u32, at most [`MAX_RANK`] |
//! | 20 | zero, u32 |
//! | 24 | payload length in bytes, u64 = elements × element size |
//! | 32 | payload capacity in bytes, u64 |
//! | 40 | writer's incarnation, u64 (0: the daemon) |
//! | 48 | shape, 8 × u64, unused ones zero |
//! | 112 | FNV-1a of bytes 0..112 and of the sequence, u64 |
//! | 120 | sequence, u64, 0 = not sealed |

use crate::worker::v1::{ElementType, Segment};

/// Bytes from the segment's start to its payload: one page, so that payloads are page-aligned.
pub const HEADER_BYTES: usize = 4096;
/// Bytes of the header that carry fields.
pub const FIELDS_BYTES: usize = 128;
/// Offset of the sequence, the field that is stored last, by one aligned 8-byte release store.
pub const SEQUENCE_OFFSET: usize = 120;
/// Dimensions that a shape can have.
pub const MAX_RANK: usize = 8;
/// Version of this layout.
pub const LAYOUT_VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"SDTENSOR";

/// What a header does not hold of what it should. The text names the segment's field, the value and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// Not one of our segments.
    #[error("segment has no tensor header (magic {0:02x?})")]
    Magic([u8; 8]),
    /// Written by another version.
    #[error("segment header has layout version {found}, expected {LAYOUT_VERSION}")]
    Version {
        /// What the header says.
        found: u32,
    },
    /// Sequence zero: the writer has not finished.
    #[error("segment is not sealed: its writer has not finished")]
    Unsealed,
    /// Fields changed after they were written, or were never written whole.
    #[error("segment header checksum does not match its fields")]
    Checksum,
    /// Element type unknown.
    #[error("segment header has unknown element type {0}")]
    ElementType(u32),
    /// Rank above [`MAX_RANK`].
    #[error("segment header has rank {0}, at most {MAX_RANK} is possible")]
    Rank(u32),
    /// Length does not follow from shape and element type, or overflows.
    #[error("segment header says {length} bytes for shape {shape:?} of {element_type}")]
    Length {
        /// What the header says.
        length: u64,
        /// Shape in the header.
        shape: Vec<u64>,
        /// Element type in the header.
        element_type: &'static str,
    },
    /// More payload than was reserved.
    #[error("segment header says {length} bytes of payload, but {capacity} are reserved")]
    Capacity {
        /// Payload bytes by the header.
        length: u64,
        /// What was reserved.
        capacity: u64,
    },
    /// The mapping is too small for the header, or for header and payload.
    #[error("segment of {mapped} bytes is too small: {needed} are needed")]
    Truncated {
        /// Bytes mapped.
        mapped: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// A field differs from the message that named the segment.
    #[error("segment header has {field} {found}, but the message says {expected}")]
    Mismatch {
        /// Which field.
        field: &'static str,
        /// In the header.
        found: String,
        /// In the message.
        expected: String,
    },
}

/// A decoded header: the tensor in the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Type of one element.
    pub element_type: ElementType,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Payload bytes reserved.
    pub capacity: u64,
    /// Incarnation of the writer; 0 is the daemon.
    pub writer: u64,
    /// What the writer was told to publish; never 0.
    pub sequence: u64,
}

/// Bytes of one element; 0 for the unspecified type.
pub fn element_bytes(element_type: ElementType) -> u64 {
    match element_type {
        ElementType::Unspecified => 0,
        ElementType::U8 => 1,
        ElementType::F16 | ElementType::Bf16 => 2,
        ElementType::F32 => 4,
        ElementType::I64 => 8,
    }
}

/// The element type's short name: `u8`, `f16`, `bf16`, `f32`, `i64`.
pub fn element_name(element_type: ElementType) -> &'static str {
    match element_type {
        ElementType::Unspecified => "unspecified",
        ElementType::U8 => "u8",
        ElementType::F16 => "f16",
        ElementType::Bf16 => "bf16",
        ElementType::F32 => "f32",
        ElementType::I64 => "i64",
    }
}

/// Payload bytes of a tensor; `None` where the product overflows.
pub fn payload_bytes(element_type: ElementType, shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(element_bytes(element_type), |bytes, dim| bytes.checked_mul(*dim))
}

fn fnv1a(bytes: &[u8], seed: u64) -> u64 {
    bytes.iter().fold(seed, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn checksum(fields: &[u8], sequence: u64) -> u64 {
    fnv1a(&sequence.to_le_bytes(), fnv1a(&fields[..112], 0xcbf2_9ce4_8422_2325))
}

fn u32_at(fields: &[u8; FIELDS_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]])
}

fn u64_at(fields: &[u8; FIELDS_BYTES], at: usize) -> u64 {
    u64::from(u32_at(fields, at)) | u64::from(u32_at(fields, at + 4)) << 32
}

impl Header {
    /// The fields as they lie in memory, the sequence included (the caller stores bytes
    /// `SEQUENCE_OFFSET..` last).
    ///
    /// # Errors
    /// A rank above [`MAX_RANK`], a tensor larger than `capacity`, sequence 0, or an unspecified element type.
    pub fn encode(&self) -> Result<[u8; FIELDS_BYTES], SegmentError> {
        let length = self.check_self()?;
        let mut fields = [0u8; FIELDS_BYTES];
        fields[..8].copy_from_slice(MAGIC);
        fields[8..12].copy_from_slice(&LAYOUT_VERSION.to_le_bytes());
        fields[12..16].copy_from_slice(&(self.element_type as u32).to_le_bytes());
        fields[16..20].copy_from_slice(&(self.shape.len() as u32).to_le_bytes());
        fields[24..32].copy_from_slice(&length.to_le_bytes());
        fields[32..40].copy_from_slice(&self.capacity.to_le_bytes());
        fields[40..48].copy_from_slice(&self.writer.to_le_bytes());
        for (i, dim) in self.shape.iter().enumerate() {
            fields[48 + 8 * i..56 + 8 * i].copy_from_slice(&dim.to_le_bytes());
        }
        let sum = checksum(&fields, self.sequence);
        fields[112..120].copy_from_slice(&sum.to_le_bytes());
        fields[SEQUENCE_OFFSET..].copy_from_slice(&self.sequence.to_le_bytes());
        Ok(fields)
    }

    /// Decodes fields that were copied out of shared memory, and checks all that can be checked without the message.
    ///
    /// # Errors
    /// Every way in which the fields do not describe a sealed tensor.
    pub fn decode(fields: &[u8; FIELDS_BYTES]) -> Result<Self, SegmentError> {
        let mut magic = [0u8; 8];
        magic.copy_from_slice(&fields[..8]);
        let sequence = u64_at(fields, SEQUENCE_OFFSET);
        if sequence == 0 {
            return Err(SegmentError::Unsealed);
        }
        if &magic != MAGIC {
            return Err(SegmentError::Magic(magic));
        }
        let version = u32_at(fields, 8);
        if version != LAYOUT_VERSION {
            return Err(SegmentError::Version { found: version });
        }
        if u64_at(fields, 112) != checksum(fields, sequence) {
            return Err(SegmentError::Checksum);
        }
        let raw_type = u32_at(fields, 12);
        let element_type = i32::try_from(raw_type)
            .ok()
            .and_then(|t| ElementType::try_from(t).ok())
            .filter(|t| *t != ElementType::Unspecified)
            .ok_or(SegmentError::ElementType(raw_type))?;
        let rank = u32_at(fields, 16);
        if rank as usize > MAX_RANK {
            return Err(SegmentError::Rank(rank));
        }
        let header = Self {
            element_type,
            shape: (0..rank as usize).map(|i| u64_at(fields, 48 + 8 * i)).collect(),
            capacity: u64_at(fields, 32),
            writer: u64_at(fields, 40),
            sequence,
        };
        let length = u64_at(fields, 24);
        if payload_bytes(header.element_type, &header.shape) != Some(length) {
            return Err(SegmentError::Length {
                length,
                shape: header.shape,
                element_type: element_name(header.element_type),
            });
        }
        header.check_self()?;
        Ok(header)
    }

    /// Payload bytes of the tensor.
    pub fn length(&self) -> u64 {
        payload_bytes(self.element_type, &self.shape).unwrap_or(u64::MAX)
    }

    /// Checks this header against the message that named the segment and the bytes that are really mapped. A shape that
    /// the message leaves empty is the writer's to choose, within the capacity.
    ///
    /// # Errors
    /// The first field that differs.
    pub fn check(&self, message: &Segment, mapped_bytes: u64) -> Result<(), SegmentError> {
        let mismatch = |field, found: String, expected: String| Err(SegmentError::Mismatch { field, found, expected });
        if self.element_type != message.element_type() {
            return mismatch(
                "element type",
                element_name(self.element_type).into(),
                element_name(message.element_type()).into(),
            );
        }
        if !message.shape.is_empty() && self.shape != message.shape {
            return mismatch("shape", format!("{:?}", self.shape), format!("{:?}", message.shape));
        }
        if self.capacity != message.capacity {
            return mismatch("capacity", self.capacity.to_string(), message.capacity.to_string());
        }
        if self.writer != message.writer {
            return mismatch("writer", self.writer.to_string(), message.writer.to_string());
        }
        if self.sequence != message.sequence {
            return mismatch("sequence", self.sequence.to_string(), message.sequence.to_string());
        }
        let needed = (HEADER_BYTES as u64).saturating_add(self.length());
        if mapped_bytes < needed {
            return Err(SegmentError::Truncated { mapped: mapped_bytes, needed });
        }
        Ok(())
    }

    fn check_self(&self) -> Result<u64, SegmentError> {
        if self.sequence == 0 {
            return Err(SegmentError::Unsealed);
        }
        if self.element_type == ElementType::Unspecified {
            return Err(SegmentError::ElementType(0));
        }
        if self.shape.len() > MAX_RANK {
            return Err(SegmentError::Rank(self.shape.len() as u32));
        }
        let Some(length) = payload_bytes(self.element_type, &self.shape) else {
            return Err(SegmentError::Length {
                length: u64::MAX,
                shape: self.shape.clone(),
                element_type: element_name(self.element_type),
            });
        };
        if length > self.capacity {
            return Err(SegmentError::Capacity { length, capacity: self.capacity });
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header { element_type: ElementType::F32, shape: vec![2, 77, 192], capacity: 1 << 20, writer: 7, sequence: 9 }
    }

    fn message(header: &Header) -> Segment {
        Segment {
            name: "x".into(),
            element_type: header.element_type as i32,
            shape: header.shape.clone(),
            capacity: header.capacity,
            writer: header.writer,
            sequence: header.sequence,
        }
    }

    #[test]
    fn a_sealed_header_round_trips_and_matches_its_message() {
        let header = header();
        let decoded = Header::decode(&header.encode().unwrap()).unwrap();
        assert_eq!(decoded, header);
        decoded.check(&message(&header), HEADER_BYTES as u64 + header.length()).unwrap();
    }

    #[test]
    fn every_single_lie_is_found() {
        let truth = header();
        let lies: [(&str, Header); 5] = [
            ("element type", Header { element_type: ElementType::F16, ..truth.clone() }),
            ("shape", Header { shape: vec![1, 77, 192], ..truth.clone() }),
            ("capacity", Header { capacity: 1 << 21, ..truth.clone() }),
            ("writer", Header { writer: 8, ..truth.clone() }),
            ("sequence", Header { sequence: 8, ..truth.clone() }),
        ];
        for (field, lie) in lies {
            let decoded = Header::decode(&lie.encode().unwrap()).unwrap();
            let error = decoded.check(&message(&truth), u64::MAX).unwrap_err();
            assert!(matches!(error, SegmentError::Mismatch { field: f, .. } if f == field), "{field}: {error}");
        }
    }

    #[test]
    fn an_unwritten_page_is_unsealed_and_a_short_mapping_is_refused() {
        assert_eq!(Header::decode(&[0; FIELDS_BYTES]), Err(SegmentError::Unsealed));
        let header = header();
        let error = header.check(&message(&header), HEADER_BYTES as u64).unwrap_err();
        assert!(matches!(error, SegmentError::Truncated { .. }));
    }

    #[test]
    fn overflowing_shapes_and_too_small_capacities_are_refused() {
        let huge = Header { shape: vec![u64::MAX, 2], ..header() };
        assert!(matches!(huge.encode(), Err(SegmentError::Length { .. })));
        let small = Header { capacity: 16, ..header() };
        assert!(matches!(small.encode(), Err(SegmentError::Capacity { .. })));
    }

    proptest! {
        #[test]
        fn any_flipped_byte_is_noticed(at in 0usize..FIELDS_BYTES, mask in 1u8..=255) {
            let truth = header();
            let mut fields = truth.encode().unwrap();
            fields[at] ^= mask;
            prop_assert!(Header::decode(&fields).is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(fields in proptest::array::uniform32(any::<[u8; 4]>())) {
            let mut bytes = [0u8; FIELDS_BYTES];
            for (i, chunk) in fields.iter().enumerate() {
                bytes[4 * i..4 * i + 4].copy_from_slice(chunk);
            }
            prop_assert!(Header::decode(&bytes).is_err());
        }
    }
}

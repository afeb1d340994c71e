//! The layout of a denoiser's checkpoint in the payload of a segment.
//!
//! A task names two slots. The worker writes them by turns, each time under the next number, which is the sequence of the
//! segment's header ([`crate::segment`]): it takes the old number away, writes the payload, then the header with the new
//! number last. A worker that dies meanwhile leaves one slot without a number and the other one whole. The daemon looks only
//! after the process is reaped, and believes a slot only if its head and its checksum hold.
//!
//! | offset | field |
//! |---|---|
//! | 0 | magic `SDCHKPNT` |
//! | 8 | version, u32 |
//! | 12 | step: calls of the diffusion model that are done, u32, never 0 |
//! | 16 | bytes of the body, u64 |
//! | 24 | checksum of step and body, u64 |
//! | 32 | the body: the engine's own format |

/// Bytes before the body.
pub const HEAD_BYTES: usize = 32;
/// Version of this layout.
pub const CHECKPOINT_VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"SDCHKPNT";

/// Why a payload is no checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// Too short, or something else.
    #[error("there is no checkpoint in it")]
    Absent,
    /// Written by another version.
    #[error("checkpoint has layout version {0}, expected {CHECKPOINT_VERSION}")]
    Version(u32),
    /// Head and payload disagree about the length.
    #[error("checkpoint says {says} bytes, but has {has}")]
    Length {
        /// By its head.
        says: u64,
        /// That are there.
        has: u64,
    },
    /// It was written half, or changed afterwards.
    #[error("checkpoint's checksum does not match: it was not written whole")]
    Checksum,
    /// No step, or more than there are.
    #[error("checkpoint is after step {0}, which this run does not have")]
    Step(u32),
}

/// FNV-1a over words of eight bytes, the last one filled with zeros: what a torn write leaves is found, a forgery is not.
fn checksum(step: u32, body: &[u8]) -> u64 {
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    let start = mix(mix(0xcbf2_9ce4_8422_2325, u64::from(step)), body.len() as u64);
    body.chunks(8).fold(start, |hash, chunk| {
        let mut word = [0u8; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(hash, u64::from_le_bytes(word))
    })
}

/// The head of a checkpoint after `step` calls with this body.
pub fn head(step: u32, body: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0u8; HEAD_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..12].copy_from_slice(&CHECKPOINT_VERSION.to_le_bytes());
    head[12..16].copy_from_slice(&step.to_le_bytes());
    head[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    head[24..].copy_from_slice(&checksum(step, body).to_le_bytes());
    head
}

/// The step and the body of a payload, after it was copied out of shared memory.
///
/// # Errors
/// Every way in which the payload is not a whole checkpoint.
pub fn open(payload: &[u8]) -> Result<(u32, &[u8]), CheckpointError> {
    let Some((head, body)) = payload.split_at_checked(HEAD_BYTES).filter(|(head, _)| head.starts_with(MAGIC)) else {
        return Err(CheckpointError::Absent);
    };
    let u32_at = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let (version, step, says) = (u32_at(8), u32_at(12), u64_at(16));
    if version != CHECKPOINT_VERSION {
        return Err(CheckpointError::Version(version));
    }
    if says != body.len() as u64 {
        return Err(CheckpointError::Length { says, has: body.len() as u64 });
    }
    if u64_at(24) != checksum(step, body) {
        return Err(CheckpointError::Checksum);
    }
    if step == 0 {
        return Err(CheckpointError::Step(0));
    }
    Ok((step, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(step: u32, body: &[u8]) -> Vec<u8> {
        [&head(step, body)[..], body].concat()
    }

    #[test]
    fn what_is_written_whole_is_read_and_what_is_torn_is_not() {
        let body: Vec<u8> = (0..203u32).map(|i| (i * 7 % 251) as u8).collect();
        let whole = payload(3, &body);
        assert_eq!(open(&whole), Ok((3, &body[..])));
        for at in 0..whole.len() {
            let mut torn = whole.clone();
            torn[at] ^= 0x40;
            assert!(open(&torn).is_err(), "byte {at}");
        }
        for length in 0..whole.len() {
            assert!(open(&whole[..length]).is_err(), "cut to {length}");
        }
        assert_eq!(open(&payload(0, &body)), Err(CheckpointError::Step(0)));
    }

    #[test]
    fn the_front_of_a_new_checkpoint_before_the_rest_of_an_old_one_is_found() {
        let (old, new) = (payload(4, &[1; 256]), payload(6, &[2; 256]));
        // Up to the version both are the same.
        for cut in 13..new.len() {
            let torn = [&new[..cut], &old[cut..]].concat();
            assert!(open(&torn).is_err(), "cut at {cut}");
        }
    }
}

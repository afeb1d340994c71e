//! What a dead denoiser left: the newest of its two checkpoints that is whole.

use sd_proto::checkpoint;

use crate::arena::{Arena, ArenaError, SegmentHandle};
use crate::jobs::request::Admitted;

/// Slots that a denoiser writes by turns.
pub const SLOTS: usize = 2;

/// A checkpoint in the daemon's own memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Calls of the diffusion model that are done.
    pub step: u32,
    /// The whole payload, as it is handed to the next process.
    pub payload: Vec<u8>,
}

impl Checkpoint {
    /// Shared memory that handing it over takes.
    pub fn segment_bytes(&self) -> u64 {
        Arena::segment_bytes(self.payload.len() as u64)
    }
}

/// Reads the slots of a process that is reaped. The second value says which were dropped and why; a slot that was never
/// written, or was being written, is the ordinary case and not worth a word.
pub fn newest(slots: &[SegmentHandle], request: &Admitted) -> (Option<Checkpoint>, Vec<String>) {
    // Heun calls the model twice a step.
    let most = request.steps.saturating_mul(2);
    let (mut found, mut dropped): (Option<(u64, Checkpoint)>, Vec<String>) = (None, Vec::new());
    for slot in slots {
        match read(slot, most) {
            Ok(Some((number, checkpoint))) => {
                if found.as_ref().is_none_or(|(newest, _)| number > *newest) {
                    found = Some((number, checkpoint));
                }
            }
            Ok(None) => {}
            Err(why) => dropped.push(format!("a checkpoint of the dead worker was dropped: {why}")),
        }
    }
    (found.map(|(_, checkpoint)| checkpoint), dropped)
}

fn read(slot: &SegmentHandle, most: u32) -> Result<Option<(u64, Checkpoint)>, String> {
    let header = match slot.read_slot() {
        Ok(header) => header,
        Err(ArenaError::Segment { source: sd_proto::segment::SegmentError::Unsealed, .. }) => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let payload = slot.read_payload(&header).map_err(|error| error.to_string())?;
    let (step, _) = checkpoint::open(&payload).map_err(|error| error.to_string())?;
    if step > most {
        return Err(checkpoint::CheckpointError::Step(step).to_string());
    }
    Ok(Some((header.sequence, Checkpoint { step, payload })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaLimits;
    use crate::jobs::fixtures;
    use sd_proto::worker::v1::ElementType;

    /// Two slots; what is written into the second has the higher number.
    fn left(first: Option<Vec<u8>>, second: Option<Vec<u8>>) -> (Option<u32>, usize) {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let arena = Arena::new(&format!("slots{}x{number}", std::process::id()), ArenaLimits { bytes: 1 << 20 });
        let slots = [first, second].map(|payload| {
            let slot = arena.create(ElementType::U8, 4096, 0, "checkpoint").unwrap();
            if let Some(payload) = payload {
                slot.write(&[payload.len() as u64], &payload).unwrap();
            }
            slot
        });
        let (found, dropped) = newest(&slots, &fixtures::admitted());
        (found.map(|checkpoint| checkpoint.step), dropped.len())
    }

    fn whole(step: u32) -> Option<Vec<u8>> {
        Some([&checkpoint::head(step, &[7; 300])[..], &[7; 300]].concat())
    }

    #[test]
    fn the_newest_whole_checkpoint_counts() {
        assert_eq!(left(whole(3), whole(4)), (Some(4), 0));
        assert_eq!(left(whole(5), whole(4)), (Some(4), 0), "by its number, whatever its step says");
        assert_eq!(left(whole(3), None), (Some(3), 0), "one that was being written is no lie");
        assert_eq!(left(None, None), (None, 0), "it died before its first step");
    }

    #[test]
    fn torn_and_lying_slots_are_dropped_with_a_word() {
        let torn = whole(4).map(|mut payload| {
            payload[100] ^= 1;
            payload
        });
        assert_eq!(left(whole(3), torn.clone()), (Some(3), 1));
        assert_eq!(left(torn, Some(vec![0xA5; 64])), (None, 2));
        assert_eq!(left(whole(1000), whole(2)), (Some(2), 1), "a step that the run does not have");
    }
}

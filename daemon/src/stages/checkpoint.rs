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

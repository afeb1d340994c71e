//! Tensors in shared memory, as a worker maps them: inputs are checked before their payload is read, outputs are written and then
//! sealed. The daemon owns every segment; a worker only maps what a task names.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use sd_engine::pipeline::PipelineError;
use sd_proto::checkpoint;
use sd_proto::segment::{FIELDS_BYTES, HEADER_BYTES, Header, SEQUENCE_OFFSET, SegmentError, element_name};
use sd_proto::worker::v1::{ElementType, NamedSegment, Segment, Task};
use shared_memory::{Shmem, ShmemConf};

/// Why a task's segment cannot be used. The text names the role and the segment.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SegmentUseError {
    /// The task does not name a segment of this role.
    #[error("the task names no {list} segment for {role:?}")]
    Absent { list: &'static str, role: &'static str },
    /// The segment cannot be opened or mapped.
    #[error("cannot map segment {name:?} for {role:?}: {reason}")]
    Map { role: String, name: String, reason: String },
    /// Header and message disagree, or the header is not one.
    #[error("segment {name:?} for {role:?}: {source}")]
    Header { role: String, name: String, source: SegmentError },
    /// Right in itself, but not what this stage reads.
    #[error("segment for {role:?} holds {found}, but this stage reads {expected}")]
    Content { role: String, found: String, expected: String },
}

struct Mapped {
    role: String,
    message: Segment,
    memory: Shmem,
}

impl Mapped {
    fn open(named: &NamedSegment) -> Result<Self, SegmentUseError> {
        let message = named.segment.clone().unwrap_or_default();
        let failed =
            |reason: String| SegmentUseError::Map { role: named.role.clone(), name: message.name.clone(), reason };
        let memory = ShmemConf::new().os_id(format!("/{}", message.name)).open().map_err(|e| failed(e.to_string()))?;
        let needed = (HEADER_BYTES as u64).saturating_add(message.capacity);
        if (memory.len() as u64) < needed {
            return Err(failed(format!("it has {} bytes, {needed} are needed", memory.len())));
        }
        Ok(Self { role: named.role.clone(), message, memory })
    }

    fn header_error(&self, source: SegmentError) -> SegmentUseError {
        SegmentUseError::Header { role: self.role.clone(), name: self.message.name.clone(), source }
    }
}

/// An input tensor, copied out of shared memory after its header was checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Input {
    /// Dimensions.
    pub(crate) shape: Vec<usize>,
    /// Payload.
    pub(crate) data: Payload,
}

/// Elements of an input.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Payload {
    /// Bytes, such as an image file.
    U8(Vec<u8>),
    /// Single precision.
    F32(Vec<f32>),
}

/// Whether a task names an input of this role.
pub(crate) fn has_input(task: &Task, role: &str) -> bool {
    task.inputs.iter().any(|named| named.role == role)
}

/// Whether a task asks for an output of this role.
pub(crate) fn has_output(task: &Task, role: &str) -> bool {
    task.outputs.iter().any(|named| named.role == role)
}

/// Reads a task's input of a role.
pub(crate) fn read(task: &Task, role: &'static str) -> Result<Input, SegmentUseError> {
    let named =
        task.inputs.iter().find(|named| named.role == role).ok_or(SegmentUseError::Absent { list: "input", role })?;
    let mapped = Mapped::open(named)?;
    let mut fields = [0u8; FIELDS_BYTES];
    // SAFETY: the mapping has at least HEADER_BYTES; the copy is ours from here on, whatever a writer does.
    unsafe { std::ptr::copy_nonoverlapping(mapped.memory.as_ptr(), fields.as_mut_ptr(), FIELDS_BYTES) };
    let header = Header::decode(&fields).map_err(|e| mapped.header_error(e))?;
    header.check(&mapped.message, mapped.memory.len() as u64).map_err(|e| mapped.header_error(e))?;
    // SAFETY: check() found header and payload to lie inside the mapping; sealed payloads are not written again.
    let bytes = unsafe {
        std::slice::from_raw_parts(mapped.memory.as_ptr().add(HEADER_BYTES).cast_const(), header.length() as usize)
    };
    let data = match header.element_type {
        ElementType::U8 => Payload::U8(bytes.to_vec()),
        ElementType::F32 => {
            Payload::F32(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
        other @ (ElementType::Unspecified | ElementType::F16 | ElementType::Bf16 | ElementType::I64) => {
            return Err(SegmentUseError::Content {
                role: role.into(),
                found: element_name(other).into(),
                expected: "u8 or f32".into(),
            });
        }
    };
    Ok(Input { shape: header.shape.iter().map(|dim| *dim as usize).collect(), data })
}

/// Reads an input that must be f32.
pub(crate) fn read_f32(task: &Task, role: &'static str) -> Result<(Vec<usize>, Vec<f32>), SegmentUseError> {
    let input = read(task, role)?;
    match input.data {
        Payload::F32(values) => Ok((input.shape, values)),
        Payload::U8(_) => {
            Err(SegmentUseError::Content { role: role.into(), found: "u8".into(), expected: "f32".into() })
        }
    }
}

/// Reads an input that must be bytes.
pub(crate) fn read_bytes(task: &Task, role: &'static str) -> Result<Vec<u8>, SegmentUseError> {
    match read(task, role)?.data {
        Payload::U8(bytes) => Ok(bytes),
        Payload::F32(_) => {
            Err(SegmentUseError::Content { role: role.into(), found: "f32".into(), expected: "u8".into() })
        }
    }
}

/// Writes a task's output of a role and seals it. Returns it as [`sd_proto::worker::v1::TaskDone`] reports it.
pub(crate) fn write(
    task: &Task,
    role: &'static str,
    element_type: ElementType,
    shape: &[usize],
    payload: &[u8],
) -> Result<NamedSegment, SegmentUseError> {
    let named =
        task.outputs.iter().find(|named| named.role == role).ok_or(SegmentUseError::Absent { list: "output", role })?;
    let mapped = Mapped::open(named)?;
    let header = Header {
        element_type,
        shape: shape.iter().map(|dim| *dim as u64).collect(),
        capacity: mapped.message.capacity,
        writer: mapped.message.writer,
        sequence: mapped.message.sequence,
    };
    let fields = header.encode().map_err(|e| mapped.header_error(e))?;
    header.check(&mapped.message, mapped.memory.len() as u64).map_err(|e| mapped.header_error(e))?;
    if header.length() != payload.len() as u64 {
        return Err(SegmentUseError::Content {
            role: role.into(),
            found: format!("{} bytes", payload.len()),
            expected: format!("{} bytes for shape {shape:?}", header.length()),
        });
    }
    // SAFETY: check() found header and payload to lie inside the mapping; the daemon reads a segment only once it is
    // sealed, and gave it to this incarnation alone to write. The sequence is stored last and with release order,
    // so that a reader that sees it sees all of the rest; its offset is a multiple of 8 in a page-aligned mapping.
    unsafe {
        let base = mapped.memory.as_ptr();
        std::ptr::copy_nonoverlapping(payload.as_ptr(), base.add(HEADER_BYTES), payload.len());
        std::ptr::copy_nonoverlapping(fields.as_ptr(), base, SEQUENCE_OFFSET);
        AtomicU64::from_ptr(base.add(SEQUENCE_OFFSET).cast::<u64>()).store(header.sequence, Ordering::Release);
    }
    Ok(NamedSegment { role: role.into(), segment: Some(Segment { shape: header.shape, ..mapped.message.clone() }) })
}

/// The two slots of a denoiser for its checkpoints, written by turns; mapped for the task's whole life.
pub(crate) struct Slots {
    slots: Vec<Mapped>,
    written: u64,
}

impl Slots {
    /// The slots that a task names; `None` where it names none.
    pub(crate) fn open(task: &Task) -> Result<Option<Self>, SegmentUseError> {
        let named = |segment: &Segment| NamedSegment { role: "checkpoint".into(), segment: Some(segment.clone()) };
        let slots = task.checkpoints.iter().map(|segment| Mapped::open(&named(segment)));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        Ok((!slots.is_empty()).then_some(Self { slots, written: 0 }))
    }

    /// Writes a checkpoint after `step` calls into the older slot. Whoever is killed meanwhile leaves the newer one whole.
    pub(crate) fn write(&mut self, step: u32, body: &[u8]) -> Result<(), SegmentUseError> {
        let number = self.written + 1;
        let mapped = &self.slots[number as usize % self.slots.len()];
        let head = checkpoint::head(step, body);
        let header = Header {
            element_type: ElementType::U8,
            shape: vec![(head.len() + body.len()) as u64],
            capacity: mapped.message.capacity,
            writer: mapped.message.writer,
            sequence: number,
        };
        // Also finds a body that is larger than the slot.
        let fields = header.encode().map_err(|e| mapped.header_error(e))?;
        let message = Segment { sequence: number, shape: Vec::new(), ..mapped.message.clone() };
        header.check(&message, mapped.memory.len() as u64).map_err(|e| mapped.header_error(e))?;
        // SAFETY: check() found header and payload to lie inside the mapping, and the daemon reads the slots of this
        // incarnation only after its end. The sequence is taken away before a byte of the payload changes and is stored last:
        // the fence and the release order keep a slot from ever having a number and half a payload. Its offset is a multiple
        // of 8 in a page-aligned mapping.
        unsafe {
            let base = mapped.memory.as_ptr();
            let sequence = AtomicU64::from_ptr(base.add(SEQUENCE_OFFSET).cast::<u64>());
            sequence.store(0, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            std::ptr::copy_nonoverlapping(head.as_ptr(), base.add(HEADER_BYTES), head.len());
            std::ptr::copy_nonoverlapping(body.as_ptr(), base.add(HEADER_BYTES + head.len()), body.len());
            std::ptr::copy_nonoverlapping(fields.as_ptr(), base, SEQUENCE_OFFSET);
            sequence.store(number, Ordering::Release);
        }
        self.written = number;
        Ok(())
    }
}

/// The body of the checkpoint that a task is to go on from; `None` where it begins.
pub(crate) fn read_resume(task: &Task) -> Result<Option<Vec<u8>>, SegmentUseError> {
    let Some(segment) = &task.resume else { return Ok(None) };
    let role = "checkpoint";
    let named = NamedSegment { role: role.into(), segment: Some(segment.clone()) };
    let input = read(&Task { inputs: vec![named], ..Task::default() }, role)?;
    let content = |found: String| SegmentUseError::Content {
        role: role.into(),
        found,
        expected: "a checkpoint that is whole".into(),
    };
    let Payload::U8(payload) = input.data else { return Err(content("f32".into())) };
    match checkpoint::open(&payload) {
        Ok((_, body)) => Ok(Some(body.to_vec())),
        Err(error) => Err(content(format!("none: {error}"))),
    }
}

/// The values of an engine tensor, row-major, for [`write`].
pub(crate) fn values(tensor: &sd_engine::tensor::Tensor) -> Result<Vec<f32>, PipelineError> {
    sd_engine::tensor::to_f32(tensor).map_err(PipelineError::from)
}

/// The bytes of f32 values as they lie in a segment.
pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Owned {
        _memory: Shmem,
        named: NamedSegment,
    }

    fn segment(role: &str, element_type: ElementType, shape: &[u64], capacity: u64) -> Owned {
        let memory = ShmemConf::new().size(HEADER_BYTES + capacity as usize).create().unwrap();
        let name = memory.get_os_id().trim_start_matches('/').to_owned();
        let segment = Segment {
            name,
            element_type: element_type as i32,
            shape: shape.to_vec(),
            capacity,
            writer: 5,
            sequence: 3,
        };
        Owned { _memory: memory, named: NamedSegment { role: role.into(), segment: Some(segment) } }
    }

    #[test]
    fn what_is_written_is_read_back_and_a_lie_is_not() {
        let owned = segment("latents", ElementType::F32, &[], 64);
        let task = Task { outputs: vec![owned.named.clone()], ..Task::default() };
        let done = write(&task, "latents", ElementType::F32, &[1, 4], &f32_bytes(&[1.0, -2.0, 3.5, 0.0])).unwrap();
        let next = Task { inputs: vec![done.clone()], ..Task::default() };
        assert_eq!(read_f32(&next, "latents").unwrap(), (vec![1, 4], vec![1.0, -2.0, 3.5, 0.0]));

        let mut lying = done;
        lying.segment.as_mut().unwrap().shape = vec![2, 2];
        let error = read_f32(&Task { inputs: vec![lying], ..Task::default() }, "latents").unwrap_err();
        assert!(matches!(error, SegmentUseError::Header { source: SegmentError::Mismatch { field: "shape", .. }, .. }));
    }

    #[test]
    fn unsealed_absent_too_small_and_mistyped_segments_are_refused() {
        let owned = segment("latents", ElementType::F32, &[4], 16);
        let task = Task { inputs: vec![owned.named.clone()], outputs: vec![owned.named.clone()], ..Task::default() };
        let unsealed = read(&task, "latents").unwrap_err();
        assert!(matches!(unsealed, SegmentUseError::Header { source: SegmentError::Unsealed, .. }), "{unsealed}");
        assert!(matches!(read(&task, "pixels"), Err(SegmentUseError::Absent { .. })));
        let large = write(&task, "latents", ElementType::F32, &[8], &[0; 32]).unwrap_err();
        assert!(matches!(large, SegmentUseError::Header { source: SegmentError::Capacity { .. }, .. }), "{large}");
        write(&task, "latents", ElementType::F32, &[4], &[0; 16]).unwrap();
        assert!(matches!(read_bytes(&task, "latents"), Err(SegmentUseError::Content { .. })));
        let mut gone = owned.named.clone();
        gone.segment.as_mut().unwrap().name = "sdd-none-1".into();
        let error = read(&Task { inputs: vec![gone], ..Task::default() }, "latents").unwrap_err();
        assert!(matches!(error, SegmentUseError::Map { .. }));
        let mut short = owned.named.clone();
        short.segment.as_mut().unwrap().capacity = 1 << 30;
        let error = read(&Task { inputs: vec![short], ..Task::default() }, "latents").unwrap_err();
        assert!(error.to_string().contains("are needed"), "{error}");
    }

    #[test]
    fn checkpoints_are_written_by_turns_and_the_newest_counts() {
        let owned =
            [segment("checkpoint", ElementType::U8, &[], 256), segment("checkpoint", ElementType::U8, &[], 256)];
        let messages = || owned.iter().map(|owned| owned.named.segment.clone().unwrap()).collect();
        let task = Task { checkpoints: messages(), ..Task::default() };
        let mut slots = Slots::open(&task).unwrap().unwrap();
        let resumed = |slot: usize, sequence: u64, length: usize| {
            let shape = vec![(checkpoint::HEAD_BYTES + length) as u64];
            let message = Segment { sequence, shape, ..task.checkpoints[slot].clone() };
            read_resume(&Task { resume: Some(message), ..Task::default() })
        };
        for step in 1..=4u32 {
            slots.write(step, &vec![step as u8; 10 + step as usize]).unwrap();
        }
        assert_eq!(resumed(0, 4, 14).unwrap().unwrap(), [4; 14]);
        assert_eq!(resumed(1, 3, 13).unwrap().unwrap(), [3; 13]);
        assert!(slots.write(5, &[0; 256]).is_err(), "larger than the slot");
        assert_eq!(resumed(1, 3, 13).unwrap().unwrap(), [3; 13], "and nothing was touched");
        assert!(Slots::open(&Task::default()).unwrap().is_none());
        assert_eq!(read_resume(&Task::default()).unwrap(), None);
    }
}

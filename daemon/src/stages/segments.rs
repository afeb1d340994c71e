//! The segments of one run of a stage: what it reads and writes in shared memory, and what is believed of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_proto::segment::Header;
use sd_proto::v1::{Failure, FailureReason, Stage};
use sd_proto::worker::v1::{ElementType, NamedSegment, Segment, TaskDone};

use super::checkpoint::{Checkpoint, SLOTS};
use super::failure::{failure, of_arena};
use super::plan::{Role, Slot};
use super::runner::{Output, StageOrder};
use super::sizes::{TensorSpec, checkpoint_capacity, tensor};
use crate::arena::{Arena, SegmentHandle};
use crate::ids::JobId;
use crate::jobs::durable::SavedTensor;
use crate::jobs::request::{Admitted, ImageFile};
use crate::picture::Pixels;
use crate::residency::Granted;

/// A tensor in shared memory, checked.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub(super) segment: SegmentHandle,
    pub(super) header: Arc<Header>,
}

impl Tensor {
    /// A tensor that was checked against its segment.
    pub(super) fn new(segment: SegmentHandle, header: Header) -> Self {
        Self { segment, header: Arc::new(header) }
    }

    /// Shared memory that it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.segment.bytes()
    }

    /// Whether its segment still says what it said when it was checked.
    pub(super) fn holds(&self) -> bool {
        self.segment.read_header().is_ok_and(|header| header == *self.header)
    }
}

impl Output for Tensor {
    fn pixels(&self) -> Result<Pixels, Failure> {
        let [1, height, width, 3] = self.header.shape[..] else {
            let message = format!("pixels have shape {:?}: this is a bug of sdd", self.header.shape);
            return Err(failure(FailureReason::Internal, Stage::Decode, message));
        };
        let rgb = self.segment.read_payload(&self.header).map_err(|error| of_arena(Stage::Decode, &error))?;
        // Admission bounds both edges far below this.
        Ok(Pixels { width: width as u32, height: height as u32, rgb })
    }

    fn save(&self) -> Option<SavedTensor> {
        let (element_type, shape) = (self.header.element_type, self.header.shape.clone());
        Some(SavedTensor { element_type, shape, bytes: self.segment.read_payload(&self.header).ok()? })
    }
}

/// Brings a tensor of an earlier daemon back into shared memory, if it is what the slot holds for this request.
pub(super) fn restore(
    arena: &Arena,
    job: &JobId,
    request: &Admitted,
    slot: Slot,
    saved: &SavedTensor,
) -> Option<Tensor> {
    let (spec, length) = (tensor(request, slot.role), saved.bytes.len() as u64);
    if saved.element_type != spec.element_type || length > spec.capacity {
        return None;
    }
    let label = format!("{} of job {job}", slot.role.name());
    let segment = arena.create(spec.element_type, length, 0, &label).ok()?;
    let header = segment.write(&saved.shape, &saved.bytes).ok()?;
    check_shape(request, slot.role, &spec, &header).ok()?;
    Some(Tensor { segment, header: Arc::new(header) })
}

/// The daemon's own inputs of a run: image files.
fn files(request: &Admitted, stage: Stage) -> Vec<(&'static str, &ImageFile)> {
    match (stage, &request.initial) {
        (Stage::VaeEncode, Some(initial)) => {
            let mask = initial.mask.as_ref().map(|mask| ("mask", mask));
            std::iter::once(("init_image", &initial.image)).chain(mask).collect()
        }
        (Stage::Unspecified | Stage::Encode | Stage::VaeEncode | Stage::Denoise | Stage::Decode, _) => Vec::new(),
    }
}

/// The segments of one task.
pub(super) struct Segments {
    /// As the task names them.
    pub(super) inputs: Vec<NamedSegment>,
    outputs: Vec<(Slot, TensorSpec, SegmentHandle)>,
    /// Where the denoiser leaves its checkpoints.
    pub(super) checkpoints: Vec<SegmentHandle>,
    /// The checkpoint to go on from.
    pub(super) resume: Option<Segment>,
    /// What the daemon wrote itself: kept until the task has ended.
    _written: Vec<SegmentHandle>,
}

impl Segments {
    /// Creates outputs and slots for checkpoints, and writes image files and the checkpoint to go on from, out of what was
    /// promised with the grant.
    pub(super) fn create(
        arena: &Arena,
        order: &StageOrder<Tensor>,
        resume: Option<&Checkpoint>,
        granted: &mut Granted,
    ) -> Result<Self, Failure> {
        let stage = order.run.stage;
        let wrong = |error| of_arena(stage, &error);
        let mut inputs = Vec::new();
        for slot in &order.run.inputs {
            let Some(tensor) = order.inputs.get(slot) else {
                let message = format!("input {} is not there: this is a bug of sdd", slot.role.name());
                return Err(failure(FailureReason::Internal, stage, message));
            };
            let segment = tensor.segment.message(&tensor.header.shape);
            inputs.push(NamedSegment { role: slot.role.name().into(), segment: Some(segment) });
        }
        let label = |role: &str| format!("{role} of job {}", order.job);
        let mut written = Vec::new();
        for (role, file) in files(&order.request, stage) {
            let bytes = file.bytes();
            let length = bytes.len() as u64;
            let promise = &mut granted.shared_memory;
            let segment = arena
                .create_reserved(promise, ElementType::U8, length, 0, &label(role))
                .and_then(|segment| segment.write(&[length], bytes).map(|_| segment))
                .map_err(wrong)?;
            inputs.push(NamedSegment { role: role.into(), segment: Some(segment.message(&[length])) });
            written.push(segment);
        }
        let mut outputs = Vec::new();
        for slot in &order.run.outputs {
            let spec = tensor(&order.request, slot.role);
            let (promise, writer) = (&mut granted.shared_memory, granted.incarnation);
            let segment = arena
                .create_reserved(promise, spec.element_type, spec.capacity, writer, &label(slot.role.name()))
                .map_err(wrong)?;
            outputs.push((*slot, spec, segment));
        }
        let mut checkpoints = Vec::new();
        if stage == Stage::Denoise {
            let (promise, writer) = (&mut granted.shared_memory, granted.incarnation);
            for _ in 0..SLOTS {
                let capacity = checkpoint_capacity(&order.request);
                let slot = arena.create_reserved(promise, ElementType::U8, capacity, writer, &label("checkpoint"));
                checkpoints.push(slot.map_err(wrong)?);
            }
        }
        let resume = match resume {
            Some(checkpoint) => {
                let length = checkpoint.payload.len() as u64;
                let promise = &mut granted.shared_memory;
                let segment = arena
                    .create_reserved(promise, ElementType::U8, length, 0, &label("checkpoint"))
                    .and_then(|segment| segment.write(&[length], &checkpoint.payload).map(|_| segment))
                    .map_err(wrong)?;
                let message = segment.message(&[length]);
                written.push(segment);
                Some(message)
            }
            None => None,
        };
        Ok(Self { inputs, outputs, checkpoints, resume, _written: written })
    }

    /// Shared memory that a run will take.
    pub(super) fn bytes(order: &StageOrder<Tensor>, resume: Option<&Checkpoint>) -> u64 {
        let outputs = order.run.outputs.iter().map(|slot| tensor(&order.request, slot.role).capacity);
        let files = files(&order.request, order.run.stage).into_iter().map(|(_, file)| file.bytes().len() as u64);
        let slots = if order.run.stage == Stage::Denoise { SLOTS } else { 0 };
        let slots = std::iter::repeat_n(checkpoint_capacity(&order.request), slots);
        let bytes = outputs.chain(files).chain(slots).map(Arena::segment_bytes).fold(0, u64::saturating_add);
        bytes.saturating_add(resume.map_or(0, Checkpoint::segment_bytes))
    }

    /// The slots for checkpoints as the task names them.
    pub(super) fn checkpoint_messages(&self) -> Vec<Segment> {
        self.checkpoints.iter().map(|slot| slot.message(&[])).collect()
    }

    /// The outputs as the task names them.
    pub(super) fn output_messages(&self) -> Vec<NamedSegment> {
        let named = |(slot, spec, segment): &(Slot, TensorSpec, SegmentHandle)| NamedSegment {
            role: slot.role.name().into(),
            segment: Some(segment.message(&spec.shape)),
        };
        self.outputs.iter().map(named).collect()
    }

    /// Checks what the worker says it has written. `Err` says how it lies.
    pub(super) fn validate(&self, request: &Admitted, done: &TaskDone) -> Result<BTreeMap<Slot, Tensor>, String> {
        let mut checked = BTreeMap::new();
        for (slot, spec, segment) in &self.outputs {
            let role = slot.role.name();
            let claim = done
                .outputs
                .iter()
                .find(|named| named.role == role)
                .and_then(|named| named.segment.as_ref())
                .ok_or_else(|| format!("the worker reports no output {role:?}"))?;
            let header = segment.validate(claim).map_err(|error| error.to_string())?;
            check_shape(request, slot.role, spec, &header)?;
            checked.insert(*slot, Tensor::new(segment.clone(), header));
        }
        Ok(checked)
    }
}

/// A valid header may still describe another tensor than the stage is to write.
fn check_shape(request: &Admitted, role: Role, spec: &TensorSpec, header: &Header) -> Result<(), String> {
    let holds = match role {
        Role::Conditioning => {
            let (rows, chunk) = (if request.guided() { 2 } else { 1 }, request.model.report.chunk_tokens());
            let width = request.model.report.text.hidden_size;
            matches!(header.shape[..], [r, t, w] if r == rows && w == width && t > 0 && t.is_multiple_of(chunk))
        }
        Role::ImageLatents | Role::MaskedImageLatents | Role::LatentMask | Role::Latents | Role::Pixels => {
            header.shape == spec.shape
        }
    };
    holds.then_some(()).ok_or_else(|| {
        format!("output {:?} has shape {:?}, which is not what this stage writes", role.name(), header.shape)
    })
}

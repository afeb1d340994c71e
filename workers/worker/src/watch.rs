//! What a stage tells while it runs: progress to the daemon, and, where `SDD_WORKER_TRACE` names a folder, every intermediate
//! tensor into files for comparing with other programs.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use sd_engine::pipeline::{PipelineError, StageObserver};
use sd_engine::residency::SegmentEvent;
use sd_engine::sampling::Checkpoint;
use sd_engine::tensor::{self, Tensor};
use sd_proto::worker::v1::TaskPhase;

use crate::runner::Control;
use crate::segment::Slots;

/// Names the folder that traced tensors are written to. A trace costs time and disk; it is for finding differences.
const TRACE_VARIABLE: &str = "SDD_WORKER_TRACE";

/// Watches one run of a stage.
pub(crate) struct Watch<'a> {
    control: &'a Control<'a>,
    step: Option<(usize, usize)>,
    slots: Option<Slots>,
    /// Why no checkpoint could be kept.
    unkept: Option<String>,
    trace: Option<Trace>,
}

impl<'a> Watch<'a> {
    /// Progress is counted in blocks, until the first step is reported.
    pub(crate) fn blocks(control: &'a Control<'a>) -> Self {
        Self { control, step: None, slots: None, unkept: None, trace: Trace::from_environment() }
    }

    /// Progress is counted in steps, and checkpoints are left in `slots`.
    pub(crate) fn steps(control: &'a Control<'a>, slots: Option<Slots>) -> Self {
        Self { step: Some((0, 0)), slots, ..Self::blocks(control) }
    }

    /// What people may want to know of the run.
    pub(crate) fn notes(self) -> Vec<String> {
        self.unkept.into_iter().collect()
    }
}

impl StageObserver for Watch<'_> {
    fn on_block(&mut self, event: &SegmentEvent<'_>) -> ControlFlow<()> {
        let (done, total) = self.step.unwrap_or(event.progress());
        self.control.block(TaskPhase::Computing, done as u64, total as u64)
    }

    fn on_step(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        self.step = Some((done, total));
        self.control.step(TaskPhase::Computing, done as u64, total as u64)
    }

    fn on_checkpoint(&mut self, make: &dyn Fn() -> Result<Checkpoint, PipelineError>) -> Result<(), PipelineError> {
        let Some(slots) = &mut self.slots else { return Ok(()) };
        let checkpoint = make()?;
        if let Err(error) = slots.write(checkpoint.done as u32, &checkpoint.to_bytes()) {
            // The picture does not depend on it; the next steps would fail in the same way.
            self.unkept = Some(format!("this run could not keep checkpoints: {error}"));
            self.slots = None;
        }
        Ok(())
    }

    fn on_tensor(&mut self, name: &str, tensor: &Tensor) {
        if let Some(trace) = &self.trace {
            trace.write(name, tensor);
        }
    }
}

/// A folder that intermediate tensors go to, one safetensors file each: `NUMBER-NAME.safetensors`, numbers in the order in
/// which this process wrote them.
struct Trace {
    folder: PathBuf,
    failed: RefCell<bool>,
}

static TRACED: AtomicU64 = AtomicU64::new(0);

impl Trace {
    fn from_environment() -> Option<Self> {
        let folder = std::env::var_os(TRACE_VARIABLE).filter(|folder| !folder.is_empty())?;
        Some(Self { folder: folder.into(), failed: RefCell::new(false) })
    }

    fn write(&self, name: &str, tensor: &Tensor) {
        if let Err(error) = self.try_write(name, tensor)
            && !self.failed.replace(true)
        {
            tracing::error!(%error, folder = %self.folder.display(), "cannot write the trace");
        }
    }

    fn try_write(&self, name: &str, tensor: &Tensor) -> anyhow::Result<()> {
        let bytes: Vec<u8> = crate::segment::f32_bytes(&tensor::to_f32(tensor)?);
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, tensor.dims().to_vec(), &bytes)?;
        let number = TRACED.fetch_add(1, Ordering::Relaxed);
        let path = self.folder.join(format!("{:08}-{number:04}-{name}.safetensors", std::process::id()));
        safetensors::serialize_to_file([(name, view)], None, &path)?;
        Ok(())
    }
}

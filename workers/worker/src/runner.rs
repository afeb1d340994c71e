//! The model thread: loads one stage of one model and runs the daemon's tasks on it, one at a time.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sd_engine::formats::WeightSet;
use sd_engine::models::ModelError;
use sd_engine::pipeline::PipelineError;
use sd_engine::residency::{LoadEvent, Residency};
use sd_proto::exit::WorkerExit;
use sd_proto::worker::v1::from_worker::Message;
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{NamedSegment, Task, TaskDone, TaskError, TaskFailed, TaskPhase, TaskProgress};
use tokio::sync::{mpsc, oneshot};

use crate::arguments::{Serve, Stage};
use crate::governor::{self, Governor};
use crate::leases::{Allowance, Revision};
use crate::memory;
use crate::outbox::Outbox;
use crate::segment::SegmentUseError;
use crate::{diffusion, text, vae};

/// How often progress within one step is reported; steps and phases always are.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// What the link hands to the model thread.
pub(crate) enum Order {
    /// Run a task.
    Run(Box<Task>),
    /// Give scratch memory back for this lease, down to these bytes, and say so on [`ModelThread::given_back`].
    Trim(Revision),
    /// The weights lease was revised: obey it, unless the running task has done so before.
    Follow,
    /// Free everything and say so.
    Unload(oneshot::Sender<()>),
}

/// Why a task failed. The text goes to the user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    /// A segment is not what the message said.
    #[error(transparent)]
    Segment(#[from] SegmentUseError),
    /// Loading or computing failed.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// The lease does not hold what the task takes at the least.
    #[error(
        "the weights lease of {lease} bytes is below the {floor} that the largest part of this model takes: grant more"
    )]
    Lease {
        /// Bytes granted.
        lease: u64,
        /// Bytes that would do.
        floor: u64,
    },
    /// A task of another stage.
    #[error("a {stage:?} worker cannot run a task of kind {kind}")]
    WrongStage {
        /// This worker's stage.
        stage: Stage,
        /// The task's kind.
        kind: &'static str,
    },
}

impl From<ModelError> for RunError {
    fn from(error: ModelError) -> Self {
        Self::Pipeline(error.into())
    }
}

impl RunError {
    fn kind(&self) -> TaskError {
        match self {
            Self::Segment(_) => TaskError::BadSegment,
            Self::Lease { .. } => TaskError::OutOfMemory,
            Self::WrongStage { .. } => TaskError::Internal,
            Self::Pipeline(error) => match error {
                PipelineError::Cancelled => TaskError::Cancelled,
                PipelineError::Request(_) => TaskError::BadRequest,
                PipelineError::Model(_) => TaskError::BadModel,
                PipelineError::NonFinite { .. } => TaskError::NonFinite,
                PipelineError::Internal(_) => TaskError::Internal,
            },
        }
    }
}

/// What a finished run leaves.
#[derive(Default)]
pub(crate) struct Finished {
    /// Outputs as sealed.
    pub(crate) outputs: Vec<NamedSegment>,
    /// For people.
    pub(crate) notes: Vec<String>,
    /// Why they are not what the task asked for; empty: they are.
    pub(crate) degraded: String,
    /// The step that it went on from.
    pub(crate) resumed_at: u32,
}

/// A stage's model, loaded on first use.
pub(crate) trait StageModel: Send {
    /// Loads what this task needs and is not loaded yet.
    fn load(&mut self, folder: &Path, task: &Task, control: &Control<'_>) -> Result<(), RunError>;
    /// Runs a task on the loaded model.
    fn run(&mut self, task: &Task, control: &Control<'_>) -> Result<Finished, RunError>;
    /// Frees the weights.
    fn unload(&mut self);
    /// Bytes of the weights in memory.
    fn weights_bytes(&self) -> u64;
    /// The stage's weight files, to find out which is to blame for an output that is not finite.
    fn weights(&self, folder: &Path) -> Result<WeightSet, ModelError>;
}

/// Cancellation and progress of one run.
pub(crate) struct Control<'a> {
    task_id: u64,
    cancelled: &'a AtomicBool,
    outbox: &'a Outbox,
    governor: &'a Governor,
    blocks: AtomicU64,
    peak: AtomicU64,
    last: Mutex<Instant>,
}

impl Control<'_> {
    /// These models share the weights lease from now on; the first of them is about to run this task.
    pub(crate) fn govern(&self, task: &Task, models: &[&Arc<Residency>]) -> Result<(), RunError> {
        let short = |(lease, floor)| RunError::Lease { lease, floor };
        self.governor.govern(models, governor::policy(task)).map_err(short)
    }

    /// Loads what of a model the lease holds.
    pub(crate) fn load(&self, model: &Residency) -> Result<(), RunError> {
        let mut progress = |event: &LoadEvent<'_>| self.block(TaskPhase::Loading, event.done, event.total);
        Ok(model.load(&mut progress).map_err(ModelError::from)?)
    }

    /// Whether to go on; asked at each block.
    pub(crate) fn checkpoint(&self) -> ControlFlow<()> {
        if self.cancelled.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Notes that a block was passed, and reports it now and then, so that a long step does not look like a hang. What the
    /// daemon has changed of the weights lease is obeyed here, between two blocks.
    pub(crate) fn block(&self, phase: TaskPhase, done: u64, total: u64) -> ControlFlow<()> {
        // Before anything is given back: the heap keeps what was freed, so this is the most that was held since the last block.
        self.sample();
        self.governor.follow();
        let heartbeat = self.blocks.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if last.elapsed() >= HEARTBEAT {
            *last = Instant::now();
            self.report(phase, done, total, heartbeat);
        }
        self.checkpoint()
    }

    fn sample(&self) {
        if let Ok(resident) = memory::resident() {
            self.peak.fetch_max(resident.charged(), Ordering::Relaxed);
        }
    }

    /// Reports a whole step.
    pub(crate) fn step(&self, phase: TaskPhase, done: u64, total: u64) -> ControlFlow<()> {
        self.report(phase, done, total, self.blocks.load(Ordering::Relaxed));
        self.checkpoint()
    }

    fn report(&self, phase: TaskPhase, done: u64, total: u64, heartbeat: u64) {
        self.outbox.offer(Message::Progress(TaskProgress {
            task_id: self.task_id,
            phase: phase as i32,
            done,
            total,
            heartbeat,
        }));
    }
}

/// The link's end of the model thread.
pub(crate) struct ModelThread {
    /// Leases of which memory was given back; not answered inside an order, so that the link goes on obeying (a cancel,
    /// say) while a task runs.
    pub(crate) given_back: mpsc::UnboundedReceiver<Revision>,
    orders: Sender<Order>,
    cancels: Arc<Cancels>,
}

/// Which tasks are to stop: the running one by its flag, ones still queued by their ids.
#[derive(Default)]
struct Cancels {
    current: Mutex<Option<(u64, Arc<AtomicBool>)>>,
    ahead: Mutex<Vec<u64>>,
}

impl Cancels {
    fn begin(&self, task_id: u64) -> Arc<AtomicBool> {
        let flag = Arc::new(AtomicBool::new(false));
        *lock(&self.current) = Some((task_id, flag.clone()));
        if lock(&self.ahead).contains(&task_id) {
            flag.store(true, Ordering::Relaxed);
        }
        flag
    }

    fn end(&self) {
        if let Some((task_id, _)) = lock(&self.current).take() {
            lock(&self.ahead).retain(|ahead| *ahead != task_id);
        }
    }

    fn cancel(&self, task_id: u64) {
        // Noted first: a task that begins between the two lines finds it.
        lock(&self.ahead).push(task_id);
        if let Some((current, flag)) = &*lock(&self.current)
            && *current == task_id
        {
            flag.store(true, Ordering::Relaxed);
        }
    }

    fn cancel_current(&self) {
        if let Some((_, flag)) = &*lock(&self.current) {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl ModelThread {
    /// Starts the thread. `finished` is told when it ends by itself.
    pub(crate) fn start(
        serve: &Serve,
        outbox: Outbox,
        allowance: Arc<Allowance>,
        finished: oneshot::Sender<WorkerExit>,
    ) -> std::io::Result<Self> {
        let (orders, inbox) = channel();
        let (giving_back, given_back) = mpsc::unbounded_channel();
        let cancels = Arc::new(Cancels::default());
        let state = Runner {
            stage: serve.stage,
            folder: serve.model.clone(),
            model: match serve.stage {
                Stage::Text => Box::new(text::TextStage::default()),
                Stage::Diffusion => Box::new(diffusion::DiffusionStage::default()),
                Stage::Vae => Box::new(vae::VaeStage::default()),
            },
            outbox,
            cancels: cancels.clone(),
            governor: Governor::new(allowance, giving_back),
        };
        if serve.threads > 0 {
            sd_engine::ops::set_threads(serve.threads).map_err(std::io::Error::other)?;
        }
        std::thread::Builder::new().name("model".into()).spawn(move || {
            // A panic must end the process as the contract says, and not leave a worker that answers no task.
            let run = std::panic::AssertUnwindSafe(|| state.serve(&inbox));
            let exit = std::panic::catch_unwind(run).unwrap_or(WorkerExit::Internal);
            let _ = finished.send(exit);
        })?;
        Ok(Self { given_back, orders, cancels })
    }

    /// Queues an order. A thread that has ended takes none; its end is reported by itself.
    pub(crate) fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }

    /// Stops a task at its next block, begun or not.
    pub(crate) fn cancel(&self, task_id: u64) {
        self.cancels.cancel(task_id);
    }

    /// Stops the running task at its next block.
    pub(crate) fn cancel_all(&self) {
        self.cancels.cancel_current();
    }
}

struct Runner {
    stage: Stage,
    folder: PathBuf,
    model: Box<dyn StageModel>,
    outbox: Outbox,
    cancels: Arc<Cancels>,
    governor: Governor,
}

impl Runner {
    fn serve(mut self, inbox: &Receiver<Order>) -> WorkerExit {
        while let Ok(order) = inbox.recv() {
            match order {
                Order::Trim(revision) => self.governor.trimmed(revision),
                Order::Follow => self.governor.follow(),
                Order::Unload(done) => {
                    self.model.unload();
                    self.governor.forget();
                    let _ = done.send(());
                }
                Order::Run(task) => {
                    if let ControlFlow::Break(exit) = self.run(&task) {
                        return exit;
                    }
                }
            }
        }
        WorkerExit::Clean
    }

    fn run(&mut self, task: &Task) -> ControlFlow<WorkerExit> {
        let cancelled = self.cancels.begin(task.task_id);
        let control = Control {
            task_id: task.task_id,
            cancelled: &cancelled,
            outbox: &self.outbox,
            governor: &self.governor,
            blocks: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            last: Mutex::new(Instant::now()),
        };
        let result = perform(&mut *self.model, self.stage, &self.folder, task, &control);
        self.cancels.end();
        self.governor.rest();
        match result {
            Ok(done) => {
                self.outbox.deliver(Message::Done(done));
                ControlFlow::Continue(())
            }
            Err(error) => {
                let kind = error.kind();
                self.outbox.deliver(Message::Failed(TaskFailed {
                    task_id: task.task_id,
                    error: kind as i32,
                    message: self.explain(&error),
                }));
                if kind == TaskError::BadModel {
                    eprintln!("{error}");
                    return ControlFlow::Break(WorkerExit::BadWeights);
                }
                ControlFlow::Continue(())
            }
        }
    }
}

impl Runner {
    fn explain(&self, error: &RunError) -> String {
        match error {
            RunError::Pipeline(PipelineError::NonFinite { .. }) => match self.model.weights(&self.folder) {
                Ok(weights) => format!("{error}: {}", sd_engine::pipeline::blame(&weights)),
                Err(unread) => format!("{error}, and the weights cannot be checked: {unread}"),
            },
            RunError::Pipeline(_) | RunError::Segment(_) | RunError::Lease { .. } | RunError::WrongStage { .. } => {
                error.to_string()
            }
        }
    }
}

fn perform(
    model: &mut dyn StageModel,
    stage: Stage,
    folder: &Path,
    task: &Task,
    control: &Control<'_>,
) -> Result<TaskDone, RunError> {
    let kind = match (&task.work, stage) {
        (Some(Work::Load(_)), _)
        | (Some(Work::Encode(_)), Stage::Text)
        | (Some(Work::VaeEncode(_) | Work::Decode(_)), Stage::Vae)
        | (Some(Work::Denoise(_)), Stage::Diffusion) => None,
        (Some(Work::Encode(_)), Stage::Diffusion | Stage::Vae) => Some("encode"),
        (Some(Work::VaeEncode(_)), Stage::Text | Stage::Diffusion) => Some("vae encode"),
        (Some(Work::Denoise(_)), Stage::Text | Stage::Vae) => Some("denoise"),
        (Some(Work::Decode(_)), Stage::Text | Stage::Diffusion) => Some("decode"),
        (None, _) => Some("unknown"),
    };
    if let Some(kind) = kind {
        return Err(RunError::WrongStage { stage, kind });
    }
    if control.checkpoint().is_break() {
        return Err(PipelineError::Cancelled.into());
    }
    let started = Instant::now();
    control.governor.take_totals();
    model.load(folder, task, control)?;
    let loaded = Instant::now();
    let finished = match &task.work {
        Some(Work::Load(_)) | None => Finished::default(),
        Some(Work::Encode(_) | Work::VaeEncode(_) | Work::Denoise(_) | Work::Decode(_)) => model.run(task, control)?,
    };
    let computed = loaded.elapsed();
    control.sample();
    let (moved, segments) = control.governor.take_totals();
    Ok(TaskDone {
        task_id: task.task_id,
        outputs: finished.outputs,
        load_micros: micros(loaded - started),
        compute_micros: micros(computed),
        peak_bytes: control.peak.load(Ordering::Relaxed),
        notes: finished.notes,
        weights_bytes: model.weights_bytes(),
        resident_segments: moved.resident as u32,
        segments: segments as u32,
        streamed_bytes: moved.streamed_bytes,
        streamed_segments: moved.streamed as u64,
        degraded: finished.degraded,
        resumed_at: finished.resumed_at,
    })
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

//! The real runner of stages: lease → worker → task → validated output.
//!
//! For one run: choose the process that is to do it (the warm one of that stage, model and device, or a new one), ask the
//! residency for everything it needs at once, start the process if it is not running, create the outputs, take the
//! device's compute token, send the task, and believe its result only after the headers in shared memory were checked. A run
//! whose worker does not survive it is attempted again, as far as the job's [`Survival`](super::resume::Survival) allows.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sd_proto::v1::{Failure, FailureReason, ProgressPhase, Stage};
use sd_proto::worker::v1::WorkerStage;
use tracing::Instrument as _;

use super::attempt::tokens;
use super::conditioning::{CacheConfig, Conditioning};
use super::failure::{Lost, failure, of_refusal, of_start};
use super::moves::Moves;
use super::operate::Pins;
use super::quarantine::{Quarantine, Suspect};
use super::runner::{StageNews, StageOrder, Stopped};
use super::segments::Tensor;
use crate::arena::Arena;
use crate::ids::DeviceId;
use crate::jobs::request::Admitted;
use crate::journal::Journal;
use crate::residency::{Granted, LeasePart, LeaseVector, Refusal, Residency};
use crate::workers::{Worker, WorkerSpec, Workers, stage_name};

/// How often a run looks for another process when the one it was to use goes away before the task began.
pub(super) const ATTEMPTS: usize = 4;

/// How long a run waits for others so that it can hold all of its weights, before it starts with those for which there is room.
const ROOM_FOR_ALL: Duration = Duration::from_secs(2);

/// How long the end of a process that was killed or retired is waited for.
pub(super) const REAPING: Duration = Duration::from_secs(5);

/// Says what a run of a stage needs on its device.
pub trait Needs: Send + Sync + 'static {
    /// Context, weights and working set, as the process holds them while it runs this stage of this request. `tokens` of
    /// conditioning over both prompts, where they are known already.
    fn parts(&self, request: &Admitted, stage: Stage, tokens: Option<u64>) -> Vec<LeasePart>;
    /// What a finished run measured: the highest bytes of its process, and the weights it holds.
    fn measured(&self, request: &Admitted, stage: Stage, tokens: Option<u64>, peak_bytes: u64, weights_bytes: u64);
}

/// Which process: what workers of equal keys can do for each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) stage: WorkerStage,
    pub(super) dir: PathBuf,
    fingerprint: String,
}

impl Key {
    /// The kind of process that runs a stage of a request.
    pub(super) fn of(request: &Admitted, stage: WorkerStage) -> Self {
        let model = &request.model;
        Self { stage, dir: model.dir.clone(), fingerprint: model.report.fingerprint.clone() }
    }

    pub(super) fn suspect<'a>(&'a self, order: &'a StageOrder<Tensor>) -> Suspect<'a> {
        let model = &order.request.model.name;
        Suspect { model, dir: &self.dir, fingerprint: &self.fingerprint, stage: self.stage }
    }
}

/// The process of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chosen {
    /// To be started by the first run that is granted what it needs.
    New(u64),
    /// Started once. An incarnation is never started again: when its process is gone, another one is chosen.
    Started(u64),
}

impl Chosen {
    fn incarnation(self) -> u64 {
        match self {
            Self::New(incarnation) | Self::Started(incarnation) => incarnation,
        }
    }
}

/// Runs stages in worker processes on one device.
pub struct Dispatcher {
    pub(super) residency: Residency,
    pub(super) workers: Workers,
    pub(super) arena: Arena,
    pub(super) needs: Arc<dyn Needs>,
    pub(super) device: DeviceId,
    threads: usize,
    pub(super) tasks: AtomicU64,
    pub(super) pins: Pins,
    pub(super) moves: Moves,
    pub(super) journal: Journal,
    pub(super) quarantine: Quarantine,
    pub(super) conditioning: Conditioning,
    /// The process of each kind, running or about to be started.
    chosen: Mutex<HashMap<Key, Chosen>>,
}

impl std::fmt::Debug for Dispatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dispatcher").field("device", &self.device).finish_non_exhaustive()
    }
}

/// Ends a run early.
pub(super) fn failed(failure: Failure) -> Stopped {
    Stopped::Failed(failure)
}

impl Dispatcher {
    /// A runner on `device` whose workers compute with `threads` threads.
    pub fn new(
        residency: Residency,
        workers: Workers,
        arena: Arena,
        needs: Arc<dyn Needs>,
        device: DeviceId,
        threads: usize,
    ) -> Self {
        let (tasks, pins, chosen) = (AtomicU64::new(1), Pins::default(), Mutex::default());
        let (journal, quarantine) = (Journal::default(), Quarantine::default());
        let conditioning = Conditioning::new(arena.clone(), CacheConfig::default());
        Self {
            residency,
            workers,
            arena,
            needs,
            device,
            threads,
            tasks,
            pins,
            moves: Moves::default(),
            journal,
            quarantine,
            conditioning,
            chosen,
        }
    }

    /// The same, with its decisions written into `journal`.
    #[must_use]
    pub fn explained_in(self, journal: Journal) -> Self {
        Self { journal, ..self }
    }

    /// The same, keeping so much of what text encoders wrote.
    #[must_use]
    pub fn remembering(self, config: CacheConfig) -> Self {
        let conditioning = Conditioning::new(self.arena.clone(), config);
        Self { conditioning, ..self }
    }

    /// The stages that are not started any more.
    pub fn quarantine(&self) -> Quarantine {
        self.quarantine.clone()
    }

    /// The device of its stages.
    pub(super) fn device_of(&self) -> &DeviceId {
        &self.device
    }

    /// What a run needs on its device.
    pub(super) fn parts_of(&self, order: &StageOrder<Tensor>) -> Vec<LeasePart> {
        self.needs.parts(&order.request, order.run.stage, tokens(order))
    }

    /// Bytes that a stage's process holds when all of it is there.
    pub(super) fn whole_of(&self, request: &Admitted, stage: Stage) -> u64 {
        self.needs.parts(request, stage, None).iter().fold(0, |sum, part| sum.saturating_add(part.want))
    }

    fn chosen(&self) -> MutexGuard<'_, HashMap<Key, Chosen>> {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that is to run a stage: the one that was chosen before, while it may still serve, else a new one.
    fn choose(&self, key: &Key) -> u64 {
        let new = || Chosen::New(self.workers.next_incarnation());
        self.chosen().entry(key.clone()).or_insert_with(new).incarnation()
    }

    /// Whether this run is the one that starts the process: nobody has started it, and it is still the chosen one.
    fn is_to_start(&self, key: &Key, incarnation: u64) -> bool {
        let mut chosen = self.chosen();
        let new = chosen.get(key) == Some(&Chosen::New(incarnation));
        if new {
            chosen.insert(key.clone(), Chosen::Started(incarnation));
        }
        new
    }

    /// This process does not serve any more.
    pub(super) fn forget(&self, key: &Key, incarnation: u64) {
        let mut chosen = self.chosen();
        if chosen.get(key).is_some_and(|chosen| chosen.incarnation() == incarnation) {
            chosen.remove(key);
        }
    }

    /// The chosen processes of the kinds that are meant, running or not.
    pub(super) fn chosen_of(&self, meant: impl Fn(&Key) -> bool) -> Vec<u64> {
        self.chosen().iter().filter(|(key, _)| meant(key)).map(|(_, chosen)| chosen.incarnation()).collect()
    }

    /// Retires processes of the same stage and folder that hold an older state of its files.
    pub(super) fn retire_outdated(&self, key: &Key) {
        let mut chosen = self.chosen();
        let outdated: Vec<Key> = chosen
            .keys()
            .filter(|k| k.stage == key.stage && k.dir == key.dir && k.fingerprint != key.fingerprint)
            .cloned()
            .collect();
        for key in outdated {
            if let Some(outdated) = chosen.remove(&key) {
                self.residency.retire(outdated.incarnation());
            }
        }
    }

    /// The request of a run as the ledger takes it.
    fn vector(&self, order: &StageOrder<Tensor>, key: &Key, incarnation: u64, shared_memory: u64) -> LeaseVector {
        LeaseVector {
            device: self.device.clone(),
            incarnation,
            tenant: order.tenant.clone(),
            job: order.job.clone(),
            holder: format!("{} of {}", stage_name(key.stage), order.request.model.name),
            parts: self.parts_of(order),
            shared_memory,
        }
    }

    /// A run that could do with fewer weights than all is granted at once what is free, and would stream the rest in every
    /// step beside processes that do nothing. So where all of them find no room, idle processes give way first, the cheapest as
    /// always; busy ones are waited for a while only.
    async fn make_room_for_all(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        shared_memory: u64,
    ) -> Result<(), Stopped> {
        if !self.parts_of(order).iter().any(|part| part.want > part.min) {
            return Ok(());
        }
        let (need, free) = self.room_for(order, key).await;
        if need <= free {
            return Ok(());
        }
        let mut vector = self.vector(order, key, self.choose(key), shared_memory);
        for part in &mut vector.parts {
            part.min = part.want;
        }
        tokio::select! {
            biased;
            () = order.stop.cancelled() => Err(Stopped::Asked),
            // What was granted so is given back at once, and found there by the request that follows.
            _ = tokio::time::timeout(ROOM_FOR_ALL, self.residency.request(vector)) => Ok(()),
        }
    }

    /// Waits for everything the run needs.
    pub(super) async fn lease(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        shared_memory: u64,
    ) -> Result<Granted, Stopped> {
        let stage = order.run.stage;
        self.make_room_for_all(order, key, shared_memory).await?;
        let mut gone = 0;
        while gone < ATTEMPTS {
            let incarnation = self.choose(key);
            let vector = self.vector(order, key, incarnation, shared_memory);
            let span = tracing::debug_span!("lease", incarnation, device = %vector.device, holder = vector.holder);
            let granted = tokio::select! {
                biased;
                () = order.stop.cancelled() => return Err(Stopped::Asked),
                granted = self.residency.request(vector).instrument(span) => granted,
            };
            match granted {
                Ok(granted) => {
                    self.keep_while_it_runs(order, incarnation);
                    self.keep_pinned(key, incarnation);
                    return Ok(granted);
                }
                Err(Refusal::HolderGone { .. }) => {
                    gone += 1;
                    self.forget(key, incarnation);
                }
                // A job in mode none keeps its stages until it ends: then there is room.
                Err(Refusal::Pinned { .. }) if self.wait_for_unpinning(order).await => {}
                Err(refusal) => return Err(failed(of_refusal(stage, &refusal))),
            }
        }
        Err(failed(failure(
            FailureReason::WorkerDied,
            stage,
            format!("{ATTEMPTS} workers went away one after the other before this stage could use them"),
        )))
    }

    /// The granted process, started if it never was; `None` where it went away between the grant and now.
    pub(super) async fn worker(
        &self,
        order: &StageOrder<Tensor>,
        key: &Key,
        incarnation: u64,
    ) -> Result<Option<Worker>, Lost> {
        if let Some(worker) = self.workers.get(incarnation).filter(Worker::is_usable) {
            return Ok(Some(worker));
        }
        if !self.is_to_start(key, incarnation) {
            return Ok(None);
        }
        let _ = order.news.try_send(StageNews::Progress { phase: ProgressPhase::Starting, done: 0, total: 1 });
        let spec = WorkerSpec {
            incarnation,
            stage: key.stage,
            model: order.request.model.name.clone(),
            model_dir: key.dir.clone(),
            device: self.device.clone(),
            threads: self.threads,
            weights_total: order.request.model.report.stage_weights(crate::workers::stage_name(key.stage)),
        };
        let started = tokio::select! {
            biased;
            // Dropping the start retires the process; the residency hears of its end.
            () = order.stop.cancelled() => return Err(Lost::Asked),
            started = self.workers.start(spec) => started,
        };
        match started {
            Ok(worker) => Ok(Some(worker)),
            Err(error) => Err(of_start(order.run.stage, &error)),
        }
    }
}

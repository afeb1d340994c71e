//! What operators do to models and devices while jobs run: load, unload, pin, release.
//!
//! A load goes the way of a job's stage (lease → worker → task), so it takes room from idle processes only and waits where
//! there is none. What leaves does so when its task has ended, and counts as gone when the ledger has the proof.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sd_proto::v1::{Failure, FailureReason, Stage};
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{LoadWork, Task, WorkerStage};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::dispatch::{Dispatcher, Key};
use super::failure::failure;
use super::plan::{Grouping, StagePlan, worker_stage};
use super::resume::Survival;
use super::runner::{StageOrder, Stopped};
use crate::ids::{DeviceId, JobId, Tenant};
use crate::jobs::durable::Rescue;
use crate::jobs::request::Admitted;
use crate::residency::{Afterwards, Released};
use crate::workers::RunError;

/// How often a load looks for another process when the one it was to use goes away before it began.
const ATTEMPTS: usize = 4;

/// An answer that is waited for.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A stage's process, as a load left it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Its process.
    pub incarnation: u64,
    /// Bytes of weights that it holds now.
    pub weights_bytes: u64,
}

/// What has left a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Freed {
    /// Processes.
    pub workers: u32,
    /// Bytes whose release is proven.
    pub bytes: u64,
}

/// One stage to be loaded.
#[derive(Debug, Clone)]
pub struct LoadOrder {
    /// Stands for the load where a job would stand.
    pub job: JobId,
    /// Who asked.
    pub tenant: Tenant,
    /// A request of the model; its size matters only for what the process may hold beside its weights.
    pub request: Arc<Admitted>,
    /// The stage.
    pub stage: Stage,
}

/// Which processes are meant.
#[derive(Debug, Clone)]
pub struct Which {
    /// Of this model.
    pub model: String,
    /// Of this folder, whatever it is called there; absent where the folder cannot be used any more.
    pub dir: Option<PathBuf>,
    /// Of these stages; empty: of all.
    pub stages: Vec<WorkerStage>,
}

impl Which {
    fn means(&self, stage: WorkerStage, model: Option<&str>, dir: &Path) -> bool {
        let this_model = match &self.dir {
            Some(own) => own == dir,
            None => model == Some(&self.model),
        };
        this_model && (self.stages.is_empty() || self.stages.contains(&stage))
    }
}

/// Carries out what operators ask for.
pub trait Operator: Send + Sync + 'static {
    /// Brings a stage onto its device. Dropping the answer gives it up.
    ///
    /// # Errors
    /// It does not fit, its files are bad, its worker died.
    fn load(&self, order: LoadOrder) -> Answer<'_, Result<Loaded, Failure>>;
    /// Takes processes off their device: idle ones now, busy ones when their task has ended. Answers when that is proven.
    fn unload(&self, which: Which) -> Answer<'_, Freed>;
    /// Keeps a model's processes, those to come included, from being taken off for others; or ends that.
    fn pin(&self, dir: &Path, pinned: bool);
    /// Has every process leave a device. With a time, nothing is granted there until it is over; zero ends an earlier one at
    /// once. Answers when all that were there are proven to be gone.
    fn release(&self, device: DeviceId, hold: Option<Duration>) -> Answer<'_, Freed>;
}

/// Folders whose processes are not to be taken off for others.
#[derive(Debug, Default)]
pub(super) struct Pins(Mutex<BTreeSet<PathBuf>>);

impl Pins {
    fn set(&self, dir: &Path, pinned: bool) {
        let mut pins = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pinned {
            pins.insert(dir.into());
        } else {
            pins.remove(dir);
        }
    }

    fn holds(&self, dir: &Path) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(dir)
    }
}

/// A dispatcher that operators reach.
#[derive(Debug, Clone)]
pub struct Operating(pub Arc<Dispatcher>);

impl Operator for Operating {
    fn load(&self, order: LoadOrder) -> Answer<'_, Result<Loaded, Failure>> {
        let (stop, dispatcher) = (CancellationToken::new(), self.0.clone());
        // The load has a task of its own, so that whoever gives it up does not drop a claim on a process that still works.
        let guard = stop.clone().drop_guard();
        let stage = order.stage;
        let loading = tokio::spawn(async move { dispatcher.load(order, stop).await });
        Box::pin(async move {
            let loaded = loading.await;
            drop(guard);
            loaded.unwrap_or_else(|error| {
                let message = format!("the load broke: {error}: this is a bug of sdd");
                Err(failure(FailureReason::Internal, stage, message))
            })
        })
    }

    fn unload(&self, which: Which) -> Answer<'_, Freed> {
        let leaving = self.0.retire_all(&which);
        Box::pin(leaving.gone())
    }

    fn pin(&self, dir: &Path, pinned: bool) {
        self.0.pin(dir, pinned);
    }

    fn release(&self, device: DeviceId, hold: Option<Duration>) -> Answer<'_, Freed> {
        Box::pin(async move {
            let residency = &self.0.residency;
            if hold == Some(Duration::ZERO) {
                residency.unhold(&device);
                return Freed::default();
            }
            // Asked for first: what is there then is what has to leave.
            let (there, released) = (residency.snapshot(), residency.hold(&device, hold));
            let there = there.await;
            let workers = there.iter().filter(|there| there.device == device).map(|there| there.holders.len()).sum();
            Freed { workers: narrow(workers), bytes: released.proven().await }
        })
    }
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Processes on their way out.
struct Leaving(Vec<Released>);

impl Leaving {
    async fn gone(self) -> Freed {
        let mut freed = Freed::default();
        for released in self.0 {
            let bytes = released.proven().await;
            freed.bytes += bytes;
            freed.workers += u32::from(bytes > 0);
        }
        freed
    }
}

impl Dispatcher {
    /// Loads one stage, from lease to loaded weights.
    pub(super) async fn load(&self, order: LoadOrder, stop: CancellationToken) -> Result<Loaded, Failure> {
        let LoadOrder { job, tenant, request, stage } = order;
        let plan = StagePlan::of(&request, Grouping::ByStage);
        let (Some(kind), Some(run)) = (worker_stage(stage), plan.runs().iter().find(|run| run.stage == stage)) else {
            return Err(failure(FailureReason::Internal, stage, "a stage that no request has cannot be loaded"));
        };
        let key = Key::of(&request, kind);
        self.retire_outdated(&key);
        let (news, _unread) = mpsc::channel(1);
        let (run, inputs) = (run.clone(), BTreeMap::new());
        let (survival, rescue) = (Survival::default(), Rescue::default());
        let order = StageOrder {
            job,
            tenant,
            request: request.clone(),
            survival,
            run,
            inputs,
            resume: None,
            rescue,
            stop: stop.clone(),
            news,
        };
        let asked = || failure(FailureReason::Shutdown, stage, "the load was given up");
        let stopped = |stopped| match stopped {
            Stopped::Asked => asked(),
            Stopped::Failed(failure) => failure,
        };
        self.admitted(&order, &key).map_err(stopped)?;
        for _ in 0..ATTEMPTS {
            let granted = self.lease(&order, &key, 0).await.map_err(stopped)?;
            let incarnation = granted.incarnation;
            let Some(worker) = self.worker(&order, &key, incarnation).await.map_err(|error| {
                self.forget(&key, incarnation);
                stopped(error.into())
            })?
            else {
                self.forget(&key, incarnation);
                continue;
            };
            let task = Task {
                task_id: self.tasks.fetch_add(1, Ordering::Relaxed),
                job_id: order.job.to_string(),
                work: Some(Work::Load(LoadWork {})),
                memory: Some(request.memory.task(stage)),
                ..Task::default()
            };
            // Without the compute token: reading and converting weights goes on beside another stage's kernels.
            match worker.run_until(task, stop.cancelled(), |_| {}).await {
                Ok(done) => {
                    granted.finish(Afterwards::ReturnWorkingSet);
                    return Ok(Loaded { incarnation, weights_bytes: done.weights_bytes });
                }
                Err(RunError::Gone) if !stop.is_cancelled() => self.forget(&key, incarnation),
                Err(error) => {
                    match &error {
                        RunError::Failed { .. } => {}
                        RunError::Died(_) | RunError::Hung(_) | RunError::Protocol(_) | RunError::Gone => {
                            self.forget(&key, incarnation);
                        }
                    }
                    return Err(stopped(super::failure::of_run(stage, &error, stop.is_cancelled()).into()));
                }
            }
        }
        let message = format!("{ATTEMPTS} workers went away one after the other before this stage could be loaded");
        Err(failure(FailureReason::WorkerDied, stage, message))
    }

    /// Asks processes to leave as soon as they are idle. The next run of their stage finds another one.
    fn retire_all(&self, which: &Which) -> Leaving {
        let mut meant: BTreeSet<u64> =
            self.chosen_of(|key| which.means(key.stage, None, &key.dir)).into_iter().collect();
        let views = self.workers.list();
        let theirs = views.iter().filter(|view| {
            let spec = &view.spec;
            which.means(spec.stage, Some(&spec.model), &spec.model_dir)
        });
        meant.extend(theirs.map(|view| view.spec.incarnation));
        Leaving(meant.into_iter().map(|incarnation| self.residency.retire(incarnation)).collect())
    }

    fn pin(&self, dir: &Path, pinned: bool) {
        self.pins.set(dir, pinned);
        let theirs = self.workers.list().into_iter().filter(|view| view.spec.model_dir == dir);
        let running: BTreeSet<u64> = theirs.map(|view| view.spec.incarnation).collect();
        for incarnation in running.into_iter().chain(self.chosen_of(|key| key.dir == dir)) {
            self.residency.pin(incarnation, pinned);
        }
    }

    /// Whether an operator has pinned a request's model.
    pub(super) fn is_pinned(&self, request: &Admitted) -> bool {
        self.pins.holds(&request.model.dir)
    }

    /// Pins a process that has just been granted its leases, if its model is pinned.
    pub(super) fn keep_pinned(&self, key: &Key, incarnation: u64) {
        if self.pins.holds(&key.dir) {
            self.residency.pin(incarnation, true);
        }
    }
}

//! Worker processes: how they are started, watched, spoken to and ended.
//!
//! * [`spawner`]: the one thread that spawns them; [`process`]: a child, its pidfd and its group.
//! * [`link`]: the private gRPC server to which they attach.
//! * `supervisor`: one owner for each, with its two clocks ([`clocks`]) and the classification of its death ([`exit`]).
//! * [`handle`]: what the rest of the daemon holds of a worker.

pub mod clocks;
pub mod exit;
pub mod handle;
pub mod inspect;
mod leases;
pub mod link;
pub mod process;
pub mod spawner;
pub mod spec;
mod supervisor;
pub mod tail;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

pub use exit::{Clock, ExitReport, ExitStatus, KillCause, Phase};
pub use handle::{RunError, Worker, WorkerPhase, WorkerView};
pub use inspect::InspectError;
pub use spec::{WorkerSpec, stage_name};

use clocks::ClockLimits;
use link::{Expected, LinkServerHandle, Peer, Routes};
use process::Process;
use spawner::{SpawnRequest, Spawner};
use supervisor::Supervisor;
use tail::StderrReader;

/// Bounds on what a worker may take its time for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerLimits {
    /// From spawning to hello.
    pub handshake: Duration,
    /// How often a worker pulses.
    pub pulse_interval: Duration,
    /// Silence after which it is taken for frozen.
    pub pulse: Duration,
    /// Least time without progress after which its task is taken for hung.
    pub progress: Duration,
    /// From a cancellation to the task's end.
    pub cancel: Duration,
    /// From a request to retire to the process's end.
    pub retire: Duration,
    /// What an inspection of a model folder may take.
    pub inspect: Duration,
}

impl Default for WorkerLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            pulse_interval: Duration::from_millis(500),
            pulse: Duration::from_secs(3),
            progress: Duration::from_secs(60),
            cancel: Duration::from_secs(2),
            retire: Duration::from_secs(3),
            inspect: Duration::from_secs(30),
        }
    }
}

impl WorkerLimits {
    fn clocks(&self) -> ClockLimits {
        ClockLimits { pulse: self.pulse, progress: self.progress }
    }
}

/// A future without a name.
pub type BoxFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Who is told what workers say about their memory, and when they are gone. Called from the supervisors: must not
/// block.
pub trait Observer: Send + Sync + 'static {
    /// The process of this incarnation exists now.
    fn spawned(&self, incarnation: u64, pid: u32);
    /// The worker can hear now. Its first task is sent only after the returned future has completed, so that what this
    /// queues for it (grants) arrives first.
    fn attached(&self, incarnation: u64) -> BoxFuture;
    /// The worker is about to end (it is being killed, or its link broke), but is not reaped yet.
    fn lost(&self, incarnation: u64);
    /// A worker measured itself.
    fn pulse(&self, incarnation: u64, device_bytes: u64, peak_bytes: u64);
    /// A worker took this long from one block to the next, longer than ever before.
    fn block_time(&self, incarnation: u64, time: Duration);
    /// A worker asks for bytes beyond what it holds.
    fn lease_requested(&self, incarnation: u64, request: sd_proto::worker::v1::LeaseRequest);
    /// A worker holds no more than `bytes` of a lease from now on.
    fn lease_returned(&self, incarnation: u64, lease: u64, bytes: u64);
    /// The process of this incarnation is reaped, or never came to be: proof that it holds nothing.
    fn reaped(&self, incarnation: u64);
}

/// Why a worker did not start.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StartError {
    /// The daemon shuts down.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// No process came to be.
    #[error("cannot start the worker program {}: {source}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// What the system says.
        source: Arc<io::Error>,
    },
    /// The process ended, or was killed, before it had said hello rightly.
    #[error("{0}")]
    Died(Arc<ExitReport>),
}

/// All workers of this daemon. Cheap to clone.
#[derive(Clone)]
pub struct Workers {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers").field("program", &self.inner.program).finish_non_exhaustive()
    }
}

struct Inner {
    program: PathBuf,
    limits: WorkerLimits,
    spawner: Spawner,
    link_path: PathBuf,
    link: Mutex<Option<LinkServerHandle>>,
    routes: Routes,
    observer: OnceLock<Arc<dyn Observer>>,
    next: AtomicU64,
    living: Mutex<BTreeMap<u64, Worker>>,
    shutdown: watch::Sender<Option<Duration>>,
    tasks: TaskTracker,
}

impl Workers {
    /// Starts the spawning thread and serves the link on `listener`, a socket that is bound at `link_path` in a folder
    /// that nobody else may enter.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn launch(
        program: PathBuf,
        limits: WorkerLimits,
        listener: UnixListener,
        link_path: &Path,
    ) -> io::Result<Self> {
        let routes = Routes::default();
        let link = LinkServerHandle::serve(listener, link_path, routes.clone(), limits.handshake);
        Ok(Self {
            inner: Arc::new(Inner {
                program,
                limits,
                spawner: Spawner::start()?,
                link_path: link_path.into(),
                link: Mutex::new(Some(link)),
                routes,
                observer: OnceLock::new(),
                next: AtomicU64::new(1),
                living: Mutex::new(BTreeMap::new()),
                shutdown: watch::Sender::new(None),
                tasks: TaskTracker::new(),
            }),
        })
    }

    /// Says who is told about the workers' memory. Once, before the first start; later calls change nothing.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        let _ = self.inner.observer.set(observer);
    }

    /// A number that was never given out before; 0 is the daemon itself.
    pub fn next_incarnation(&self) -> u64 {
        self.inner.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Starts a worker and waits for its hello. Whatever fails, no process is left and the observer has heard that the
    /// incarnation holds nothing. Where the caller goes away meanwhile, the worker is retired.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(&self, spec: WorkerSpec) -> Result<Worker, StartError> {
        // A task of its own: a caller that is dropped half-way must not leave a process without an owner.
        let (reply, answer) = oneshot::channel();
        let workers = self.clone();
        self.inner.tasks.spawn(async move { workers.start_owned(spec, reply).await });
        answer.await.unwrap_or(Err(StartError::ShuttingDown))
    }

    async fn start_owned(&self, spec: WorkerSpec, mut reply: oneshot::Sender<Result<Worker, StartError>>) {
        let incarnation = spec.incarnation;
        let (ready, attached) = oneshot::channel();
        let worker = match self.spawn(spec, ready).await {
            Ok(worker) => worker,
            Err(error) => {
                self.observer().reaped(incarnation);
                let _ = reply.send(Err(error));
                return;
            }
        };
        let attached = tokio::select! {
            attached = attached => attached,
            () = reply.closed() => {
                worker.retire();
                return;
            }
        };
        let result = match attached {
            Ok(()) => {
                self.observer().attached(incarnation).await;
                Ok(worker.clone())
            }
            Err(_) => Err(StartError::Died(worker.exited().await)),
        };
        if reply.send(result).is_err() {
            worker.retire();
        }
    }

    async fn spawn(&self, spec: WorkerSpec, ready: oneshot::Sender<()>) -> Result<Worker, StartError> {
        let inner = &self.inner;
        if inner.shutdown.borrow().is_some() {
            return Err(StartError::ShuttingDown);
        }
        let failed = |source| StartError::Spawn { program: inner.program.clone(), source: Arc::new(source) };
        let mut token = [0u8; sd_proto::TOKEN_BYTES];
        getrandom::fill(&mut token).map_err(|error| failed(io::Error::other(error.to_string())))?;
        let (route, attaching) = inner.routes.open(spec.incarnation);
        let request = SpawnRequest {
            program: inner.program.clone(),
            arguments: spec.arguments(&inner.link_path),
            token: Some(token),
            capture_stdout: false,
        };
        let spawned = inner.spawner.spawn(request).await.map_err(failed)?;
        let process = Process::adopt(spawned.pid).map_err(failed)?;
        let stderr = StderrReader::start(spec.incarnation, spawned.stderr).map_err(failed)?;
        tracing::debug!(incarnation = spec.incarnation, pid = spawned.pid, "started {}", spec.title());
        self.observer().spawned(spec.incarnation, spawned.pid);
        let (commands, inbox) = mpsc::unbounded_channel();
        let (view, view_receiver) = watch::channel(WorkerView {
            spec: spec.clone(),
            pid: spawned.pid,
            phase: WorkerPhase::Starting,
            device_bytes: 0,
            weights_bytes: 0,
            started: Instant::now(),
        });
        let (exit, exit_receiver) = watch::channel(None);
        let incarnation = spec.incarnation;
        let peer = Peer { pid: spawned.pid, uid: nix::unistd::geteuid().as_raw() };
        let supervisor = Supervisor {
            process,
            stderr,
            expected: Expected { token, peer, spec },
            route,
            attaching,
            commands: inbox,
            view,
            exit,
            ready,
            shutdown: inner.shutdown.subscribe(),
            observer: self.observer(),
            limits: inner.limits.clone(),
        };
        let worker = Worker { commands, view: view_receiver, exit: exit_receiver };
        self.living().insert(incarnation, worker.clone());
        let workers = self.clone();
        inner.tasks.spawn(async move {
            supervisor.run().await;
            workers.living().remove(&incarnation);
        });
        Ok(worker)
    }

    fn observer(&self) -> Arc<dyn Observer> {
        struct Nobody;
        impl Observer for Nobody {
            fn spawned(&self, _: u64, _: u32) {}
            fn attached(&self, _: u64) -> BoxFuture {
                Box::pin(std::future::ready(()))
            }
            fn lost(&self, _: u64) {}
            fn pulse(&self, _: u64, _: u64, _: u64) {}
            fn block_time(&self, _: u64, _: Duration) {}
            fn lease_requested(&self, _: u64, _: sd_proto::worker::v1::LeaseRequest) {}
            fn lease_returned(&self, _: u64, _: u64, _: u64) {}
            fn reaped(&self, _: u64) {}
        }
        self.inner.observer.get().cloned().unwrap_or_else(|| Arc::new(Nobody))
    }

    fn living(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Worker>> {
        self.inner.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A living worker by its incarnation.
    pub fn get(&self, incarnation: u64) -> Option<Worker> {
        self.living().get(&incarnation).cloned()
    }

    /// Every worker that is not reaped, oldest first.
    pub fn list(&self) -> Vec<WorkerView> {
        self.living().values().map(Worker::view).collect()
    }

    /// Ends every worker: SIGTERM to the groups, after `grace` SIGKILL; refuses new ones. Returns when all are reaped, and
    /// says whether they were: a process that the kernel itself holds up is given up on after two more seconds.
    pub async fn shutdown(&self, grace: Duration) -> bool {
        self.inner.shutdown.send_replace(Some(grace));
        self.inner.tasks.close();
        let all = tokio::time::timeout(grace + Duration::from_secs(2), self.inner.tasks.wait()).await.is_ok();
        if !all {
            tracing::error!(left = self.list().len(), "workers could not be reaped: the kernel holds them up");
        }
        let link = self.inner.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(link) = link {
            link.close().await;
        }
        all
    }
}

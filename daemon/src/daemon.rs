//! The daemon as a whole: assembly from the outside in, and the way back out, which always ends.
//!
//! Order of the start: leftovers of dead instances are swept, the devices are locked (so that no other daemon of the host hands
//! out the same bytes), the sockets are bound, then everything is built and served. Order of the end: refuse new jobs, let
//! accepted ones end or cancel them, close the public server, end the workers, remove the sockets, free the locks.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::endpoint::Endpoint;
use sd_proto::exit::ProgramExit;
use sd_proto::instance::{self, DeviceLock, DeviceLockError, Holder, InstanceLock};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::api::Identity;
use crate::arena::{Arena, ArenaLimits, host_free};
use crate::assembly::Parts;
use crate::config::{self, Config};
use crate::devices;
use crate::ids::DeviceId;
use crate::jobs::durable::{self, DiskStore, Store, StoreError};
use crate::jobs::{Admission, Drained, Jobs};
use crate::memory;
use crate::notify;
use crate::residency::device::{DeviceError, HostMemory};
use crate::residency::{Bytes, DeviceConfig};
use crate::serve::PublicServer;
use crate::sockets::{Listener, SocketError, SocketFiles, bind_unix, prepare_runtime_dir};
use crate::stages::memory::MemoryPlan;
use crate::workers::Workers;

/// What calls that are being answered may take once all jobs have ended.
const CALLS_GRACE: Duration = Duration::from_secs(1);
/// What the end may take beyond the times that are configured, before the process gives itself up.
const LAST_RESORT: Duration = Duration::from_secs(10);

/// What the process that started us handed over.
#[derive(Debug, Default)]
pub struct Inherited {
    /// A pipe: we are private to whoever holds its other end.
    pub owner: Option<OwnedFd>,
    /// Where to write the endpoint when serving.
    pub ready: Option<OwnedFd>,
}

/// Why the daemon does not run, or stopped running.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another daemon holds a device.
    #[error("{0}")]
    Held(DeviceLockError),
    /// A socket cannot be had.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// A device is not what the configuration says.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Accepted jobs cannot be recorded where the configuration says.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The host has no room for tensors.
    #[error("{0}")]
    SharedMemory(String),
    /// The configuration of memory leaves nothing to be used.
    #[error("{0}")]
    Memory(String),
    /// The system refuses something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system says.
        source: io::Error,
    },
    /// A listener failed while serving.
    #[error("the server failed: {0}")]
    Server(String),
}

impl DaemonError {
    /// How the process ends because of it.
    pub fn exit(&self) -> ProgramExit {
        match self {
            Self::Held(DeviceLockError::Held { .. } | DeviceLockError::Overcommitted { .. })
            | Self::Socket(SocketError::Held(_))
            | Self::Store(StoreError::Held(_)) => ProgramExit::Held,
            Self::Device(DeviceError::Budget { .. } | DeviceError::Unknown { .. })
            | Self::Socket(_)
            | Self::SharedMemory(_)
            | Self::Memory(_) => ProgramExit::Usage,
            Self::Held(DeviceLockError::Io { .. })
            | Self::Device(_)
            | Self::Store(_)
            | Self::System { .. }
            | Self::Server(_) => ProgramExit::Failure,
        }
    }
}

pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> DaemonError {
    let what = what.into();
    move |source| DaemonError::System { what, source }
}

/// Locks that are held for the daemon's life, and what is removed at its end. Fields drop in this order: the sockets go
/// before anybody can take the locks.
struct Claims {
    _sockets: SocketFiles,
    _private_dir: PrivateDir,
    instance: InstanceLock,
    devices: Vec<DeviceLock>,
}

/// The folder of a private daemon, made for it alone; removed if it is empty.
struct PrivateDir(Option<PathBuf>);

impl Drop for PrivateDir {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// Why the daemon is to end.
enum Ending {
    /// A signal, which says its name.
    Signal(&'static str),
    /// An operator drained it; its jobs have ended.
    Drained,
    /// The client it was started for has gone, and so have all others.
    OwnerGone,
    /// It cannot go on.
    Failed(String),
}

/// Runs the daemon to its end.
///
/// # Errors
/// See [`DaemonError`]; its [`exit`](DaemonError::exit) is the process's exit code.
pub async fn run(config: Config, inherited: Inherited) -> Result<(), DaemonError> {
    let mut signals = Signals::new().map_err(system("listen for signals"))?;
    let lock_dir = lock_dir(&config)?;
    sweep(&lock_dir);
    let mut holder = Holder {
        pid: std::process::id(),
        uid: nix::unistd::geteuid().as_raw(),
        endpoint: config.listen[0].to_string(),
        runtime_dir: config.runtime_dir.clone(),
        private: inherited.owner.is_some(),
    };
    // What the host does not have is refused before anything is held or bound.
    let device = device(&config)?;
    let gpus = devices::gpus(&config, holder.private)?;
    for (key, warning) in preset_warnings(&config) {
        tracing::warn!(key, "{warning}");
    }
    let shared_memory = arena_limits(&config)?;
    let mut device_lock = devices::lock(&config, &lock_dir, &device.0, &holder).map_err(DaemonError::Held)?;
    let mut instance = InstanceLock::create(&lock_dir, &holder).map_err(system("create the instance lock"))?;

    prepare_runtime_dir(&config.runtime_dir)?;
    let mut sockets = SocketFiles::default();
    let link_path = config.runtime_dir.join(format!("link-{}.sock", instance.id()));
    let link = bind_unix(&link_path, 0o600)?;
    sockets.add(link_path.clone());
    let mut listeners = Vec::new();
    for endpoint in &config.listen {
        let listener = Listener::bind(endpoint, config.socket_mode).await?;
        if let Listener::Unix(_, path) = &listener {
            sockets.add(path.clone());
        }
        listeners.push(listener);
    }
    let endpoints: Vec<Endpoint> = listeners.iter().map(Listener::endpoint).collect();
    let endpoint = endpoints[0].clone();
    holder.endpoint = endpoint.to_string();
    instance.update(&holder).and_then(|()| device_lock.update(&holder)).map_err(system("write the locks"))?;
    let private_dir = PrivateDir(holder.private.then(|| config.runtime_dir.clone()));
    let claims = Claims { _sockets: sockets, _private_dir: private_dir, instance, devices: vec![device_lock] };

    let arena = Arena::new(claims.instance.id(), shared_memory);
    let identity =
        Identity { instance: claims.instance.id().into(), endpoint: endpoint.to_string(), started: SystemTime::now() };
    let store = store(&config, holder.private)?;
    let parts = Parts::build(&config, device, gpus, arena, identity, (link, &link_path), store.clone())?;
    let Parts { workers, jobs, admission, generation, control, shutdown, ending } = parts;
    // What was accepted before comes before what is new: clients are answered when it is back in its place.
    let early = tokio::select! {
        biased;
        name = signals.next() => Some(Ending::Signal(name)),
        () = take_up(store, &admission, &jobs) => None,
    };
    let server = PublicServer::start(generation, control, listeners).await;
    let mut server = server.map_err(|error| DaemonError::Server(error.to_string()))?;
    for endpoint in &endpoints {
        if matches!(endpoint, Endpoint::Tcp { .. }) {
            tracing::warn!(%endpoint, "clients over TCP are not authenticated: they share one tenant, apart from local users");
        }
        tracing::info!(%endpoint, instance = claims.instance.id(), "serving");
    }
    if let Some(pipe) = inherited.ready {
        notify::ready(pipe, &endpoint);
    }
    notify::service_manager("READY=1");
    let trimming = tokio::spawn(trim_when_idle(jobs.clone()));

    let why = match early {
        Some(why) => why,
        None => tokio::select! {
            name = signals.next() => Ending::Signal(name),
            () = shutdown.cancelled() => Ending::Drained,
            () = owner_gone(inherited.owner, &jobs) => Ending::OwnerGone,
            problem = server.failed() => Ending::Failed(problem),
        },
    };
    notify::service_manager("STOPPING=1");
    let outcome = stop(&config, &why, &mut signals, workers, jobs, server, &ending).await;
    trimming.abort();
    // In their order: sockets, folder, locks.
    let Claims { devices, .. } = claims;
    drop(devices);
    outcome
}

fn lock_dir(config: &Config) -> Result<PathBuf, DaemonError> {
    match &config.lock_dir {
        Some(path) => {
            std::fs::create_dir_all(path).map_err(system(format!("create the lock folder {}", path.display())))?;
            Ok(path.clone())
        }
        None => instance::default_lock_dir().map_err(system("create the lock folder")),
    }
}

fn sweep(lock_dir: &Path) {
    match instance::sweep(lock_dir) {
        Ok(swept) if swept.instances > 0 => tracing::info!(
            instances = swept.instances,
            segments = swept.segments,
            bytes = swept.bytes,
            sockets = swept.sockets,
            "removed what dead daemons left"
        ),
        Ok(_) => {}
        // Not ours alone: another user's files may be unreadable to us.
        Err(error) => tracing::warn!(%error, folder = %lock_dir.display(), "cannot look for what dead daemons left"),
    }
}

/// The device, and its budget before what the memory's configuration keeps free of it.
fn device(config: &Config) -> Result<(DeviceConfig, u64), DaemonError> {
    let budget = config.devices.get(&DeviceId::cpu()).copied().unwrap_or_default();
    let mut device = DeviceConfig::cpu(budget)?;
    let configured = device.budget;
    let bounds = MemoryPlan::resolve(&config.memory.settings(), None).bounds;
    device.budget = bounds.limit(device.total, configured);
    if device.budget == 0 {
        return Err(DaemonError::Memory(format!(
            "memory.max_vram and memory.reserve_gb leave nothing of the {} that may be used on device {}: reserve less",
            Bytes(configured),
            device.id
        )));
    }
    // The ledger's own bounds follow the supervisor's: it must not kill first what may still answer.
    device.rules.retire_time = device.rules.retire_time.max(config.workers.retire + config.workers.cancel);
    tracing::debug!(device = %device.id, budget = %Bytes(device.budget), total = %Bytes(device.total), "device");
    Ok((device, configured))
}

/// What is to be said of presets that count on more memory than the host has, with the key of each.
fn preset_warnings(config: &Config) -> Vec<(String, String)> {
    let Ok(host) = HostMemory::read() else { return Vec::new() };
    let models = config.memory.models.iter().filter(|(_, own)| own.preset.is_some());
    let models = models.map(|(name, _)| (format!("model_memory.{name}.preset"), config.memory.of(name).preset));
    std::iter::once(("memory.preset".to_owned(), config.memory.settings().preset))
        .chain(models)
        .filter_map(|(key, preset)| Some((key, preset.warning(host.total)?)))
        .collect()
}

/// The effective configuration as clients are shown it: a preset that the host is too small for says so.
pub(crate) fn shown(config: &Config) -> Vec<config::Value> {
    let mut values = config.values();
    for (key, warning) in preset_warnings(config) {
        for value in values.iter_mut().filter(|value| value.key == key) {
            value.source = format!("{} (warning: {warning})", value.source);
        }
    }
    values
}

fn arena_limits(config: &Config) -> Result<ArenaLimits, DaemonError> {
    let free = host_free().map_err(system("examine /dev/shm"))?;
    let limits = match config.shared_memory {
        Some(bytes) if bytes > free => {
            return Err(DaemonError::SharedMemory(format!(
                "limits.shared_memory is {}, but /dev/shm has {} free: set less, or give the host (container: --shm-size) \
                 a larger one",
                Bytes(bytes),
                Bytes(free)
            )));
        }
        Some(bytes) => ArenaLimits { bytes },
        None => ArenaLimits { bytes: free },
    };
    /// What one job of the model that is built in takes at most.
    const PREFLIGHT: u64 = 32 << 20;
    if limits.bytes < PREFLIGHT {
        tracing::warn!(
            "only {} of shared memory can be used: jobs may be refused; give the host (container: --shm-size) a larger /dev/shm",
            Bytes(limits.bytes)
        );
    }
    Ok(limits)
}

/// Where accepted jobs are recorded. A private daemon records none: its jobs are for a client that ends with it.
fn store(config: &Config, private: bool) -> Result<Option<Arc<dyn Store>>, DaemonError> {
    let Some(folder) = config.state_dir.as_ref().filter(|_| !private) else { return Ok(None) };
    match DiskStore::open(folder) {
        Ok(store) => Ok(Some(Arc::new(store))),
        // Where nobody asked for it, a daemon without it is better than none.
        Err(error) if !config.origins.contains_key("state_dir") => {
            tracing::warn!(%error, "accepted jobs will not outlive this daemon");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

async fn take_up(store: Option<Arc<dyn Store>>, admission: &Admission, jobs: &Jobs) {
    let Some(store) = store else { return };
    let count = durable::take_up(store, admission, jobs).await;
    if count > 0 {
        tracing::info!(jobs = count, "took up what was accepted before");
    }
}

/// Completes when the owner of a private daemon is gone and no job of anybody is left; never for others.
async fn owner_gone(owner: Option<OwnedFd>, jobs: &Jobs) {
    let Some(owner) = owner else { return std::future::pending().await };
    notify::owner_gone(owner).await;
    tracing::debug!("the client that this daemon was started for has gone");
    let _ = jobs.activity().wait_for(|activity| activity.is_idle()).await;
}

/// Gives memory back whenever the last job has ended.
async fn trim_when_idle(jobs: Jobs) {
    let mut activity = jobs.activity();
    let mut busy = false;
    while activity.changed().await.is_ok() {
        let idle = activity.borrow_and_update().is_idle();
        if idle && busy {
            memory::trim();
        }
        busy = !idle;
    }
}

/// Brings everything to its end, within the configured times.
async fn stop(
    config: &Config,
    ending: &Ending,
    signals: &mut Signals,
    workers: Workers,
    jobs: Jobs,
    server: PublicServer,
    streams: &CancellationToken,
) -> Result<(), DaemonError> {
    let drain = match ending {
        Ending::Signal(name) => {
            tracing::info!(signal = name, "draining: jobs may take {:.0?}; a second signal stops them", config.drain);
            config.drain
        }
        Ending::OwnerGone => config.drain,
        Ending::Drained => Duration::ZERO,
        Ending::Failed(problem) => {
            tracing::error!(problem, "ending");
            Duration::ZERO
        }
    };
    let workers_bound = config.workers.cancel * 2 + config.jobs.stop + config.stop;
    give_up_after(drain + workers_bound + CALLS_GRACE + LAST_RESORT);
    server.refuse().await;
    tokio::select! {
        drained = jobs.drain(drain) => {
            let Drained { finished, cancelled, kept } = drained;
            tracing::info!(finished, cancelled, kept, "drained");
        }
        name = signals.next() => {
            tracing::info!(signal = name, "stopping all jobs");
        }
    }
    jobs.shutdown().await;
    streams.cancel();
    server.close(CALLS_GRACE).await;
    let reaped = workers.shutdown(config.stop).await;
    match ending {
        Ending::Failed(problem) => Err(DaemonError::Server(problem.clone())),
        Ending::Signal(_) | Ending::Drained | Ending::OwnerGone if !reaped => {
            Err(DaemonError::Server("a worker could not be reaped".into()))
        }
        Ending::Signal(_) | Ending::Drained | Ending::OwnerGone => {
            tracing::info!("ended");
            Ok(())
        }
    }
}

/// The end is bounded even where a part of it hangs: the process leaves, and the kernel kills its workers with it.
fn give_up_after(bound: Duration) {
    let give_up = move || {
        std::thread::sleep(bound);
        tracing::error!(?bound, "the end took too long: giving up");
        std::process::exit(ProgramExit::Internal.code());
    };
    if let Err(error) = std::thread::Builder::new().name("last-resort".into()).stack_size(128 << 10).spawn(give_up) {
        tracing::warn!(%error, "no thread to bound the end with");
    }
}

/// The signals that ask for an end.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the next one. Cancel-safe.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}

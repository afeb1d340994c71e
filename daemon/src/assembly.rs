//! What the daemon is made of, put together from the configuration.

use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::api::{Backing, ControlService, GenerationService, Identity, Live};
use crate::arena::Arena;
use crate::clock::RuntimeClock;
use crate::config::Config;
use crate::jobs::durable::{Keeper, Store};
use crate::jobs::{Admission, Jobs};
use crate::journal::Journal;
use crate::models::Registry;
use crate::residency::estimate::Estimator;
use crate::residency::peaks::Peaks;
use crate::residency::{DeviceConfig, Residency};
use crate::stages::Dispatcher;
use crate::stages::keep_alive::KeepAlive;
use crate::stages::needs::DeviceNeeds;
use crate::stages::operate::Operating;
use crate::workers::Workers;

use crate::daemon::{DaemonError, shown, system};

/// What is built of the configuration.
pub(crate) struct Parts {
    pub(crate) workers: Workers,
    pub(crate) jobs: Jobs,
    pub(crate) admission: Admission,
    pub(crate) generation: GenerationService,
    pub(crate) control: ControlService,
    pub(crate) shutdown: CancellationToken,
    /// Ends streams that have no end of their own.
    pub(crate) ending: CancellationToken,
}

impl Parts {
    /// Builds everything that serves, from the bottom up; nothing is served yet.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn build(
        config: &Config,
        (device, configured_budget): (DeviceConfig, u64),
        gpus: Vec<DeviceConfig>,
        arena: Arena,
        identity: Identity,
        (link, link_path): (tokio::net::UnixListener, &Path),
        store: Option<Arc<dyn Store>>,
    ) -> Result<Self, DaemonError> {
        let workers = Workers::launch(config.worker_binary.clone(), config.workers.clone(), link, link_path)
            .map_err(system("start the spawning thread"))?;
        let (id, budget, total) = (device.id.clone(), device.budget, device.total);
        let journal = Journal::default();
        let clock = Arc::new(RuntimeClock::new());
        let residency = Residency::start([vec![device], gpus].concat(), arena.clone(), clock, journal.clone());
        residency.set_holders(Arc::new(workers.clone()));
        workers.observe(Arc::new(residency.clone()));
        let estimator = Estimator::cpu().remembering(Peaks::open(&config.peaks_file));
        let needs = DeviceNeeds::new(id.clone(), budget, estimator)
            .of_total(total, configured_budget)
            .configured(config.memory.clone())
            .with_dry_runs(Arc::new(workers.clone()));
        let needs = Arc::new(needs);
        let dispatcher = Dispatcher::new(
            residency.clone(),
            workers.clone(),
            arena.clone(),
            Arc::clone(&needs) as _,
            id,
            config.threads,
        );
        let dispatcher = dispatcher.explained_in(journal.clone()).remembering(config.cache);
        let quarantine = dispatcher.quarantine();
        let registry = Registry::new(config.models.clone(), Arc::new(workers.clone()));
        let admission = Admission::new(registry, config.jobs.clone(), needs);
        let dispatcher = Arc::new(dispatcher);
        let jobs = Jobs::start_with(dispatcher.clone(), config.jobs.clone(), store.map(Keeper::start));
        let (shutdown, ending) = (CancellationToken::new(), CancellationToken::new());
        jobs.follow(&journal);
        let keep_alive = KeepAlive { time: config.keep_alive, ..KeepAlive::default() };
        tokio::spawn(keep_alive.keep(residency.clone(), workers.clone()));
        let overview = Arc::new(Live { residency, workers: workers.clone(), arena });
        let generation = GenerationService::new(jobs.clone(), admission.clone());
        let backing = Backing {
            jobs: jobs.clone(),
            admission: admission.clone(),
            overview,
            journal,
            operator: Arc::new(Operating(dispatcher)),
            quarantine,
            ending: ending.clone(),
            shutdown: shutdown.clone(),
            drain_grace: config.drain,
            config: Arc::new(shown(config)),
        };
        let control = ControlService::new(identity, backing);
        Ok(Self { workers, jobs, admission, generation, control, shutdown, ending })
    }
}

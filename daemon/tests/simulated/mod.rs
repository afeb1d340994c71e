//! A GPU that is played, and a host around it whose processes do only what a test says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sdd::arena::{Arena, ArenaLimits};
use sdd::clock::RuntimeClock;
use sdd::ids::DeviceId;
use sdd::journal::Journal;
use sdd::residency::device::{
    DriverFacts, GpuError, GpuFacts, GpuList, GpuMemory, GpuProbe, GpuProcess, GpuSource, HostFacts,
};
use sdd::residency::{DeviceConfig, DeviceSnapshot, Granted, Incarnation, LeaseVector, Refusal, Residency, Rules};
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub(crate) use crate::ledger_support::calls::Call;
use crate::ledger_support::{self, calls::Calls};

pub(crate) const GIB: u64 = 1 << 30;
const UUID: &str = "GPU-5d1f0c5e-0000-4000-8000-000000000001";

/// What the driver shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Showing {
    /// Memory and processes.
    Everything,
    /// Memory alone.
    NoProcess,
    /// It fails for a moment.
    Nothing(String),
    /// The GPU is gone.
    Lost(String),
}

#[derive(Debug)]
struct State {
    showing: Showing,
    held: BTreeMap<u32, u64>,
    /// When a process's bytes are freed.
    leaving: BTreeMap<u32, Instant>,
}

/// The GPU.
#[derive(Debug)]
pub(crate) struct SimulatedGpu {
    total: u64,
    state: Mutex<State>,
}

impl SimulatedGpu {
    fn new(total: u64) -> Self {
        let state = State { showing: Showing::Everything, held: BTreeMap::new(), leaving: BTreeMap::new() };
        Self { total, state: Mutex::new(state) }
    }

    pub(crate) fn shows(&self, showing: Showing) {
        self.state.lock().unwrap().showing = showing;
    }

    pub(crate) fn holds(&self, pid: u32, bytes: u64) {
        self.state.lock().unwrap().held.insert(pid, bytes);
    }

    /// A process's bytes are freed so much later.
    pub(crate) fn leaves_after(&self, pid: u32, time: Duration) {
        self.state.lock().unwrap().leaving.insert(pid, Instant::now() + time);
    }

    /// The processes as the driver knows them, and whether it tells.
    fn look(&self) -> Result<(bool, BTreeMap<u32, u64>), GpuError> {
        let mut state = self.state.lock().unwrap();
        let now = Instant::now();
        let gone: Vec<u32> = state.leaving.iter().filter(|(_, at)| now >= **at).map(|(pid, _)| *pid).collect();
        for pid in gone {
            state.leaving.remove(&pid);
            state.held.remove(&pid);
        }
        match &state.showing {
            Showing::Everything => Ok((true, state.held.clone())),
            Showing::NoProcess => Ok((false, state.held.clone())),
            Showing::Nothing(why) => Err(GpuError::Failed(why.clone())),
            Showing::Lost(why) => Err(GpuError::Lost(why.clone())),
        }
    }
}

impl GpuSource for SimulatedGpu {
    fn driver(&self) -> Result<DriverFacts, GpuError> {
        Ok(DriverFacts { driver: "1.0".into(), cuda: "13.0".into() })
    }

    fn gpus(&self) -> Result<GpuList, GpuError> {
        let facts = GpuFacts {
            id: UUID.into(),
            name: "a played GPU".into(),
            bus: "00000000:01:00.0".into(),
            compute_mode: None,
            divided: None,
            capability: None,
        };
        Ok(GpuList { gpus: vec![facts], problems: Vec::new() })
    }

    fn memory(&self, _: &DeviceId) -> Result<GpuMemory, GpuError> {
        let (_, held) = self.look()?;
        Ok(GpuMemory { total: self.total, free: self.total - held.values().sum::<u64>(), reserved: 0 })
    }

    fn processes(&self, _: &DeviceId) -> Result<Vec<GpuProcess>, GpuError> {
        match self.look()? {
            (true, held) => Ok(held.into_iter().map(|(pid, bytes)| GpuProcess { pid, bytes: Some(bytes) }).collect()),
            (false, _) => Err(GpuError::Untold("not here".into())),
        }
    }
}

/// A residency over a played GPU. Processes have their incarnation as pid.
pub(crate) struct Host {
    pub(crate) gpu: Arc<SimulatedGpu>,
    pub(crate) residency: Residency,
    calls: Arc<Calls>,
}

impl Host {
    pub(crate) fn new(total: u64, facts: HostFacts) -> Self {
        Self::with(total, facts, |probe| probe)
    }

    pub(crate) fn observed(total: u64, why: &str) -> Self {
        Self::with(total, HostFacts::default(), |probe| probe.observed_only(why))
    }

    fn with(total: u64, facts: HostFacts, how: impl Fn(GpuProbe) -> GpuProbe) -> Self {
        let gpu = Arc::new(SimulatedGpu::new(total));
        let source: Arc<dyn GpuSource> = gpu.clone();
        let device = DeviceConfig {
            id: UUID.into(),
            name: "a played GPU".into(),
            total,
            budget: total,
            // A worker's silence is not what is tested here.
            rules: Rules {
                reaping_proves: false,
                tolerance: 0,
                term: Duration::from_secs(600),
                // Weights go with their process, so that an idle one has one way to give them back.
                weights_move: false,
                ..Rules::default()
            },
            probe: Arc::new(how(GpuProbe::new(source, UUID.into(), facts))),
        };
        let name = format!("sim{:08x}{:p}", std::process::id(), Arc::as_ptr(&gpu));
        let arena = Arena::new(&name, ArenaLimits { bytes: 1 << 20 });
        let residency = Residency::start(vec![device], arena, Arc::new(RuntimeClock::new()), Journal::default());
        let calls = Arc::new(Calls::default());
        residency.set_holders(calls.clone());
        Self { gpu, residency, calls }
    }

    pub(crate) fn id(&self) -> DeviceId {
        UUID.into()
    }

    /// What was wanted of processes since this was asked last, but for grants.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.take().into_iter().filter(|call| !matches!(call, Call::Grant(..))).collect()
    }

    pub(crate) async fn view(&self) -> DeviceSnapshot {
        self.residency.snapshot().await.remove(0)
    }

    pub(crate) fn vector(&self, incarnation: Incarnation, weights: u64, working_set: u64) -> LeaseVector {
        LeaseVector { device: self.id(), ..ledger_support::vector(incarnation, 0, weights, working_set) }
    }

    /// A process that runs for a task and holds all that it was granted.
    pub(crate) async fn start(&self, incarnation: Incarnation, weights: u64) -> Granted {
        self.start_with(incarnation, weights, 0).await
    }

    async fn start_with(&self, incarnation: Incarnation, weights: u64, working_set: u64) -> Granted {
        let granted = self.residency.request(self.vector(incarnation, weights, working_set)).await.unwrap();
        let pid = u32::try_from(incarnation).unwrap();
        self.residency.holder_spawned(incarnation, pid);
        self.residency.holder_attached(incarnation).await;
        self.gpu.holds(pid, weights + working_set);
        self.residency.pulse(incarnation, weights + working_set, weights + working_set);
        self.view().await;
        granted
    }

    /// An idle process that holds weights.
    pub(crate) async fn warm(&self, incarnation: Incarnation, weights: u64) {
        self.warm_with(incarnation, weights, 0).await;
    }

    /// An idle process that holds weights and a working set.
    pub(crate) async fn warm_with(&self, incarnation: Incarnation, weights: u64, working_set: u64) {
        drop(self.start_with(incarnation, weights, working_set).await);
        // So that the device has been read with the process there.
        tokio::time::sleep(Duration::from_secs(2)).await;
        self.calls();
    }

    /// A request that waits.
    pub(crate) async fn wait_for(
        &self,
        incarnation: Incarnation,
        weights: u64,
    ) -> JoinHandle<Result<Granted, Refusal>> {
        let (residency, vector) = (self.residency.clone(), self.vector(incarnation, weights, 0));
        let waiting = tokio::spawn(async move { residency.request(vector).await });
        // Its command is queued when the task has been polled once, and the snapshot's behind it.
        tokio::task::yield_now().await;
        assert_eq!(self.view().await.waiters.len(), 1, "it waits");
        waiting
    }
}

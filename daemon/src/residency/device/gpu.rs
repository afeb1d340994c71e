//! GPUs as a driver shows them: what is asked of the driver, and what is concluded from its answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::host::{HostFacts, process_name};
use super::{
    Budget, DeviceConfig, DeviceError, DeviceProbe, DeviceReading, ForeignProcess, ProbeError, Processes, Shown,
};
use crate::ids::DeviceId;
use crate::residency::ledger::Rules;

/// Bytes of a GPU that are never leased: what contexts and the driver may take beyond what they were seen to take.
const MARGIN: u64 = 128 << 20;

/// Why nothing is leased of a GPU yet.
const NO_CUDA: &str = "the worker of this build computes on the CPU alone (it has no CUDA): place the stage on cpu";

/// What is asked of a driver. [`Nvml`](super::Nvml) asks NVIDIA's; tests play one. Every call answers within
/// milliseconds, and a failed one is an error, never a zero.
pub trait GpuSource: Send + Sync + 'static {
    /// Versions of the driver.
    ///
    /// # Errors
    /// See [`GpuError`].
    fn driver(&self) -> Result<DriverFacts, GpuError>;
    /// Every GPU, in the order of the PCI bus, and what keeps others from being listed.
    ///
    /// # Errors
    /// See [`GpuError`].
    fn gpus(&self) -> Result<GpuList, GpuError>;
    /// Memory of one GPU, by its UUID.
    ///
    /// # Errors
    /// See [`GpuError`].
    fn memory(&self, gpu: &DeviceId) -> Result<GpuMemory, GpuError>;
    /// The processes that hold something of a GPU: those that compute, draw or go through MPS, each once.
    ///
    /// # Errors
    /// See [`GpuError`].
    fn processes(&self, gpu: &DeviceId) -> Result<Vec<GpuProcess>, GpuError>;
}

/// Why a driver does not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// There is no driver, or it is not loaded.
    #[error("no NVIDIA driver answers: {0}")]
    Absent(String),
    /// The GPU is gone until it, the driver or the host is restarted.
    #[error("{0}")]
    Lost(String),
    /// It does not say this here, and never will.
    #[error("the driver does not tell: {0}")]
    Untold(String),
    /// It may say it later.
    #[error("{0}")]
    Failed(String),
}

impl From<GpuError> for ProbeError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::Absent(_) | GpuError::Lost(_) => Self::Lost(error.to_string()),
            GpuError::Untold(_) | GpuError::Failed(_) => Self::Failed(error.to_string()),
        }
    }
}

/// Versions of a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverFacts {
    /// Of the driver, as in "580.159.03".
    pub driver: String,
    /// Newest CUDA that it runs, as in "13.0".
    pub cuda: String,
}

/// All GPUs of a host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuList {
    /// Those that answer.
    pub gpus: Vec<GpuFacts>,
    /// Those that do not: why.
    pub problems: Vec<String>,
}

/// Who may open contexts on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Shared,
    /// One process at a time.
    Exclusive,
    /// None.
    Prohibited,
}

impl ComputeMode {
    /// In the words of the driver's tools.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "default",
            Self::Exclusive => "exclusive process",
            Self::Prohibited => "prohibited",
        }
    }
}

/// What does not change of a GPU while the driver runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFacts {
    /// Its UUID, "GPU-…".
    pub id: DeviceId,
    /// Its name.
    pub name: String,
    /// Its place on the bus, as in "00000000:17:00.0".
    pub bus: String,
    /// Who may open contexts; `None` where the driver does not say.
    pub compute_mode: Option<ComputeMode>,
    /// Whether it is divided into instances (MIG); `None` where it cannot be.
    pub divided: Option<bool>,
    /// Compute capability, as in "9.0"; `None` where the driver does not say.
    pub capability: Option<String>,
}

/// Memory of a GPU in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total: u64,
    /// What nobody holds.
    pub free: u64,
    /// What the driver keeps for itself.
    pub reserved: u64,
}

/// One process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its id, as this process sees it.
    pub pid: u32,
    /// Bytes it holds; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

/// Puts lists of processes together, each process once. One that computes and draws is in two lists with the same bytes:
/// they are not added up.
pub fn merge(lists: impl IntoIterator<Item = Vec<GpuProcess>>) -> Vec<GpuProcess> {
    let mut merged: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for process in lists.into_iter().flatten() {
        let bytes = merged.entry(process.pid).or_default();
        *bytes = (*bytes).max(process.bytes);
    }
    merged.into_iter().map(|(pid, bytes)| GpuProcess { pid, bytes }).collect()
}

impl DeviceConfig {
    /// A GPU, observed: this build leases nothing there. A budget that is not given is all that is free there, but for the margin.
    ///
    /// # Errors
    /// The driver does not say how much there is, or `budget` is more.
    pub fn gpu(
        facts: GpuFacts,
        source: &Arc<dyn GpuSource>,
        host: HostFacts,
        budget: Budget,
    ) -> Result<Self, DeviceError> {
        let memory = source.memory(&facts.id);
        let memory = memory.map_err(|source| DeviceError::Gpu { device: facts.id.clone(), source })?;
        let budget = match budget {
            Budget::Auto => memory.free.saturating_sub(MARGIN),
            Budget::Bytes(budget) if budget > memory.total => {
                return Err(DeviceError::Budget { device: facts.id, budget, total: memory.total });
            }
            Budget::Bytes(budget) => budget,
        };
        let probe = Arc::new(GpuProbe::new(source.clone(), facts.id.clone(), host).observed_only(NO_CUDA));
        // The driver frees what a process held, some time after it is reaped: the device must be asked.
        let rules = Rules { reaping_proves: false, ..Rules::default() };
        Ok(Self { id: facts.id, name: facts.name, total: memory.total, budget, rules, probe })
    }
}

/// Measures processes on one GPU.
pub struct GpuProbe {
    source: Arc<dyn GpuSource>,
    gpu: DeviceId,
    host: HostFacts,
    /// Processes that the driver has shown. Where it may not show all, the absence of one of these says something.
    shown: Mutex<BTreeSet<u32>>,
    /// Why nothing is leased there, if so.
    observed_only: Option<String>,
}

impl GpuProbe {
    /// A probe of one GPU of a source, where leases may be had.
    pub fn new(source: Arc<dyn GpuSource>, gpu: DeviceId, host: HostFacts) -> Self {
        Self { source, gpu, host, shown: Mutex::default(), observed_only: None }
    }

    /// The same for a GPU where nothing is leased, for this reason.
    #[must_use]
    pub fn observed_only(self, why: impl Into<String>) -> Self {
        Self { observed_only: Some(why.into()), ..self }
    }

    /// The processes, or why they are not shown.
    fn list(&self) -> Result<Result<Vec<GpuProcess>, String>, GpuError> {
        if self.host.wsl {
            return Ok(Err("WSL does not show processes of a GPU".into()));
        }
        match self.source.processes(&self.gpu) {
            Ok(processes) => {
                self.shown.lock().unwrap_or_else(PoisonError::into_inner).extend(processes.iter().map(|p| p.pid));
                Ok(Ok(processes))
            }
            Err(GpuError::Untold(why)) => Ok(Err(why)),
            Err(error) => Err(error),
        }
    }

    /// Whether the absence of a process from the list means that it holds nothing. In a process namespace of its own (a
    /// container) the driver may show no process at all, so there it means something only for one that was shown before.
    fn absence_tells(&self, pid: u32) -> bool {
        !self.host.nested_processes || self.shown.lock().unwrap_or_else(PoisonError::into_inner).contains(&pid)
    }
}

impl DeviceProbe for GpuProbe {
    fn usable(&self) -> Result<(), String> {
        self.observed_only.clone().map_or(Ok(()), Err)
    }

    fn process_bytes(&self, pid: u32) -> io::Result<Option<u64>> {
        match self.process(pid) {
            Ok(Shown::Bytes(bytes)) => Ok(Some(bytes)),
            Ok(Shown::Nothing) => Ok(None),
            Ok(Shown::Hidden { .. }) => Err(io::Error::other("the device does not show processes here")),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn process(&self, pid: u32) -> Result<Shown, ProbeError> {
        let found = self.list()?.ok().map(|list| list.into_iter().find(|process| process.pid == pid));
        match found {
            Some(Some(GpuProcess { bytes: Some(bytes), .. })) => Ok(Shown::Bytes(bytes)),
            Some(None) if self.absence_tells(pid) => Ok(Shown::Nothing),
            // No list, a process without bytes, or one whose absence says nothing.
            Some(Some(GpuProcess { bytes: None, .. }) | None) | None => {
                Ok(Shown::Hidden { free: self.source.memory(&self.gpu)?.free })
            }
        }
    }

    fn reading(&self, own: &[u32]) -> Result<Option<DeviceReading>, ProbeError> {
        let list = self.list()?;
        let memory = self.source.memory(&self.gpu)?;
        let (held, processes) = match list {
            Err(why) => (None, Processes::Hidden { why }),
            Ok(list) => judge(&list, own, |pid| self.absence_tells(pid)),
        };
        Ok(Some(DeviceReading { total: memory.total, free: memory.free, own: held, margin: MARGIN, processes }))
    }
}

/// Tells our own processes from others. Own bytes are known only where every one of ours is shown with its bytes, or surely
/// holds none.
fn judge(list: &[GpuProcess], own: &[u32], absence_tells: impl Fn(u32) -> bool) -> (Option<u64>, Processes) {
    let mut held = 0u64;
    for pid in own {
        match list.iter().find(|process| process.pid == *pid) {
            Some(GpuProcess { bytes: Some(bytes), .. }) => held = held.saturating_add(*bytes),
            None if absence_tells(*pid) => {}
            Some(GpuProcess { bytes: None, .. }) => {
                return (None, Processes::Hidden { why: "the driver shows processes without their bytes".into() });
            }
            None => {
                let why = "the driver does not show processes in this container".into();
                return (None, Processes::Hidden { why });
            }
        }
    }
    let others = list.iter().filter(|process| !own.contains(&process.pid));
    let mut foreign: Vec<ForeignProcess> = others
        .map(|process| ForeignProcess { pid: process.pid, name: process_name(process.pid), bytes: process.bytes })
        .collect();
    foreign.sort_by_key(|process| (std::cmp::Reverse(process.bytes), process.pid));
    (Some(held), Processes::Listed { foreign })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, bytes: impl Into<Option<u64>>) -> GpuProcess {
        GpuProcess { pid, bytes: bytes.into() }
    }

    #[test]
    fn a_process_in_two_lists_is_counted_once() {
        let merged = merge([vec![process(7, 100), process(3, 5)], vec![process(7, 100), process(9, None)], vec![]]);
        assert_eq!(merged, [process(3, 5), process(7, 100), process(9, None)]);
    }

    #[test]
    fn others_are_told_from_our_own_and_bytes_that_are_not_told_are_not_zero() {
        let list = [process(1, 10), process(2, 20), process(3, 40)];
        let (held, processes) = judge(&list, &[2, 8], |_| true);
        assert_eq!(held, Some(20));
        let Processes::Listed { foreign } = processes else { panic!("{processes:?}") };
        assert_eq!(foreign.iter().map(|p| (p.pid, p.bytes)).collect::<Vec<_>>(), [(3, Some(40)), (1, Some(10))]);
        let (held, processes) = judge(&[process(2, None)], &[2], |_| true);
        assert!(held.is_none() && matches!(processes, Processes::Hidden { .. }), "{processes:?}");
        let (held, processes) = judge(&list, &[8], |_| false);
        assert!(held.is_none() && matches!(processes, Processes::Hidden { .. }), "{processes:?}");
    }
}

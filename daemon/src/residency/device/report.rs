//! All devices of this host as they stand, for programs: what `sdd --devices` prints and `sdctl doctor` reads. It needs no
//! running daemon and takes nothing from one.

use serde::{Deserialize, Serialize};

use super::gpu::{GpuFacts, GpuProbe, GpuSource};
use super::host::{self, HostFacts};
use super::{DeviceProbe as _, HostMemory, Nvml, Processes};
use std::sync::Arc;

/// The whole report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Linux inside Windows.
    pub wsl: bool,
    /// Processes have a namespace of their own: a container.
    pub nested_processes: bool,
    /// NVIDIA's MPS runs.
    pub mps: bool,
    /// The host's memory.
    pub cpu: CpuReport,
    /// NVIDIA's driver.
    pub driver: DriverReport,
    /// Every GPU, in the order of the PCI bus: `cuda0` is the first.
    pub gpus: Vec<GpuReport>,
    /// GPUs that do not answer: why.
    pub problems: Vec<String>,
}

/// The host's memory in bytes, the tightest control group included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuReport {
    /// As it stands.
    Memory {
        /// All.
        total: u64,
        /// What can be used without swapping.
        available: u64,
    },
    /// It cannot be read.
    Problem(String),
}

/// The driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverReport {
    /// It answers.
    Present {
        /// Its version.
        version: String,
        /// Newest CUDA that it runs.
        cuda: String,
    },
    /// There is none.
    Absent(String),
    /// It does not answer as it should.
    Problem(String),
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReport {
    /// Its UUID.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its place on the bus.
    pub bus: String,
    /// "default", "exclusive process" or "prohibited"; absent where the driver does not say.
    pub compute_mode: Option<String>,
    /// Whether it is divided into instances (MIG); absent where it cannot be.
    pub divided: Option<bool>,
    /// Compute capability.
    pub capability: Option<String>,
    /// Its memory and who holds it.
    pub state: GpuState,
}

/// A GPU's memory and who holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuState {
    /// It answers.
    Memory {
        /// Bytes it has.
        total: u64,
        /// Bytes that nobody holds.
        free: u64,
        /// Who holds the rest, largest first.
        processes: Vec<ProcessReport>,
        /// Why processes are not shown, if they are not.
        hidden: Option<String>,
    },
    /// It does not.
    Problem(String),
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Its id.
    pub pid: u32,
    /// Its name; empty where the system does not say.
    pub name: String,
    /// Bytes it holds; absent where the driver does not say.
    pub bytes: Option<u64>,
}

impl Report {
    /// As this host stands.
    pub fn read() -> Self {
        match Nvml::load() {
            Ok(nvml) => Self::of(HostFacts::read(), Ok(Arc::new(nvml))),
            Err(error) => Self::of(HostFacts::read(), Err(error)),
        }
    }

    /// From what a driver says.
    pub fn of(host: HostFacts, source: Result<Arc<dyn GpuSource>, super::GpuError>) -> Self {
        let cpu = match HostMemory::read() {
            Ok(HostMemory { total, available }) => CpuReport::Memory { total, available },
            Err(error) => CpuReport::Problem(error.to_string()),
        };
        let mut report = Self {
            wsl: host.wsl,
            nested_processes: host.nested_processes,
            mps: host::mps_runs(),
            cpu,
            driver: DriverReport::Absent(String::new()),
            gpus: Vec::new(),
            problems: Vec::new(),
        };
        let problem = |error: super::GpuError| match error {
            super::GpuError::Absent(why) => DriverReport::Absent(why),
            error => DriverReport::Problem(error.to_string()),
        };
        let source = match source {
            Ok(source) => source,
            Err(error) => return Self { driver: problem(error), ..report },
        };
        report.driver = match source.driver() {
            Ok(facts) => DriverReport::Present { version: facts.driver, cuda: facts.cuda },
            Err(error) => problem(error),
        };
        match source.gpus() {
            Ok(list) => {
                report.gpus = list.gpus.into_iter().map(|facts| gpu(facts, &source, host)).collect();
                report.problems = list.problems;
            }
            Err(error) => report.problems.push(error.to_string()),
        }
        report
    }
}

fn gpu(facts: GpuFacts, source: &Arc<dyn GpuSource>, host: HostFacts) -> GpuReport {
    let state = match GpuProbe::new(source.clone(), facts.id.clone(), host).reading(&[]) {
        Ok(Some(reading)) => {
            let bytes = |process: &super::ForeignProcess| process.bytes.unwrap_or(0);
            let seen: u64 = reading.foreign().iter().map(bytes).sum();
            let processes = reading.foreign().iter().map(|process| ProcessReport {
                pid: process.pid,
                name: process.name.clone(),
                bytes: process.bytes,
            });
            let processes: Vec<_> = processes.collect();
            let hidden = match reading.processes {
                Processes::Hidden { why } => Some(why),
                // Much is in use and nobody is shown: they are somewhere else.
                Processes::Listed { .. } if host.nested_processes && seen == 0 && in_use(&reading) => {
                    Some("memory is in use, and the driver shows no process in this container".into())
                }
                Processes::Listed { .. } | Processes::NotListed => None,
            };
            GpuState::Memory { total: reading.total, free: reading.free, processes, hidden }
        }
        Ok(None) => GpuState::Problem("it is not measured".into()),
        Err(error) => GpuState::Problem(error.to_string()),
    };
    GpuReport {
        id: facts.id.to_string(),
        name: facts.name,
        bus: facts.bus,
        compute_mode: facts.compute_mode.map(|mode| mode.name().into()),
        divided: facts.divided,
        capability: facts.capability,
        state,
    }
}

/// Whether more of a GPU is in use than a driver takes for itself: a twentieth, or a GiB.
fn in_use(reading: &super::DeviceReading) -> bool {
    reading.total.saturating_sub(reading.free) > (reading.total / 20).max(1 << 30)
}

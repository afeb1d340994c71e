//! What a device has, and what a process holds of it.
//!
//! * [`DeviceProbe`]: how a device is asked. [`CpuProbe`] asks the kernel, [`GpuProbe`] a driver ([`GpuSource`], [`Nvml`]).
//! * [`DeviceReading`]: a device as it stands, with what others use of it.
//! * [`report`]: all that this host shows, for `sdd --devices`.

mod cpu;
mod gpu;
mod host;
mod nvml;
pub mod report;

use std::fmt;
use std::io;
use std::sync::Arc;

pub use self::cpu::{CpuProbe, HostMemory};
pub use self::gpu::{
    ComputeMode, DriverFacts, GpuError, GpuFacts, GpuList, GpuMemory, GpuProbe, GpuProcess, GpuSource, merge,
};
pub use self::host::HostFacts;
pub use self::nvml::Nvml;
use super::lease::Bytes;
use super::ledger::Rules;
use crate::ids::DeviceId;

/// How the bytes of processes on a device are measured. The ledger itself never measures; the service does when
/// the ledger asks.
pub trait DeviceProbe: Send + Sync + 'static {
    /// Bytes that the process holds on the device, or `None` where the device shows no such process. Answers within a
    /// millisecond or so.
    ///
    /// # Errors
    /// The device cannot be asked. That proves nothing: the bytes stay charged.
    fn process_bytes(&self, pid: u32) -> io::Result<Option<u64>>;

    /// What the device shows of a process. Devices that show every process need not say more than
    /// [`DeviceProbe::process_bytes`].
    ///
    /// # Errors
    /// The device cannot be asked, or is lost. That proves nothing: the bytes stay charged.
    fn process(&self, pid: u32) -> Result<Shown, ProbeError> {
        match self.process_bytes(pid) {
            Ok(Some(bytes)) => Ok(Shown::Bytes(bytes)),
            Ok(None) => Ok(Shown::Nothing),
            Err(error) => Err(ProbeError::Failed(error.to_string())),
        }
    }

    /// Whether anything can be leased there at all; why not, and what to do.
    ///
    /// # Errors
    /// The reason, for people.
    fn usable(&self) -> Result<(), String> {
        Ok(())
    }

    /// The device as it stands. `own` are the processes of this daemon that may hold bytes there; all others are foreign.
    /// `None` for a device that nobody shares: its capacity is its budget.
    ///
    /// # Errors
    /// [`ProbeError::Lost`] where the device is gone; [`ProbeError::Failed`] where it cannot be asked now. Neither means that
    /// anything is free.
    fn reading(&self, own: &[u32]) -> Result<Option<DeviceReading>, ProbeError> {
        let _ = own;
        Ok(None)
    }
}

/// What a device shows of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// It holds so many bytes.
    Bytes(u64),
    /// It holds nothing: the device shows every process, and not this one.
    Nothing,
    /// The device does not show it, whatever it holds.
    Hidden {
        /// Bytes that nobody holds, which is all that is known.
        free: u64,
    },
}

/// Why a device does not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// It is gone until the host or the driver is restarted.
    #[error("the device is lost: {0}")]
    Lost(String),
    /// It may answer later.
    #[error("the device cannot be asked: {0}")]
    Failed(String),
}

/// A device as it stands at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReading {
    /// Bytes it has.
    pub total: u64,
    /// Bytes that nobody holds.
    pub free: u64,
    /// Bytes that this daemon's processes hold, by the device's own measure; `None` where it does not show them.
    pub own: Option<u64>,
    /// Bytes that are not to be leased although they are free: what the measure may be wrong by.
    pub margin: u64,
    /// Whom the device shows.
    pub processes: Processes,
}

impl DeviceReading {
    /// Bytes that leases may hold together now: the budget, or what others leave of the device where that is less. `said` is
    /// what our own processes say that they hold; it counts where the device does not show them.
    pub fn capacity(&self, budget: u64, said: u64) -> u64 {
        budget.min(self.free.saturating_add(self.own.unwrap_or(said)).saturating_sub(self.margin))
    }

    /// Processes that are not this daemon's; empty where the device lists none.
    pub fn foreign(&self) -> &[ForeignProcess] {
        match &self.processes {
            Processes::Listed { foreign } => foreign,
            Processes::NotListed | Processes::Hidden { .. } => &[],
        }
    }
}

/// Whom a device shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Processes {
    /// Every process, with its bytes.
    Listed {
        /// Those that are not this daemon's, largest first.
        foreign: Vec<ForeignProcess>,
    },
    /// Any process can be asked about; a list would say nothing (CPU).
    NotListed,
    /// No process, this daemon's neither: a release can only be inferred from the free bytes.
    Hidden {
        /// For people.
        why: String,
    },
}

/// A process on the device that is not this daemon's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignProcess {
    /// Its id.
    pub pid: u32,
    /// Its name; empty where the system does not say.
    pub name: String,
    /// Bytes it holds; `None` where the device does not say.
    pub bytes: Option<u64>,
}

/// One device of the residency.
#[derive(Clone)]
pub struct DeviceConfig {
    /// Its id: "cpu", or a GPU's UUID.
    pub id: DeviceId,
    /// For people.
    pub name: String,
    /// Bytes it has.
    pub total: u64,
    /// Bytes that leases may hold together.
    pub budget: u64,
    /// Deadlines and bounds.
    pub rules: Rules,
    /// How its processes are measured.
    pub probe: Arc<dyn DeviceProbe>,
}

impl fmt::Debug for DeviceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceConfig").field("id", &self.id).field("budget", &self.budget).finish_non_exhaustive()
    }
}

/// How much of a device may be leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Budget {
    /// Four fifths of what is free when the daemon starts.
    #[default]
    Auto,
    /// So many bytes.
    Bytes(u64),
}

/// Why a device cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The system does not say how much memory it has.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not what it should be.
    #[error("{path} has no field {field}")]
    Field {
        /// The file.
        path: &'static str,
        /// What was looked for.
        field: &'static str,
    },
    /// Configured, and not there.
    #[error("the configuration names device {device}, which is not there: known are {known}")]
    Unknown {
        /// What was named.
        device: DeviceId,
        /// What there is.
        known: String,
    },
    /// A GPU does not say how much memory it has.
    #[error("{device}: {source}")]
    Gpu {
        /// Which.
        device: DeviceId,
        /// What the driver says.
        source: GpuError,
    },
    /// Configured beyond what there is.
    #[error("a budget of {} was set for device {device}, which has {}: set less", Bytes(*budget), Bytes(*total))]
    Budget {
        /// The device.
        device: DeviceId,
        /// Configured.
        budget: u64,
        /// What there is.
        total: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_is_what_others_leave_and_never_more_than_the_budget() {
        let reading =
            |free, own| DeviceReading { total: 100, free, own: Some(own), margin: 5, processes: Processes::NotListed };
        assert_eq!(reading(90, 0).capacity(50, 0), 50);
        assert_eq!(reading(10, 45).capacity(50, 0), 50, "what our own processes hold is ours to lease");
        assert_eq!(reading(10, 20).capacity(50, 0), 25);
        assert_eq!(reading(3, 0).capacity(50, 0), 0);
        let unseen = DeviceReading { own: None, ..reading(10, 0) };
        assert_eq!(
            unseen.capacity(50, 20),
            25,
            "where the device does not show our processes, they speak for themselves"
        );
    }
}

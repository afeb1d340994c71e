//! The CPU device: the host's memory, or what the control groups leave of it.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::{Budget, DeviceConfig, DeviceError, DeviceProbe, DeviceReading, ProbeError, Processes};
use crate::ids::DeviceId;
use crate::residency::ledger::Rules;

/// Bytes of available memory that are never leased: `MemAvailable` is the kernel's estimate, and the programs that share the
/// host breathe.
const MARGIN: u64 = 64 << 20;

impl DeviceConfig {
    /// The CPU device.
    ///
    /// # Errors
    /// The system does not say how much there is, or `budget` is more.
    pub fn cpu(budget: Budget) -> Result<Self, DeviceError> {
        let host = HostMemory::read()?;
        let budget = match budget {
            Budget::Auto => host.available / 5 * 4,
            Budget::Bytes(bytes) if bytes > host.total => {
                return Err(DeviceError::Budget { device: DeviceId::cpu(), budget: bytes, total: host.total });
            }
            Budget::Bytes(bytes) => bytes,
        };
        Ok(Self {
            id: DeviceId::cpu(),
            name: processor_name().unwrap_or_else(|| "CPU".into()),
            total: host.total,
            budget,
            rules: Rules::default(),
            probe: Arc::new(CpuProbe),
        })
    }
}

/// Memory of the host as a process here may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes there are: the host's, or the control group's limit where that is lower.
    pub total: u64,
    /// Bytes that can be used now without swapping: `MemAvailable`, or the control group's headroom where that is lower.
    pub available: u64,
}

const MEMINFO: &str = "/proc/meminfo";

impl HostMemory {
    /// As it stands.
    ///
    /// # Errors
    /// `/proc/meminfo` cannot be read or lacks a field.
    pub fn read() -> Result<Self, DeviceError> {
        let text = fs::read_to_string(MEMINFO).map_err(|source| DeviceError::Read { path: MEMINFO, source })?;
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let groups = group_limits(Path::new("/sys/fs/cgroup"), &own);
        Self::of(&text, &groups)
    }

    fn of(meminfo: &str, groups: &[GroupLimit]) -> Result<Self, DeviceError> {
        let field = |field| kib_field(meminfo, field).ok_or(DeviceError::Field { path: MEMINFO, field });
        let host = Self { total: field("MemTotal:")?, available: field("MemAvailable:")? };
        Ok(groups.iter().fold(host, |host, group| Self {
            total: host.total.min(group.limit),
            available: host.available.min(group.limit.saturating_sub(group.used)),
        }))
    }
}

/// What one control group allows, and what is used of it that cannot simply be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GroupLimit {
    limit: u64,
    used: u64,
}

/// The limits of this process's memory control group and of all its parents, in either version of the file system.
/// `own` is the text of `/proc/self/cgroup`. A container often sees its own group as the root, so that the path in `own`
/// does not exist below `root`: then the root's files are the ones that count.
fn group_limits(root: &Path, own: &str) -> Vec<GroupLimit> {
    let mut limits = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (base, limit, used, cache) = if controllers.is_empty() {
            (root.to_path_buf(), "memory.max", "memory.current", "inactive_file")
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        } else {
            continue;
        };
        let path = path.trim_start_matches('/');
        let mut folder = base.join(path);
        while folder.starts_with(&base) {
            if let Some(bytes) = number(&folder.join(limit)) {
                let dropped = fs::read_to_string(folder.join("memory.stat"))
                    .ok()
                    .and_then(|text| word_field(&text, cache))
                    .unwrap_or(0);
                let used = number(&folder.join(used)).unwrap_or(0).saturating_sub(dropped);
                limits.push(GroupLimit { limit: bytes, used });
            }
            if !folder.pop() {
                break;
            }
        }
    }
    limits
}

/// The number in a file of one number; `None` where there is none ("max").
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn word_field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// A field of the form `Name:   123 kB`, in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn processor_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// The CPU device: a process is charged `RssAnon + RssShmem`. Mapped files (weights that are used as they lie) are not
/// charged, because the kernel drops them when it needs the room.
///
/// Read from `/proc/PID/status`, not `smaps_rollup`: the counters cost about 20 µs whatever the process's size, while
/// `smaps_rollup` walks its page tables (some 5 ms per GiB) with its memory lock held. The counters lag by at most a few
/// pages a thread, far below the ledger's tolerance.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuProbe;

impl DeviceProbe for CpuProbe {
    fn process_bytes(&self, pid: u32) -> io::Result<Option<u64>> {
        match fs::read_to_string(format!("/proc/{pid}/status")) {
            Ok(text) => Ok(charged_bytes(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // The process vanished between open and read.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What others use is seen in what is left, not process by process: a host has hundreds, and their shared pages cannot be
    /// told apart.
    fn reading(&self, own: &[u32]) -> Result<Option<DeviceReading>, ProbeError> {
        let host = HostMemory::read().map_err(|error| ProbeError::Failed(error.to_string()))?;
        // Before the free bytes are added to them: a worker that grows in between is counted in neither, never in both.
        let mut held = 0u64;
        for pid in own {
            let bytes = self.process_bytes(*pid).map_err(|error| ProbeError::Failed(error.to_string()))?;
            held = held.saturating_add(bytes.unwrap_or(0));
        }
        Ok(Some(DeviceReading {
            total: host.total,
            free: host.available,
            own: Some(held),
            margin: MARGIN,
            processes: Processes::NotListed,
        }))
    }
}

/// Charged bytes from the text of `/proc/PID/status`; `None` for a process without memory (a zombie has none).
fn charged_bytes(status: &str) -> Option<u64> {
    Some(kib_field(status, "RssAnon:")? + kib_field(status, "RssShmem:")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO_TEXT: &str = "MemTotal:       24684344 kB\nMemFree:        1 kB\nMemAvailable:   20000000 kB\n";

    #[test]
    fn the_lower_of_host_and_group_counts() {
        let host = HostMemory::of(MEMINFO_TEXT, &[]).unwrap();
        assert_eq!(host, HostMemory { total: 24_684_344 << 10, available: 20_000_000 << 10 });
        let groups = [GroupLimit { limit: 9 << 30, used: 1 << 30 }, GroupLimit { limit: 8 << 30, used: 0 }];
        assert_eq!(HostMemory::of(MEMINFO_TEXT, &groups).unwrap(), HostMemory { total: 8 << 30, available: 8 << 30 });
        let full = [GroupLimit { limit: 1 << 30, used: 2 << 30 }];
        assert_eq!(HostMemory::of(MEMINFO_TEXT, &full).unwrap().available, 0);
        assert!(matches!(
            HostMemory::of("MemTotal: 1 kB\n", &[]),
            Err(DeviceError::Field { field: "MemAvailable:", .. })
        ));
    }

    #[test]
    fn limits_of_both_versions_and_of_parents_are_found() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/a/memory.limit_in_bytes", "4096\n");
        write("memory/a/memory.usage_in_bytes", "3000\n");
        write("memory/a/memory.stat", "cache 5\ntotal_inactive_file 1000\n");
        assert_eq!(
            group_limits(root.path(), "4:cpu,memory:/a/b\n"),
            [GroupLimit { limit: 9_223_372_036_854_771_712, used: 0 }, GroupLimit { limit: 4096, used: 2000 }]
        );
        write("u/memory.max", "max\n");
        write("memory.max", "8192\n");
        write("memory.current", "100\n");
        assert_eq!(group_limits(root.path(), "0::/u\n"), [GroupLimit { limit: 8192, used: 100 }]);
        assert_eq!(group_limits(root.path(), "0::/not/seen/from/here\n"), [GroupLimit { limit: 8192, used: 100 }]);
        assert_eq!(group_limits(root.path(), "1:cpuset:/\nnonsense\n"), []);
    }

    #[test]
    fn a_budget_beyond_the_host_is_refused_with_both_numbers() {
        let error = DeviceConfig::cpu(Budget::Bytes(u64::MAX)).err().unwrap();
        assert!(matches!(error, DeviceError::Budget { .. }), "{error}");
        let config = DeviceConfig::cpu(Budget::Auto).unwrap();
        assert!(0 < config.budget && config.budget < config.total);
        assert_eq!(DeviceConfig::cpu(Budget::Bytes(1 << 20)).unwrap().budget, 1 << 20);
    }

    #[test]
    fn a_process_is_charged_for_what_it_touches() {
        let own = std::process::id();
        let before = CpuProbe.process_bytes(own).unwrap().unwrap();
        let touched = vec![1u8; 64 << 20];
        let after = CpuProbe.process_bytes(own).unwrap().unwrap();
        assert!(after >= before + (60 << 20), "{before} then {after} with {} more", touched.len());
        // Larger than any pid the kernel gives out.
        assert_eq!(CpuProbe.process_bytes(1 << 30).unwrap(), None);
    }

    #[test]
    fn a_reading_counts_our_own_processes_as_ours() {
        let own = std::process::id();
        let touched = vec![1u8; 64 << 20];
        let reading = CpuProbe.reading(&[own, 1 << 30]).unwrap().expect("the host can be asked");
        assert!(
            reading.own >= Some(touched.len() as u64) && reading.free > 0 && reading.free <= reading.total,
            "{reading:?}"
        );
        assert_eq!(CpuProbe.reading(&[]).unwrap().unwrap().own, Some(0));
    }

    #[test]
    fn a_zombie_holds_nothing() {
        assert_eq!(charged_bytes("Name:\tx\nState:\tZ (zombie)\n"), None);
        assert_eq!(charged_bytes("RssAnon:\t     148 kB\nRssFile:\t 1900 kB\nRssShmem:\t  2 kB\n"), Some(150 << 10));
    }
}

//! What a host is that decides what a driver can show: WSL, a process namespace of its own, MPS.

use std::fs;

/// Facts about the host, read once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostFacts {
    /// Linux inside Windows: its driver shows no processes.
    pub wsl: bool,
    /// Processes have a namespace of their own (a container): others' are not seen, and a driver may show none.
    pub nested_processes: bool,
}

/// The inode number of the first namespace of processes; the kernel fixes it.
const FIRST_PROCESS_NAMESPACE: &str = "pid:[4026531836]";

impl HostFacts {
    /// As the kernel tells.
    pub fn read() -> Self {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self {
            wsl: release.to_ascii_lowercase().contains("microsoft"),
            nested_processes: namespace.as_os_str() != FIRST_PROCESS_NAMESPACE,
        }
    }
}

/// The name of a process; empty where the system does not say.
pub(super) fn process_name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).map(|name| name.trim_end().to_owned()).unwrap_or_default()
}

/// Whether processes of NVIDIA's MPS run, which puts several processes into one context.
pub(super) fn mps_runs() -> bool {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.any(|pid| is_mps(&process_name(pid)))
}

/// The kernel cuts names to fifteen characters, so server and control daemon look alike.
fn is_mps(name: &str) -> bool {
    name.starts_with("nvidia-cuda-mps")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_have_names() {
        assert!(!process_name(std::process::id()).is_empty());
        assert_eq!(process_name(1 << 30), "");
        assert!(is_mps("nvidia-cuda-mps") && !is_mps("nvidia-persiste"));
    }
}

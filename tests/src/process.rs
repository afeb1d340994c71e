//! Processes as the kernel shows them: a view that is not the daemon's own.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A living process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its arguments, the program first.
    pub arguments: Vec<String>,
}

impl Process {
    /// The program's file name.
    pub fn program(&self) -> &str {
        self.arguments.first().and_then(|path| Path::new(path).file_name()?.to_str()).unwrap_or_default()
    }

    /// The value after `--NAME`.
    pub fn argument(&self, name: &str) -> Option<&str> {
        let at = self.arguments.iter().position(|argument| argument == name)?;
        self.arguments.get(at + 1).map(String::as_str)
    }

    /// Sends a signal; a process that has just ended is no error.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.pid), signal);
    }

    /// `RssAnon + RssShmem` in bytes, as the kernel counts now; `None` once it is gone.
    pub fn resident(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let field = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        };
        Some((field("RssAnon:")? + field("RssShmem:")?) << 10)
    }

    /// Bytes of a mapped file that this process has in memory, by the end of the file's path; `None` once it is gone.
    pub fn mapped_of(&self, path: &str) -> Option<u64> {
        let maps = fs::read_to_string(format!("/proc/{}/smaps", self.pid)).ok()?;
        let mut ours = false;
        let mut sum = 0;
        for line in maps.lines() {
            // A mapping's own line starts with its addresses; those of its fields with their names.
            if line.split(' ').next().is_some_and(|word| word.contains('-')) {
                ours = line.ends_with(path);
            } else if let Some(size) = line.strip_prefix("Rss:").filter(|_| ours) {
                sum += size.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
            }
        }
        Some(sum << 10)
    }

    /// Private memory alone (`RssAnon`), in bytes.
    pub fn anonymous(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
    }
}

/// Descriptors that a process has open; `None` once it is gone.
pub fn descriptors(pid: i32) -> Option<usize> {
    Some(fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count())
}

/// All processes whose environment has `NAME=VALUE`; zombies have none and do not count as living.
pub fn with_environment(name: &str, value: &Path) -> Vec<Process> {
    let wanted = format!("{name}={}", value.display()).into_bytes();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<Process> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == wanted)
        })
        .filter_map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let arguments: Vec<String> = line
                .split(|byte| *byte == 0)
                .filter(|argument| !argument.is_empty())
                .map(|argument| String::from_utf8_lossy(argument).into_owned())
                .collect();
            (!arguments.is_empty()).then_some(Process { pid, arguments })
        })
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

/// Polls until `condition` gives a value; `None` after `limit`. Polling a condition is how a test sees another process; it is no
/// synchronisation by time: the limit only bounds a failure.
pub fn eventually<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

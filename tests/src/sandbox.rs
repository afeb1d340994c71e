//! A host of its own for one test.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::process::{self, Process};
use crate::programs::{programs, repository};

/// A folder with all that the programs would otherwise look for on the host. What still runs when it is dropped is
/// killed, and what that leaves is swept.
#[derive(Debug)]
pub struct Sandbox {
    folder: tempfile::TempDir,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Sandbox {
    /// An empty one.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("sdd-test-").tempdir().expect("a temporary folder");
        for name in ["locks", "run", "config", "home", "out"] {
            fs::create_dir(folder.path().join(name)).expect("a folder in it");
        }
        Self { folder }
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Where its daemons lock.
    pub fn lock_dir(&self) -> PathBuf {
        self.path().join("locks")
    }

    /// A folder for pictures.
    pub fn out(&self) -> PathBuf {
        self.path().join("out")
    }

    /// A command that sees only this sandbox.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        // The cache is shared by all tests: it holds the default model, written once and atomically.
        let cache = programs().sdd.parent().expect("a folder").join("test-cache");
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("SDD_") || text.starts_with("SDCTL_") || text.starts_with("SD_WORKER_") {
                command.env_remove(&name);
            }
        }
        command
            .env("SDD_LOCK_DIR", self.lock_dir())
            // What one test's daemon learns must not decide another's leases.
            .env("SDD_PEAKS_FILE", self.path().join("peaks.jsonl"))
            .env("XDG_RUNTIME_DIR", self.path().join("run"))
            .env("XDG_CONFIG_HOME", self.path().join("config"))
            .env("XDG_CACHE_HOME", cache)
            .env("XDG_STATE_HOME", self.path().join("state"))
            .env("HOME", self.path().join("home"))
            .env("SDD_SYSTEM_SOCKET", self.path().join("no-system-socket"))
            .env("NO_COLOR", "1")
            .current_dir(self.out())
            .stdin(Stdio::null());
        command
    }

    /// An `sdctl` with these arguments.
    pub fn sdctl<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, arguments: I) -> Command {
        let mut command = self.command(&programs().sdctl);
        command.args(arguments);
        command
    }

    /// Runs `sdctl` and expects success; its output otherwise becomes the failure.
    pub fn sdctl_ok<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(&self, arguments: I) -> Output {
        let output = self.sdctl(arguments).output().expect("sdctl runs");
        assert!(output.status.success(), "sdctl failed with {}: {}", output.status, text(&output));
        output
    }

    /// A copy of the default model: the same numbers in other files, so to a daemon another model.
    pub fn default_model_as(&self, name: &str) -> PathBuf {
        let folder = self.path().join("models").join(name);
        copy(&repository().join("models/default"), &folder);
        folder
    }

    /// All living processes that were started in this sandbox.
    pub fn processes(&self) -> Vec<Process> {
        process::with_environment("SDD_LOCK_DIR", &self.lock_dir())
    }

    /// Those of one program.
    pub fn processes_of(&self, program: &str) -> Vec<Process> {
        self.processes().into_iter().filter(|process| process.program() == program).collect()
    }

    /// Ids of the instances that hold, or left, a lock file.
    pub fn instances(&self) -> Vec<String> {
        let entries = fs::read_dir(self.lock_dir()).expect("the lock folder");
        entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Some(name.strip_prefix("instance-")?.strip_suffix(".lock")?.to_owned())
            })
            .collect()
    }

    /// Shared-memory segments of these instances that exist now.
    pub fn segments(instances: &[String]) -> Vec<String> {
        let entries = fs::read_dir(sd_proto::instance::SHM_DIR).expect("/dev/shm");
        let ours = |name: &String| instances.iter().any(|id| name.starts_with(&format!("sdd-{id}-")));
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).filter(ours).collect()
    }

    /// Waits until no process of this sandbox lives; panics with what does after `limit`.
    pub fn expect_no_process(&self, limit: Duration) {
        if process::eventually(limit, || self.processes().is_empty().then_some(())).is_none() {
            panic!("processes are left after {limit:?}: {:#?}", self.processes());
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Workers die with their daemon; one that does not is caught by the next round.
        while !self.processes().is_empty() {
            for process in self.processes() {
                process.signal(Signal::SIGKILL);
            }
            std::thread::yield_now();
        }
        let _ = sd_proto::instance::sweep(&self.lock_dir());
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder to copy").flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a kind of file").is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

/// Both outputs of a program, for messages.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

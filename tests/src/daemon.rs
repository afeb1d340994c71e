//! A running `sdd`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::{Process, eventually};
use crate::programs::programs;
use crate::sandbox::Sandbox;

/// A daemon of a test, killed with its sandbox at the latest.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Where it listens, as it said itself.
    pub endpoint: String,
}

/// What a test wants of its daemon.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `--set` values.
    pub set: Vec<String>,
    /// Environment.
    pub environment: Vec<(String, String)>,
    /// Models by name.
    pub models: Vec<(String, PathBuf)>,
}

impl Options {
    /// With one more `KEY=VALUE`.
    #[must_use]
    pub fn set(mut self, value: impl Into<String>) -> Self {
        self.set.push(value.into());
        self
    }

    /// With one more variable.
    #[must_use]
    pub fn environment(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// With one more model.
    #[must_use]
    pub fn model(mut self, name: &str, folder: impl Into<PathBuf>) -> Self {
        self.models.push((name.into(), folder.into()));
        self
    }

    /// With a worker that misbehaves in one stage.
    #[must_use]
    pub fn fault(self, plan: &str) -> Self {
        self.set(format!("worker_binary={}", programs().faulty_worker.display()))
            .environment("SDD_TEST_FAULT", plan)
            .environment("SDD_TEST_WORKER", programs().sd_worker.display().to_string())
    }

    fn command(&self, sandbox: &Sandbox) -> Command {
        let mut command = sandbox.command(&programs().sdd);
        // Named, since root's defaults are the system's.
        command.arg("--listen").arg(format!("unix:{}", sandbox.path().join("run/sdd.sock").display()));
        command.arg("--runtime-dir").arg(sandbox.path().join("run/sdd"));
        for value in &self.set {
            command.args(["--set", value]);
        }
        for (name, folder) in &self.models {
            command.arg("--model").arg(format!("{name}={}", folder.display()));
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

impl Daemon {
    /// Starts a daemon and waits until it serves.
    pub fn start(sandbox: &Sandbox, options: &Options) -> Self {
        let (ready, said) = nix::unistd::pipe().expect("a pipe");
        let mut command = options.command(sandbox);
        let descriptor = said.as_raw_fd();
        command.arg("--ready-fd").arg(descriptor.to_string()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: fcntl is async-signal-safe, and the descriptor is open until after the fork.
        unsafe {
            command.pre_exec(move || {
                if libc::fcntl(descriptor, libc::F_SETFD, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let mut child = command.spawn().expect("sdd starts");
        drop(said);
        let mut endpoint = String::new();
        BufReader::new(std::fs::File::from(ready)).read_line(&mut endpoint).expect("the pipe");
        if endpoint.trim().is_empty() {
            let mut log = String::new();
            let _ = child.kill();
            if let Some(mut stderr) = child.stderr.take() {
                let _ = stderr.read_to_string(&mut log);
            }
            panic!("sdd did not come to serve: {log}");
        }
        // Read on, so that the daemon never waits for the reader of its log.
        if let Some(stderr) = child.stderr.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    eprintln!("sdd: {line}");
                }
            });
        }
        Self { child, endpoint: endpoint.trim().to_owned() }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Its process.
    pub fn process(&self) -> Process {
        Process { pid: self.pid(), arguments: vec!["sdd".into()] }
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.endpoint.strip_prefix("unix:").expect("a Unix socket").into()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the daemon lives");
    }

    /// Waits for its end.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        eventually(limit, || self.child.try_wait().expect("a child")).unwrap_or_else(|| {
            panic!("the daemon did not end within {limit:?}");
        })
    }

    /// Asks it to end as an operator would, and waits.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait(Duration::from_secs(15))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! A daemon started for one session: it ends when the session's pipe closes, however the session ends, and what it
//! leaves on the host is removed by us whatever happened to it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use sd_proto::endpoint::Endpoint;
use sd_proto::exit::ProgramExit;
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};

use crate::Client;
use crate::program::{PROGRAM_VARIABLE, find_program};
use crate::runtime_dir::RuntimeDir;

/// Starting includes writing the default model into the cache, perhaps on a slow disk.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// How long the daemon may take to end by itself; it bounds its own shutdown below this.
const GRACE: Duration = Duration::from_millis(2500);
/// After how much of it we ask whether others keep the daemon busy.
const ASK_AFTER: Duration = Duration::from_millis(400);
/// How long it may take after SIGTERM.
const TERM_GRACE: Duration = Duration::from_secs(2);
/// How many of the daemon's last lines an error shows.
const LOG_LINES: usize = 15;

/// Why no private daemon serves.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No `sdd` anywhere.
    #[error("no daemon runs, and no sdd to start was found ({}): install sdd beside sdctl, or set {PROGRAM_VARIABLE}", tried.join(", "))]
    NoProgram {
        /// Where we looked.
        tried: Vec<String>,
    },
    /// It cannot be started.
    #[error("cannot start {}: {source}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// No folder, pipe or log for it.
    #[error("cannot prepare a private daemon: {what}: {source}")]
    Prepare {
        /// What failed.
        what: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// Another daemon holds the device.
    #[error("another daemon holds the device: {message}")]
    Held {
        /// The daemon's line that names the holder.
        message: String,
    },
    /// It ended before it served.
    #[error("the private daemon {} ended before it served ({}){}", program.display(), describe(*status), indent(log))]
    Ended {
        /// The program.
        program: PathBuf,
        /// How.
        status: ExitStatus,
        /// Its last lines.
        log: Vec<String>,
    },
    /// It did not serve in time and was killed.
    #[error("the private daemon did not serve within {} s and was killed{}", after.as_secs(), indent(log))]
    NotReady {
        /// How long we waited.
        after: Duration,
        /// Its last lines.
        log: Vec<String>,
    },
    /// It announced nonsense.
    #[error("the private daemon announced {text:?}, which is not an endpoint: are sdctl and sdd of one version?")]
    Announcement {
        /// What it wrote.
        text: String,
    },
}

impl StartError {
    /// How the daemon ended, where it did by itself with a code of ours.
    pub fn exit_code(&self) -> Option<i32> {
        match self {
            Self::Ended { status, .. } => status.code(),
            Self::Held { .. } => Some(ProgramExit::Held.code()),
            Self::NoProgram { .. }
            | Self::Spawn { .. }
            | Self::Prepare { .. }
            | Self::NotReady { .. }
            | Self::Announcement { .. } => None,
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => {
            let name = Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |s| s.to_string());
            format!("killed by {name}")
        }
        (None, None) => "unknown status".into(),
    }
}

fn indent(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

/// How a private daemon went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// By itself.
    Ended,
    /// It had to be told or killed.
    Forced,
    /// It still works for other clients that joined it, and ends after them.
    Shared,
}

/// A running private daemon.
#[derive(Debug)]
pub struct PrivateDaemon {
    child: Child,
    process: Pid,
    owner: Option<OwnedFd>,
    dir: RuntimeDir,
    log: File,
    endpoint: Endpoint,
    lock_dir: Option<PathBuf>,
    reaped: bool,
    /// Left to other clients: nothing of it is ours to remove.
    left: bool,
}

impl PrivateDaemon {
    /// Starts one and waits until it serves. Cancel-safe: dropping the future kills what was started.
    ///
    /// `program`: the `sdd` to start; absent: the one found by [`find_program`]. `verbose` sends its log to our stderr.
    ///
    /// # Errors
    /// See [`StartError`]; [`StartError::Held`] where another daemon holds the device.
    pub async fn start(program: Option<&Path>, lock_dir: Option<PathBuf>, verbose: bool) -> Result<Self, StartError> {
        let prepare = |what| move |source: io::Error| StartError::Prepare { what, source };
        let program = match program {
            Some(program) => program.to_owned(),
            None => find_program()?,
        };
        let dir = RuntimeDir::create().map_err(prepare("folder for its socket"))?;
        let (owner_theirs, owner) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|e| prepare("pipe")(e.into()))?;
        let (ready, ready_theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|e| prepare("pipe")(e.into()))?;
        let log = nix::sys::memfd::memfd_create(c"sdd-log", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)
            .map(File::from)
            .map_err(|e| prepare("log")(e.into()))?;
        let stderr = match verbose {
            true => Stdio::inherit(),
            false => Stdio::from(log.try_clone().map_err(prepare("log"))?),
        };
        let mut command = Command::new(&program);
        command
            .arg("--private-owner-fd")
            .arg(owner_theirs.as_raw_fd().to_string())
            .arg("--ready-fd")
            .arg(ready_theirs.as_raw_fd().to_string())
            .arg("--runtime-dir")
            .arg(&dir.path)
            // A configuration file may name addresses that are not for this one call.
            .arg("--listen")
            .arg(Endpoint::Unix(dir.path.join("sdd.sock")).to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            // A group of its own: the terminal's Ctrl-C is for us, and we cancel in order.
            .process_group(0)
            .kill_on_drop(false);
        if let Some(lock_dir) = &lock_dir {
            command.env("SDD_LOCK_DIR", lock_dir);
        }
        inherit(&mut command, [owner_theirs.as_raw_fd(), ready_theirs.as_raw_fd()]);
        let child = command.spawn().map_err(|source| StartError::Spawn { program: program.clone(), source })?;
        drop((owner_theirs, ready_theirs));
        let process = Pid::from_raw(child.id().map_or(0, |id| id as i32));
        let mut daemon = Self {
            child,
            process,
            owner: Some(owner),
            endpoint: Endpoint::Unix(dir.path.join("sdd.sock")),
            dir,
            log,
            lock_dir,
            reaped: false,
            left: false,
        };
        match tokio::time::timeout(READY_LIMIT, announcement(ready)).await {
            Ok(Ok(Some(text))) => match text.parse() {
                Ok(endpoint) => {
                    daemon.endpoint = endpoint;
                    Ok(daemon)
                }
                Err(_) => Err(StartError::Announcement { text }),
            },
            // End of file: it ended, or is about to.
            Ok(Ok(None)) => Err(daemon.ended_early(program).await),
            Ok(Err(source)) => Err(StartError::Prepare { what: "pipe", source }),
            Err(_) => Err(StartError::NotReady { after: READY_LIMIT, log: daemon.log_tail() }),
        }
    }

    async fn ended_early(mut self, program: PathBuf) -> StartError {
        let status = match tokio::time::timeout(GRACE, self.child.wait()).await {
            Ok(Ok(status)) => {
                self.reaped = true;
                status
            }
            Ok(Err(source)) => return StartError::Prepare { what: "wait", source },
            Err(_) => return StartError::NotReady { after: GRACE, log: self.log_tail() },
        };
        let log = self.log_tail();
        if status.code() == Some(ProgramExit::Held.code()) {
            let message = log.last().cloned().unwrap_or_else(|| "it does not say which".into());
            return StartError::Held { message };
        }
        StartError::Ended { program, status, log }
    }

    /// Where it serves.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.process.as_raw()
    }

    /// The last lines that it and its workers wrote to stderr.
    pub fn log_tail(&self) -> Vec<String> {
        let length = self.log.metadata().map_or(0, |m| m.len());
        let start = length.saturating_sub(16 << 10);
        let mut bytes = vec![0; (length - start) as usize];
        let read = self.log.read_at(&mut bytes, start).unwrap_or(0);
        let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].iter().map(|line| (*line).to_owned()).collect()
    }

    /// How it has ended, if it has or is about to: a broken connection shows before the process can be reaped.
    pub async fn ended(&mut self) -> Option<String> {
        let waited = tokio::time::timeout(Duration::from_millis(500), self.child.wait()).await;
        let status = waited.ok()?.ok()?;
        self.reaped = true;
        Some(describe(status))
    }

    /// Ends it in bounded time and removes what it left. `client` tells whether other clients' jobs are still running;
    /// the daemon then stays for them.
    pub async fn close(mut self, client: Option<&Client>) -> Closed {
        drop(self.owner.take());
        let begun = Instant::now();
        let mut busy = 0;
        while let Some(left) = GRACE.checked_sub(begun.elapsed()) {
            if self.reaped || self.waited(left.min(ASK_AFTER)).await {
                return Closed::Ended;
            }
            let Some(client) = client else { continue };
            let status = client.status_within(ASK_AFTER).await;
            // Once may be our own job, which is being cancelled.
            busy += u32::from(status.is_ok_and(|status| status.queued_jobs + status.running_jobs > 0));
            if busy > 1 {
                self.left = true;
                return Closed::Shared;
            }
        }
        // It may have ended while we asked; the group is ours as long as the child is not reaped.
        if self.waited(Duration::ZERO).await {
            return Closed::Ended;
        }
        let _ = nix::sys::signal::kill(self.process, Signal::SIGTERM);
        // Where this is not enough, `drop` kills the group.
        self.waited(TERM_GRACE).await;
        Closed::Forced
    }

    async fn waited(&mut self, limit: Duration) -> bool {
        self.reaped |= matches!(tokio::time::timeout(limit, self.child.wait()).await, Ok(Ok(_)));
        self.reaped
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        drop(self.owner.take());
        if self.left {
            self.dir.keep();
            return;
        }
        // Reaped meanwhile by the runtime: the process id may be another's by now.
        self.reaped |= !matches!(self.child.try_wait(), Ok(None));
        if !self.reaped && self.process.as_raw() > 1 {
            let _ = killpg(self.process, Signal::SIGKILL);
            // Its lock is free only when it is gone, and SIGKILL does not take long.
            let _ = waitpid(self.process, None);
        }
        let lock_dir = self.lock_dir.clone().map_or_else(sd_proto::instance::default_lock_dir, Ok);
        if let Ok(lock_dir) = lock_dir {
            let _ = sd_proto::instance::sweep(&lock_dir);
        }
    }
}

/// Lets the child inherit these descriptors, under the same numbers.
#[allow(unsafe_code)]
fn inherit(command: &mut Command, descriptors: [RawFd; 2]) {
    let keep = move || {
        for descriptor in descriptors {
            // SAFETY: fcntl is async-signal-safe; the descriptors are open, the parent holds them until after the
            // spawn, and the child has its own table.
            if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure makes one async-signal-safe call and allocates nothing.
    unsafe { command.pre_exec(keep) };
}

/// Reads the line that a serving daemon writes; `None` where it closes the pipe without one.
async fn announcement(ready: OwnedFd) -> io::Result<Option<String>> {
    let mut ready = tokio::net::unix::pipe::Receiver::from_owned_fd(ready)?;
    let mut line = Vec::new();
    let mut chunk = [0; 512];
    loop {
        let read = ready.read(&mut chunk).await?;
        line.extend_from_slice(&chunk[..read]);
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            return Ok(Some(String::from_utf8_lossy(&line[..end]).trim().to_owned()));
        }
        if read == 0 || line.len() > 4096 {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    fn script(dir: &Path, text: &str) -> PathBuf {
        let file = dir.join("sdd");
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    /// A stand-in that finds the values of the flags it is started with as `$owner`, `$ready` and `$dir`.
    fn stand_in(dir: &Path, text: &str) -> PathBuf {
        let flags = "while [ $# -gt 0 ]; do case $1 in --private-owner-fd) owner=$2;; --ready-fd) ready=$2;; \
                     --runtime-dir) dir=$2;; esac; shift 2; done";
        script(dir, &format!("{flags}\n{text}"))
    }

    #[tokio::test]
    async fn it_serves_until_its_pipe_closes_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        // `read` on the owner pipe returns when our end closes.
        let sdd = stand_in(
            dir.path(),
            "touch $dir/sdd.sock; echo unix:$dir/sdd.sock > /proc/self/fd/$ready; read line < /proc/self/fd/$owner; exit 0",
        );
        let daemon = PrivateDaemon::start(Some(&sdd), Some(dir.path().into()), false).await.unwrap();
        let Endpoint::Unix(socket) = daemon.endpoint().clone() else { panic!("not a socket") };
        let runtime = socket.parent().unwrap().to_owned();
        assert_eq!(fs::metadata(&runtime).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(daemon.close(None).await, Closed::Ended);
        assert!(!runtime.exists());
    }

    #[tokio::test]
    async fn a_daemon_that_ends_early_is_reported_with_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let sdd = stand_in(dir.path(), "echo no budget >&2; exit 64");
        let error = PrivateDaemon::start(Some(&sdd), Some(dir.path().into()), false).await.unwrap_err();
        assert_eq!(error.exit_code(), Some(64));
        assert!(error.to_string().ends_with("(exit code 64)\n  no budget"), "{error}");
        let sdd = stand_in(dir.path(), "echo device cpu is held by sdd with pid 7 >&2; exit 75");
        let error = PrivateDaemon::start(Some(&sdd), Some(dir.path().into()), false).await.unwrap_err();
        assert!(matches!(&error, StartError::Held { message } if message.contains("pid 7")), "{error:?}");
    }

    #[tokio::test]
    async fn one_that_is_dropped_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        // Ignores the pipe's end and SIGTERM alike.
        let sdd = stand_in(
            dir.path(),
            "trap '' TERM; echo unix:$dir/sdd.sock > /proc/self/fd/$ready; while :; do sleep 60; done",
        );
        let daemon = PrivateDaemon::start(Some(&sdd), Some(dir.path().into()), false).await.unwrap();
        let process = Pid::from_raw(daemon.pid());
        let runtime = daemon.dir.path.clone();
        drop(daemon);
        assert_eq!(nix::sys::signal::kill(process, None), Err(nix::errno::Errno::ESRCH));
        assert!(!runtime.exists());
    }
}

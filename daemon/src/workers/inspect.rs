//! Asking the worker program what is in a model folder: the daemon itself never parses model files.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

use super::Workers;
use super::exit::RawStatus;
use super::process::Process;
use super::spawner::SpawnRequest;
use super::tail::StderrReader;

/// Most bytes that a description may have.
const MAX_REPORT: u64 = 4 << 20;

/// Why a folder was not described.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The program could not be run.
    #[error("cannot run {} to inspect a model: {source}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The model's files are bad; the worker's own words.
    #[error("{0}")]
    BadModel(String),
    /// Anything else that went wrong.
    #[error("inspection of {} failed ({how}): {message}", folder.display())]
    Failed {
        /// The folder.
        folder: PathBuf,
        /// Exit code, signal or time.
        how: String,
        /// The last words.
        message: String,
    },
}

impl Workers {
    /// Runs `sd-worker inspect FOLDER` and returns what it prints: one JSON document.
    ///
    /// # Errors
    /// See [`InspectError`]. No process is left.
    pub async fn inspect(&self, folder: &Path) -> Result<Vec<u8>, InspectError> {
        self.describe(folder, vec!["inspect".into(), folder.into()]).await
    }

    /// Runs `sd-worker estimate FOLDER` with these arguments and returns what it prints: one JSON document.
    ///
    /// # Errors
    /// See [`InspectError`]. No process is left.
    pub async fn estimate(&self, folder: &Path, arguments: &[OsString]) -> Result<Vec<u8>, InspectError> {
        let mut all: Vec<OsString> = vec!["estimate".into(), folder.into()];
        all.extend(arguments.iter().cloned());
        self.describe(folder, all).await
    }

    async fn describe(&self, folder: &Path, arguments: Vec<OsString>) -> Result<Vec<u8>, InspectError> {
        // A task of its own, so that a caller which goes away leaves the child to an owner.
        let workers = self.clone();
        let owned = folder.to_path_buf();
        let task = self.inner.tasks.spawn(async move { workers.describe_owned(&owned, arguments).await });
        task.await.unwrap_or_else(|error| {
            Err(InspectError::Failed { folder: folder.into(), how: "internal".into(), message: error.to_string() })
        })
    }

    async fn describe_owned(&self, folder: &Path, arguments: Vec<OsString>) -> Result<Vec<u8>, InspectError> {
        let program = &self.inner.program;
        let failed = |source| InspectError::Spawn { program: program.clone(), source };
        let request = SpawnRequest { program: program.clone(), arguments, token: None, capture_stdout: true };
        let mut shutdown = self.inner.shutdown.subscribe();
        let spawned = self.inner.spawner.spawn(request).await.map_err(failed)?;
        let mut process = Process::adopt(spawned.pid).map_err(failed)?;
        let stderr = StderrReader::start(0, spawned.stderr).map_err(failed)?;
        let stdout = spawned.stdout.ok_or_else(|| failed(io::Error::other("stdout was not captured")))?;
        let stdout = pipe::Receiver::from_owned_fd(stdout).map_err(failed)?;
        let mut report = Vec::new();
        let mut limited = stdout.take(MAX_REPORT + 1);
        let work = async {
            let read = limited.read_to_end(&mut report).await;
            if read.as_ref().is_ok_and(|bytes| *bytes as u64 > MAX_REPORT) {
                return Some("its description has no end".to_owned());
            }
            process.ended().await;
            read.err().map(|error| error.to_string())
        };
        let stopped = tokio::select! {
            finished = work => finished,
            () = tokio::time::sleep(self.inner.limits.inspect) => {
                Some(format!("it did not end within {:.1?}", self.inner.limits.inspect))
            }
            _ = shutdown.wait_for(Option::is_some) => Some("the daemon shuts down".to_owned()),
        };
        if stopped.is_some() {
            process.signal(Signal::SIGKILL);
            process.ended().await;
        }
        let raw = process.reap();
        let message = stderr.finish(std::time::Duration::from_millis(50)).await.join("\n");
        let problem = |how: String| InspectError::Failed { folder: folder.into(), how, message: message.clone() };
        match (stopped, raw) {
            (Some(how), _) => Err(problem(how)),
            (None, RawStatus::Code(0)) => Ok(report),
            (None, RawStatus::Code(code)) if code == sd_proto::exit::WorkerExit::BadWeights.code() => {
                let text = message.trim();
                let text = text.strip_prefix("error: ").unwrap_or(text);
                Err(InspectError::BadModel(text.to_owned()))
            }
            (None, RawStatus::Code(code)) => Err(problem(format!("exit code {code}"))),
            (None, RawStatus::Signal(signal)) => Err(problem(format!("signal {signal}"))),
            (None, RawStatus::Unknown) => Err(problem("unknown exit status".into())),
        }
    }
}

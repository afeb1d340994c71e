//! One `sdctl generate` under observation.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sd_proto::exit::ProgramExit;
use sd_tests::sandbox::Sandbox;
use serde_json::Value;

/// What a client is to make.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    /// Denoising steps.
    pub(crate) steps: u32,
    /// Edge of the picture in pixels.
    pub(crate) edge: u32,
}

/// A running client; killed when dropped.
#[derive(Debug)]
pub(crate) struct Client {
    child: Child,
    out: PathBuf,
    name: String,
    limit: Duration,
    pub(crate) started: Instant,
}

/// How a client ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    /// `succeeded`, `cancelled`, the reason of a failure, `disconnected`; `interrupted` and `killed` are the client's own.
    pub(crate) outcome: String,
    /// The job, where it was accepted.
    pub(crate) job: Option<String>,
    /// The picture.
    pub(crate) picture: Option<Vec<u8>>,
    /// When it was seen to have ended.
    pub(crate) at: Instant,
    /// What it said, for messages.
    pub(crate) said: String,
}

/// Polls every five milliseconds; false after `limit`.
pub(crate) fn within(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a child's end, and kills it when that does not come.
pub(crate) fn end_of(child: &mut Child, limit: Duration) -> anyhow::Result<ExitStatus> {
    let mut status = None;
    within(limit, || {
        status = child.try_wait().ok().flatten();
        status.is_some()
    });
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    status.with_context(|| format!("it did not end within {limit:?}"))
}

/// Whether a line of `--json` output is a last event.
pub(crate) fn terminal(event: &Value) -> bool {
    matches!(event["event"].as_str(), Some("succeeded" | "failed" | "cancelled"))
}

/// The events in a program's output.
pub(crate) fn events(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

impl Client {
    /// Starts one. `name` tells its files from those of other clients that run now.
    pub(crate) fn start(
        sandbox: &Sandbox,
        endpoint: &str,
        job: Job,
        name: &str,
        limit: Duration,
    ) -> anyhow::Result<Self> {
        let out = sandbox.out();
        let picture = format!("{name}.png");
        let _ = fs::remove_file(out.join(&picture));
        let (steps, edge) = (job.steps.to_string(), job.edge.to_string());
        let mut command = sandbox.sdctl(["generate", "a robot", "--seed", "5", "--json", "--force"]);
        command.args(["--steps", &steps, "--width", &edge, "--height", &edge, "-o", &picture, "--endpoint", endpoint]);
        command.stdout(File::create(out.join(format!("{name}.out")))?);
        command.stderr(File::create(out.join(format!("{name}.err")))?);
        let child = command.spawn().context("sdctl does not start")?;
        Ok(Self { child, out, name: name.into(), limit, started: Instant::now() })
    }

    fn text(&self, which: &str) -> String {
        fs::read_to_string(self.out.join(format!("{}.{which}", self.name))).unwrap_or_default()
    }

    /// Its job, as soon as that is accepted.
    pub(crate) fn job(&self) -> Option<String> {
        Some(events(&self.text("out")).first()?["job_id"].as_str()?.to_owned())
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Sends a signal, unless it has ended.
    pub(crate) fn signal(&mut self, signal: Signal) {
        if !self.has_ended() {
            let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
        }
    }

    /// Waits for its end in bounded time, and checks that it told exactly one.
    ///
    /// # Errors
    /// It did not end, told two ends or none, or its exit code contradicts what it told.
    pub(crate) fn wait(mut self) -> anyhow::Result<Ended> {
        let status = end_of(&mut self.child, self.limit);
        let at = Instant::now();
        let said = format!("{}{}", self.text("out"), self.text("err"));
        let status = status.with_context(|| format!("client {}: {said}", self.name))?;
        let told = events(&self.text("out"));
        let last: Vec<&Value> = told.iter().filter(|event| terminal(event)).collect();
        ensure!(last.len() <= 1, "client {} told {} ends: {said}", self.name, last.len());
        let job = told.first().and_then(|event| event["job_id"].as_str()).map(str::to_owned);
        let code = status.code();
        let outcome = match (last.first().and_then(|event| event["event"].as_str()), code) {
            (Some("succeeded"), Some(0)) => "succeeded".to_owned(),
            (Some("cancelled"), Some(code)) if code != 0 => "cancelled".into(),
            (Some("failed"), Some(code)) if code != 0 => {
                last[0]["reason"].as_str().context("a failure without a reason")?.to_owned()
            }
            (None, Some(code)) if code == ProgramExit::Interrupted.code() => "interrupted".into(),
            (_, None) => "killed".into(),
            (None, Some(code)) if code != 0 && !self.text("err").trim().is_empty() => "disconnected".into(),
            (told, _) => bail!("client {} told {told:?} and ended with {status}: {said}", self.name),
        };
        let picture = fs::read(self.out.join(format!("{}.png", self.name))).ok();
        Ok(Ended { outcome, job, picture, at, said })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

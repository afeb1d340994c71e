//! The host under test: one sandbox, one daemon, and what they are measured by.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use sd_tests::daemon::Options;
use sd_tests::process::{Process, descriptors};
use sd_tests::programs::programs;
use sd_tests::{Daemon, Sandbox};

use super::client::{Client, Job, end_of, events, terminal, within};

/// Longest that a job may take on a loaded machine; only a failure takes it.
pub(crate) const LONG: Duration = Duration::from_secs(120);
/// From a fault to the client's end. The longest deadline on the way is the handshake of a new worker (10 s).
pub(crate) const BOUND: Duration = Duration::from_secs(45);
/// How long a killed process may be seen.
const SOON: Duration = Duration::from_secs(3);

/// What the daemon holds when nothing runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    /// `RssAnon` in KiB.
    pub(crate) memory: f64,
    /// Open descriptors.
    pub(crate) descriptors: usize,
}

/// A sandbox with a daemon.
pub(crate) struct World {
    pub(crate) sandbox: Sandbox,
    pub(crate) daemon: Daemon,
    job: Job,
    /// The picture that every job must make.
    reference: Vec<u8>,
    /// Jobs made, for names.
    calls: u64,
    /// Every instance there has been, for its segments.
    instances: Vec<String>,
}

fn start(sandbox: &Sandbox) -> Daemon {
    let plan = sandbox.path().join("fault");
    // Frozen workers are to be noticed in a time that a run has; ended jobs, which are kept by count and bytes, must not
    // look like growth.
    let options = Options::default().fault(&format!("@{}", plan.display()));
    let options = options.set("deadlines.pulse=2s").set("limits.ended_jobs=16");
    // Each job is to encode its prompt.
    Daemon::start(sandbox, &options.set("cache.conditioning=0"))
}

impl World {
    /// Starts the daemon, and makes the reference picture.
    pub(crate) fn new(job: Job) -> anyhow::Result<Self> {
        let sandbox = Sandbox::new();
        let daemon = start(&sandbox);
        let instances = sandbox.instances();
        let mut world = Self { sandbox, daemon, job, reference: Vec::new(), calls: 0, instances };
        let ended = world.client()?.wait()?;
        ensure!(ended.outcome == "succeeded", "the first job: {}", ended.said);
        world.reference = ended.picture.context("the first job made no picture")?;
        world.control()?;
        Ok(world)
    }

    /// Starts a client.
    pub(crate) fn client(&mut self) -> anyhow::Result<Client> {
        self.calls += 1;
        let name = format!("{}", self.calls % 16);
        Client::start(&self.sandbox, &self.daemon.endpoint, self.job, &name, LONG)
    }

    /// One undisturbed call: it must make the same bytes. Returns how long it took.
    pub(crate) fn control(&mut self) -> anyhow::Result<Duration> {
        let client = self.client()?;
        let started = client.started;
        let ended = client.wait().context("the call afterwards")?;
        ensure!(ended.outcome == "succeeded", "the call afterwards ended with {}: {}", ended.outcome, ended.said);
        self.check_picture(ended.picture.as_deref()).context("the call afterwards")?;
        Ok(ended.at - started)
    }

    /// Whether a picture is the reference.
    pub(crate) fn check_picture(&self, picture: Option<&[u8]>) -> anyhow::Result<()> {
        ensure!(picture == Some(&self.reference[..]), "the picture is missing or another one");
        Ok(())
    }

    /// Which stage's workers misbehave, and how, from their next start on; `None`: none do.
    pub(crate) fn set_fault(&self, plan: Option<&str>) -> anyhow::Result<()> {
        let path = self.sandbox.path().join("fault");
        let new = self.sandbox.path().join("fault.new");
        fs::write(&new, plan.unwrap_or(""))?;
        Ok(fs::rename(new, path)?)
    }

    /// Lets stages whose workers were made to die again and again be started again.
    pub(crate) fn clear_quarantine(&self) -> anyhow::Result<()> {
        let mut command = self.sandbox.sdctl(["quarantine", "clear", "--endpoint", &self.daemon.endpoint]);
        let output = command.output()?;
        ensure!(output.status.success(), "clearing the quarantine: {}", sd_tests::sandbox::text(&output));
        Ok(())
    }

    /// Living workers, of one stage or of all.
    pub(crate) fn workers(&self, stage: Option<&str>) -> Vec<Process> {
        let mut workers = self.sandbox.processes();
        workers.retain(|process| {
            matches!(process.program(), "sd-worker" | "faulty-worker")
                && process.argument("--stage").is_some_and(|of| stage.is_none_or(|stage| of == stage))
        });
        workers
    }

    /// Kills workers that are idle and waits until they are gone.
    pub(crate) fn kill_idle(&self, stage: Option<&str>) -> anyhow::Result<()> {
        let workers = self.workers(stage);
        workers.iter().for_each(|worker| worker.signal(Signal::SIGKILL));
        let gone = || !self.workers(stage).iter().any(|living| workers.contains(living));
        ensure!(within(SOON, gone), "killed workers are still there after {SOON:?}");
        Ok(())
    }

    /// Checks by the daemon's own log of a job that it has ended exactly once, however often it is asked; waits for that end
    /// for at most `limit`. Returns the last event's name.
    pub(crate) fn replay(&self, job: &str, limit: Duration) -> anyhow::Result<String> {
        let log = self.sandbox.out().join("replay.out");
        let mut command =
            self.sandbox.sdctl(["watch", job, "--no-save", "--json", "--endpoint", &self.daemon.endpoint]);
        command.stdout(fs::File::create(&log)?).stderr(std::process::Stdio::null());
        let mut child = command.spawn()?;
        end_of(&mut child, limit).with_context(|| format!("watching job {job} to its end"))?;
        let told = events(&fs::read_to_string(&log)?);
        let ends = told.iter().filter(|event| terminal(event)).count();
        ensure!(ends == 1, "job {job} has {ends} last events");
        let last = told.last().filter(|event| terminal(event)).context("a last event is followed by others")?;
        Ok(last["event"].as_str().unwrap_or_default().to_owned())
    }

    /// What the daemon holds now.
    pub(crate) fn held(&self) -> anyhow::Result<Held> {
        let process = self.daemon.process();
        let memory = process.anonymous().context("the daemon is gone")? as f64 / 1024.0;
        Ok(Held { memory, descriptors: descriptors(process.pid).context("the daemon is gone")? })
    }

    /// Processes beyond the daemon and one worker a stage.
    pub(crate) fn surplus(&self) -> usize {
        let stages = ["text", "diffusion", "vae"].map(|stage| self.workers(Some(stage)).len().min(1));
        self.sandbox.processes().len().saturating_sub(1 + stages.iter().sum::<usize>())
    }

    /// Kills the daemon; checks that all its processes die with it.
    pub(crate) fn kill_daemon(&mut self) -> anyhow::Result<()> {
        self.daemon.signal(Signal::SIGKILL);
        self.daemon.wait(BOUND);
        let daemons = || self.sandbox.processes().iter().all(|process| process.program() == "sdctl");
        ensure!(within(SOON, daemons), "workers outlive their daemon: {:?}", self.sandbox.processes());
        Ok(())
    }

    /// Starts another daemon after the first was killed; checks that it swept up.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        let dead = self.sandbox.instances();
        self.daemon = start(&self.sandbox);
        let segments = Sandbox::segments(&dead);
        ensure!(segments.is_empty(), "segments of the killed daemon are left: {segments:?}");
        let now = self.sandbox.instances();
        ensure!(!now.iter().any(|id| dead.contains(id)), "the killed daemon's lock file is left");
        self.instances.extend(now);
        Ok(())
    }

    /// Stops the daemon as an operator would; says all that is left then.
    pub(crate) fn end(self) -> Vec<String> {
        let Self { sandbox, daemon, instances, .. } = self;
        let socket = daemon.socket();
        let asked = Instant::now();
        let status = daemon.stop();
        let mut left = Vec::new();
        if !status.success() {
            left.push(format!("the daemon ended with {status} after {:.1?}", asked.elapsed()));
        }
        within(SOON, || sandbox.processes().is_empty());
        left.extend(sandbox.processes().iter().map(|process| format!("process {process:?}")));
        left.extend(Sandbox::segments(&instances).into_iter().map(|name| format!("segment {name}")));
        left.extend(sandbox.instances().into_iter().map(|id| format!("lock file of instance {id}")));
        if socket.exists() {
            left.push(format!("socket {}", socket.display()));
        }
        left
    }
}

/// Where the programs come from, for the table.
pub(crate) fn build() -> String {
    let folder = programs().sdd.parent().and_then(|folder| folder.file_name()?.to_str().map(str::to_owned));
    folder.unwrap_or_default()
}

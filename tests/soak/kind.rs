//! What goes wrong, by kind.

use nix::sys::signal::Signal;

/// Stages that a worker is started for.
const STAGES: [&str; 3] = ["text", "diffusion", "vae"];
/// How workers misbehave; see `faulty-worker`.
const LIES: [&str; 7] = ["abort", "exit-zero", "lying-shape", "lying-writer", "garbage", "unsealed", "out-of-memory"];
/// What a job survives where it happens once.
const ONCE: [&str; 6] = ["abort", "exit-zero", "garbage", "unsealed", "out-of-memory", "exit-memory"];

/// One kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The worker of a stage gets a signal at a random moment of a job.
    Worker(Signal, &'static str),
    /// All workers are killed while they are idle, and a job is submitted at once.
    Idle,
    /// Every worker of a random stage ends or lies in its task.
    Faulty(&'static str),
    /// One worker of a random stage does, the next one works.
    Once(&'static str),
    /// The client gets SIGINT.
    CtrlC,
    /// Another client cancels the job.
    Cancel,
    /// The client is killed.
    Client,
    /// Several clients at once, and random kills of workers and clients.
    Crowd,
    /// The daemon is killed.
    Daemon,
}

impl Kind {
    /// Every kind, in the order in which they run.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        all.extend(STAGES.map(|stage| Self::Worker(Signal::SIGKILL, stage)));
        all.extend(STAGES.map(|stage| Self::Worker(Signal::SIGSTOP, stage)));
        all.push(Self::Idle);
        all.extend(LIES.map(Self::Faulty));
        all.extend(ONCE.map(Self::Once));
        all.extend([Self::CtrlC, Self::Cancel, Self::Client, Self::Crowd, Self::Daemon]);
        all
    }

    /// Its name in arguments and tables.
    pub(crate) fn name(self) -> String {
        match self {
            Self::Worker(Signal::SIGSTOP, stage) => format!("stop-{stage}"),
            Self::Worker(_, stage) => format!("kill-{stage}"),
            Self::Idle => "kill-idle".into(),
            Self::Faulty(lie) => format!("worker-{lie}"),
            Self::Once(lie) => format!("once-{lie}"),
            Self::CtrlC => "ctrl-c".into(),
            Self::Cancel => "cancel".into(),
            Self::Client => "kill-client".into(),
            Self::Crowd => "crowd".into(),
            Self::Daemon => "kill-daemon".into(),
        }
    }

    /// Whether a job may end this way. That a job succeeds is right where the fault came too late to be felt.
    pub(crate) fn allows(self, outcome: &str) -> bool {
        let allowed: &[&str] = match self {
            Self::Worker(..) | Self::Idle | Self::Once(_) => &["succeeded"],
            Self::Faulty("abort" | "exit-zero") => &["worker_died"],
            Self::Faulty("out-of-memory") => &["out_of_memory"],
            Self::Faulty(_) => &["protocol"],
            Self::CtrlC | Self::Cancel => &["succeeded", "cancelled"],
            Self::Client => &["succeeded", "cancelled"],
            Self::Crowd => &["succeeded", "worker_died", "cancelled"],
            Self::Daemon => &["succeeded", "disconnected"],
        };
        allowed.contains(&outcome)
    }

    /// Whether it may end in a quarantine: three deaths of one stage's workers in a row.
    pub(crate) fn quarantines(self) -> bool {
        match self {
            Self::Faulty(_) | Self::Crowd => true,
            Self::Worker(..)
            | Self::Idle
            | Self::Once(_)
            | Self::CtrlC
            | Self::Cancel
            | Self::Client
            | Self::Daemon => false,
        }
    }

    /// A number that tells its random moments from those of the others.
    pub(crate) fn salt(self) -> u64 {
        // FNV-1a.
        self.name()
            .bytes()
            .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
    }
}

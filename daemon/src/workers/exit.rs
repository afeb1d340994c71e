//! How a worker ended: its exit status, what we had decided about it before, and its last words.

use std::fmt;
use std::time::Duration;

use sd_proto::exit::WorkerExit;

use crate::residency::LeaseKill;

/// Which of the clocks of a worker ran out: one until it says hello, two from then on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// From its start to its hello.
    Hello,
    /// No pulse came: the process is frozen.
    Pulse,
    /// The task's progress stood still, in this phase.
    Progress(Phase),
}

/// What a task's progress clock waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first sign of life of a task.
    Starting,
    /// Bytes of weights.
    Loading,
    /// Blocks.
    Computing,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Computing => "computing",
        })
    }
}

/// Why the daemon ends a worker. Recorded before the signal is sent, so that a death that follows is not mistaken for
/// the kernel's doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KillCause {
    /// One of its clocks ran out after this long.
    Hung {
        /// Which clock.
        clock: Clock,
        /// How long nothing was heard.
        silent: Duration,
    },
    /// Its hello was not right.
    Handshake(String),
    /// It said what cannot be: a message out of order, a header that does not hold.
    Protocol(String),
    /// It did not stop its task within the deadline of a cancellation.
    CancelDeadline(Duration),
    /// The ledger ended it.
    Lease(LeaseKill),
    /// It lost its link and did not exit by itself.
    LinkLost,
    /// It was asked to retire and did not exit in time.
    RetireDeadline(Duration),
    /// It was retired in favour of others (it may still exit with code 0 by itself).
    Retired,
    /// The daemon shuts down.
    Shutdown,
}

impl fmt::Display for KillCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hung { clock: Clock::Pulse, silent } => write!(f, "it was frozen: no pulse for {silent:.1?}"),
            Self::Hung { clock: Clock::Hello, silent } => {
                write!(f, "it hung at its start: it did not say hello within {silent:.1?}")
            }
            Self::Hung { clock: Clock::Progress(phase), silent } => {
                write!(f, "it hung: no progress while {phase} for {silent:.1?}")
            }
            Self::Handshake(why) => write!(f, "its handshake failed: {why}"),
            Self::Protocol(what) => write!(f, "it broke the protocol: {what}"),
            Self::CancelDeadline(after) => write!(f, "it did not stop within {after:.1?} of the cancellation"),
            Self::Lease(kill) => kill.fmt(f),
            Self::LinkLost => f.write_str("its link to the daemon broke"),
            Self::RetireDeadline(after) => write!(f, "it did not exit within {after:.1?} of being retired"),
            Self::Retired => f.write_str("it was retired"),
            Self::Shutdown => f.write_str("the daemon shuts down"),
        }
    }
}

/// What the kernel says about a process that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawStatus {
    /// It exited with this code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
    /// Somebody else reaped it: nothing is known. Does not happen while the daemon is the only parent.
    Unknown,
}

/// A death by its cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitStatus {
    /// Code 0.
    Clean,
    /// The worker did not understand its command line: daemon and worker are of different versions.
    BadArguments,
    /// Model files missing, truncated, or of another architecture.
    BadWeights,
    /// It could not allocate what it needed, and said so.
    OutOfMemory,
    /// The kernel's out-of-memory killer took it.
    OomKilled,
    /// The device vanished or its context is poisoned.
    DeviceLost,
    /// It lost its link to the daemon.
    LostLink,
    /// A panic, or an error without a better name.
    Internal,
    /// The daemon killed it.
    Killed(KillCause),
    /// A signal that we did not send.
    Signal(i32),
    /// A code that is not in the contract.
    UnknownCode(i32),
    /// The status could not be read.
    Unknown,
}

impl ExitStatus {
    /// Classifies a death. `intent` is what the daemon had recorded before it last signalled the process;
    /// `oom_kills_rose` whether the kernel's count of out-of-memory kills rose while the process lived and since it was
    /// last heard.
    pub fn classify(raw: RawStatus, intent: Option<&KillCause>, oom_kills_rose: bool) -> Self {
        match raw {
            RawStatus::Unknown => Self::Unknown,
            RawStatus::Code(code) => match WorkerExit::from_code(code) {
                Some(WorkerExit::Clean) => Self::Clean,
                Some(WorkerExit::BadArguments) => Self::BadArguments,
                Some(WorkerExit::BadWeights) => Self::BadWeights,
                Some(WorkerExit::Internal) => Self::Internal,
                Some(WorkerExit::OutOfMemory) => Self::OutOfMemory,
                Some(WorkerExit::DeviceLost) => Self::DeviceLost,
                Some(WorkerExit::LostLink) => Self::LostLink,
                None => Self::UnknownCode(code),
            },
            RawStatus::Signal(signal) => match intent {
                Some(cause) if matches!(signal, libc::SIGKILL | libc::SIGTERM) => Self::Killed(cause.clone()),
                Some(_) | None if signal == libc::SIGKILL && oom_kills_rose => Self::OomKilled,
                Some(_) | None => Self::Signal(signal),
            },
        }
    }

    /// Whether the worker itself is to blame, so that a model whose workers die this way again and again is not restarted
    /// for ever. Kills by decision do not count.
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Clean | Self::LostLink => false,
            Self::Killed(cause) => match cause {
                KillCause::Hung { .. } | KillCause::Handshake(_) | KillCause::Protocol(_) | KillCause::LinkLost => true,
                KillCause::CancelDeadline(_)
                | KillCause::Lease(_)
                | KillCause::RetireDeadline(_)
                | KillCause::Retired
                | KillCause::Shutdown => false,
            },
            Self::BadArguments
            | Self::BadWeights
            | Self::OutOfMemory
            | Self::OomKilled
            | Self::DeviceLost
            | Self::Internal
            | Self::Signal(_)
            | Self::UnknownCode(_)
            | Self::Unknown => true,
        }
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean => f.write_str("exited cleanly"),
            Self::BadArguments => {
                f.write_str("did not understand its command line: are sdd and sd-worker of one version?")
            }
            Self::BadWeights => f.write_str("could not use the model's files"),
            Self::OutOfMemory => f.write_str("ran out of memory"),
            Self::OomKilled => f.write_str("was killed by the kernel because the host ran out of memory"),
            Self::DeviceLost => f.write_str("lost its device"),
            Self::LostLink => f.write_str("lost its link to the daemon"),
            Self::Internal => f.write_str("failed by a bug"),
            Self::Killed(cause) => write!(f, "was killed by the daemon because {cause}"),
            Self::Signal(number) => {
                let name = nix::sys::signal::Signal::try_from(*number).map(|s| s.as_str()).unwrap_or("unknown signal");
                write!(f, "was ended by signal {number} ({name}), which the daemon did not send")
            }
            Self::UnknownCode(code) => write!(f, "exited with code {code}"),
            Self::Unknown => f.write_str("ended, and its status could not be read"),
        }
    }
}

/// All that is known about a worker's end. Sent once, after the process was reaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitReport {
    /// Its incarnation.
    pub incarnation: u64,
    /// Its process id, free for others by now.
    pub pid: u32,
    /// Why it ended.
    pub status: ExitStatus,
    /// What the daemon had decided before; `None` where the death is not its doing.
    pub intent: Option<KillCause>,
    /// The last lines of its standard error, oldest first.
    pub stderr: Vec<String>,
    /// How long it lived.
    pub lived: Duration,
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {} (pid {}) {}", self.incarnation, self.pid, self.status)?;
        match self.stderr.last() {
            Some(line) => write!(f, "; its last words: {line}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_contract_has_its_class() {
        let class = |code| ExitStatus::classify(RawStatus::Code(code), None, false);
        assert_eq!(class(0), ExitStatus::Clean);
        assert_eq!(class(64), ExitStatus::BadArguments);
        assert_eq!(class(65), ExitStatus::BadWeights);
        assert_eq!(class(70), ExitStatus::Internal);
        assert_eq!(class(101), ExitStatus::Internal, "a Rust panic");
        assert_eq!(class(71), ExitStatus::OutOfMemory);
        assert_eq!(class(72), ExitStatus::DeviceLost);
        assert_eq!(class(73), ExitStatus::LostLink);
        assert_eq!(class(7), ExitStatus::UnknownCode(7));
    }

    #[test]
    fn the_kernels_kill_is_told_from_ours_and_from_a_strangers() {
        let kill = RawStatus::Signal(libc::SIGKILL);
        assert_eq!(ExitStatus::classify(kill, None, true), ExitStatus::OomKilled);
        assert_eq!(ExitStatus::classify(kill, None, false), ExitStatus::Signal(9));
        let ours = ExitStatus::classify(kill, Some(&KillCause::Shutdown), true);
        assert_eq!(ours, ExitStatus::Killed(KillCause::Shutdown));
        let crash = ExitStatus::classify(RawStatus::Signal(libc::SIGSEGV), Some(&KillCause::Shutdown), true);
        assert_eq!(crash, ExitStatus::Signal(libc::SIGSEGV), "a crash during a shutdown is still a crash");
        assert!(!ours.is_failure() && crash.is_failure());
    }
}

//! The words of the ledger: what is asked for, what is held, how it is given back, why not.

use std::fmt;
use std::time::Duration;

use sd_proto::{v1, worker::v1 as link};

use crate::ids::{DeviceId, JobId, Tenant};

/// One life of a worker process; never used twice.
pub type Incarnation = u64;

/// A lease's number, unique in a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A request's number, unique in a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What leased bytes are for. A process has at most one lease of each purpose on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// What a process takes on the device before it holds any weight; charged once.
    Context,
    /// Weights that are resident.
    Weights,
    /// Activations, workspaces and, on the CPU device, mapped segments of one task.
    WorkingSet,
}

impl Purpose {
    /// As it travels to the worker.
    pub fn to_link(self) -> link::LeasePurpose {
        match self {
            Self::Context => link::LeasePurpose::Context,
            Self::Weights => link::LeasePurpose::Weights,
            Self::WorkingSet => link::LeasePurpose::WorkingSet,
        }
    }

    /// As it came from a worker; `None` for the unspecified one.
    pub fn from_link(purpose: link::LeasePurpose) -> Option<Self> {
        match purpose {
            link::LeasePurpose::Unspecified => None,
            link::LeasePurpose::Context => Some(Self::Context),
            link::LeasePurpose::Weights => Some(Self::Weights),
            link::LeasePurpose::WorkingSet => Some(Self::WorkingSet),
        }
    }

    /// As clients see it.
    pub fn to_public(self) -> v1::LeasePurpose {
        match self {
            Self::Context => v1::LeasePurpose::Context,
            Self::Weights => v1::LeasePurpose::Weights,
            Self::WorkingSet => v1::LeasePurpose::WorkingSet,
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Context => "context",
            Self::Weights => "weights",
            Self::WorkingSet => "working set",
        })
    }
}

/// Bytes of one purpose that a task needs its process to hold, in all: what the process holds already counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeasePart {
    /// What for.
    pub purpose: Purpose,
    /// Least bytes with which the task can run.
    pub min: u64,
    /// Bytes beyond which more would not help; at least `min`. What is granted above `min` may be revised away while
    /// the task runs.
    pub want: u64,
}

impl LeasePart {
    /// A part that needs exactly `bytes`.
    pub fn exactly(purpose: Purpose, bytes: u64) -> Self {
        Self { purpose, min: bytes, want: bytes }
    }
}

/// Everything one stage task needs, granted all or nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LeaseVector {
    /// Where.
    pub device: DeviceId,
    /// For which process, whether it runs already or is yet to be started.
    pub incarnation: Incarnation,
    /// Whose job.
    pub tenant: Tenant,
    /// Which job.
    pub job: JobId,
    /// For people: "diffusion of default".
    pub holder: String,
    /// One part a purpose. What the process holds of a purpose that is not named stays as it is.
    pub parts: Vec<LeasePart>,
    /// Bytes of shared memory that the task's segments will take.
    pub shared_memory: u64,
}

/// A lease as granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantedLease {
    /// Its number; the same lease keeps it when it grows.
    pub id: LeaseId,
    /// What for.
    pub purpose: Purpose,
    /// All bytes of it, earlier ones included.
    pub bytes: u64,
}

/// Why a request is not granted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// More than the device may ever lease.
    #[error(
        "{holder} needs {} on device {device} ({breakdown}), but {} may be used there: choose a smaller size, \
         or raise the device's budget",
        Bytes(*need), Bytes(*limit)
    )]
    DoesNotFit {
        /// Where.
        device: DeviceId,
        /// For what.
        holder: String,
        /// Bytes that it needs at least.
        need: u64,
        /// Bytes that leases of the device may hold together.
        limit: u64,
        /// What `need` is made of, for people.
        breakdown: String,
    },
    /// More shared memory than there may ever be.
    #[error(
        "{holder} needs {} of shared memory, but {} may be used: choose a smaller size, or give the host \
         (container: --shm-size) a larger /dev/shm",
        Bytes(*need), Bytes(*limit)
    )]
    SharedMemory {
        /// For what.
        holder: String,
        /// Bytes that it needs.
        need: u64,
        /// Bytes that segments may take together.
        limit: u64,
    },
    /// More than the device may lease beside what is pinned there.
    #[error(
        "{holder} needs {} on device {device}, but {} of {} are pinned there ({pinned}): unpin a model, or choose a \
         smaller size",
        Bytes(*need), Bytes(*kept), Bytes(*limit)
    )]
    Pinned {
        /// Where.
        device: DeviceId,
        /// For what.
        holder: String,
        /// Bytes that it needs at least.
        need: u64,
        /// Bytes that pinned processes keep.
        kept: u64,
        /// Bytes that leases of the device may hold together.
        limit: u64,
        /// The pinned processes.
        pinned: String,
    },
    /// The process it was for is retired, killed or dead: ask for a new one.
    #[error("the process {incarnation} of {holder} is gone: ask for a new one")]
    HolderGone {
        /// Which.
        incarnation: Incarnation,
        /// For what.
        holder: String,
    },
    /// No such device.
    #[error("there is no device {device}: known are {known}")]
    NoDevice {
        /// What was asked for.
        device: DeviceId,
        /// What there is.
        known: String,
    },
    /// The device can lease nothing: it is gone, or this build cannot work there.
    #[error("{holder} cannot use device {device}: {why}")]
    Unusable {
        /// Which.
        device: DeviceId,
        /// For what.
        holder: String,
        /// Why, and what to do.
        why: String,
    },
    /// The parts contradict themselves; a bug of the caller.
    #[error("request of {holder} is not well formed: {what}")]
    Malformed {
        /// For what.
        holder: String,
        /// What is wrong.
        what: String,
    },
    /// The daemon ends.
    #[error("the daemon is shutting down")]
    ShuttingDown,
}

impl Refusal {
    /// Bytes that were needed, where bytes are the reason; else 0.
    pub fn need(&self) -> u64 {
        match self {
            Self::DoesNotFit { need, .. } | Self::SharedMemory { need, .. } | Self::Pinned { need, .. } => *need,
            Self::HolderGone { .. }
            | Self::NoDevice { .. }
            | Self::Unusable { .. }
            | Self::Malformed { .. }
            | Self::ShuttingDown => 0,
        }
    }
}

/// Why the ledger ends a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseKill {
    /// It did not give back what a revision took from it within this time.
    RevisionOverdue(Duration),
    /// It was asked to retire and did not exit within this time.
    RetireOverdue(Duration),
    /// It did not pulse for a lease's term.
    TermExpired(Duration),
    /// It holds more than its leases and did not give it back.
    OverLease {
        /// Bytes measured.
        measured: u64,
        /// Bytes leased.
        leased: u64,
    },
    /// It has no lease: its job withdrew while it was being started.
    NoLease,
}

impl fmt::Display for LeaseKill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RevisionOverdue(after) => write!(f, "it did not give memory back within {after:.1?}"),
            Self::RetireOverdue(after) => write!(f, "it did not exit within {after:.1?} of being retired"),
            Self::TermExpired(term) => write!(f, "it was silent for {term:.1?}, the term of its leases"),
            Self::OverLease { measured, leased } => {
                write!(f, "it holds {} where {} are leased", Bytes(*measured), Bytes(*leased))
            }
            Self::NoLease => f.write_str("it has no lease"),
        }
    }
}

/// How a release was proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Proof {
    /// The process is gone (or was never started).
    Reaped,
    /// The device's own accounting shows it.
    Measured,
    /// The device's free bytes rose by the amount.
    Inferred,
}

impl Proof {
    /// As it travels to the worker.
    pub fn to_link(self) -> link::ProofMethod {
        match self {
            Self::Reaped => link::ProofMethod::Reaped,
            Self::Measured => link::ProofMethod::Measured,
            Self::Inferred => link::ProofMethod::Inferred,
        }
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reaped => "reaped",
            Self::Measured => "measured",
            Self::Inferred => "inferred",
        })
    }
}

/// A number of bytes as people read it: "512 B", "96.0 MiB", "1.50 GiB".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 0..1024 => write!(f, "{bytes} B"),
            bytes @ 1024..1_048_576 => write!(f, "{:.1} KiB", bytes as f64 / 1024.0),
            bytes @ 1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", bytes as f64 / 1_048_576.0),
            bytes => write!(f, "{:.2} GiB", bytes as f64 / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_by_people() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (96 << 20, "96.0 MiB"), (3 << 29, "1.50 GiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn a_refusal_says_need_limit_and_remedy() {
        let refusal = Refusal::DoesNotFit {
            device: DeviceId::cpu(),
            holder: "vae of default".into(),
            need: 3 << 30,
            limit: 1 << 30,
            breakdown: "weights 1.00 GiB".into(),
        };
        let text = refusal.to_string();
        for word in ["vae of default", "3.00 GiB", "1.00 GiB", "cpu", "smaller size", "budget"] {
            assert!(text.contains(word), "{text}");
        }
    }
}

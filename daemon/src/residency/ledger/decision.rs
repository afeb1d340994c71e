//! What the ledger decided, for people and for the record.

use std::fmt;
use std::time::Duration;

use super::super::lease::{Bytes, Incarnation, LeaseKill, Proof, Refusal};
use super::super::policy::Rung;
use crate::clock::Moment;
use crate::ids::{DeviceId, JobId};

/// One decision about bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// When.
    pub at: Moment,
    /// On which device.
    pub device: DeviceId,
    /// For whose sake; `None` where no job caused it.
    pub job: Option<JobId>,
    /// About which process; `None` where it is about the device.
    pub incarnation: Option<Incarnation>,
    /// The process for people: "diffusion of default".
    pub title: String,
    /// What.
    pub kind: DecisionKind,
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecisionKind {
    /// A request waits for bytes.
    WaitsForBytes {
        /// Bytes it needs beyond what its process holds.
        need: u64,
        /// Bytes that are free.
        available: u64,
        /// Processes that are busy and hold the rest.
        busy: Vec<String>,
    },
    /// A request waits for shared memory.
    WaitsForSharedMemory {
        /// Bytes it needs.
        need: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// A request waits for its process to end another task or a revision.
    WaitsForProcess,
    /// A request was granted.
    Granted {
        /// Bytes beyond what its process held.
        bytes: u64,
        /// How long it waited.
        waited: Duration,
    },
    /// A request was refused.
    Refused(Refusal),
    /// A process must give bytes back.
    TakesBack {
        /// How far it goes.
        rung: Rung,
        /// Bytes that this frees.
        bytes: u64,
        /// For whom: a process's title, or what else needs the room.
        wanted_by: String,
    },
    /// Bytes are free again.
    Proven {
        /// How many.
        bytes: u64,
        /// How it is known.
        proof: Proof,
        /// From the return or death to the proof.
        after: Duration,
    },
    /// A process is killed.
    Killed(LeaseKill),
    /// A process holds more than it was granted.
    Overdraft {
        /// Bytes measured.
        measured: u64,
        /// Bytes leased.
        leased: u64,
    },
    /// The device's capacity changed.
    Capacity {
        /// Before.
        from: u64,
        /// Now.
        to: u64,
    },
    /// Bytes stay charged because their release is not proven in time.
    Degraded {
        /// How many.
        bytes: u64,
        /// How long it has been waited for.
        since: Duration,
    },
    /// What was unproven has been proven.
    Recovered,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = &self.title;
        match &self.kind {
            DecisionKind::WaitsForBytes { need, available, busy } => {
                write!(f, "{title} waits for {} on {}, {} are free", Bytes(*need), self.device, Bytes(*available))?;
                match busy.as_slice() {
                    [] => Ok(()),
                    busy => write!(f, "; busy: {}", busy.join(", ")),
                }
            }
            DecisionKind::WaitsForSharedMemory { need, available } => {
                write!(f, "{title} waits for {} of shared memory, {} are free", Bytes(*need), Bytes(*available))
            }
            DecisionKind::WaitsForProcess => write!(f, "{title} waits for its process to end another task"),
            DecisionKind::Granted { bytes, waited } => {
                write!(f, "{title} was granted {} on {} after {waited:.1?}", Bytes(*bytes), self.device)
            }
            DecisionKind::Refused(refusal) => write!(f, "{refusal}"),
            DecisionKind::TakesBack { rung, bytes, wanted_by } => {
                write!(f, "{title} must {rung} ({}) for {wanted_by}", Bytes(*bytes))
            }
            DecisionKind::Proven { bytes, proof, after } => {
                write!(f, "{title} released {} ({proof}, after {after:.1?})", Bytes(*bytes))
            }
            DecisionKind::Killed(cause) => write!(f, "{title} is killed: {cause}"),
            DecisionKind::Overdraft { measured, leased } => {
                write!(f, "{title} holds {} where {} are leased", Bytes(*measured), Bytes(*leased))
            }
            DecisionKind::Capacity { from, to } => {
                write!(f, "capacity of {} went from {} to {}", self.device, Bytes(*from), Bytes(*to))
            }
            DecisionKind::Degraded { bytes, since } => write!(
                f,
                "{} is degraded: the release of {} by {title} is not proven after {since:.1?}, they stay charged",
                self.device,
                Bytes(*bytes)
            ),
            DecisionKind::Recovered => write!(f, "{} is no longer degraded", self.device),
        }
    }
}

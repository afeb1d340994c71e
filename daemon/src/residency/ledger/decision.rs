//! What the ledger decided, for people and for the record.

use std::fmt;
use std::time::Duration;

use sd_proto::v1;

use super::super::lease::{Bytes, Incarnation, LeaseId, LeaseKill, Proof, Refusal};
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
    /// The lease, where one is meant.
    pub lease: Option<LeaseId>,
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
    /// The device is given to other programs.
    Held {
        /// For how long nothing is granted; `None`: until somebody asks for it.
        time: Option<Duration>,
    },
    /// The device is this daemon's again.
    Unheld,
    /// A request waits because the device is given to other programs.
    WaitsForDevice {
        /// How much longer.
        time: Duration,
    },
    /// Bytes stay charged because their release is not proven in time.
    Degraded {
        /// How many.
        bytes: u64,
        /// How long it has been waited for.
        since: Duration,
    },
    /// What was unproven has been proven, or a device that was gone answers again.
    Recovered,
    /// The device is gone.
    DeviceLost {
        /// What it says.
        why: String,
    },
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
            DecisionKind::Held { time: Some(time) } => {
                write!(f, "{} is given to other programs for {time:.1?}", self.device)
            }
            DecisionKind::Held { time: None } => write!(f, "{} is given to other programs", self.device),
            DecisionKind::Unheld => write!(f, "{} is no longer given to other programs", self.device),
            DecisionKind::WaitsForDevice { time } => {
                write!(f, "{title} waits: {} is given to other programs for {time:.1?}", self.device)
            }
            DecisionKind::Degraded { bytes, since } => write!(
                f,
                "{} is degraded: the release of {} by {title} is not proven after {since:.1?}, they stay charged",
                self.device,
                Bytes(*bytes)
            ),
            DecisionKind::Recovered => write!(f, "{} is no longer degraded", self.device),
            DecisionKind::DeviceLost { why } => write!(f, "{} is lost: {why}", self.device),
        }
    }
}

impl From<&Decision> for v1::Decision {
    /// Sequence and time are the journal's to fill in.
    fn from(decision: &Decision) -> Self {
        let (kind, bytes) = match &decision.kind {
            DecisionKind::WaitsForBytes { need, .. } | DecisionKind::WaitsForSharedMemory { need, .. } => {
                (v1::DecisionKind::Waits, *need)
            }
            DecisionKind::WaitsForProcess | DecisionKind::WaitsForDevice { .. } => (v1::DecisionKind::Waits, 0),
            DecisionKind::Granted { bytes, .. } => (v1::DecisionKind::Granted, *bytes),
            DecisionKind::Refused(refusal) => (v1::DecisionKind::Refused, refusal.need()),
            DecisionKind::TakesBack { bytes, .. } => (v1::DecisionKind::TakesBack, *bytes),
            DecisionKind::Proven { bytes, .. } => (v1::DecisionKind::Proven, *bytes),
            DecisionKind::Killed(LeaseKill::OverLease { measured, .. }) => (v1::DecisionKind::Killed, *measured),
            DecisionKind::Killed(
                LeaseKill::RevisionOverdue(_)
                | LeaseKill::RetireOverdue(_)
                | LeaseKill::TermExpired(_)
                | LeaseKill::NoLease,
            ) => (v1::DecisionKind::Killed, 0),
            DecisionKind::Overdraft { measured, .. } => (v1::DecisionKind::Overdraft, *measured),
            DecisionKind::Capacity { to, .. } => (v1::DecisionKind::Capacity, *to),
            DecisionKind::Held { .. } | DecisionKind::Unheld => (v1::DecisionKind::Capacity, 0),
            DecisionKind::Degraded { bytes, .. } => (v1::DecisionKind::Degraded, *bytes),
            DecisionKind::Recovered => (v1::DecisionKind::Recovered, 0),
            DecisionKind::DeviceLost { .. } => (v1::DecisionKind::Degraded, 0),
        };
        let (mut rung, mut wanted_by, mut proven) = (String::new(), String::new(), String::new());
        if let DecisionKind::TakesBack { rung: how_far, wanted_by: whom, .. } = &decision.kind {
            (rung, wanted_by) = (how_far.to_string(), whom.clone());
        }
        if let DecisionKind::WaitsForBytes { busy, .. } = &decision.kind {
            wanted_by = busy.join(", ");
        }
        if let DecisionKind::Proven { proof, .. } = &decision.kind {
            proven = proof.to_string();
        }
        Self {
            kind: kind as i32,
            device: decision.device.to_string(),
            job_id: decision.job.as_ref().map(ToString::to_string).unwrap_or_default(),
            incarnation: decision.incarnation.unwrap_or(0),
            holder: decision.title.clone(),
            lease_id: decision.lease.map_or(0, |lease| lease.0),
            bytes,
            rung,
            proof: proven,
            wanted_by,
            text: decision.to_string(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_travels_with_all_it_says() {
        let decision = |kind| Decision {
            at: Moment::ZERO,
            device: DeviceId::cpu(),
            job: Some("j".into()),
            incarnation: Some(3),
            title: "vae of default".into(),
            lease: Some(LeaseId(7)),
            kind,
        };
        let taken = DecisionKind::TakesBack { rung: Rung::Park, bytes: 1 << 20, wanted_by: "text of other".into() };
        let sent = v1::Decision::from(&decision(taken));
        assert_eq!((sent.kind(), sent.bytes, sent.rung.as_str()), (v1::DecisionKind::TakesBack, 1 << 20, "park"));
        assert_eq!((sent.device.as_str(), sent.job_id.as_str(), sent.incarnation, sent.lease_id), ("cpu", "j", 3, 7));
        assert_eq!(
            (sent.holder.as_str(), sent.wanted_by.as_str(), sent.text.as_str()),
            ("vae of default", "text of other", "vae of default must park (1.0 MiB) for text of other")
        );
        let proven = DecisionKind::Proven { bytes: 5, proof: Proof::Measured, after: Duration::from_millis(1) };
        let sent = v1::Decision::from(&decision(proven));
        assert_eq!((sent.kind(), sent.bytes, sent.proof.as_str()), (v1::DecisionKind::Proven, 5, "measured"));
        let refusal = Refusal::SharedMemory { holder: "x".into(), need: 9, limit: 1 };
        let sent = v1::Decision::from(&decision(DecisionKind::Refused(refusal)));
        assert_eq!((sent.kind(), sent.bytes), (v1::DecisionKind::Refused, 9));
    }
}

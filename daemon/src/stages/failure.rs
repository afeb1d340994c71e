//! What went wrong in a stage, in the words of the public interface.

use sd_proto::v1::{Failure, FailureReason, Stage};
use sd_proto::worker::v1::TaskError;

use super::runner::Stopped;
use crate::arena::ArenaError;
use crate::residency::{LeaseKill, Refusal};
use crate::workers::{ExitReport, ExitStatus, KillCause, RunError, StartError};

/// A failure without a worker's last words.
pub fn failure(reason: FailureReason, stage: Stage, message: impl Into<String>) -> Failure {
    Failure { reason: reason as i32, stage: stage as i32, message: message.into(), stderr: Vec::new() }
}

/// A lease was refused.
pub fn of_refusal(stage: Stage, refusal: &Refusal) -> Failure {
    let reason = match refusal {
        Refusal::DoesNotFit { .. } | Refusal::SharedMemory { .. } | Refusal::Pinned { .. } => FailureReason::DoesNotFit,
        Refusal::ShuttingDown => FailureReason::Shutdown,
        Refusal::Unusable { .. } => FailureReason::DoesNotFit,
        Refusal::HolderGone { .. } | Refusal::NoDevice { .. } | Refusal::Malformed { .. } => FailureReason::Internal,
    };
    failure(reason, stage, refusal.to_string())
}

/// A segment could not be had, or a worker lied about one.
pub fn of_arena(stage: Stage, error: &ArenaError) -> Failure {
    let reason = match error {
        ArenaError::Limit { .. } | ArenaError::Full { .. } => FailureReason::DoesNotFit,
        ArenaError::Identity { .. } | ArenaError::Segment { .. } => FailureReason::Protocol,
        ArenaError::System { .. } | ArenaError::Write { .. } => FailureReason::Internal,
    };
    failure(reason, stage, error.to_string())
}

/// Why an attempt at a stage run has no output, by what follows from it.
#[derive(Debug, Clone, PartialEq)]
pub enum Lost {
    /// The job was to stop.
    Asked,
    /// Another attempt would end in the same way.
    Final(Failure),
    /// The worker did not survive it; another one may.
    Worker {
        /// What the job fails with where it is not run again.
        failure: Failure,
        /// The worker is to blame, and no decision of the daemon's.
        blamed: bool,
    },
    /// There was not enough memory for it.
    Memory(Failure),
}

impl From<Lost> for Stopped {
    /// For whoever makes one attempt alone.
    fn from(lost: Lost) -> Self {
        match lost {
            Lost::Asked => Self::Asked,
            Lost::Final(failure) | Lost::Worker { failure, .. } | Lost::Memory(failure) => Self::Failed(failure),
        }
    }
}

/// A worker did not start.
pub fn of_start(stage: Stage, error: &StartError) -> Lost {
    match error {
        StartError::ShuttingDown => Lost::Final(failure(FailureReason::Shutdown, stage, error.to_string())),
        StartError::Spawn { .. } => Lost::Final(failure(FailureReason::Internal, stage, error.to_string())),
        StartError::Died(report) => of_death(stage, report),
    }
}

/// A worker died.
pub fn of_death(stage: Stage, report: &ExitReport) -> Lost {
    let told = |reason| Failure { stderr: report.stderr.clone(), ..failure(reason, stage, report.to_string()) };
    let blamed = |reason| Lost::Worker { failure: told(reason), blamed: true };
    let decided = |reason| Lost::Worker { failure: told(reason), blamed: false };
    match &report.status {
        ExitStatus::BadWeights => Lost::Final(told(FailureReason::Model)),
        // Daemon and worker are of different versions: so is the next one.
        ExitStatus::BadArguments => Lost::Final(told(FailureReason::WorkerDied)),
        ExitStatus::OutOfMemory | ExitStatus::OomKilled => Lost::Memory(told(FailureReason::OutOfMemory)),
        ExitStatus::Killed(cause) => match cause {
            KillCause::Hung { .. } => blamed(FailureReason::WorkerHung),
            KillCause::Protocol(_) => blamed(FailureReason::Protocol),
            KillCause::Handshake(_) | KillCause::LinkLost => blamed(FailureReason::WorkerDied),
            KillCause::Shutdown => Lost::Final(told(FailureReason::Shutdown)),
            KillCause::Lease(LeaseKill::OverLease { .. }) => Lost::Memory(told(FailureReason::OutOfMemory)),
            KillCause::Lease(LeaseKill::TermExpired(_)) => blamed(FailureReason::WorkerHung),
            KillCause::Lease(LeaseKill::RevisionOverdue(_) | LeaseKill::RetireOverdue(_) | LeaseKill::NoLease)
            | KillCause::CancelDeadline(_)
            | KillCause::RetireDeadline(_)
            | KillCause::Retired => decided(FailureReason::WorkerDied),
        },
        ExitStatus::Clean
        | ExitStatus::DeviceLost
        | ExitStatus::LostLink
        | ExitStatus::Internal
        | ExitStatus::Signal(_)
        | ExitStatus::UnknownCode(_)
        | ExitStatus::Unknown => blamed(FailureReason::WorkerDied),
    }
}

/// A task did not end well. `asked`: its job was told to stop meanwhile.
pub fn of_run(stage: Stage, error: &RunError, asked: bool) -> Lost {
    let failed = |reason, message: &str| Lost::Final(failure(reason, stage, message));
    match error {
        // However the worker came to its end: the job wanted it.
        _ if asked => Lost::Asked,
        RunError::Failed { error, message } => match error {
            TaskError::Cancelled => failed(FailureReason::Internal, "the worker stopped a task that nobody cancelled"),
            TaskError::BadRequest => failed(FailureReason::InvalidRequest, message),
            TaskError::BadModel | TaskError::NonFinite => failed(FailureReason::Model, message),
            TaskError::BadSegment => failed(FailureReason::Protocol, message),
            TaskError::OutOfMemory => Lost::Memory(failure(FailureReason::OutOfMemory, stage, message)),
            TaskError::Unspecified | TaskError::Internal => failed(FailureReason::Internal, message),
        },
        RunError::Died(report) | RunError::Hung(report) | RunError::Protocol(report) => of_death(stage, report),
        RunError::Gone => failed(FailureReason::WorkerDied, "the worker went away before the task began"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    fn report(status: ExitStatus) -> Arc<ExitReport> {
        let stderr = vec!["first".to_owned(), "last words".to_owned()];
        Arc::new(ExitReport { incarnation: 3, pid: 4, status, intent: None, stderr, lived: Duration::ZERO })
    }

    #[test]
    fn a_death_is_told_by_its_cause_with_the_last_words() {
        let over = LeaseKill::NoLease;
        for (status, reason, fate) in [
            (ExitStatus::Signal(9), FailureReason::WorkerDied, "blamed"),
            (ExitStatus::Clean, FailureReason::WorkerDied, "blamed"),
            (ExitStatus::OomKilled, FailureReason::OutOfMemory, "memory"),
            (ExitStatus::BadWeights, FailureReason::Model, "final"),
            (ExitStatus::Killed(KillCause::Protocol("lie".into())), FailureReason::Protocol, "blamed"),
            (ExitStatus::Killed(KillCause::Shutdown), FailureReason::Shutdown, "final"),
            (ExitStatus::Killed(KillCause::Lease(over)), FailureReason::WorkerDied, "decided"),
        ] {
            let lost = of_run(Stage::Denoise, &RunError::Died(report(status.clone())), false);
            let (failure, found) = match lost {
                Lost::Worker { failure, blamed } => (failure, if blamed { "blamed" } else { "decided" }),
                Lost::Memory(failure) => (failure, "memory"),
                Lost::Final(failure) => (failure, "final"),
                Lost::Asked => panic!("nobody asked"),
            };
            assert_eq!((failure.reason(), found), (reason, fate), "{status}");
            assert_eq!(
                (failure.stage(), failure.stderr.last().map(String::as_str)),
                (Stage::Denoise, Some("last words"))
            );
        }
    }

    #[test]
    fn whatever_ends_a_task_of_a_job_that_was_to_stop_is_a_stop() {
        for error in [
            RunError::Gone,
            RunError::Died(report(ExitStatus::Killed(KillCause::CancelDeadline(Duration::from_secs(2))))),
            RunError::Died(report(ExitStatus::Signal(9))),
            RunError::Failed { error: TaskError::Cancelled, message: "cancelled".into() },
        ] {
            assert_eq!(of_run(Stage::Decode, &error, true), Lost::Asked);
            assert_ne!(of_run(Stage::Decode, &error, false), Lost::Asked);
        }
    }

    #[test]
    fn a_workers_own_failures_keep_their_message() {
        let error = RunError::Failed { error: TaskError::NonFinite, message: "unet.conv_in.weight holds NaN".into() };
        let Lost::Final(failure) = of_run(Stage::Denoise, &error, false) else { panic!("failed") };
        assert_eq!(
            (failure.reason(), failure.message.as_str()),
            (FailureReason::Model, "unet.conv_in.weight holds NaN")
        );
        let error = RunError::Failed { error: TaskError::OutOfMemory, message: "needs more".into() };
        assert!(matches!(of_run(Stage::Decode, &error, false), Lost::Memory(_)));
    }
}

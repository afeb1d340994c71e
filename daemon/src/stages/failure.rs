//! What went wrong in a stage, in the words of the public interface.

use sd_proto::v1::{Failure, FailureReason, Stage};
use sd_proto::worker::v1::TaskError;

use crate::arena::ArenaError;
use crate::residency::{LeaseKill, Refusal};
use crate::workers::{ExitReport, ExitStatus, KillCause, RunError, StartError};

use super::runner::Stopped;

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

/// A worker did not start.
pub fn of_start(stage: Stage, error: &StartError) -> Failure {
    match error {
        StartError::ShuttingDown => failure(FailureReason::Shutdown, stage, error.to_string()),
        StartError::Spawn { .. } => failure(FailureReason::Internal, stage, error.to_string()),
        StartError::Died(report) => of_death(stage, report),
    }
}

/// A worker died.
pub fn of_death(stage: Stage, report: &ExitReport) -> Failure {
    let reason = match &report.status {
        ExitStatus::BadWeights => FailureReason::Model,
        ExitStatus::OutOfMemory | ExitStatus::OomKilled => FailureReason::OutOfMemory,
        ExitStatus::Killed(cause) => match cause {
            KillCause::Hung { .. } => FailureReason::WorkerHung,
            KillCause::Protocol(_) => FailureReason::Protocol,
            KillCause::Shutdown => FailureReason::Shutdown,
            KillCause::Lease(LeaseKill::OverLease { .. }) => FailureReason::OutOfMemory,
            KillCause::Lease(LeaseKill::TermExpired(_)) => FailureReason::WorkerHung,
            KillCause::Lease(LeaseKill::RevisionOverdue(_) | LeaseKill::RetireOverdue(_) | LeaseKill::NoLease)
            | KillCause::Handshake(_)
            | KillCause::CancelDeadline(_)
            | KillCause::LinkLost
            | KillCause::RetireDeadline(_)
            | KillCause::Retired => FailureReason::WorkerDied,
        },
        ExitStatus::Clean
        | ExitStatus::BadArguments
        | ExitStatus::DeviceLost
        | ExitStatus::LostLink
        | ExitStatus::Internal
        | ExitStatus::Signal(_)
        | ExitStatus::UnknownCode(_)
        | ExitStatus::Unknown => FailureReason::WorkerDied,
    };
    Failure { stderr: report.stderr.clone(), ..failure(reason, stage, report.to_string()) }
}

/// A task did not end well. `asked`: its job was told to stop meanwhile.
pub fn of_run(stage: Stage, error: &RunError, asked: bool) -> Stopped {
    let failed = |reason, message: &str| Stopped::Failed(failure(reason, stage, message));
    match error {
        // However the worker came to its end: the job wanted it.
        _ if asked => Stopped::Asked,
        RunError::Failed { error, message } => match error {
            TaskError::Cancelled => failed(FailureReason::Internal, "the worker stopped a task that nobody cancelled"),
            TaskError::BadRequest => failed(FailureReason::InvalidRequest, message),
            TaskError::BadModel | TaskError::NonFinite => failed(FailureReason::Model, message),
            TaskError::BadSegment => failed(FailureReason::Protocol, message),
            TaskError::OutOfMemory => failed(FailureReason::OutOfMemory, message),
            TaskError::Unspecified | TaskError::Internal => failed(FailureReason::Internal, message),
        },
        RunError::Died(report) | RunError::Hung(report) | RunError::Protocol(report) => {
            Stopped::Failed(of_death(stage, report))
        }
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

    fn reason(stopped: &Stopped) -> FailureReason {
        match stopped {
            Stopped::Failed(failure) => failure.reason(),
            Stopped::Asked => FailureReason::Unspecified,
        }
    }

    #[test]
    fn a_death_is_told_by_its_cause_with_the_last_words() {
        for (status, expected) in [
            (ExitStatus::Signal(9), FailureReason::WorkerDied),
            (ExitStatus::OomKilled, FailureReason::OutOfMemory),
            (ExitStatus::BadWeights, FailureReason::Model),
            (ExitStatus::Killed(KillCause::Protocol("lie".into())), FailureReason::Protocol),
            (ExitStatus::Killed(KillCause::Shutdown), FailureReason::Shutdown),
            (ExitStatus::Killed(KillCause::Lease(LeaseKill::NoLease)), FailureReason::WorkerDied),
        ] {
            let stopped = of_run(Stage::Denoise, &RunError::Died(report(status.clone())), false);
            assert_eq!(reason(&stopped), expected, "{status}");
            let Stopped::Failed(failure) = stopped else { panic!("failed") };
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
            RunError::Failed { error: TaskError::Cancelled, message: "cancelled".into() },
        ] {
            assert_eq!(of_run(Stage::Decode, &error, true), Stopped::Asked);
            assert_ne!(of_run(Stage::Decode, &error, false), Stopped::Asked);
        }
    }

    #[test]
    fn a_workers_own_failures_keep_their_message() {
        let error = RunError::Failed { error: TaskError::NonFinite, message: "unet.conv_in.weight holds NaN".into() };
        let Stopped::Failed(failure) = of_run(Stage::Denoise, &error, false) else { panic!("failed") };
        assert_eq!(
            (failure.reason(), failure.message.as_str()),
            (FailureReason::Model, "unet.conv_in.weight holds NaN")
        );
    }
}

//! What goes wrong: its text, its exit code, and the one place where it is printed.

use std::io::{self, Write as _};

use sd_client::proto::{Failure, FailureReason, Stage};
use sd_client::{CallError, ConnectError, OpenError, PlacesError, Refusal, StartError, names};
use sd_proto::exit::ProgramExit;
use serde_json::{Value, json};
use tonic::Code;

use super::human;

/// Something that ends the program.
#[derive(Debug)]
pub(super) struct Trouble {
    /// The exit code.
    pub(super) exit: ProgramExit,
    /// What happened, lower case, with the remedy; may have several lines.
    message: String,
    /// A word for programs.
    reason: &'static str,
    /// Already told as an event of its own, so that `--json` does not say it twice.
    told: bool,
}

impl Trouble {
    fn new(exit: ProgramExit, reason: &'static str, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), reason, told: false }
    }

    /// The command line does not make sense.
    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self::new(ProgramExit::Usage, "usage", message)
    }

    /// An input file is bad.
    pub(super) fn data(message: impl Into<String>) -> Self {
        Self::new(ProgramExit::Data, "input", message)
    }

    /// What was named does not exist.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ProgramExit::Unavailable, "unavailable", message)
    }

    /// Output cannot be written.
    pub(super) fn output(message: impl Into<String>) -> Self {
        Self::new(ProgramExit::Output, "output", message)
    }

    /// A bug, or a system that does not do what it must.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(ProgramExit::Internal, "internal", message)
    }

    /// A job that was cancelled by somebody else.
    pub(super) fn cancelled_elsewhere(reason: &str) -> Self {
        let mut trouble = Self::new(ProgramExit::Failure, "cancelled", "the job was cancelled");
        if !reason.is_empty() {
            trouble.message = format!("the job was cancelled: {reason}");
        }
        trouble.told = true;
        trouble
    }

    /// Adds lines that explain it, such as the last ones of a log.
    pub(super) fn add_lines(&mut self, title: &str, lines: &[String]) {
        if !lines.is_empty() {
            self.message.push_str(&format!("\n{title}:"));
            for line in lines {
                self.message.push_str("\n  ");
                self.message.push_str(line);
            }
        }
    }

    /// Prints it on stderr (and as an event on stdout with `json`) and gives the exit code.
    pub(super) fn print(&self, json: bool) -> ProgramExit {
        if json && !self.told {
            let event = self.as_json();
            let _ = writeln!(io::stdout().lock(), "{event}");
        }
        // A closed stderr is no reason to panic.
        let _ = writeln!(io::stderr().lock(), "sdctl: {}", human::lines(&self.message));
        self.exit
    }

    fn as_json(&self) -> Value {
        json!({ "event": "error", "reason": self.reason, "message": self.message, "exit": self.exit.code() })
    }
}

impl From<PlacesError> for Trouble {
    fn from(error: PlacesError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<OpenError> for Trouble {
    fn from(error: OpenError) -> Self {
        let message = error.to_string();
        match error {
            OpenError::Connect { error, .. } => match error {
                ConnectError::Forbidden { .. } | ConnectError::Untrusted { .. } => {
                    Self::new(ProgramExit::Permission, "permission", message)
                }
                ConnectError::Absent { .. } | ConnectError::Silent { .. } | ConnectError::Foreign { .. } => {
                    Self::unavailable(message)
                }
            },
            OpenError::Call(error) => error.into(),
            OpenError::NoDaemon { .. } => Self::unavailable(message),
            OpenError::Start(error) => match (&error, error.exit_code()) {
                // The daemon's configuration is wrong, and its lines say how.
                (StartError::Ended { .. }, Some(64)) => Self::usage(message),
                _ => Self::unavailable(message),
            },
            OpenError::Held { .. } => Self::new(ProgramExit::Held, "held", message),
            OpenError::Locks(_) => Self::internal(message),
        }
    }
}

impl From<CallError> for Trouble {
    fn from(error: CallError) -> Self {
        let message = error.to_string();
        match error {
            CallError::Refused(refusal) => refused(&refusal, message),
            CallError::Lost { .. } | CallError::Silent { .. } | CallError::Incomplete { .. } => {
                Self::new(ProgramExit::Unavailable, "daemon_gone", message)
            }
            CallError::Malformed { .. } => Self::internal(message),
        }
    }
}

fn refused(refusal: &Refusal, message: String) -> Trouble {
    // The daemon's own word is finer than the code.
    let reason = refusal.reason.as_deref().map(str::to_lowercase);
    let named = reason.as_deref().map(|reason| reason.strip_prefix("failure_reason_").unwrap_or(reason));
    let by_name = ALL_REASONS.into_iter().find(|reason| named == Some(names::failure_reason(*reason)));
    if let Some(reason @ (FailureReason::Model | FailureReason::DoesNotFit | FailureReason::OutOfMemory)) = by_name {
        return Trouble::new(exit_of(reason), names::failure_reason(reason), message);
    }
    let file = |field: &str| ["init_image", "mask"].iter().any(|name| field.ends_with(name));
    match refusal.code {
        Code::InvalidArgument | Code::OutOfRange if refusal.violations.iter().any(|v| file(&v.field)) => {
            Trouble::data(message)
        }
        Code::InvalidArgument | Code::OutOfRange => Trouble::new(ProgramExit::Usage, "invalid_request", message),
        Code::NotFound => Trouble::new(ProgramExit::Unavailable, "not_found", message),
        Code::PermissionDenied | Code::Unauthenticated => Trouble::new(ProgramExit::Permission, "permission", message),
        Code::ResourceExhausted => Trouble::new(ProgramExit::Capacity, "capacity", message),
        Code::Unavailable | Code::DeadlineExceeded => Trouble::unavailable(message),
        Code::FailedPrecondition | Code::Aborted | Code::AlreadyExists | Code::Cancelled => {
            Trouble::new(ProgramExit::Failure, "refused", message)
        }
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss | Code::Unimplemented => Trouble::internal(message),
    }
}

const ALL_REASONS: [FailureReason; 9] = [
    FailureReason::InvalidRequest,
    FailureReason::Model,
    FailureReason::DoesNotFit,
    FailureReason::OutOfMemory,
    FailureReason::WorkerDied,
    FailureReason::WorkerHung,
    FailureReason::Protocol,
    FailureReason::Shutdown,
    FailureReason::Internal,
];

/// The exit code for a job's failure.
fn exit_of(reason: FailureReason) -> ProgramExit {
    match reason {
        FailureReason::InvalidRequest => ProgramExit::Usage,
        FailureReason::Model => ProgramExit::Data,
        FailureReason::DoesNotFit | FailureReason::OutOfMemory => ProgramExit::Capacity,
        FailureReason::Unspecified
        | FailureReason::WorkerDied
        | FailureReason::WorkerHung
        | FailureReason::Protocol => ProgramExit::Failure,
        FailureReason::Shutdown => ProgramExit::Unavailable,
        FailureReason::Internal => ProgramExit::Internal,
    }
}

impl From<&Failure> for Trouble {
    fn from(failure: &Failure) -> Self {
        let reason = failure.reason();
        let stage = match failure.stage() {
            Stage::Unspecified => String::new(),
            stage => format!(" in stage {}", names::stage(stage)),
        };
        let message = match failure.message.is_empty() {
            true => format!("the job failed{stage}: {}", names::failure_reason(reason).replace('_', " ")),
            false => format!("the job failed{stage}: {}", failure.message),
        };
        let mut trouble = Self::new(exit_of(reason), names::failure_reason(reason), message);
        trouble.told = true;
        // Not again where the message quotes them already.
        let new: Vec<String> = failure.stderr.iter().filter(|line| !failure.message.contains(*line)).cloned().collect();
        trouble.add_lines("last lines of the worker", &new);
        trouble
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_client::Violation;

    fn refusal(code: Code, field: Option<&str>, reason: Option<&str>) -> ProgramExit {
        let violations =
            field.map(|field| Violation { field: field.into(), description: "bad".into() }).into_iter().collect();
        let reason = reason.map(str::to_owned);
        let refusal = Refusal { code, message: "no".into(), violations, reason, facts: Default::default() };
        Trouble::from(CallError::Refused(refusal)).exit
    }

    #[test]
    fn refusals_have_their_exit_codes() {
        assert_eq!(refusal(Code::InvalidArgument, Some("width"), None), ProgramExit::Usage);
        assert_eq!(refusal(Code::InvalidArgument, Some("image.init_image"), None), ProgramExit::Data);
        assert_eq!(refusal(Code::FailedPrecondition, None, Some("FAILURE_REASON_MODEL")), ProgramExit::Data);
        assert_eq!(refusal(Code::FailedPrecondition, None, Some("DOES_NOT_FIT")), ProgramExit::Capacity);
        assert_eq!(refusal(Code::NotFound, Some("model"), None), ProgramExit::Unavailable);
        assert_eq!(refusal(Code::PermissionDenied, None, None), ProgramExit::Permission);
        assert_eq!(refusal(Code::Internal, None, None), ProgramExit::Internal);
    }

    #[test]
    fn a_failed_job_names_stage_cause_and_the_workers_last_lines_once() {
        let failure = Failure {
            reason: FailureReason::WorkerDied.into(),
            stage: Stage::Denoise.into(),
            message: "worker 7 was killed by SIGSEGV".into(),
            stderr: vec!["one".into(), "worker 7 was killed".into()],
        };
        let trouble = Trouble::from(&failure);
        assert_eq!(trouble.exit, ProgramExit::Failure);
        assert_eq!(
            trouble.message,
            "the job failed in stage denoise: worker 7 was killed by SIGSEGV\nlast lines of the worker:\n  one"
        );
    }
}

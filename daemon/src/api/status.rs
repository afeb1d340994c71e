//! The one table from errors to gRPC codes.
//!
//! | error | code | `ErrorInfo.reason` |
//! |---|---|---|
//! | field violations | `INVALID_ARGUMENT` + `BadRequest` | `INVALID_REQUEST` |
//! | too large for the budget | `INVALID_ARGUMENT` + `BadRequest` | `DOES_NOT_FIT` |
//! | unknown model | `NOT_FOUND` | `UNKNOWN_MODEL` |
//! | model's files cannot be read or used | `FAILED_PRECONDITION` | `MODEL` |
//! | inspection or check itself failed | `INTERNAL` | `INTERNAL` |
//! | a path from somebody else | `PERMISSION_DENIED` | `PATH_NOT_ALLOWED` |
//! | not the operator | `PERMISSION_DENIED` | `OPERATOR_ONLY` |
//! | no such job, or another tenant's | `NOT_FOUND` | `UNKNOWN_JOB` |
//! | queue full | `RESOURCE_EXHAUSTED` + `RetryInfo` | `QUEUE_FULL` |
//! | a job that is to be kept cannot be recorded | `RESOURCE_EXHAUSTED` | `NOT_RECORDED` |
//! | draining | `UNAVAILABLE` | `DRAINING` |
//! | no such device | `NOT_FOUND` | `UNKNOWN_DEVICE` |
//! | an operator's load fails | `RESOURCE_EXHAUSTED` for memory, `FAILED_PRECONDITION` for the model and its workers, `UNAVAILABLE` at the end, else `INTERNAL` | the failure's reason |

use std::collections::HashMap;
use std::time::Duration;

use sd_proto::v1::{Failure, FailureReason};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::ids::DeviceId;
use crate::jobs::admission::{AdmissionError, DoesNotFit, Violation};
use crate::jobs::{NotFound, SubmitError};
use crate::models::ModelError;

/// Who says so, in `ErrorInfo.domain`.
const DOMAIN: &str = "sdd";
/// When a full queue is worth another try.
const RETRY: Duration = Duration::from_secs(5);

fn details(reason: &str, facts: &[(&str, String)]) -> ErrorDetails {
    let facts: HashMap<String, String> = facts.iter().map(|(name, fact)| ((*name).into(), fact.clone())).collect();
    ErrorDetails::with_error_info(reason, DOMAIN, facts)
}

/// The status of an error of admission.
pub fn of_admission(error: &AdmissionError) -> Status {
    match error {
        AdmissionError::Invalid(violations) => invalid(error.to_string(), violations),
        AdmissionError::Model(model) => of_model(model),
        AdmissionError::PathNotAllowed(_) => {
            Status::with_error_details(Code::PermissionDenied, error.to_string(), details("PATH_NOT_ALLOWED", &[]))
        }
        AdmissionError::DoesNotFit(numbers) => does_not_fit(numbers),
        AdmissionError::Broken(_) => {
            Status::with_error_details(Code::Internal, error.to_string(), details("INTERNAL", &[]))
        }
    }
}

fn invalid(message: String, violations: &[Violation]) -> Status {
    let mut details = details("INVALID_REQUEST", &[]);
    for violation in violations {
        details.add_bad_request_violation(violation.field, violation.description.clone());
    }
    Status::with_error_details(Code::InvalidArgument, message, details)
}

fn does_not_fit(numbers: &DoesNotFit) -> Status {
    let mut facts = vec![
        ("need_bytes", numbers.need.to_string()),
        ("limit_bytes", numbers.limit.to_string()),
        ("device", numbers.device.clone()),
        ("stage", numbers.stage.as_str_name().to_owned()),
    ];
    if let Some((width, height)) = numbers.largest {
        facts.extend([("largest_width", width.to_string()), ("largest_height", height.to_string())]);
    }
    if let Some(mode) = numbers.fitting {
        facts.push(("fitting_mode", mode.to_string()));
    }
    let mut details = details("DOES_NOT_FIT", &facts);
    for field in ["width", "height"] {
        details.add_bad_request_violation(field, numbers.to_string());
    }
    Status::with_error_details(Code::InvalidArgument, numbers.to_string(), details)
}

/// The status of an error about a model.
pub fn of_model(error: &ModelError) -> Status {
    let (code, details) = match error {
        ModelError::Unknown { name, known } => {
            (Code::NotFound, details("UNKNOWN_MODEL", &[("model", name.clone()), ("known", known.join(","))]))
        }
        ModelError::RelativePath(path) => {
            let mut details = details("INVALID_REQUEST", &[("model", path.display().to_string())]);
            details.add_bad_request_violation("model", error.to_string());
            (Code::InvalidArgument, details)
        }
        ModelError::Unreadable { name, .. } | ModelError::Unusable { name, .. } => {
            (Code::FailedPrecondition, details("MODEL", &[("model", name.clone())]))
        }
        ModelError::Inspection { name, .. } => (Code::Internal, details("INTERNAL", &[("model", name.clone())])),
        ModelError::Embedded(_) => (Code::FailedPrecondition, details("MODEL", &[])),
    };
    Status::with_error_details(code, error.to_string(), details)
}

/// The status of a job that is not taken.
pub fn of_submit(error: &SubmitError) -> Status {
    match error {
        SubmitError::Full(full) => {
            let mut details = details("QUEUE_FULL", &[]);
            details.set_retry_info(Some(RETRY));
            Status::with_error_details(Code::ResourceExhausted, full.to_string(), details)
        }
        SubmitError::NotRecorded(_) => {
            Status::with_error_details(Code::ResourceExhausted, error.to_string(), details("NOT_RECORDED", &[]))
        }
        SubmitError::Draining => {
            Status::with_error_details(Code::Unavailable, error.to_string(), details("DRAINING", &[]))
        }
    }
}

/// The status of a job that does not exist for its caller.
pub fn of_not_found(error: &NotFound) -> Status {
    let details = details("UNKNOWN_JOB", &[("job_id", error.0.to_string())]);
    Status::with_error_details(Code::NotFound, error.to_string(), details)
}

/// The status of an operator's call by somebody else.
pub fn operator_only() -> Status {
    let message = "only the daemon's own user and root may do this, over its unix socket";
    Status::with_error_details(Code::PermissionDenied, message, details("OPERATOR_ONLY", &[]))
}

/// The status of a call with a field that cannot be.
pub fn bad_field(field: &'static str, description: String) -> Status {
    invalid(format!("{field}: {description}"), &[Violation { field, description }])
}

/// The status of a device that does not exist.
pub fn unknown_device(device: &str, known: &[DeviceId]) -> Status {
    let known: Vec<&str> = known.iter().map(DeviceId::as_str).collect();
    let message = format!("there is no device {device:?}: there are {}", known.join(", "));
    Status::with_error_details(Code::NotFound, message, details("UNKNOWN_DEVICE", &[("device", device.to_owned())]))
}

/// The status of a stage that could not be loaded for an operator.
pub fn of_failure(failure: &Failure) -> Status {
    let reason = failure.reason();
    let code = match reason {
        FailureReason::DoesNotFit | FailureReason::OutOfMemory => Code::ResourceExhausted,
        FailureReason::Model | FailureReason::WorkerDied | FailureReason::WorkerHung | FailureReason::Protocol => {
            Code::FailedPrecondition
        }
        FailureReason::Shutdown => Code::Unavailable,
        FailureReason::Unspecified | FailureReason::InvalidRequest | FailureReason::Internal => Code::Internal,
    };
    let lines = failure.stderr.iter().filter(|line| !failure.message.contains(*line));
    let message = lines.fold(failure.message.clone(), |text, line| format!("{text}\n  {line}"));
    let name = reason.as_str_name().trim_start_matches("FAILURE_REASON_");
    Status::with_error_details(code, message, details(name, &[("stage", failure.stage().as_str_name().to_owned())]))
}

//! What can go wrong in a call, for programs to match.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use sd_proto::endpoint::Endpoint;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// One field of a request that the daemon refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Name of the field in `ImageRequest`, such as `width` or `image.width`.
    pub field: String,
    /// What is wrong with it, the limit and the remedy.
    pub description: String,
}

/// The daemon's own answer that it does not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The class of the error.
    pub code: Code,
    /// For people.
    pub message: String,
    /// The request's fields at fault.
    pub violations: Vec<Violation>,
    /// A stable word for programs (`google.rpc.ErrorInfo.reason`), where the daemon gives one.
    pub reason: Option<String>,
    /// Further facts by name, such as numbers of bytes.
    pub facts: BTreeMap<String, String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.message.is_empty() { self.code.description() } else { &self.message })?;
        // The message usually says it already; then once is enough.
        for violation in self.violations.iter().filter(|v| !self.message.contains(&v.description)) {
            write!(f, "\n{}: {}", violation.field, violation.description)?;
        }
        Ok(())
    }
}

/// Why a call did not give its answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The daemon refused it.
    #[error("{0}")]
    Refused(Refusal),
    /// The connection broke: the daemon ended, was killed, or froze.
    #[error("the daemon at {endpoint} is gone: {detail}")]
    Lost {
        /// Which daemon.
        endpoint: Endpoint,
        /// What the transport says.
        detail: String,
    },
    /// No answer in time.
    #[error("the daemon at {endpoint} did not answer {what} within {} s", after.as_secs_f64())]
    Silent {
        /// Which daemon.
        endpoint: Endpoint,
        /// The call.
        what: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// The stream of events ended before the job's terminal event.
    #[error("the daemon at {endpoint} ended the events of a job before its last one")]
    Incomplete {
        /// Which daemon.
        endpoint: Endpoint,
    },
    /// The answer lacks what it must have.
    #[error("the daemon at {endpoint} answered {what} without {missing}")]
    Malformed {
        /// Which daemon.
        endpoint: Endpoint,
        /// The call.
        what: &'static str,
        /// The part.
        missing: &'static str,
    },
}

impl CallError {
    /// Reads a status. One that the transport made carries its cause; one that the daemon sent does not.
    pub(crate) fn from_status(endpoint: &Endpoint, status: Status) -> Self {
        if let Some(cause) = std::error::Error::source(&status) {
            let mut detail = cause.to_string();
            let mut deeper = cause.source();
            while let Some(cause) = deeper {
                detail = cause.to_string();
                deeper = cause.source();
            }
            return Self::Lost { endpoint: endpoint.clone(), detail };
        }
        let details = status.get_error_details();
        let violations = details
            .bad_request()
            .map(|bad| &bad.field_violations[..])
            .unwrap_or_default()
            .iter()
            .map(|v| Violation { field: v.field.clone(), description: v.description.clone() })
            .collect();
        let info = details.error_info();
        Self::Refused(Refusal {
            code: status.code(),
            message: status.message().to_owned(),
            violations,
            reason: info.map(|info| info.reason.clone()).filter(|reason| !reason.is_empty()),
            facts: info.map(|info| info.metadata.clone().into_iter().collect()).unwrap_or_default(),
        })
    }

    /// Whether the daemon went away or is about to, so that another one may do what was asked.
    pub fn daemon_is_gone(&self) -> bool {
        match self {
            Self::Lost { .. } | Self::Incomplete { .. } => true,
            Self::Refused(refusal) => refusal.code == Code::Unavailable,
            Self::Silent { .. } | Self::Malformed { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use tonic_types::ErrorDetails;

    fn endpoint() -> Endpoint {
        "localhost:1".parse().unwrap()
    }

    #[test]
    fn field_violations_and_reason_are_decoded() {
        let mut details = ErrorDetails::new();
        details.add_bad_request_violation("width", "must be a multiple of 8, is 513");
        details.set_error_info("INVALID_REQUEST", "sdd", HashMap::from([("limit".to_owned(), "8".to_owned())]));
        let status = Status::with_error_details(Code::InvalidArgument, "request refused", details);
        let CallError::Refused(refusal) = CallError::from_status(&endpoint(), status) else { panic!("not refused") };
        assert_eq!(refusal.code, Code::InvalidArgument);
        assert_eq!(refusal.violations[0].field, "width");
        assert_eq!(refusal.reason.as_deref(), Some("INVALID_REQUEST"));
        assert_eq!(refusal.facts["limit"], "8");
        assert_eq!(refusal.to_string(), "request refused\nwidth: must be a multiple of 8, is 513");
    }

    #[test]
    fn a_message_that_says_it_already_is_not_repeated() {
        let violations = vec![Violation { field: "steps".into(), description: "must be above zero".into() }];
        let message = "steps must be above zero".to_owned();
        let refusal =
            Refusal { code: Code::InvalidArgument, message, violations, reason: None, facts: BTreeMap::new() };
        assert_eq!(refusal.to_string(), "steps must be above zero");
    }

    #[test]
    fn a_broken_transport_is_told_from_the_daemons_own_answer() {
        let broken = Status::from_error(Box::new(std::io::Error::other("broken pipe")));
        assert!(matches!(CallError::from_status(&endpoint(), broken), CallError::Lost { .. }));
        let sent = CallError::from_status(&endpoint(), Status::unknown("odd"));
        assert!(matches!(sent, CallError::Refused(_)) && !sent.daemon_is_gone());
        assert!(CallError::from_status(&endpoint(), Status::unavailable("draining")).daemon_is_gone());
    }
}

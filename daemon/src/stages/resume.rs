//! Whether a stage run that was lost is run again: the pure rules of a job's survival.
//!
//! What earlier stages wrote is still held, so a lost run costs a repetition of that stage alone, in another process. A job
//! may lose [`CHANCES`] runs to deaths of workers; a lack of memory is answered once, on the next cheaper plan where there is
//! one.

use std::sync::Arc;

use sd_proto::v1::{Failure, Stage};

use super::failure::Lost;
use crate::jobs::request::Admitted;

/// Runs of stages that one job may lose to deaths of workers.
pub const CHANCES: u32 = 3;

/// What a job has survived so far, and how it is run now.
#[derive(Debug, Clone)]
pub struct Survival {
    chances: u32,
    /// Memory ran out once.
    cheaper: bool,
    /// Why the pictures are not what was promised at admission.
    degraded: Vec<String>,
}

impl Default for Survival {
    fn default() -> Self {
        Self { chances: CHANCES, cheaper: false, degraded: Vec::new() }
    }
}

/// What follows from a lost run.
#[derive(Debug, Clone)]
pub enum Next {
    /// Nothing more: the job was to stop.
    Stop,
    /// The job fails.
    Fail(Failure),
    /// It is run again.
    Again {
        /// How; `None`: as before.
        request: Option<Arc<Admitted>>,
        /// Whether what the lost process computed may be taken over.
        trusted: bool,
        /// For people: what was lost and what is done about it.
        text: String,
    },
}

impl Survival {
    /// Decides about a run that was lost.
    pub fn lost(&mut self, lost: Lost, request: &Admitted) -> Next {
        match lost {
            Lost::Asked => Next::Stop,
            Lost::Final(failure) => Next::Fail(failure),
            Lost::Worker { failure, .. } => {
                let Some(left) = self.chances.checked_sub(1) else {
                    let message = format!("{} (its {CHANCES} retries were used up)", failure.message);
                    return Next::Fail(Failure { message, ..failure });
                };
                self.chances = left;
                let text = format!("{}: the stage is run again in another process", failure.message);
                // Who lied about its output may have lied about its checkpoints.
                let trusted = failure.reason() != sd_proto::v1::FailureReason::Protocol;
                Next::Again { request: None, trusted, text }
            }
            Lost::Memory(failure) if self.cheaper => {
                let message = format!("{}; it was tried twice. {}", failure.message, advice(failure.stage()));
                Next::Fail(Failure { message, ..failure })
            }
            Lost::Memory(failure) => {
                self.cheaper = true;
                let cheaper = cheaper(request, failure.stage());
                let how = match &cheaper {
                    Some((_, what)) => format!("once more, with {what}"),
                    None => "once more, in a fresh process".into(),
                };
                let text = format!("{}: the stage is run {how}", failure.message);
                let request = cheaper.map(|(cheaper, what)| {
                    if cheaper.plan != request.plan {
                        self.degraded(format!("memory ran out, so it was made with {what}"));
                    }
                    Arc::new(cheaper)
                });
                Next::Again { request, trusted: true, text }
            }
        }
    }

    /// Notes why the pictures are not what was promised.
    pub fn degraded(&mut self, why: String) {
        if !why.is_empty() && !self.degraded.contains(&why) {
            self.degraded.push(why);
        }
    }

    /// Why the pictures are not what was promised; empty: they are.
    pub fn why_degraded(&self) -> String {
        self.degraded.join("; ")
    }
}

/// The same request on the next cheaper plan for a stage, and what that is, for people.
fn cheaper(request: &Admitted, stage: Stage) -> Option<(Admitted, String)> {
    let size = (request.width, request.height);
    let (memory, plan, what) = request.memory.cheaper(stage, &request.plan, size)?;
    Some((Admitted { memory, plan, ..request.clone() }, what))
}

fn advice(stage: Stage) -> &'static str {
    match stage {
        Stage::Encode => "Shorten the prompt, or raise the device's budget (devices.cpu.budget)",
        Stage::Unspecified | Stage::VaeEncode | Stage::Denoise | Stage::Decode => {
            "Ask for a smaller picture, or raise the device's budget (devices.cpu.budget)"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use crate::stages::failure::failure;
    use sd_proto::v1::FailureReason;

    fn died(reason: FailureReason) -> Lost {
        Lost::Worker { failure: failure(reason, Stage::Denoise, "it died"), blamed: true }
    }

    #[test]
    fn a_job_survives_three_deaths_and_fails_with_the_fourth() {
        let (mut survival, request) = (Survival::default(), fixtures::admitted());
        for _ in 0..CHANCES {
            let next = survival.lost(died(FailureReason::WorkerDied), &request);
            assert!(matches!(next, Next::Again { request: None, trusted: true, .. }), "{next:?}");
        }
        let Next::Fail(failure) = survival.lost(died(FailureReason::WorkerHung), &request) else { panic!("again") };
        assert_eq!(failure.reason(), FailureReason::WorkerHung);
        assert!(failure.message.starts_with("it died") && failure.message.contains('3'), "{}", failure.message);
        assert!(survival.why_degraded().is_empty(), "a death changes no picture");
    }

    #[test]
    fn what_a_liar_computed_is_not_taken_over() {
        let next = Survival::default().lost(died(FailureReason::Protocol), &fixtures::admitted());
        assert!(matches!(next, Next::Again { trusted: false, .. }), "{next:?}");
    }

    #[test]
    fn a_lack_of_memory_is_answered_once_and_then_with_advice() {
        let (mut survival, request) = (Survival::default(), fixtures::admitted());
        let lack = || Lost::Memory(failure(FailureReason::OutOfMemory, Stage::Decode, "it ran out of memory"));
        let Next::Again { request: Some(cheaper), trusted: true, text } = survival.lost(lack(), &request) else {
            panic!("a picture of {} × {} can be decoded in tiles", request.width, request.height)
        };
        assert_ne!(cheaper.plan, request.plan);
        assert!(text.contains("tiles") && survival.why_degraded().contains("tiles"), "{text}");
        let Next::Fail(failure) = survival.lost(lack(), &request) else { panic!("again") };
        assert_eq!(failure.reason(), FailureReason::OutOfMemory);
        assert!(failure.message.contains("smaller picture"), "{}", failure.message);
        let next = survival.lost(died(FailureReason::WorkerDied), &request);
        assert!(matches!(next, Next::Again { .. }), "deaths are counted apart");
    }

    #[test]
    fn a_cheaper_plan_that_changes_no_byte_marks_nothing() {
        let (mut survival, request) = (Survival::default(), fixtures::admitted());
        let lack = Lost::Memory(failure(FailureReason::OutOfMemory, Stage::Denoise, "it ran out of memory"));
        let Next::Again { request: Some(cheaper), .. } = survival.lost(lack, &request) else {
            panic!("no cheaper plan")
        };
        assert!(cheaper.plan == request.plan && cheaper.memory != request.memory);
        assert_eq!(survival.why_degraded(), "");
    }

    #[test]
    fn what_would_fail_again_fails_and_what_was_to_stop_stops() {
        let (mut survival, request) = (Survival::default(), fixtures::admitted());
        let wrong = failure(FailureReason::Model, Stage::Encode, "bad weights");
        assert!(matches!(survival.lost(Lost::Final(wrong), &request), Next::Fail(_)));
        assert!(matches!(survival.lost(Lost::Asked, &request), Next::Stop));
    }
}

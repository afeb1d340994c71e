//! `sdctl events`: what is decided about memory.

use sd_client::names;
use sd_client::proto::Decision;
use sd_proto::exit::ProgramExit;

use super::args::{EventsArgs, Global};
use super::interrupts::Interrupts;
use super::lists::existing;
use super::report::Trouble;
use super::{human, json, screen};

/// Prints decisions, one a line, as they come.
pub(super) async fn run(global: &Global, args: EventsArgs) -> Result<ProgramExit, Trouble> {
    let mut interrupts = Interrupts::listen()?;
    let session = tokio::select! {
        session = existing(global) => session?,
        () = interrupts.next() => return Ok(ProgramExit::Interrupted),
    };
    let job = args.job.as_deref().unwrap_or_default();
    let mut decisions = session.client().decisions(job, args.follow).await?;
    let mut told = false;
    loop {
        let decision = tokio::select! {
            decision = decisions.next() => decision,
            () = interrupts.next() => return Ok(ProgramExit::Interrupted),
        };
        let Some(decision) = decision else { break };
        let decision = decision?;
        told = true;
        match global.json {
            true => screen::out(json::decision(&decision))?,
            false => screen::out(line(&decision))?,
        }
    }
    if !told && !global.quiet && !global.json {
        screen::say("nothing was decided yet");
    }
    if args.follow && args.job.is_none() && !global.quiet {
        screen::say("sdctl: the daemon has ended");
    }
    Ok(ProgramExit::Success)
}

/// Time, job, kind, text.
fn line(decision: &Decision) -> String {
    let time = decision.time.as_ref().map_or_else(|| "-".into(), milliseconds);
    let job = if decision.job_id.is_empty() { "-" } else { &decision.job_id };
    let kind = names::decision_kind(decision.kind()).replace('_', " ");
    human::line(&format!("{time}  {job:<12}  {kind:<11}  {}", decision.text)).into_owned()
}

/// A time with milliseconds: decisions come faster than seconds, and nobody reads nanoseconds.
fn milliseconds(time: &prost_types::Timestamp) -> String {
    let nanos = time.nanos - time.nanos.rem_euclid(1_000_000);
    let cut = prost_types::Timestamp { seconds: time.seconds, nanos };
    let text = cut.to_string();
    match text.split_once('.') {
        Some((seconds, fraction)) => {
            format!("{seconds}.{:0<3}Z", fraction.trim_end_matches('Z').get(..3).unwrap_or(""))
        }
        None => format!("{}.000Z", text.trim_end_matches('Z')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_client::proto::DecisionKind;

    #[test]
    fn a_line_has_time_job_kind_and_text() {
        let decision = Decision {
            time: Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 5_999_999 }),
            kind: DecisionKind::TakesBack.into(),
            job_id: "0123456789ab".into(),
            text: "vae must\u{1b} retire".into(),
            ..Default::default()
        };
        assert_eq!(line(&decision), "2027-01-15T08:00:00.005Z  0123456789ab  takes back   vae must\\u{1b} retire");
        let whole = prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 };
        assert_eq!(milliseconds(&whole), "2027-01-15T08:00:00.000Z");
        assert!(line(&Decision::default()).starts_with("-  -"));
    }
}

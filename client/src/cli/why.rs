//! `sdctl why`: a job's story, told from what was decided about it and from its timings.

use std::time::{Duration, SystemTime};

use sd_client::names;
use sd_client::proto::{Decision, DecisionKind, ExplainJobResponse, Job, JobState, StageTiming};
use sd_proto::exit::ProgramExit;

use super::args::{Global, WhyArgs};
use super::lists::existing;
use super::report::Trouble;
use super::table::Table;
use super::{human, json, screen};

/// Tells it.
pub(super) async fn run(global: &Global, args: WhyArgs) -> Result<ProgramExit, Trouble> {
    let session = existing(global).await?;
    let job = match args.job {
        Some(job) => job,
        None => match session.client().list(false, 1).await?.into_iter().next() {
            Some(newest) => newest.id,
            None => return Err(Trouble::unavailable("there is no job to explain: none was submitted here yet")),
        },
    };
    let explained = session.client().explain(&job).await?;
    if global.json {
        screen::out(format_args!("{:#}", json::explanation(&explained)))?;
    } else {
        screen::out(story(&explained))?;
    }
    Ok(ProgramExit::Success)
}

/// The whole text.
fn story(explained: &ExplainJobResponse) -> String {
    let job = explained.job.clone().unwrap_or_default();
    let mut parts = vec![heading(&job)];
    if let Some(failure) = &job.failure {
        let mut text = format!("It failed: {}", human::lines(&failure.message));
        for line in &failure.stderr {
            text.push_str(&format!("\n  {}", human::line(line)));
        }
        parts.push(text);
    }
    parts.push(summary(&job, &explained.decisions));
    if !explained.decisions.is_empty() {
        parts.push(timeline(&job, &explained.decisions));
    }
    let stages = job.timings.map(|timings| timings.stages).unwrap_or_default();
    if !stages.is_empty() {
        parts.push(stage_table(&stages));
    }
    parts.join("\n\n")
}

fn heading(job: &Job) -> String {
    let request = job.request.clone().unwrap_or_default();
    let state = match job.state() {
        JobState::Queued => format!("waits behind {}", human::count(job.position.into(), "job")),
        JobState::Running => format!("runs, stage {}", names::stage(job.stage())),
        state @ (JobState::Succeeded | JobState::Failed | JobState::Cancelled | JobState::Unspecified) => {
            names::job_state(state).into()
        }
    };
    let timings = job.timings.clone().unwrap_or_default();
    let total = human::duration(human::wire_duration(timings.total.as_ref()));
    let took = if job.finished.is_some() { format!(" after {total}") } else { format!(", {total} so far") };
    let prompt = human::shorten(&request.prompt, 48);
    let size = format!("{}x{}", request.width, request.height);
    let pictures = human::count(request.count.max(1).into(), "picture");
    let model = human::line(&request.model);
    let mut lines =
        vec![format!("job {} {state}{took}: \"{prompt}\", {pictures} of {size} by {model}", human::line(&job.id))];
    if let Some(memory) = &request.memory {
        lines.push(format!("asked of memory: {}", asked(&json::memory(memory))));
    }
    lines.join("\n")
}

/// `mode aggressive, vae_tiling true`
fn asked(memory: &serde_json::Value) -> String {
    let pairs = memory.as_object().into_iter().flatten().map(|(key, value)| match value.as_str() {
        Some(text) => format!("{key} {text}"),
        None => format!("{key} {value}"),
    });
    pairs.collect::<Vec<_>>().join(", ")
}

/// What it waited for, and what was done for it, in a few sentences.
fn summary(job: &Job, decisions: &[Decision]) -> String {
    let timings = job.timings.clone().unwrap_or_default();
    let mut lines = Vec::new();
    let queued = human::wire_duration(timings.queued.as_ref());
    if queued >= Duration::from_millis(10) {
        lines.push(format!("It waited {} for its turn.", human::duration(queued)));
    }
    let waited: Duration = timings.stages.iter().map(|stage| human::wire_duration(stage.waited.as_ref())).sum();
    if waited >= Duration::from_millis(10) {
        lines.push(format!("Its stages waited {} for memory and for processes.", human::duration(waited)));
    }
    let of = |kind: DecisionKind| decisions.iter().filter(move |decision| decision.kind() == kind);
    let taken: Vec<&Decision> = of(DecisionKind::TakesBack).collect();
    if !taken.is_empty() {
        let bytes = human::bytes(taken.iter().map(|decision| decision.bytes).sum());
        let times = human::count(taken.len() as u64, "time");
        let mut rungs: Vec<String> = Vec::new();
        for rung in ["shrink", "park", "retire"] {
            let number = taken.iter().filter(|decision| decision.rung == rung).count();
            if number > 0 {
                rungs.push(format!("{rung} {number}"));
            }
        }
        let rungs = if rungs.is_empty() { String::new() } else { format!(" ({})", rungs.join(", ")) };
        lines.push(format!("Memory was taken back for it {times}{rungs}, {bytes} in all."));
    }
    for (kind, text) in [
        (DecisionKind::Refused, "was refused memory"),
        (DecisionKind::Killed, "had a process killed"),
        (DecisionKind::Retries, "had a stage run again"),
    ] {
        let number = of(kind).count() as u64;
        if number > 0 {
            lines.push(format!("It {text} {}.", human::count(number, "time")));
        }
    }
    let cached = timings.stages.iter().filter(|stage| stage.cached).count() as u64;
    if cached > 0 {
        lines.push(format!("{} remembered and not run.", were(cached, "stage's result", "stages' results")));
    }
    let streamed: u64 = timings.stages.iter().map(|stage| stage.streamed_bytes).sum();
    if streamed > 0 {
        lines.push(format!("{} of weights were streamed, because they did not stay.", human::bytes(streamed)));
    }
    if lines.is_empty() {
        lines.push("Nothing had to be waited for or moved.".into());
    }
    lines.join("\n")
}

fn were(number: u64, one: &str, many: &str) -> String {
    if number == 1 { format!("1 {one} was") } else { format!("{number} {many} were") }
}

/// The decisions in their order, with the time since the job was submitted.
fn timeline(job: &Job, decisions: &[Decision]) -> String {
    let start = job.submitted.and_then(|time| SystemTime::try_from(time).ok());
    let mut table = Table::new(&[">AFTER", "WHAT", "WHY"]);
    for decision in decisions {
        let since = decision.time.and_then(|time| SystemTime::try_from(time).ok()).zip(start);
        let after = since.map(|(time, start)| time.duration_since(start).unwrap_or_default());
        table.row([
            after.map_or_else(|| "-".into(), human::duration),
            names::decision_kind(decision.kind()).replace('_', " "),
            decision.text.clone(),
        ]);
    }
    table.render()
}

fn stage_table(stages: &[StageTiming]) -> String {
    let mut table = Table::new(&[
        "STAGE",
        ">PICTURE",
        ">WAITED",
        ">LOADED",
        ">COMPUTED",
        ">TOTAL",
        ">STAYED",
        ">STREAMED",
        ">PEAK",
        "NOTES",
    ]);
    let time = |duration: &Option<prost_types::Duration>| human::duration(human::wire_duration(duration.as_ref()));
    let bytes = |bytes: u64| if bytes == 0 { "-".into() } else { human::bytes(bytes) };
    for stage in stages {
        let stayed = match stage.segments {
            0 => "-".into(),
            all => format!("{}/{all}", stage.resident_segments),
        };
        let mut notes = Vec::new();
        if stage.cached {
            notes.push("remembered".to_owned());
        }
        if stage.retries > 0 {
            notes.push(format!("run again {}", human::count(stage.retries.into(), "time")));
        }
        if stage.resumed_at > 0 {
            notes.push(format!("resumed at step {}", stage.resumed_at));
        }
        table.row([
            names::stage(stage.stage()).into(),
            (stage.image_index + 1).to_string(),
            time(&stage.waited),
            time(&stage.loaded),
            time(&stage.computed),
            time(&stage.total),
            stayed,
            bytes(stage.streamed_bytes),
            bytes(stage.peak_bytes),
            notes.join(", "),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_client::proto::{ImageRequest, JobTimings, Stage};

    fn wire(milliseconds: u64) -> Option<prost_types::Duration> {
        prost_types::Duration::try_from(Duration::from_millis(milliseconds)).ok()
    }

    #[test]
    fn the_story_names_waits_evictions_retries_and_cache_hits() {
        let submitted = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let decision = |after: u64, kind: DecisionKind, rung: &str, text: &str| Decision {
            time: Some((submitted + Duration::from_millis(after)).into()),
            kind: kind.into(),
            rung: rung.into(),
            bytes: 3 << 20,
            text: text.into(),
            ..Default::default()
        };
        let stages = vec![
            StageTiming { stage: Stage::Encode.into(), cached: true, ..Default::default() },
            StageTiming {
                stage: Stage::Denoise.into(),
                waited: wire(400),
                computed: wire(2000),
                resident_segments: 3,
                segments: 12,
                streamed_bytes: 5 << 20,
                retries: 1,
                resumed_at: 7,
                ..Default::default()
            },
        ];
        let job = Job {
            id: "j1".into(),
            state: JobState::Succeeded.into(),
            request: Some(ImageRequest { prompt: "a cat".into(), width: 64, height: 48, ..Default::default() }),
            submitted: Some(submitted.into()),
            finished: Some((submitted + Duration::from_secs(3)).into()),
            timings: Some(JobTimings { queued: wire(500), total: wire(3000), stages }),
            ..Default::default()
        };
        let decisions = vec![
            decision(600, DecisionKind::Waits, "", "diffusion of default waits for 3.0 MiB"),
            decision(610, DecisionKind::TakesBack, "retire", "vae of other must retire"),
            decision(900, DecisionKind::Retries, "", "denoise goes on at step 7"),
        ];
        let text = story(&ExplainJobResponse { job: Some(job), decisions });
        for part in [
            "job j1 succeeded after 3.0 s: \"a cat\", 1 picture of 64x48",
            "It waited 500 ms for its turn.",
            "Its stages waited 400 ms for memory",
            "Memory was taken back for it 1 time (retire 1), 3.00 MiB in all.",
            "It had a stage run again 1 time.",
            "1 stage's result was remembered",
            "5.00 MiB of weights were streamed",
            "600 ms  waits       diffusion of default waits for 3.0 MiB",
            "610 ms  takes back  vae of other must retire",
            "3/12",
            "run again 1 time, resumed at step 7",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }

    #[test]
    fn a_job_without_a_story_says_so() {
        let text = story(&ExplainJobResponse::default());
        assert!(text.contains("Nothing had to be waited for or moved."), "{text}");
        assert!(!text.contains("AFTER"), "{text}");
    }
}

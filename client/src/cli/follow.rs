//! What is done with a job's events, whoever submitted it: show, print, save.

use sd_client::names;
use sd_client::proto::job_event::Event;
use sd_client::proto::{Failure, ImageReady, ImageRequest, JobEvent, JobTimings, Stage};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

use super::args::Global;
use super::naming::{Facts, Naming};
use super::progress::Progress;
use super::report::Trouble;
use super::{human, json, screen, show};

/// Where pictures go.
#[derive(Debug)]
pub(super) enum Sink {
    /// Into files.
    Files(Naming),
    /// The bytes of one picture on stdout.
    Stdout,
    /// Nowhere.
    Nowhere,
}

/// How a job ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// With all its pictures.
    Succeeded,
    /// With this failure.
    Failed(Box<Failure>),
    /// Cancelled, for this reason.
    Cancelled(String),
}

/// Follows one job.
#[derive(Debug)]
pub(super) struct Follower {
    json: bool,
    quiet: bool,
    verbose: bool,
    sink: Sink,
    facts: Facts,
    show: Option<show::Method>,
    pub(super) progress: Progress,
    job_id: Option<String>,
    seeds: Vec<u64>,
    steps: Option<u32>,
}

impl Follower {
    /// `facts`: what names of files are made of.
    pub(super) fn new(global: &Global, sink: Sink, facts: Facts, show: Option<show::Method>) -> Self {
        Self {
            json: global.json,
            quiet: global.quiet,
            verbose: global.verbose,
            // A picture on stdout or a stream of JSON is for a program.
            show: show.filter(|_| matches!(sink, Sink::Files(_) | Sink::Nowhere) && !global.json && !global.quiet),
            sink,
            facts,
            progress: Progress::new(global.quiet),
            job_id: None,
            seeds: Vec::new(),
            steps: None,
        }
    }

    /// Whether names of files hold the model's.
    pub(super) fn wants_model(&self) -> bool {
        matches!(&self.sink, Sink::Files(naming) if naming.needs_model())
    }

    /// Tells the name of the model that the daemon will use.
    pub(super) fn model_is(&mut self, name: &str) {
        self.facts.model = name.to_owned();
    }

    /// Checks before anything is computed that what comes can be written.
    pub(super) fn check(&self, request: &ImageRequest) -> Result<(), Trouble> {
        match &self.sink {
            Sink::Files(naming) => naming.check(&self.facts, request.seed.unwrap_or(0), request.count.max(1)),
            Sink::Stdout | Sink::Nowhere => Ok(()),
        }
    }

    /// The job's id, once an event has told it.
    pub(super) fn job_id(&self) -> Option<&str> {
        self.job_id.as_deref()
    }

    /// Takes in an event; gives the outcome with the last one.
    pub(super) fn take(&mut self, event: &JobEvent) -> Result<Option<Outcome>, Trouble> {
        if self.job_id.is_none() && !event.job_id.is_empty() {
            self.job_id = Some(event.job_id.clone());
        }
        let mut saved = None;
        if let Some(Event::Image(image)) = &event.event {
            saved = self.save(image)?;
        }
        if self.json {
            let line = json::event(event, saved.as_deref());
            self.progress.aside(|| screen::out(line))?;
        } else if let Some(path) = &saved {
            self.progress.aside(|| screen::out(path.display()))?;
        }
        match &event.event {
            Some(Event::Queued(queued)) => {
                self.progress.queued(queued);
                self.steps = queued.effective.as_ref().and_then(|request| request.steps);
            }
            Some(Event::StageStarted(started)) => self.progress.stage(started),
            Some(Event::Progress(advance)) => self.progress.advance(advance),
            Some(Event::StageFinished(_)) => {}
            Some(Event::Image(image)) => {
                self.seeds.push(image.seed);
                if let Some(method) = self.show
                    && let Err(error) = self.progress.aside(|| show::draw(method, &image.png))
                {
                    self.note(&format!("cannot show the picture here: {error}"));
                }
            }
            Some(Event::Note(note)) if self.verbose => self.note(&note.text),
            Some(Event::Decision(decision)) if self.verbose => self.note(&decision.text),
            Some(Event::Note(_) | Event::Decision(_)) => {}
            Some(Event::Succeeded(succeeded)) => {
                self.progress.finish();
                if !self.quiet && !self.json {
                    screen::say(summary(&self.seeds, self.steps, &succeeded.timings.clone().unwrap_or_default()));
                    if !succeeded.degraded.is_empty() {
                        screen::say(format_args!("sdctl: not as planned: {}", human::lines(&succeeded.degraded)));
                    }
                }
                return Ok(Some(Outcome::Succeeded));
            }
            Some(Event::Failed(failure)) => {
                self.progress.finish();
                return Ok(Some(Outcome::Failed(Box::new(failure.clone()))));
            }
            Some(Event::Cancelled(cancelled)) => {
                self.progress.finish();
                return Ok(Some(Outcome::Cancelled(cancelled.reason.clone())));
            }
            // An event of a newer daemon.
            None => {}
        }
        Ok(None)
    }

    /// A line for people, past the bar.
    pub(super) fn note(&self, text: &str) {
        if !self.quiet {
            self.progress.aside(|| screen::say(format_args!("sdctl: {}", human::line(text))));
        }
    }

    /// Says that the job was cancelled at the user's wish.
    pub(super) fn interrupted(&self, told_by_daemon: bool) -> Result<(), Trouble> {
        self.progress.finish();
        if self.json && !told_by_daemon {
            screen::out(json!({ "event": "cancelled", "job_id": self.job_id, "reason": "interrupted" }))?;
        }
        screen::say("sdctl: cancelled");
        Ok(())
    }

    fn save(&mut self, image: &ImageReady) -> Result<Option<PathBuf>, Trouble> {
        match &self.sink {
            Sink::Nowhere => Ok(None),
            Sink::Stdout => self.progress.aside(|| screen::out_bytes(&image.png)).map(|()| None),
            Sink::Files(naming) => {
                let written = naming.write(&self.facts, image.index, image.seed, &image.png)?;
                if written.moved {
                    self.note(&format!("the name was taken meanwhile; saved as {}", written.path.display()));
                }
                Ok(Some(written.path))
            }
        }
    }
}

/// One line: how many pictures, their seeds, and where the time went.
fn summary(seeds: &[u64], steps: Option<u32>, timings: &JobTimings) -> String {
    let sum = |pick: fn(&sd_client::proto::StageTiming) -> Duration, stage: Option<Stage>| {
        let chosen = timings.stages.iter().filter(|t| stage.is_none_or(|stage| t.stage() == stage));
        chosen.map(pick).sum::<Duration>()
    };
    let mut parts = Vec::new();
    for stage in [Stage::Encode, Stage::VaeEncode, Stage::Denoise, Stage::Decode] {
        let computed = sum(|t| human::wire_duration(t.computed.as_ref()), Some(stage));
        if computed.is_zero() {
            continue;
        }
        let mut part = format!("{} {}", names::stage(stage), human::duration(computed));
        if let (Stage::Denoise, Some(steps)) = (stage, steps) {
            part.push_str(&format!(" ({})", human::count(steps.into(), "step")));
        }
        parts.push(part);
    }
    for (name, time) in [
        ("load", sum(|t| human::wire_duration(t.loaded.as_ref()), None)),
        ("start", sum(|t| human::wire_duration(t.waited.as_ref()), None)),
        ("queue", human::wire_duration(timings.queued.as_ref())),
    ] {
        if time >= Duration::from_millis(10) {
            parts.push(format!("{name} {}", human::duration(time)));
        }
    }
    let range = match seeds {
        [] => String::new(),
        [seed] => format!(", seed {seed}"),
        [first, .., last] => format!(", seeds {first} to {last}"),
    };
    let pictures = human::count(seeds.len() as u64, "picture");
    let total = human::duration(human::wire_duration(timings.total.as_ref()));
    let detail = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
    format!("{pictures} in {total}{range}{detail}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_client::proto::StageTiming;

    #[test]
    fn the_summary_says_where_the_time_went() {
        let wire = |milliseconds| prost_types::Duration::try_from(Duration::from_millis(milliseconds)).ok();
        let stage = |stage: Stage, computed| StageTiming {
            stage: stage.into(),
            computed: wire(computed),
            loaded: wire(20),
            waited: wire(30),
            ..Default::default()
        };
        let stages = vec![
            stage(Stage::Encode, 80),
            stage(Stage::Denoise, 2500),
            stage(Stage::Decode, 600),
            stage(Stage::Denoise, 2800),
            stage(Stage::Decode, 650),
        ];
        let timings = JobTimings { queued: wire(1), total: wire(7001), stages };
        assert_eq!(
            summary(&[7, 8], Some(20), &timings),
            "2 pictures in 7.0 s, seeds 7 to 8: encode 80 ms, denoise 5.3 s (20 steps), decode 1.2 s, load 100 ms, start 150 ms"
        );
        assert_eq!(summary(&[7], None, &JobTimings::default()), "1 picture in 0 µs, seed 7");
    }
}

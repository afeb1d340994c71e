//! A bar over stages and steps, on a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sd_client::names;
use sd_client::proto::{Progress as Advance, ProgressPhase, Queued, StageStarted};

use super::human;

/// Shows how far a job is. Draws on stderr, and only if that is a terminal.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    pictures: u32,
    stage: String,
}

impl Progress {
    /// One that draws nothing when `quiet`.
    pub(super) fn new(quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(None, target).with_style(spinner());
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Self { bar, pictures: 1, stage: String::new() }
    }

    /// What goes on before the first event.
    pub(super) fn waiting(&self, text: &str) {
        self.bar.set_style(spinner());
        self.bar.set_message(human::line(text).into_owned());
    }

    /// The job was admitted.
    pub(super) fn queued(&mut self, queued: &Queued) {
        self.pictures = queued.effective.as_ref().map_or(1, |request| request.count.max(1));
        match (queued.position, queued.estimated_wait) {
            (0, _) => self.waiting("starting"),
            (n, None) => self.waiting(&format!("waiting behind {}", human::count(n.into(), "job"))),
            (n, Some(wait)) => {
                let wait = human::duration(human::wire_duration(Some(&wait)));
                self.waiting(&format!("waiting behind {}, about {wait}", human::count(n.into(), "job")));
            }
        }
    }

    /// A stage begins.
    pub(super) fn stage(&mut self, started: &StageStarted) {
        let picture = match self.pictures {
            1 => String::new(),
            of => format!(" picture {} of {of}", started.image_index + 1),
        };
        let number = match started.of {
            0 => String::new(),
            of => format!("[{}/{of}] ", started.number),
        };
        self.stage = format!("{number}{}{picture}", names::stage_activity(started.stage()));
        self.waiting(&self.stage);
    }

    /// A stage gets on.
    pub(super) fn advance(&mut self, advance: &Advance) {
        match advance.phase() {
            ProgressPhase::Starting | ProgressPhase::Unspecified => self.waiting(&format!("{}: starting", self.stage)),
            ProgressPhase::Loading => self.measure(advance, format!("{}: loading", self.stage), true),
            ProgressPhase::Computing => self.measure(advance, self.stage.clone(), false),
        }
    }

    fn measure(&self, advance: &Advance, message: String, bytes: bool) {
        if advance.total == 0 {
            return self.waiting(&message);
        }
        let numbers = if bytes { "{bytes}/{total_bytes}" } else { "{pos}/{len}" };
        let template = format!("{{spinner}} {{msg}} {{bar:30}} {numbers} {{elapsed}}");
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        // Numbers first, so that no frame shows the old ones in the new style.
        self.bar.set_length(advance.total);
        self.bar.set_position(advance.done);
        self.bar.set_message(message);
        self.bar.set_style(style.progress_chars("━╸─"));
    }

    /// Does something with the terminal while the bar is out of the way.
    pub(super) fn aside<T>(&self, action: impl FnOnce() -> T) -> T {
        self.bar.suspend(action)
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn spinner() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {msg} {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner())
}

//! The state machine of one job: pure, `(state, input) → (state, effects)`.
//!
//! ```text
//!            Dispatch            DriverEnded
//!   Queued ───────────► Running ─────────────► Ended(Succeeded | Failed)
//!      │ Cancel,            │ Cancel, Shutdown
//!      │ Shutdown, Refuse   ▼        DriverEnded
//!      └──────────┐     Stopping ────────────► Ended(Cancelled | Failed by shutdown)
//!                 ▼
//!              Ended
//! ```
//!
//! A terminal event is an [`Ending`], every other event an [`Entry`]; only the transition into `Ended` yields
//! [`Effect::End`], and nothing leads out of `Ended`. So a job has exactly one terminal event, and it is the last.

use sd_proto::v1::{
    Cancelled, Decision, Failure, FailureReason, ImageReady, JobState, Note, Progress, Stage, StageFinished,
    StageStarted,
};

/// How a job ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    /// Every image is there.
    Succeeded {
        /// Why the pictures are not what was promised at admission; empty: they are.
        degraded: String,
    },
    /// It failed.
    Failed(Failure),
    /// Somebody cancelled it.
    Cancelled(Cancelled),
}

impl Ending {
    /// Whether the daemon's end is what ended it.
    pub fn is_shutdown(&self) -> bool {
        match self {
            Self::Failed(failure) => failure.reason() == FailureReason::Shutdown,
            Self::Succeeded { .. } | Self::Cancelled(_) => false,
        }
    }
}

/// An event that ends nothing.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// A stage run was dispatched to a worker.
    StageStarted(StageStarted),
    /// A stage goes on.
    Progress(Progress),
    /// A stage run's output is valid.
    StageFinished(StageFinished),
    /// A picture is there.
    Image(ImageReady),
    /// What the daemon decided about this job.
    Note(Note),
    /// What was decided about memory for this job.
    Decision(Box<Decision>),
}

/// Where a job stands.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Waits for its turn.
    Queued,
    /// Its driver runs its stages.
    Running {
        /// The stage that runs or ran last; unspecified before the first.
        stage: Stage,
        /// Pictures finished.
        images: u32,
    },
    /// Its driver was told to stop and has not yet; the job will end like this.
    Stopping {
        /// The stage that is being stopped.
        stage: Stage,
        /// Pictures finished.
        images: u32,
        /// How it will end.
        ending: Ending,
    },
    /// Nothing more happens.
    Ended {
        /// Pictures finished.
        images: u32,
        /// How.
        ending: Ending,
    },
}

/// How a driver came to its end.
#[derive(Debug, Clone, PartialEq)]
pub enum DriverEnd {
    /// Every stage run is done.
    Completed {
        /// Why the pictures are not what was promised at admission; empty: they are.
        degraded: String,
    },
    /// A stage failed for good.
    Failed(Failure),
    /// It was told to stop.
    Stopped,
}

/// What happens to a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Its turn has come.
    Dispatch,
    /// Its driver reports.
    Driver(Entry),
    /// Its driver is through; always its last word.
    DriverEnded(DriverEnd),
    /// Somebody no longer wants it.
    Cancel {
        /// Why, for people.
        reason: String,
    },
    /// The daemon goes.
    Shutdown {
        /// The job is recorded and goes on at the next start.
        kept: bool,
    },
    /// It was recorded before a restart and cannot go on.
    Refuse(Failure),
}

/// What the owner does about it, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Append to the log.
    Record(Entry),
    /// Start the driver.
    Start,
    /// Tell the driver to stop.
    Stop,
    /// Append the terminal event, and let go of all that the job held.
    End(Ending),
}

impl State {
    /// The next state and what is to be done. Inputs that no longer matter change nothing.
    #[must_use]
    pub fn step(self, input: Input) -> (Self, Vec<Effect>) {
        match (self, input) {
            (Self::Queued, Input::Dispatch) => {
                (Self::Running { stage: Stage::Unspecified, images: 0 }, vec![Effect::Start])
            }
            (Self::Queued, Input::Cancel { reason }) => end(0, Ending::Cancelled(Cancelled { reason })),
            (Self::Queued, Input::Shutdown { kept }) => end(0, shut_down(Stage::Unspecified, kept)),
            (Self::Queued, Input::Refuse(failure)) => end(0, Ending::Failed(failure)),
            // No driver exists yet: whatever this is, it is not about this life of the job.
            (Self::Queued, Input::Driver(_) | Input::DriverEnded(_)) => (Self::Queued, Vec::new()),

            (Self::Running { stage, images }, Input::Driver(entry)) => {
                let (stage, images) = advance(stage, images, &entry);
                (Self::Running { stage, images }, vec![Effect::Record(entry)])
            }
            (Self::Running { images, .. }, Input::DriverEnded(DriverEnd::Completed { degraded })) => {
                end(images, Ending::Succeeded { degraded })
            }
            (Self::Running { images, .. }, Input::DriverEnded(DriverEnd::Failed(failure))) => {
                end(images, Ending::Failed(failure))
            }
            (Self::Running { stage, images }, Input::DriverEnded(DriverEnd::Stopped)) => {
                let message = "the job's driver stopped without being told to: this is a bug of sdd".into();
                let failure = Failure {
                    reason: FailureReason::Internal as i32,
                    stage: stage as i32,
                    message,
                    stderr: Vec::new(),
                };
                end(images, Ending::Failed(failure))
            }
            (Self::Running { stage, images }, Input::Cancel { reason }) => {
                let ending = Ending::Cancelled(Cancelled { reason });
                (Self::Stopping { stage, images, ending }, vec![Effect::Stop])
            }
            (Self::Running { stage, images }, Input::Shutdown { kept }) => {
                (Self::Stopping { stage, images, ending: shut_down(stage, kept) }, vec![Effect::Stop])
            }
            (running @ Self::Running { .. }, Input::Dispatch | Input::Refuse(_)) => (running, Vec::new()),

            (Self::Stopping { images, ending, .. }, Input::DriverEnded(_)) => end(images, ending),
            // What was under way when the stop came is still told.
            (Self::Stopping { stage, images, ending }, Input::Driver(entry)) => {
                let (stage, images) = advance(stage, images, &entry);
                (Self::Stopping { stage, images, ending }, vec![Effect::Record(entry)])
            }
            // The first reason counts.
            (
                stopping @ Self::Stopping { .. },
                Input::Dispatch | Input::Cancel { .. } | Input::Shutdown { .. } | Input::Refuse(_),
            ) => (stopping, Vec::new()),

            (
                ended @ Self::Ended { .. },
                Input::Dispatch
                | Input::Driver(_)
                | Input::DriverEnded(_)
                | Input::Cancel { .. }
                | Input::Shutdown { .. }
                | Input::Refuse(_),
            ) => (ended, Vec::new()),
        }
    }

    /// Whether nothing more happens.
    pub fn is_ended(&self) -> bool {
        matches!(self, Self::Ended { .. })
    }

    /// Whether a driver exists.
    pub fn is_running(&self) -> bool {
        matches!(self, Self::Running { .. } | Self::Stopping { .. })
    }

    /// The state's name for clients. A job that is being stopped still runs.
    pub fn to_proto(&self) -> JobState {
        match self {
            Self::Queued => JobState::Queued,
            Self::Running { .. } | Self::Stopping { .. } => JobState::Running,
            Self::Ended { ending: Ending::Succeeded { .. }, .. } => JobState::Succeeded,
            Self::Ended { ending: Ending::Failed(_), .. } => JobState::Failed,
            Self::Ended { ending: Ending::Cancelled(_), .. } => JobState::Cancelled,
        }
    }

    /// The stage that runs; unspecified while none does.
    pub fn stage(&self) -> Stage {
        match self {
            Self::Running { stage, .. } | Self::Stopping { stage, .. } => *stage,
            Self::Queued | Self::Ended { .. } => Stage::Unspecified,
        }
    }

    /// Pictures finished.
    pub fn images(&self) -> u32 {
        match self {
            Self::Queued => 0,
            Self::Running { images, .. } | Self::Stopping { images, .. } | Self::Ended { images, .. } => *images,
        }
    }
}

fn advance(stage: Stage, images: u32, entry: &Entry) -> (Stage, u32) {
    match entry {
        Entry::StageStarted(started) => (started.stage(), images),
        Entry::Image(_) => (stage, images + 1),
        Entry::Progress(_) | Entry::StageFinished(_) | Entry::Note(_) | Entry::Decision(_) => (stage, images),
    }
}

fn end(images: u32, ending: Ending) -> (State, Vec<Effect>) {
    (State::Ended { images, ending: ending.clone() }, vec![Effect::End(ending)])
}

fn shut_down(stage: Stage, kept: bool) -> Ending {
    let message = match kept {
        true => {
            "the daemon was shut down; the job is recorded and goes on, under this id, when the daemon starts again"
        }
        false => "the daemon was shut down before the job ended: submit it again",
    };
    Ending::Failed(Failure {
        reason: FailureReason::Shutdown as i32,
        stage: stage as i32,
        message: message.into(),
        stderr: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn failure() -> Failure {
        Failure { reason: FailureReason::WorkerDied as i32, message: "x".into(), ..Failure::default() }
    }

    fn input() -> impl Strategy<Value = Input> {
        prop_oneof![
            Just(Input::Dispatch),
            Just(Input::Driver(Entry::StageStarted(StageStarted { stage: 3, ..StageStarted::default() }))),
            Just(Input::Driver(Entry::Progress(Progress::default()))),
            Just(Input::Driver(Entry::StageFinished(StageFinished::default()))),
            Just(Input::Driver(Entry::Image(ImageReady::default()))),
            Just(Input::Driver(Entry::Note(Note::default()))),
            Just(Input::Driver(Entry::Decision(Box::default()))),
            Just(Input::DriverEnded(DriverEnd::Completed { degraded: String::new() })),
            Just(Input::DriverEnded(DriverEnd::Failed(failure()))),
            Just(Input::DriverEnded(DriverEnd::Stopped)),
            Just(Input::Cancel { reason: "c".into() }),
            any::<bool>().prop_map(|kept| Input::Shutdown { kept }),
            Just(Input::Refuse(failure())),
        ]
    }

    proptest! {
        #[test]
        fn any_inputs_give_at_most_one_terminal_event_and_nothing_after_it(
            inputs in proptest::collection::vec(input(), 0..60)
        ) {
            let mut state = State::Queued;
            let (mut ends, mut starts, mut stops, mut images) = (0, 0, 0, 0);
            for input in inputs {
                let (next, effects) = state.step(input);
                for effect in effects {
                    prop_assert_eq!(ends, 0, "an effect after the terminal event");
                    match effect {
                        Effect::End(ending) => {
                            ends += 1;
                            let ended = State::Ended { images, ending };
                            prop_assert_eq!(&next, &ended);
                        }
                        Effect::Start => starts += 1,
                        Effect::Stop => {
                            prop_assert_eq!(starts, 1, "stopped before it was started");
                            stops += 1;
                        }
                        Effect::Record(Entry::Image(_)) => images += 1,
                        Effect::Record(_) => {}
                    }
                }
                state = next;
            }
            prop_assert_eq!(state.is_ended(), ends == 1);
            prop_assert_eq!(state.images(), images);
            prop_assert!(starts <= 1 && stops <= 1);
        }

        /// Whatever came before, a job that is told to stop and whose driver ends has ended: nothing can hold it open.
        #[test]
        fn a_stop_and_the_drivers_end_always_end_a_job(inputs in proptest::collection::vec(input(), 0..30)) {
            let mut state = State::Queued;
            for input in inputs {
                state = state.step(input).0;
            }
            state = state.step(Input::Shutdown { kept: false }).0;
            state = state.step(Input::DriverEnded(DriverEnd::Stopped)).0;
            prop_assert!(state.is_ended());
        }
    }

    #[test]
    fn a_cancelled_job_stays_cancelled_though_its_driver_completes() {
        let (state, _) = State::Queued.step(Input::Dispatch);
        let (state, effects) = state.step(Input::Cancel { reason: "by its owner".into() });
        assert_eq!(effects, [Effect::Stop]);
        let (state, effects) = state.step(Input::DriverEnded(DriverEnd::Completed { degraded: String::new() }));
        assert_eq!(state.to_proto(), JobState::Cancelled);
        assert_eq!(effects, [Effect::End(Ending::Cancelled(Cancelled { reason: "by its owner".into() }))]);
    }
}

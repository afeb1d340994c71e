//! The two clocks that watch a worker: its pulse, and the progress of its task. Pure: the time is given.

use std::time::Duration;

use sd_proto::worker::v1::{TaskPhase, TaskProgress};
use tokio::time::Instant;

use super::exit::{Clock, KillCause, Phase};

/// How long each clock runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClockLimits {
    /// Silence after which a process is taken for frozen.
    pub pulse: Duration,
    /// Least time without progress after which a task is taken for hung. A slower block, once learned, extends it.
    pub progress: Duration,
}

/// A block may take this many times the longest that this worker was seen to take.
const PATIENCE: u32 = 20;
/// A verdict that comes this much too late was delayed by the daemon itself (stopped, or starved of processor time):
/// what the worker sent meanwhile is not read yet.
const OWN_DELAY: Duration = Duration::from_millis(500);

/// Both clocks of one worker.
#[derive(Debug)]
pub struct Clocks {
    limits: ClockLimits,
    heard: Instant,
    task: Option<TaskClock>,
    longest: Duration,
}

#[derive(Debug)]
struct TaskClock {
    phase: Phase,
    moved: Instant,
    last: Option<(i32, u64, u64)>,
}

/// What the clocks say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing is due before this time.
    Wait(Instant),
    /// A clock ran out.
    Kill(KillCause),
}

impl Clocks {
    /// Clocks of a worker that said hello just now.
    pub fn new(limits: ClockLimits, now: Instant) -> Self {
        Self { limits, heard: now, task: None, longest: Duration::ZERO }
    }

    /// A pulse came.
    pub fn pulse(&mut self, now: Instant) {
        self.heard = now;
    }

    /// A task was sent.
    pub fn task_started(&mut self, now: Instant) {
        self.task = Some(TaskClock { phase: Phase::Starting, moved: now, last: None });
    }

    /// The task's progress came. Only what differs from the last one counts as moving. The time of a block, where none took longer
    /// before.
    pub fn progress(&mut self, progress: &TaskProgress, now: Instant) -> Option<Duration> {
        let task = self.task.as_mut()?;
        let seen = (progress.phase, progress.done, progress.heartbeat);
        if task.last == Some(seen) {
            return None;
        }
        let took = (task.phase == Phase::Computing).then(|| now - task.moved).filter(|took| *took > self.longest);
        if let Some(took) = took {
            self.longest = took;
        }
        task.last = Some(seen);
        task.moved = now;
        task.phase = match progress.phase() {
            TaskPhase::Unspecified => Phase::Starting,
            TaskPhase::Loading => Phase::Loading,
            TaskPhase::Computing => Phase::Computing,
        };
        took
    }

    /// The task ended.
    pub fn task_ended(&mut self) {
        self.task = None;
    }

    /// Whether a clock ran out, or when to look again. A verdict that the daemon itself was too late for is postponed once.
    pub fn check(&mut self, now: Instant) -> Verdict {
        let pulse_due = self.heard + self.limits.pulse;
        if now >= pulse_due {
            if now - pulse_due > OWN_DELAY {
                tracing::warn!(late = ?(now - pulse_due), "the daemon itself was held up: giving the worker one more pulse");
                self.heard = now;
                return self.check(now);
            }
            return Verdict::Kill(KillCause::Hung { clock: Clock::Pulse, silent: now - self.heard });
        }
        let Some(task) = &mut self.task else { return Verdict::Wait(pulse_due) };
        let allowed = match task.phase {
            Phase::Starting | Phase::Loading => self.limits.progress,
            Phase::Computing => self.limits.progress.max(self.longest * PATIENCE),
        };
        let progress_due = task.moved + allowed;
        if now >= progress_due {
            if now - progress_due > OWN_DELAY {
                task.moved = now;
                return self.check(now);
            }
            let silent = now - task.moved;
            return Verdict::Kill(KillCause::Hung { clock: Clock::Progress(task.phase), silent });
        }
        Verdict::Wait(pulse_due.min(progress_due))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn clocks(now: Instant) -> Clocks {
        Clocks::new(ClockLimits { pulse: 3000 * MS, progress: 60_000 * MS }, now)
    }

    fn progress(phase: TaskPhase, done: u64, heartbeat: u64) -> TaskProgress {
        TaskProgress { task_id: 1, phase: phase as i32, done, total: 100, heartbeat }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_kills_and_a_pulse_does_not() {
        let start = Instant::now();
        let mut clocks = clocks(start);
        assert_eq!(clocks.check(start + 2999 * MS), Verdict::Wait(start + 3000 * MS));
        clocks.pulse(start + 2999 * MS);
        assert_eq!(clocks.check(start + 3000 * MS), Verdict::Wait(start + 5999 * MS));
        let cause = KillCause::Hung { clock: Clock::Pulse, silent: 3000 * MS };
        assert_eq!(clocks.check(start + 5999 * MS), Verdict::Kill(cause));
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_was_stopped_does_not_blame_its_workers() {
        let start = Instant::now();
        let mut clocks = clocks(start);
        let resumed = start + 100_000 * MS;
        assert_eq!(clocks.check(resumed), Verdict::Wait(resumed + 3000 * MS));
        assert!(matches!(clocks.check(resumed + 3000 * MS), Verdict::Kill(_)), "only once");
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_progress_without_movement_is_a_hang() {
        let start = Instant::now();
        let mut clocks = clocks(start);
        clocks.task_started(start);
        clocks.progress(&progress(TaskPhase::Loading, 10, 0), start + 1000 * MS);
        for second in 2..=61u32 {
            let now = start + second * 1000 * MS;
            clocks.pulse(now);
            clocks.progress(&progress(TaskPhase::Loading, 10, 0), now);
            let verdict = clocks.check(now);
            if second < 61 {
                assert!(matches!(verdict, Verdict::Wait(_)), "{second}: {verdict:?}");
            } else {
                let cause = KillCause::Hung { clock: Clock::Progress(Phase::Loading), silent: 60_000 * MS };
                assert_eq!(verdict, Verdict::Kill(cause));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_block_once_seen_extends_the_patience() {
        let start = Instant::now();
        let mut clocks = clocks(start);
        clocks.task_started(start);
        clocks.progress(&progress(TaskPhase::Computing, 0, 0), start);
        let slow = start + 10_000 * MS;
        clocks.progress(&progress(TaskPhase::Computing, 0, 1), slow);
        let later = slow + 61_000 * MS;
        clocks.pulse(later);
        assert!(matches!(clocks.check(later), Verdict::Wait(_)), "20 × 10 s are allowed now");
        let due = slow + 200_000 * MS;
        clocks.pulse(due);
        assert!(matches!(clocks.check(due), Verdict::Kill(_)));
    }
}

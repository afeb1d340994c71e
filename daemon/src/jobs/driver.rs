//! Runs the stages of one job in order, keeps what they hand to each other, and makes the pictures.
//!
//! The outputs of finished runs stay held until no later run reads them, so that a run can be repeated in another worker
//! without repeating what came before it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sd_proto::v1::{
    Failure, FailureReason, ImageReady, Note, Progress, ProgressPhase, Stage, StageFinished, StageStarted, StageTiming,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::durable::progress::remaining;
use super::durable::{self, Handover, Rescue, SavedTensor};
use super::request::Admitted;
use super::state::{DriverEnd, Entry};
use super::store::duration;
use crate::ids::{JobId, Tenant};
use crate::picture;
use crate::stages::checkpoint::Checkpoint;
use crate::stages::plan::{Slot, StagePlan, StageRun};
use crate::stages::resume::Survival;
use crate::stages::runner::{Output, StageNews, StageOrder, StageReport, StageRunner, Stopped};

/// Least time between two events about bytes loaded. Steps are told one by one.
const LOADING_INTERVAL: Duration = Duration::from_millis(100);
/// Least time between two events about steps or blocks computed; the last one is always told.
const COMPUTING_INTERVAL: Duration = Duration::from_millis(20);
/// Progress events of one job after which the intervals double, again and again: a log that is kept whole must not
/// grow with a job's length.
const DOUBLE_AFTER: u32 = 1000;

/// Least time between two events of one phase, when a job has told so many already.
fn interval(phase: ProgressPhase, told: u32) -> Duration {
    let least = match phase {
        ProgressPhase::Loading => LOADING_INTERVAL,
        ProgressPhase::Unspecified | ProgressPhase::Starting | ProgressPhase::Computing => COMPUTING_INTERVAL,
    };
    least * (1 << (told / DOUBLE_AFTER).min(16))
}

/// What a driver is given.
#[derive(Debug)]
pub struct Assignment {
    /// Which job.
    pub job: JobId,
    /// Whose.
    pub tenant: Tenant,
    /// The request.
    pub request: Arc<Admitted>,
    /// Its stage runs.
    pub plan: Arc<StagePlan>,
    /// Fires when the job is to stop.
    pub stop: CancellationToken,
    /// What an earlier daemon did of it; and where it is put what this one did, if it is to stop.
    pub handover: Handover,
    /// Whether what is done is worth keeping: the job is recorded.
    pub is_recorded: bool,
    /// How long a stage may take to stop before it is left to itself.
    pub stop_bound: Duration,
    /// Where to report.
    pub entries: mpsc::Sender<(JobId, Entry)>,
}

impl Assignment {
    async fn tell(&self, entry: Entry) {
        // The owner outlives its drivers but for the end of the whole process.
        let _ = self.entries.send((self.job.clone(), entry)).await;
    }
}

/// Runs a job to its end, and tells the runner that it has ended.
pub async fn drive<R: StageRunner>(runner: Arc<R>, job: Assignment) -> DriverEnd {
    let id = job.job.clone();
    let end = drive_stages(runner.clone(), job).await;
    R::ended(&runner, &id);
    end
}

async fn drive_stages<R: StageRunner>(runner: Arc<R>, job: Assignment) -> DriverEnd {
    let mut done = job.handover.take().unwrap_or_default();
    let mut held = restore(&runner, &job, std::mem::take(&mut done.tensors)).await;
    let remaining = remaining(&job.plan, &done.painted(), &held.keys().copied().collect());
    for picture in std::mem::take(&mut done.pictures) {
        job.tell(Entry::Image(picture)).await;
    }
    let of = job.plan.runs().len() as u32;
    let mut told = 0;
    let mut course =
        Course { request: job.request.clone(), survival: Survival::default(), resume: None, rescue: Rescue::default() };
    for (index, run) in job.plan.runs().iter().enumerate() {
        if !remaining[index] {
            continue;
        }
        if job.stop.is_cancelled() {
            leave(&job, &course, held, done.checkpoint).await;
            return DriverEnd::Stopped;
        }
        let is_next = |(image, _): &mut (u32, Checkpoint)| run.stage == Stage::Denoise && *image == run.image;
        course.resume = done.checkpoint.take_if(is_next).map(|(_, checkpoint)| checkpoint);
        course.rescue = Rescue::default();
        let began = Instant::now();
        let report = match run_stage(&*runner, &job, run, (index as u32 + 1, of), &course, &held, &mut told).await {
            Ok(report) => report,
            Err(Stopped::Asked) => {
                let checkpoint = course.rescue.take().map(|checkpoint| (run.image, checkpoint)).or(done.checkpoint);
                leave(&job, &course, held, checkpoint).await;
                return DriverEnd::Stopped;
            }
            Err(Stopped::Failed(failure)) => return DriverEnd::Failed(failure),
        };
        let (stage, image_index) = (run.stage as i32, run.image);
        let timing = StageTiming { stage, image_index, total: Some(duration(began.elapsed())), ..report.timing };
        job.tell(Entry::StageFinished(StageFinished { stage, image_index, timing: Some(timing) })).await;

        (course.request, course.survival) = (report.request, report.survival);
        held.extend(report.outputs);
        if run.stage == Stage::Decode {
            match paint(&course, run, &mut held).await {
                Ok(image) => job.tell(Entry::Image(image)).await,
                Err(failure) => return DriverEnd::Failed(failure),
            }
        }
        held.retain(|slot, _| job.plan.needed_from(*slot, index + 1));
    }
    DriverEnd::Completed { degraded: course.survival.why_degraded() }
}

/// Brings back what stages of an earlier daemon wrote.
async fn restore<R: StageRunner>(
    runner: &Arc<R>,
    job: &Assignment,
    saved: Vec<(Slot, SavedTensor)>,
) -> BTreeMap<Slot, R::Output> {
    if saved.is_empty() {
        return BTreeMap::new();
    }
    let (runner, id, request) = (runner.clone(), job.job.clone(), job.request.clone());
    let restore = move |(slot, saved): (Slot, SavedTensor)| Some((slot, runner.restore(&id, &request, slot, saved)?));
    let restored = tokio::task::spawn_blocking(move || saved.into_iter().filter_map(restore).collect());
    restored.await.unwrap_or_default()
}

/// Puts down what is done of a job that is to stop, for the next daemon. Not where memory ran out and the job went on under
/// another plan: the next one begins as was promised at admission.
async fn leave<O: Output>(
    job: &Assignment,
    course: &Course,
    held: BTreeMap<Slot, O>,
    checkpoint: Option<(u32, Checkpoint)>,
) {
    if !job.is_recorded || course.request.plan != job.request.plan || !course.survival.why_degraded().is_empty() {
        return;
    }
    let save = |(slot, output): (Slot, O)| Some((slot, output.save()?));
    let saved = tokio::task::spawn_blocking(move || held.into_iter().filter_map(save).collect());
    let tensors = saved.await.unwrap_or_default();
    job.handover.leave(durable::Progress { tensors, checkpoint, pictures: Vec::new() });
}

/// How a job goes on after what it has survived.
struct Course {
    /// The request as it is run now.
    request: Arc<Admitted>,
    survival: Survival,
    /// The checkpoint that the next run goes on from.
    resume: Option<Checkpoint>,
    /// Where it puts its newest one if it is to stop.
    rescue: Rescue,
}

async fn run_stage<R: StageRunner>(
    runner: &R,
    job: &Assignment,
    run: &StageRun,
    (number, of): (u32, u32),
    course: &Course,
    held: &BTreeMap<Slot, R::Output>,
    told: &mut u32,
) -> Result<StageReport<R::Output>, Stopped> {
    let (news, mut incoming) = mpsc::channel(16);
    let order = StageOrder {
        job: job.job.clone(),
        tenant: job.tenant.clone(),
        request: course.request.clone(),
        survival: course.survival.clone(),
        resume: course.resume.clone(),
        rescue: course.rescue.clone(),
        run: run.clone(),
        inputs: run.inputs.iter().filter_map(|slot| Some((*slot, held.get(slot)?.clone()))).collect(),
        stop: job.stop.clone(),
        news,
    };
    let mut teller = Teller { job, run, number, of, started: false, last: None, told };
    let span = tracing::info_span!("stage", stage = run.stage.as_str_name(), image = run.image);
    let running = runner.run(order).instrument(span);
    tokio::pin!(running);
    let overdue = async {
        job.stop.cancelled().await;
        sleep(job.stop_bound).await;
    };
    tokio::pin!(overdue);
    let result = loop {
        tokio::select! {
            biased;
            Some(news) = incoming.recv() => teller.tell(news).await,
            result = &mut running => break result,
            () = &mut overdue => {
                tracing::error!(job = %job.job, stage = run.stage.as_str_name(), "stage did not stop in time, left to itself");
                return Err(Stopped::Asked);
            }
        }
    };
    while let Ok(news) = incoming.try_recv() {
        teller.tell(news).await;
    }
    if result.is_ok() {
        teller.start(0).await;
    }
    result
}

/// Turns a run's news into events, not too many of them.
struct Teller<'a> {
    job: &'a Assignment,
    run: &'a StageRun,
    number: u32,
    of: u32,
    started: bool,
    last: Option<(ProgressPhase, u64, Instant)>,
    /// Progress events of the whole job so far.
    told: &'a mut u32,
}

impl Teller<'_> {
    async fn start(&mut self, incarnation: u64) {
        if !self.started {
            self.started = true;
            let (stage, image_index) = (self.run.stage as i32, self.run.image);
            let started = StageStarted { stage, image_index, incarnation, number: self.number, of: self.of };
            self.job.tell(Entry::StageStarted(started)).await;
        }
    }

    async fn tell(&mut self, news: StageNews) {
        match news {
            StageNews::Worker { incarnation } => self.start(incarnation).await,
            StageNews::Note(text) => self.job.tell(Entry::Note(Note { text })).await,
            StageNews::Progress { phase, done, total } => {
                self.start(0).await;
                if self.is_worth_telling(phase, done, total) {
                    self.last = Some((phase, done, Instant::now()));
                    *self.told += 1;
                    let (stage, image_index) = (self.run.stage as i32, self.run.image);
                    let progress = Progress { stage, image_index, phase: phase as i32, done, total };
                    self.job.tell(Entry::Progress(progress)).await;
                }
            }
        }
    }

    fn is_worth_telling(&self, phase: ProgressPhase, done: u64, total: u64) -> bool {
        let Some((last_phase, last_done, at)) = self.last else { return true };
        if phase != last_phase {
            return true;
        }
        done != last_done && (done == total || at.elapsed() >= interval(phase, *self.told))
    }
}

/// Makes the picture of a decoded image.
async fn paint<O: crate::stages::runner::Output>(
    course: &Course,
    run: &StageRun,
    held: &mut BTreeMap<Slot, O>,
) -> Result<ImageReady, Failure> {
    let internal = |message: String| Failure {
        reason: FailureReason::Internal as i32,
        stage: Stage::Decode as i32,
        message,
        stderr: Vec::new(),
    };
    let Some(output) = run.outputs.first().and_then(|slot| held.remove(slot)) else {
        return Err(internal("the decode stage reported no pixels: this is a bug of sdd".into()));
    };
    let (request, index, degraded) = (course.request.clone(), run.image, course.survival.why_degraded());
    // Copying and compressing takes milliseconds: not on a thread that serves others.
    let painted = tokio::task::spawn_blocking(move || {
        let pixels = output.pixels()?;
        drop(output);
        let picture =
            picture::encode(&pixels, &request, index, &degraded).map_err(|error| internal(error.to_string()))?;
        Ok(ImageReady {
            index,
            seed: request.image_seed(index),
            width: pixels.width,
            height: pixels.height,
            png: picture.png,
            parameters: picture.parameters,
        })
    });
    painted.await.unwrap_or_else(|error| Err(internal(format!("making the picture failed: {error}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_of_steps_makes_a_log_of_some_thousand_events() {
        let (mut told, mut time, day) = (0, Duration::ZERO, Duration::from_secs(24 * 3600));
        while time < day {
            time += interval(ProgressPhase::Computing, told);
            told += 1;
        }
        assert!((5_000..20_000).contains(&told), "{told}");
        assert_eq!(interval(ProgressPhase::Computing, 999), COMPUTING_INTERVAL, "an ordinary job tells every step");
        assert!(interval(ProgressPhase::Loading, u32::MAX) > Duration::from_secs(3600), "and nothing overflows");
    }
}

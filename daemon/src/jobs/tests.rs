//! The owner of the jobs with a fake runner, under paused time: no process, no model.

mod durable;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use sd_proto::v1::{Failure, FailureReason, JobEvent, JobState, ProgressPhase, Stage, job_event};
use sd_proto::worker::v1::ElementType;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use super::durable::SavedTensor;
use super::fixtures;
use super::*;
use crate::ids::{JobId, Tenant};
use crate::picture::Pixels;
use crate::stages::plan::{Grouping, Slot};
use crate::stages::runner::{Output, StageNews, StageOrder, StageReport, StageRunner, Stopped};

/// What a fake stage writes: counts how many there are, so that a leak shows.
#[derive(Clone)]
struct FakeOutput {
    size: (u32, u32),
    _alive: Arc<Alive>,
}

struct Alive(Arc<AtomicUsize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Output for FakeOutput {
    fn pixels(&self) -> Result<Pixels, Failure> {
        let (width, height) = self.size;
        Ok(Pixels { width, height, rgb: vec![9; (3 * width * height) as usize] })
    }

    fn save(&self) -> Option<SavedTensor> {
        let shape = vec![u64::from(self.size.0), u64::from(self.size.1)];
        Some(SavedTensor { element_type: ElementType::U8, shape, bytes: Vec::new() })
    }
}

/// What a fake stage does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Work(Duration),
    Fail,
    Panic,
    /// Goes on although it was told to stop.
    Deaf,
}

type Script = Box<dyn Fn(&Admitted, Stage, u32) -> Act + Send + Sync>;

struct FakeRunner {
    act: Script,
    token: Semaphore,
    outputs: Arc<AtomicUsize>,
    order: Mutex<Vec<(JobId, Stage, u32)>>,
}

impl FakeRunner {
    fn new(act: impl Fn(&Admitted, Stage, u32) -> Act + Send + Sync + 'static) -> Arc<Self> {
        let (token, outputs, order) = (Semaphore::new(1), Arc::default(), Mutex::default());
        Arc::new(Self { act: Box::new(act), token, outputs, order })
    }

    fn seconds(seconds: u64) -> Arc<Self> {
        Self::new(move |_, _, _| Act::Work(Duration::from_secs(seconds)))
    }
}

impl StageRunner for FakeRunner {
    type Output = FakeOutput;

    fn restore(&self, _: &JobId, request: &Admitted, _: Slot, saved: SavedTensor) -> Option<FakeOutput> {
        let size = (request.width, request.height);
        if saved.shape != [u64::from(size.0), u64::from(size.1)] {
            return None;
        }
        self.outputs.fetch_add(1, Ordering::SeqCst);
        Some(FakeOutput { size, _alive: Arc::new(Alive(self.outputs.clone())) })
    }

    async fn run(&self, order: StageOrder<FakeOutput>) -> Result<StageReport<FakeOutput>, Stopped> {
        let (stage, image) = (order.run.stage, order.run.image);
        assert_eq!(order.inputs.keys().copied().collect::<Vec<Slot>>(), {
            let mut slots = order.run.inputs.clone();
            slots.sort();
            slots
        });
        let began = Instant::now();
        let _token = self.token.acquire().await.unwrap();
        let waited = began.elapsed();
        self.order.lock().unwrap().push((order.job.clone(), stage, image));
        let _ = order.news.send(StageNews::Worker { incarnation: 5 }).await;
        let duration = match (self.act)(&order.request, stage, image) {
            Act::Work(duration) => duration,
            Act::Fail => {
                let reason = FailureReason::WorkerDied as i32;
                let failure = Failure { reason, stage: stage as i32, message: "it died".into(), ..Failure::default() };
                return Err(Stopped::Failed(failure));
            }
            Act::Panic => panic!("the fake runner was asked to"),
            Act::Deaf => {
                sleep(Duration::from_secs(1_000_000)).await;
                Duration::ZERO
            }
        };
        const STEPS: u32 = 10;
        for step in 1..=STEPS {
            tokio::select! {
                biased;
                () = order.stop.cancelled() => return Err(Stopped::Asked),
                () = sleep(duration / STEPS) => {}
            }
            let (done, total) = (u64::from(step), u64::from(STEPS));
            let _ = order.news.try_send(StageNews::Progress { phase: ProgressPhase::Computing, done, total });
        }
        let output = |slot: &Slot| {
            self.outputs.fetch_add(1, Ordering::SeqCst);
            let size = (order.request.width, order.request.height);
            (*slot, FakeOutput { size, _alive: Arc::new(Alive(self.outputs.clone())) })
        };
        let outputs: BTreeMap<_, _> = order.run.outputs.iter().map(output).collect();
        Ok(StageReport::new(&order, outputs, waited, Duration::ZERO, duration))
    }
}

fn tenant(number: u32) -> Tenant {
    viewer::tenant_of_uid(number)
}

fn own(number: u32) -> Viewer {
    Viewer::Tenant(tenant(number))
}

fn small(count: u32) -> Admitted {
    Admitted { width: 8, height: 8, count, ..fixtures::admitted() }
}

async fn all(mut watcher: Watcher) -> Vec<JobEvent> {
    let mut events = Vec::new();
    while let Some(event) = watcher.next().await {
        events.push(JobEvent::clone(&event));
    }
    events
}

/// What every job's events must be, whatever happened.
fn check_events(events: &[JobEvent]) {
    let sequences: Vec<u64> = events.iter().map(|event| event.sequence).collect();
    assert_eq!(sequences, (1..=events.len() as u64).collect::<Vec<_>>());
    assert!(matches!(events[0].event, Some(job_event::Event::Queued(_))), "the first is queued");
    let terminal = |event: &JobEvent| {
        use job_event::Event as E;
        matches!(event.event, Some(E::Succeeded(_) | E::Failed(_) | E::Cancelled(_)))
    };
    assert_eq!(events.iter().filter(|event| terminal(event)).count(), 1);
    assert!(terminal(events.last().unwrap()), "the terminal event is the last");
}

fn names(events: &[JobEvent]) -> Vec<String> {
    use job_event::Event as E;
    let name = |event: &JobEvent| {
        Some(match event.event.as_ref()? {
            E::Queued(_) => "queued".into(),
            E::StageStarted(s) => format!("start {} {}", s.stage().as_str_name(), s.number),
            E::Progress(_) => return None,
            E::StageFinished(s) => format!("finish {}", s.stage().as_str_name()),
            E::Image(image) => format!("image {} seed {}", image.index, image.seed),
            E::Succeeded(_) => "succeeded".into(),
            E::Failed(failure) => format!("failed {}", failure.message),
            E::Cancelled(cancelled) => format!("cancelled {}", cancelled.reason),
            E::Note(note) => note.text.clone(),
            E::Decision(decision) => decision.text.clone(),
        })
    };
    events.iter().filter_map(name).collect()
}

#[tokio::test(start_paused = true)]
async fn a_job_runs_its_stages_in_order_and_its_pictures_come() {
    let runner = FakeRunner::seconds(1);
    let jobs = Jobs::start(runner.clone(), Limits::default());
    let (job, watcher) = jobs.submit(tenant(1), small(2), Grouping::ByImage).await.unwrap();
    let events = all(watcher).await;
    check_events(&events);
    assert_eq!(
        names(&events),
        [
            "queued",
            "start STAGE_ENCODE 1",
            "finish STAGE_ENCODE",
            "start STAGE_DENOISE 2",
            "finish STAGE_DENOISE",
            "start STAGE_DECODE 3",
            "finish STAGE_DECODE",
            "image 0 seed 1",
            "start STAGE_DENOISE 4",
            "finish STAGE_DENOISE",
            "start STAGE_DECODE 5",
            "finish STAGE_DECODE",
            "image 1 seed 2",
            "succeeded"
        ]
    );
    let Some(job_event::Event::Queued(queued)) = &events[0].event else { panic!("queued") };
    assert_eq!((queued.position, queued.estimated_wait), (0, Some(prost_types::Duration::default())));
    assert_eq!(queued.effective.as_ref().unwrap().steps, Some(20));
    let last = jobs.get(job, own(1)).await.unwrap();
    assert_eq!((last.state(), last.images_done), (JobState::Succeeded, 2));
    assert_eq!(last.timings.unwrap().stages.len(), 5);
    assert_eq!(runner.outputs.load(Ordering::SeqCst), 0, "nothing is held after the end");
}

#[tokio::test(start_paused = true)]
async fn a_stage_is_run_for_all_images_where_not_all_stages_fit() {
    let jobs = Jobs::start(FakeRunner::seconds(1), Limits::default());
    let (_, watcher) = jobs.submit(tenant(1), small(2), Grouping::ByStage).await.unwrap();
    let started: Vec<_> = names(&all(watcher).await).into_iter().filter(|name| name.starts_with("start")).collect();
    assert_eq!(
        started,
        [
            "start STAGE_ENCODE 1",
            "start STAGE_DENOISE 2",
            "start STAGE_DENOISE 3",
            "start STAGE_DECODE 4",
            "start STAGE_DECODE 5"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn late_watchers_see_what_early_ones_saw_and_may_start_in_the_middle() {
    let jobs = Jobs::start(FakeRunner::seconds(1), Limits::default());
    let (job, watcher) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let early = all(watcher).await;
    let late = all(jobs.watch(job.clone(), own(1), 0).await.unwrap()).await;
    assert_eq!(early, late);
    let rest = all(jobs.watch(job, own(1), 3).await.unwrap()).await;
    assert_eq!(rest, late[3..]);
}

#[tokio::test(start_paused = true)]
async fn jobs_are_served_in_order_and_told_how_long_they_wait() {
    let limits = Limits { running_jobs: 1, ..Limits::default() };
    let jobs = Jobs::start(FakeRunner::seconds(2), limits);
    let queued = |events: &[JobEvent]| match &events[0].event {
        Some(job_event::Event::Queued(queued)) => (queued.position, queued.estimated_wait.map(|d| d.seconds)),
        other => panic!("{other:?}"),
    };
    let submit = |number| jobs.submit(tenant(number), small(1), Grouping::ByImage);
    let (first, first_watcher) = submit(1).await.unwrap();
    sleep(Duration::from_millis(1)).await;
    let (_, second_watcher) = submit(2).await.unwrap();
    assert_eq!(jobs.get(first, own(1)).await.unwrap().state(), JobState::Running);
    let second = all(second_watcher).await;
    assert_eq!(queued(&second), (1, None), "nothing is known before the first job has run");
    assert_eq!(queued(&all(first_watcher).await), (0, Some(0)));

    // Three stages of two seconds each are known now.
    let (_, running) = submit(1).await.unwrap();
    sleep(Duration::from_millis(1)).await;
    let (_, next) = submit(2).await.unwrap();
    let (_, last) = submit(3).await.unwrap();
    assert_eq!(jobs.activity().borrow().queued, 2);
    let (a, b, c) = (all(running).await, all(next).await, all(last).await);
    assert_eq!((queued(&a), queued(&b), queued(&c)), ((0, Some(0)), (1, Some(6)), (2, Some(12))));
}

#[tokio::test(start_paused = true)]
async fn two_jobs_take_turns_stage_by_stage() {
    let runner = FakeRunner::seconds(1);
    let jobs = Jobs::start(runner.clone(), Limits { running_jobs: 2, ..Limits::default() });
    let (a, first) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let (b, second) = jobs.submit(tenant(2), small(1), Grouping::ByImage).await.unwrap();
    check_events(&all(first).await);
    check_events(&all(second).await);
    let order: Vec<JobId> = runner.order.lock().unwrap().iter().map(|(job, _, _)| job.clone()).collect();
    assert_eq!(order, [&a, &b, &a, &b, &a, &b].map(Clone::clone));
}

#[tokio::test(start_paused = true)]
async fn cancelling_ends_a_waiting_job_at_once_and_a_running_one_in_bounded_time() {
    let limits = Limits { running_jobs: 1, stop: Duration::from_secs(3), ..Limits::default() };
    let act = |_: &Admitted, stage, _| {
        if stage == Stage::Denoise { Act::Deaf } else { Act::Work(Duration::from_secs(1)) }
    };
    let jobs = Jobs::start(FakeRunner::new(act), limits);
    let (running, running_watcher) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let (waiting, waiting_watcher) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    sleep(Duration::from_secs(2)).await;
    let began = Instant::now();
    let job = jobs.cancel(waiting, own(1), "not wanted".into()).await.unwrap();
    assert_eq!((job.state(), began.elapsed()), (JobState::Cancelled, Duration::ZERO));
    assert_eq!(names(&all(waiting_watcher).await), ["queued", "cancelled not wanted"]);

    let job = jobs.cancel(running.clone(), own(1), "not wanted".into()).await.unwrap();
    assert_eq!(job.state(), JobState::Cancelled);
    assert!(began.elapsed() <= Duration::from_secs(4), "{:?}", began.elapsed());
    check_events(&all(running_watcher).await);
    // Cancelling an ended job changes nothing.
    assert_eq!(jobs.cancel(running, own(1), "again".into()).await.unwrap(), job);
    assert!(jobs.activity().borrow().is_idle());
}

#[tokio::test(start_paused = true)]
async fn a_failed_stage_and_a_broken_driver_fail_their_job_only() {
    let act = |request: &Admitted, stage, _: u32| match (request.seed, stage) {
        (1, Stage::Denoise) => Act::Fail,
        (2, Stage::Denoise) => Act::Panic,
        _ => Act::Work(Duration::from_secs(1)),
    };
    let runner = FakeRunner::new(act);
    let jobs = Jobs::start(runner.clone(), Limits::default());
    let mut watchers = Vec::new();
    for seed in [1, 2, 3] {
        let request = Admitted { seed, ..small(1) };
        watchers.push(jobs.submit(tenant(1), request, Grouping::ByImage).await.unwrap().1);
    }
    let mut ends = Vec::new();
    for watcher in watchers {
        let events = all(watcher).await;
        check_events(&events);
        ends.push(names(&events).pop().unwrap());
    }
    assert_eq!(ends[0], "failed it died");
    assert!(ends[1].starts_with("failed the job's driver broke"), "{}", ends[1]);
    assert_eq!(ends[2], "succeeded");
    assert_eq!(runner.outputs.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn another_tenants_jobs_do_not_exist() {
    let jobs = Jobs::start(FakeRunner::seconds(1), Limits::default());
    let (job, watcher) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    assert!(jobs.get(job.clone(), own(2)).await.is_err());
    assert!(jobs.watch(job.clone(), own(2), 0).await.is_err());
    assert!(jobs.cancel(job.clone(), own(2), String::new()).await.is_err());
    assert!(jobs.list(own(2), false, 10).await.is_empty());
    let operator = Viewer::Operator(tenant(0));
    assert_eq!(jobs.list(operator.clone(), true, 10).await.len(), 1);
    assert_eq!(names(&all(watcher).await).last().unwrap(), "succeeded");
    assert_eq!(jobs.get(job, operator).await.unwrap().tenant, "uid:1");
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_and_the_oldest_ended_jobs_are_forgotten() {
    let limits = Limits { running_jobs: 1, queued_jobs: 2, ended_jobs: 2, ..Limits::default() };
    let jobs = Jobs::start(FakeRunner::seconds(1), limits);
    let mut watchers = Vec::new();
    let mut ids = Vec::new();
    for _ in 0..3 {
        let (id, watcher) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
        ids.push(id);
        watchers.push(watcher);
    }
    let refused = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap_err();
    assert!(matches!(refused, SubmitError::Full(_)), "{refused}");
    for watcher in watchers {
        check_events(&all(watcher).await);
    }
    assert_eq!(jobs.get(ids[0].clone(), own(1)).await, Err(NotFound(ids[0].clone())));
    let newest: Vec<_> = jobs.list(own(1), false, 10).await.into_iter().map(|job| job.id).collect();
    assert_eq!(newest, [ids[2].to_string(), ids[1].to_string()]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_lets_jobs_end_and_cancels_what_is_too_slow() {
    let jobs = Jobs::start(FakeRunner::seconds(4), Limits { running_jobs: 1, ..Limits::default() });
    let (_, first) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let (_, second) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let draining = tokio::spawn({
        let jobs = jobs.clone();
        async move { jobs.drain(Duration::from_secs(20)).await }
    });
    sleep(Duration::from_secs(1)).await;
    let refused = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap_err();
    assert_eq!(refused, SubmitError::Draining);
    assert_eq!(names(&all(first).await).last().unwrap(), "succeeded");
    assert!(names(&all(second).await).last().unwrap().starts_with("cancelled"));
    assert_eq!(draining.await.unwrap(), Drained { finished: 1, cancelled: 1, kept: 0 });
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_every_job() {
    let jobs = Jobs::start(FakeRunner::seconds(100), Limits { running_jobs: 1, ..Limits::default() });
    let (_, running) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let (_, waiting) = jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    jobs.shutdown().await;
    for watcher in [running, waiting] {
        let events = all(watcher).await;
        check_events(&events);
        let Some(job_event::Event::Failed(failure)) = &events.last().unwrap().event else { panic!("failed") };
        assert_eq!(failure.reason(), FailureReason::Shutdown);
    }
    assert_eq!(jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap_err(), SubmitError::Draining);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Jobs of random fates, cancelled, abandoned and shut down at random moments: each ends once, nothing is held.
    #[test]
    fn whatever_happens_every_job_ends_exactly_once(
        fates in proptest::collection::vec((0u8..5, 0u64..8000, 1u32..4, 0u8..3), 1..8),
        shutdown in 0u64..20_000,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async move {
            let acts = [Act::Work(Duration::from_millis(700)), Act::Work(Duration::ZERO), Act::Fail, Act::Panic, Act::Deaf];
            let runner = FakeRunner::new(move |request: &Admitted, stage, _| {
                if stage == Stage::Denoise { acts[request.seed as usize] } else { acts[0] }
            });
            let limits = Limits { running_jobs: 2, stop: Duration::from_secs(3), ..Limits::default() };
            let jobs = Jobs::start(runner.clone(), limits);
            let mut watching = Vec::new();
            for (act, after, count, how) in fates {
                let request = Admitted { seed: u64::from(act), ..small(count) };
                let (job, watcher) = jobs.submit(tenant(1), request, Grouping::ByImage).await.unwrap();
                watching.push(tokio::spawn(all(watcher)));
                let jobs = jobs.clone();
                tokio::spawn(async move {
                    sleep(Duration::from_millis(after)).await;
                    match how {
                        0 => {}
                        1 => jobs.abandon(job, "gone"),
                        _ => drop(jobs.cancel(job, own(1), "cancelled".into()).await),
                    }
                });
            }
            sleep(Duration::from_millis(shutdown)).await;
            jobs.shutdown().await;
            for events in watching {
                check_events(&events.await.unwrap());
            }
            assert!(jobs.activity().borrow().is_idle());
            // A deaf stage's future is dropped, so even its outputs are gone.
            assert_eq!(runner.outputs.load(Ordering::SeqCst), 0);
        });
    }
}

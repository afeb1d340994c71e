//! Jobs that outlive their daemon: what is recorded when, and what becomes of it at the next start.

use std::path::Path;
use std::pin::Pin;

use sd_proto::v1::NumericPlan;

use super::*;
use crate::jobs::admission::StageNeed;
use crate::jobs::durable::{DurableJob, Keeper, Loaded, Store, StoreError, take_up};
use crate::models::{Inspector, Model, Registry, RegistryConfig};
use crate::workers::InspectError;

/// A store in memory. A copy of it is what a daemon that is killed leaves.
#[derive(Default)]
struct MemoryStore {
    jobs: Mutex<BTreeMap<JobId, DurableJob>>,
    is_full: bool,
}

impl MemoryStore {
    fn copy(&self) -> Arc<Self> {
        Arc::new(Self { jobs: Mutex::new(self.jobs.lock().unwrap().clone()), is_full: false })
    }

    fn ids(&self) -> Vec<JobId> {
        self.load().unwrap().jobs.into_iter().map(|job| job.id).collect()
    }

    fn change(&self, change: impl Fn(&mut DurableJob)) {
        self.jobs.lock().unwrap().values_mut().for_each(change);
    }
}

impl Store for MemoryStore {
    fn put(&self, job: &DurableJob) -> Result<(), StoreError> {
        if self.is_full {
            let source = std::io::Error::from_raw_os_error(libc::ENOSPC);
            return Err(StoreError::Write { job: job.id.clone(), folder: "memory".into(), source });
        }
        self.jobs.lock().unwrap().insert(job.id.clone(), job.clone());
        Ok(())
    }

    fn remove(&self, job: &JobId) -> Result<(), StoreError> {
        self.jobs.lock().unwrap().remove(job);
        Ok(())
    }

    fn note_start(&self, job: &JobId) {
        if let Some(job) = self.jobs.lock().unwrap().get_mut(job) {
            job.broken_runs += 1;
        }
    }

    fn load(&self) -> Result<Loaded, StoreError> {
        let mut jobs: Vec<DurableJob> = self.jobs.lock().unwrap().values().cloned().collect();
        jobs.sort_by_key(|job| job.order);
        Ok(Loaded { jobs, damaged: Vec::new() })
    }
}

struct Sample;

impl Inspector for Sample {
    fn inspect<'a>(&'a self, _: &'a Path) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, InspectError>> + Send + 'a>> {
        Box::pin(async { Ok(include_str!("../../models/sample_report.json").into()) })
    }
}

/// What a request needs, and under which plan it would be made now.
struct FakeFits {
    plan: NumericPlan,
    budget: u64,
}

impl Fits for FakeFits {
    fn needs(&self, _: &Admitted) -> Vec<StageNeed> {
        let source = crate::residency::estimate::Source::Formula;
        vec![StageNeed { stage: Stage::Decode, context: 4, weights: 6, floor: 6, working_set: 10, source }]
    }

    fn limit(&self, _: &Admitted) -> u64 {
        self.budget
    }

    fn device(&self) -> String {
        "cpu".into()
    }

    fn plans(
        &self,
        _: &Model,
        asked: Option<&sd_proto::v1::MemoryRequest>,
    ) -> (crate::stages::MemoryPlan, NumericPlan) {
        let settings = crate::config::memory::Settings::default();
        (crate::stages::MemoryPlan::resolve(&settings, asked), self.plan.clone())
    }
}

/// One life of a daemon.
struct Life {
    jobs: Jobs,
    store: Arc<MemoryStore>,
    runner: Arc<FakeRunner>,
    _models: tempfile::TempDir,
}

impl Life {
    /// A daemon that finds this store.
    async fn begin(store: Arc<MemoryStore>, runner: Arc<FakeRunner>) -> Self {
        Self::begin_with(store, runner, FakeFits { plan: fixtures::numeric_plan(), budget: 100 }).await
    }

    async fn begin_with(store: Arc<MemoryStore>, runner: Arc<FakeRunner>, fits: FakeFits) -> Self {
        let models = tempfile::tempdir().unwrap();
        let config = RegistryConfig {
            models: BTreeMap::from([("default".into(), models.path().to_owned())]),
            cache_dir: models.path().join("nothing"),
            ..RegistryConfig::default()
        };
        let registry = Registry::new(config, Arc::new(Sample));
        let admission = Admission::new(registry, Limits::default(), Arc::new(fits));
        let limits = Limits { running_jobs: 1, queued_jobs: 4, ..Limits::default() };
        let jobs = Jobs::start_with(runner.clone(), limits, Some(Keeper::start(store.clone())));
        take_up(store.clone(), &admission, &jobs).await;
        Self { jobs, store, runner, _models: models }
    }

    async fn keep(&self, seed: u64) -> (JobId, Watcher) {
        let request = Admitted { seed, ..small(1) };
        self.jobs.submit_kept(tenant(1), request, Grouping::ByImage).await.unwrap()
    }

    async fn events(&self, job: &JobId) -> Vec<JobEvent> {
        let events = all(self.jobs.watch(job.clone(), own(1), 0).await.unwrap()).await;
        check_events(&events);
        events
    }

    /// Returns once what was sent to the store before is done.
    async fn settled(&self) {
        // A shutdown waits for the store, behind everything that was sent to it before.
        self.jobs.shutdown().await;
    }
}

fn last(events: &[JobEvent]) -> String {
    names(events).pop().unwrap()
}

/// The reason and the text of a job's failure.
fn failure(events: &[JobEvent]) -> (FailureReason, String) {
    match &events.last().unwrap().event {
        Some(job_event::Event::Failed(failure)) => (failure.reason(), failure.message.clone()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_kept_job_is_recorded_when_it_is_accepted_and_until_it_ends() {
    let life = Life::begin(Arc::default(), FakeRunner::seconds(1)).await;
    let (kept, watcher) = life.keep(7).await;
    assert_eq!(life.store.ids(), std::slice::from_ref(&kept));
    let record = life.store.load().unwrap().jobs.remove(0);
    assert_eq!((record.tenant, record.request.seed, record.plan), (tenant(1), Some(7), fixtures::numeric_plan()));
    let (_, attended) = life.jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    assert_eq!(life.store.ids(), [kept], "whose client cancels by leaving is not recorded");
    assert_eq!(last(&all(watcher).await), "succeeded");
    assert_eq!(last(&all(attended).await), "succeeded");
    life.settled().await;
    assert_eq!(life.store.ids(), []);
}

#[tokio::test(start_paused = true)]
async fn after_a_kill_every_kept_job_goes_on_under_its_id_and_in_its_order() {
    let killed = Life::begin(Arc::default(), FakeRunner::seconds(1)).await;
    let mut ids = Vec::new();
    for seed in [31, 32, 33, 34, 35] {
        ids.push(killed.keep(seed).await.0);
    }
    killed.events(&ids[0]).await;
    sleep(Duration::from_millis(1500)).await;
    let left = killed.store.copy();
    assert_eq!(left.ids(), ids[1..]);

    let next = Life::begin(left, FakeRunner::seconds(1)).await;
    let refused = next.jobs.submit_kept(tenant(1), small(1), Grouping::ByImage).await;
    assert!(refused.is_ok(), "the one that ran leaves three of four places taken: {refused:?}");
    let newest = refused.unwrap().0;
    for (id, seed) in ids[1..].iter().zip([32, 33, 34, 35]) {
        let events = next.events(id).await;
        let told = names(&events);
        assert_eq!(told[0], "queued");
        assert!(told[1].starts_with("taken up again after a restart"), "{}", told[1]);
        assert_eq!(told[1].ends_with("begun anew"), seed == 32, "{}", told[1]);
        assert!(told.contains(&format!("image 0 seed {seed}")), "{told:?}");
        assert_eq!(told.last().unwrap(), "succeeded");
    }
    assert_eq!(last(&next.events(&newest).await), "succeeded");
    let order: Vec<JobId> = next.runner.order.lock().unwrap().iter().step_by(3).map(|(job, ..)| job.clone()).collect();
    assert_eq!(order, [&ids[1..], &[newest]].concat(), "what was accepted before comes before what is new");
    assert_eq!(next.jobs.get(ids[0].clone(), own(1)).await, Err(NotFound(ids[0].clone())));
    next.settled().await;
    assert_eq!(next.store.ids(), []);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_would_give_another_picture_fails_with_the_reason() {
    let plan = fixtures::numeric_plan();
    let ours = || FakeFits { plan: fixtures::numeric_plan(), budget: 100 };
    type Change = fn(&mut DurableJob);
    let same: Change = |_| {};
    let cases: [(FakeFits, Change, FailureReason, &str); 6] = [
        (ours(), |job| job.model.fingerprint = "x".into(), FailureReason::Model, "have changed"),
        (
            ours(),
            |job| (job.model.name, job.model.dir) = ("gone".into(), "/nowhere".into()),
            FailureReason::Model,
            "there is no model \"gone\"",
        ),
        (
            FakeFits { plan: NumericPlan { backend: "portable".into(), ..plan.clone() }, budget: 100 },
            same,
            FailureReason::Internal,
            "backend was candle and is portable",
        ),
        (FakeFits { plan, budget: 5 }, same, FailureReason::DoesNotFit, "does not fit"),
        (ours(), |job| job.request.steps = Some(0), FailureReason::InvalidRequest, "steps"),
        (ours(), |job| job.broken_runs = 3, FailureReason::Internal, "killed 3 times"),
    ];
    for (fits, change, reason, word) in cases {
        let killed = Life::begin(Arc::default(), FakeRunner::seconds(1000)).await;
        let (id, _) = killed.keep(1).await;
        let left = killed.store.copy();
        left.change(change);
        let next = Life::begin_with(left, FakeRunner::seconds(1), fits).await;
        let events = next.events(&id).await;
        let told = names(&events);
        assert_eq!(told.len(), 3, "queued, a note, the end: {told:?}");
        let (told, message) = failure(&events);
        assert_eq!(told, reason, "{message}");
        assert!(message.contains(word) && message.contains("submit it again"), "{message}");
        assert_eq!(next.jobs.get(id, own(1)).await.unwrap().state(), JobState::Failed);
        next.settled().await;
        assert_eq!(next.store.ids(), []);
        killed.settled().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_keeps_recorded_jobs_for_the_next_start_and_cancels_the_others() {
    let life = Life::begin(Arc::default(), FakeRunner::seconds(4)).await;
    let (first, _) = life.keep(1).await;
    let (running, _) = life.keep(2).await;
    let (waiting, _) = life.keep(3).await;
    let (attended, attending) = life.jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    let drained = life.jobs.drain(Duration::from_secs(20)).await;
    assert_eq!(drained, Drained { finished: 1, cancelled: 1, kept: 2 });
    assert_eq!(last(&life.events(&first).await), "succeeded");
    assert!(last(&all(attending).await).starts_with("cancelled"));
    for job in [&running, &waiting] {
        let (reason, message) = failure(&life.events(job).await);
        assert_eq!(reason, FailureReason::Shutdown);
        assert!(message.contains("goes on, under this id, when the daemon starts again"), "{message}");
    }
    life.jobs.shutdown().await;
    assert_eq!(life.store.ids(), [running.clone(), waiting.clone()]);
    assert!(life.store.load().unwrap().jobs.iter().all(|job| job.broken_runs == 0), "nothing was broken off");

    let next = Life::begin(life.store.copy(), FakeRunner::seconds(1)).await;
    assert!(next.jobs.get(attended, own(1)).await.is_err());
    assert_eq!(next.jobs.list(own(1), true, 10).await.len(), 2);
    let cancelled = next.jobs.cancel(waiting, own(1), "not wanted".into()).await.unwrap();
    assert_eq!(cancelled.state(), JobState::Cancelled);
    assert_eq!(last(&next.events(&running).await), "succeeded");
    next.settled().await;
    assert_eq!(next.store.ids(), []);
}

#[tokio::test(start_paused = true)]
async fn after_a_drain_a_job_goes_on_after_its_last_finished_stage_and_with_its_pictures() {
    let life = Life::begin(Arc::default(), FakeRunner::seconds(1)).await;
    let request = Admitted { seed: 7, ..small(2) };
    let (id, _) = life.jobs.submit_kept(tenant(1), request, Grouping::ByImage).await.unwrap();
    // Encoded, the first image painted, the second one half denoised.
    let drained = life.jobs.drain(Duration::from_millis(3500)).await;
    assert_eq!(drained, Drained { finished: 0, cancelled: 0, kept: 1 });
    life.jobs.shutdown().await;
    assert_eq!(life.runner.outputs.load(Ordering::SeqCst), 0, "nothing is held after the end");

    let next = Life::begin(life.store.copy(), FakeRunner::seconds(1)).await;
    let events = next.events(&id).await;
    let told = names(&events);
    assert!(told[1].contains("1 picture is done, it goes on after its last finished stage"), "{}", told[1]);
    assert_eq!(
        told[2..],
        [
            "image 0 seed 7",
            "start STAGE_DENOISE 4",
            "finish STAGE_DENOISE",
            "start STAGE_DECODE 5",
            "finish STAGE_DECODE",
            "image 1 seed 8",
            "succeeded"
        ]
    );
    next.settled().await;
    assert_eq!(next.store.ids(), []);
}

#[tokio::test(start_paused = true)]
async fn a_job_that_cannot_be_recorded_is_refused_and_one_that_need_not_be_runs() {
    let store = Arc::new(MemoryStore { is_full: true, ..MemoryStore::default() });
    let life = Life::begin(store, FakeRunner::seconds(1)).await;
    let refused = life.jobs.submit_kept(tenant(1), small(1), Grouping::ByImage).await.unwrap_err();
    assert!(matches!(&refused, SubmitError::NotRecorded(why) if why.contains("durable = false")), "{refused}");
    let (_, watcher) = life.jobs.submit(tenant(1), small(1), Grouping::ByImage).await.unwrap();
    assert_eq!(last(&all(watcher).await), "succeeded");
    let states: Vec<_> = life.jobs.list(own(1), false, 10).await.iter().map(|job| job.state()).collect();
    assert_eq!(states, [JobState::Succeeded, JobState::Cancelled]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(25))]
    /// Daemons that are killed or shut down at random moments, one after the other on one store: no kept job is lost, and each has
    /// one end in its last life.
    #[test]
    fn no_kept_job_is_lost_whenever_its_daemon_ends(
        lives in proptest::collection::vec((0u64..9000, any::<bool>(), 0usize..3), 1..4),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async move {
            let mut store: Arc<MemoryStore> = Arc::default();
            let (mut accepted, mut ended) = (Vec::new(), Vec::new());
            for (millis, is_killed, more) in lives {
                let life = Life::begin(store.clone(), FakeRunner::seconds(1)).await;
                for seed in 0..more {
                    if let Ok((id, _)) = life.jobs.submit_kept(tenant(1), Admitted { seed: seed as u64, ..small(1) }, Grouping::ByImage).await {
                        accepted.push(id);
                    }
                }
                sleep(Duration::from_millis(millis)).await;
                if is_killed {
                    // Whatever the old one still does, it does to its own copy.
                    store = life.store.copy();
                    store.change(|job| job.broken_runs = 0);
                }
                let already: Vec<_> = life.jobs.list(own(1), false, 100).await;
                ended.extend(already.into_iter().filter(|job| job.state() == JobState::Succeeded).map(|job| job.id));
                life.jobs.shutdown().await;
                for id in &accepted {
                    if life.jobs.get(id.clone(), own(1)).await.is_ok() {
                        life.events(id).await;
                    }
                }
            }
            let last = Life::begin(store, FakeRunner::seconds(0)).await;
            for id in &accepted {
                match last.jobs.get(id.clone(), own(1)).await {
                    Ok(_) => assert_eq!(names(&last.events(id).await).last().unwrap(), "succeeded"),
                    Err(_) => assert!(ended.contains(&id.to_string()), "{id} is lost"),
                }
            }
            last.jobs.shutdown().await;
            assert_eq!(last.store.ids(), []);
        });
    }
}

//! The public services over a real Unix socket, with a fake runner of stages and a fake inspector of models.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::generation_client::GenerationClient;
use sd_proto::v1::{
    CancelRequest, Decision, DecisionKind, DrainRequest, ExplainJobRequest, Failure, FitRequest, GenerateRequest,
    GetRequest, GetStatusRequest, ImageRequest, InspectModelRequest, JobEvent, JobState, ListModelsRequest,
    ListRequest, LoadModelRequest, MemoryRequest, NumericPlan, PinModelRequest, ProgressPhase, ReleaseDeviceRequest,
    ShowConfigRequest, Stage, SubmitRequest, UnloadModelRequest, WatchDecisionsRequest, WatchDecisionsResponse,
    WatchRequest, job_event,
};
use sdd::api::{self, Backing, ControlService, GenerationService, Identity, Overview};
use sdd::arena::ArenaUsage;
use sdd::config::Value;
use sdd::config::memory::Settings;
use sdd::jobs::admission::StageNeed;
use sdd::jobs::{Admission, Admitted, Fits, Jobs, Limits};
use sdd::journal::Journal;
use sdd::models::{Inspector, Model, Registry, RegistryConfig};
use sdd::picture::Pixels;
use sdd::residency::DeviceSnapshot;
use sdd::residency::estimate::Source;
use sdd::stages::memory::MemoryPlan;
use sdd::stages::operate::{Answer, Freed, LoadOrder, Loaded, Operator, Which};
use sdd::stages::runner::{Output, StageNews, StageOrder, StageReport, StageRunner, Stopped};
use sdd::workers::{InspectError, WorkerView};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

const REPORT: &str = include_str!("../src/models/sample_report.json");

/// Describes every folder that has a `model_index.json` by the sample; a folder with a file `bad` is a bad model.
struct FakeInspector;

impl Inspector for FakeInspector {
    fn inspect<'a>(
        &'a self,
        folder: &'a Path,
    ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, InspectError>> + Send + 'a>> {
        Box::pin(async move {
            if folder.join("bad").exists() {
                return Err(InspectError::BadModel("unet: tensor conv_in.weight is missing".into()));
            }
            Ok(REPORT.into())
        })
    }
}

/// Pictures of one colour, made as fast as permits are given.
struct FakeRunner {
    steps: Arc<Semaphore>,
    stopped: Arc<Semaphore>,
}

#[derive(Clone)]
struct Size(u32, u32);

impl Output for Size {
    fn pixels(&self) -> Result<Pixels, Failure> {
        Ok(Pixels { width: self.0, height: self.1, rgb: vec![200; (3 * self.0 * self.1) as usize] })
    }
}

impl StageRunner for FakeRunner {
    type Output = Size;

    async fn run(&self, order: StageOrder<Size>) -> Result<StageReport<Size>, Stopped> {
        let _ = order.news.send(StageNews::Worker { incarnation: 1 }).await;
        tokio::select! {
            biased;
            () = order.stop.cancelled() => {
                self.stopped.add_permits(1);
                return Err(Stopped::Asked);
            }
            step = self.steps.acquire() => step.unwrap().forget(),
        }
        let phase = ProgressPhase::Computing;
        let _ = order.news.send(StageNews::Progress { phase, done: 1, total: 1 }).await;
        let size = Size(order.request.width, order.request.height);
        let outputs: BTreeMap<_, _> = order.run.outputs.iter().map(|slot| (*slot, size.clone())).collect();
        let (waited, loaded, computed) = (Duration::ZERO, Duration::ZERO, Duration::from_millis(3));
        Ok(StageReport::new(&order, outputs, waited, loaded, computed))
    }
}

/// A budget in which 100 bytes a pixel of decoding must fit.
struct FakeFits;

impl Fits for FakeFits {
    fn needs(&self, request: &Admitted) -> Vec<StageNeed> {
        let working_set = 100 * u64::from(request.width) * u64::from(request.height);
        let (context, weights, source) = (400_000, 600_000, Source::Formula);
        vec![StageNeed { stage: Stage::Decode, context, weights, floor: weights, working_set, source }]
    }

    fn limit(&self, _: &Admitted) -> u64 {
        60_000_000
    }

    fn device(&self) -> String {
        "cpu".into()
    }

    fn plans(&self, model: &Model, asked: Option<&MemoryRequest>) -> (MemoryPlan, NumericPlan) {
        let plan =
            NumericPlan { version: model.report.numerics_version, device: "cpu".into(), ..NumericPlan::default() };
        (MemoryPlan::resolve(&Settings::default(), asked), plan)
    }
}

struct FakeOverview;

impl Overview for FakeOverview {
    fn devices(&self) -> Pin<Box<dyn Future<Output = Vec<DeviceSnapshot>> + Send + '_>> {
        let cpu = DeviceSnapshot {
            device: sdd::ids::DeviceId::cpu(),
            name: String::new(),
            total: 1,
            budget: 1,
            capacity: 1,
            leased: 0,
            unproven: 0,
            overdraft: 0,
            degraded: None,
            held_until: None,
            foreign: Vec::new(),
            leases: Vec::new(),
            holders: Vec::new(),
            waiters: Vec::new(),
            computing: None,
        };
        Box::pin(async { vec![cpu] })
    }

    fn workers(&self) -> Vec<WorkerView> {
        Vec::new()
    }

    fn shared_memory(&self) -> ArenaUsage {
        ArenaUsage { segments: 0, bytes: 0, limit: 1, free: 1 }
    }
}

/// Notes what it is asked for.
#[derive(Default)]
struct FakeOperator {
    asked: std::sync::Mutex<Vec<String>>,
}

impl FakeOperator {
    fn note(&self, text: String) {
        self.asked.lock().unwrap().push(text);
    }
}

impl Operator for FakeOperator {
    fn load(&self, order: LoadOrder) -> Answer<'_, Result<Loaded, Failure>> {
        self.note(format!("load {} of {} for {}", order.stage.as_str_name(), order.request.model.name, order.tenant));
        let reason = sd_proto::v1::FailureReason::DoesNotFit as i32;
        let failed = Failure { reason, message: "too large".into(), stage: order.stage as i32, ..Failure::default() };
        let fits = order.stage != Stage::Decode;
        Box::pin(async move { if fits { Ok(Loaded { incarnation: 7, weights_bytes: 9 }) } else { Err(failed) } })
    }

    fn unload(&self, which: Which) -> Answer<'_, Freed> {
        self.note(format!("unload {:?} of {} in {}", which.stages, which.model, which.dir.is_some()));
        Box::pin(async { Freed { workers: 2, bytes: 11 } })
    }

    fn pin(&self, dir: &Path, pinned: bool) {
        self.note(format!("pin {} {pinned}", dir.file_name().unwrap().display()));
    }

    fn release(&self, device: sdd::ids::DeviceId, hold: Option<Duration>) -> Answer<'_, Freed> {
        self.note(format!("release {device} {hold:?}"));
        Box::pin(async { Freed { workers: 1, bytes: 13 } })
    }
}

struct Daemon {
    folder: tempfile::TempDir,
    steps: Arc<Semaphore>,
    stopped: Arc<Semaphore>,
    jobs: Jobs,
    ended: CancellationToken,
    journal: Journal,
    operator: Arc<FakeOperator>,
    ending: CancellationToken,
    tcp: std::net::SocketAddr,
}

impl Daemon {
    /// Serves on a Unix socket and on TCP. `steps` stage runs go through; more when permits are added.
    async fn start(steps: usize, limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let models = folder.path().join("models");
        for (name, bad) in [("mine", false), ("broken", true)] {
            std::fs::create_dir_all(models.join(name)).unwrap();
            std::fs::write(models.join(name).join("model_index.json"), "{}").unwrap();
            if bad {
                std::fs::write(models.join(name).join("bad"), "").unwrap();
            }
        }
        let config = RegistryConfig {
            folder: Some(models),
            default: Some("mine".into()),
            cache_dir: folder.path().join("cache"),
            ..RegistryConfig::default()
        };
        let registry = Registry::new(config, Arc::new(FakeInspector));
        let (steps, stopped) = (Arc::new(Semaphore::new(steps)), Arc::new(Semaphore::new(0)));
        let runner = FakeRunner { steps: steps.clone(), stopped: stopped.clone() };
        let jobs = Jobs::start(Arc::new(runner), limits.clone());
        let admission = Admission::new(registry, limits, Arc::new(FakeFits));
        let ended = CancellationToken::new();
        let generation = GenerationService::new(jobs.clone(), admission.clone());
        let identity = Identity { instance: "i".into(), endpoint: "unix:/x".into(), started: SystemTime::now() };
        let operator = Arc::new(FakeOperator::default());
        let (journal, ending) = (Journal::default(), CancellationToken::new());
        jobs.follow(&journal);
        let backing = Backing {
            jobs: jobs.clone(),
            admission,
            overview: Arc::new(FakeOverview),
            journal: journal.clone(),
            operator: operator.clone(),
            quarantine: sdd::stages::Quarantine::default(),
            ending: ending.clone(),
            shutdown: ended.clone(),
            drain_grace: Duration::from_secs(1),
            config: Arc::new(vec![Value {
                key: "threads".into(),
                value: Some("2".into()),
                source: "--threads".into(),
            }]),
        };
        let control = ControlService::new(identity, backing);
        let socket = UnixListener::bind(folder.path().join("s")).unwrap();
        let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let router = || {
            Server::builder()
                .add_service(api::generation(generation.clone()))
                .add_service(api::control(control.clone()))
        };
        tokio::spawn(router().serve_with_incoming(UnixListenerStream::new(socket)));
        let incoming = tonic::transport::server::TcpIncoming::from(tcp);
        tokio::spawn(router().serve_with_incoming(incoming));
        Self { folder, steps, stopped, jobs, ended, journal, operator, ending, tcp: address }
    }

    async fn channel(&self) -> Channel {
        let path = self.folder.path().join("s");
        let connect = tower::service_fn(move |_| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?)) }
        });
        Endpoint::from_static("http://daemon").connect_with_connector(connect).await.unwrap()
    }

    async fn generation(&self) -> GenerationClient<Channel> {
        GenerationClient::new(self.channel().await).max_decoding_message_size(sd_proto::MAX_MESSAGE_BYTES)
    }

    async fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel().await)
    }

    async fn tcp(&self) -> GenerationClient<Channel> {
        GenerationClient::connect(format!("http://{}", self.tcp)).await.unwrap()
    }
}

fn image() -> ImageRequest {
    ImageRequest { prompt: "a red heart".into(), width: 64, height: 64, ..ImageRequest::default() }
}

fn generate(image: ImageRequest, keep: bool) -> GenerateRequest {
    GenerateRequest { image: Some(image), keep }
}

fn own_tenant() -> String {
    format!("uid:{}", nix::unistd::geteuid())
}

fn field_names(status: &Status) -> Vec<String> {
    let details = status.get_error_details();
    let bad = details.bad_request().map(|bad| bad.field_violations.clone()).unwrap_or_default();
    bad.into_iter().map(|violation| violation.field).collect()
}

fn reason(status: &Status) -> String {
    status.get_error_details().error_info().map(|info| info.reason.clone()).unwrap_or_default()
}

#[tokio::test]
async fn generate_streams_every_event_and_the_picture() {
    let daemon = Daemon::start(100, Limits::default()).await;
    let mut client = daemon.generation().await;
    let request = ImageRequest { count: 2, seed: Some(40), ..image() };
    let mut stream = client.generate(generate(request, false)).await.unwrap().into_inner();
    let mut events: Vec<JobEvent> = Vec::new();
    while let Some(response) = stream.message().await.unwrap() {
        events.push(response.event.unwrap());
    }
    assert_eq!(events.iter().map(|e| e.sequence).collect::<Vec<_>>(), (1..=events.len() as u64).collect::<Vec<_>>());
    let Some(job_event::Event::Queued(queued)) = &events[0].event else { panic!("{:?}", events[0]) };
    let effective = queued.effective.as_ref().unwrap();
    assert_eq!((effective.model.as_str(), effective.steps, effective.seed), ("mine", Some(20), Some(40)));
    assert_eq!(queued.plan.as_ref().unwrap().device, "cpu");
    let images: Vec<_> = events
        .iter()
        .filter_map(|event| match &event.event {
            Some(job_event::Event::Image(image)) => Some(image),
            _ => None,
        })
        .collect();
    assert_eq!(images.iter().map(|image| (image.index, image.seed)).collect::<Vec<_>>(), [(0, 40), (1, 41)]);
    let reader = png::Decoder::new(std::io::Cursor::new(&images[1].png)).read_info().unwrap();
    assert_eq!((reader.info().width, reader.info().height), (64, 64));
    assert!(images[1].parameters.contains("Seed: 41"));
    assert!(matches!(events.last().unwrap().event, Some(job_event::Event::Succeeded(_))));

    let job_id = events[0].job_id.clone();
    let job = client.get(GetRequest { job_id: job_id.clone() }).await.unwrap().into_inner().job.unwrap();
    assert_eq!((job.state(), job.images_done, job.tenant), (JobState::Succeeded, 2, own_tenant()));
    // Everything again for one who comes late, and the rest for one who was there.
    let watch = WatchRequest { job_id, after_sequence: 2 };
    let mut late = client.watch(watch).await.unwrap().into_inner();
    let mut replayed = Vec::new();
    while let Some(response) = late.message().await.unwrap() {
        replayed.push(response.event.unwrap());
    }
    assert_eq!(replayed, events[2..]);
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_job_unless_it_keeps_it() {
    let daemon = Daemon::start(0, Limits { running_jobs: 1, ..Limits::default() }).await;
    for keep in [false, true] {
        let mut client = daemon.generation().await;
        let mut stream = client.generate(generate(image(), keep)).await.unwrap().into_inner();
        let job_id = stream.message().await.unwrap().unwrap().event.unwrap().job_id;
        drop(stream);
        drop(client);
        let mut other = daemon.generation().await;
        if keep {
            daemon.steps.add_permits(3);
        } else {
            // Its stage was told to stop: nothing else ends this wait.
            daemon.stopped.acquire().await.unwrap().forget();
        }
        let mut watched = other.watch(WatchRequest { job_id, after_sequence: 0 }).await.unwrap().into_inner();
        let mut last = None;
        while let Some(response) = watched.message().await.unwrap() {
            last = response.event.and_then(|event| event.event);
        }
        match last {
            Some(job_event::Event::Succeeded(_)) => assert!(keep),
            Some(job_event::Event::Cancelled(cancelled)) => {
                assert!(!keep && cancelled.reason.contains("went away"), "{cancelled:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn submitted_jobs_run_unwatched_and_cancel_answers_with_the_end() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let job_id = client.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    let listed = client.list(ListRequest { active_only: true, limit: 0 }).await.unwrap().into_inner().jobs;
    assert_eq!(listed.iter().map(|job| job.id.clone()).collect::<Vec<_>>(), std::slice::from_ref(&job_id));
    let ended = client.cancel(CancelRequest { job_id }).await.unwrap().into_inner().job.unwrap();
    assert_eq!(ended.state(), JobState::Cancelled);
    assert!(client.list(ListRequest { active_only: true, limit: 0 }).await.unwrap().into_inner().jobs.is_empty());
}

#[tokio::test]
async fn bad_requests_are_refused_with_their_fields() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let bad = ImageRequest { width: 65, steps: Some(0), guidance_scale: Some(f64::NAN), ..image() };
    let status = client.submit(SubmitRequest { image: Some(bad) }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "INVALID_REQUEST"));
    assert_eq!(field_names(&status), ["width", "steps", "guidance_scale"]);
    assert!(status.message().contains("64") && status.message().contains("72"), "{}", status.message());

    // 100 bytes a pixel and a million more than 60 million: 768 × 768 is the largest square.
    let large = ImageRequest { width: 1024, height: 1024, ..image() };
    let status = client.submit(SubmitRequest { image: Some(large) }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "DOES_NOT_FIT"));
    let facts = status.get_error_details().error_info().unwrap().metadata.clone();
    assert_eq!((facts["largest_width"].as_str(), facts["largest_height"].as_str()), ("768", "768"));
    assert_eq!(facts["limit_bytes"], "60000000");
    assert_eq!(facts["need_bytes"], (1_000_000 + 100 * 1024 * 1024).to_string());

    let status = client.submit(SubmitRequest { image: None }).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let status = client.get(GetRequest { job_id: "nonsense".into() }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_JOB"));
}

#[tokio::test]
async fn models_are_found_by_name_and_paths_only_by_the_own_user() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let with_model = |model: &str| SubmitRequest { image: Some(ImageRequest { model: model.into(), ..image() }) };

    let status = client.submit(with_model("nonsense")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_MODEL"));
    for known in ["mine", "broken", "default"] {
        assert!(status.message().contains(known), "{}", status.message());
    }
    let status = client.submit(with_model("broken")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "MODEL"));
    assert!(status.message().contains("conv_in.weight is missing"), "{}", status.message());
    let status = client.submit(with_model("./relative")).await.unwrap_err();
    assert_eq!((status.code(), field_names(&status)), (Code::InvalidArgument, vec!["model".to_owned()]));
    let status = client.submit(with_model("/nonexistent/model")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "MODEL"));

    let path = daemon.folder.path().join("models/mine").display().to_string();
    client.submit(with_model(&path)).await.unwrap();
    let mut stranger = daemon.tcp().await;
    let status = stranger.submit(with_model(&path)).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "PATH_NOT_ALLOWED"));
    stranger.submit(with_model("mine")).await.unwrap();
}

#[tokio::test]
async fn peers_over_tcp_are_another_tenant() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let (mut own, mut stranger) = (daemon.generation().await, daemon.tcp().await);
    let ours = own.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    let theirs = stranger.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    for status in [
        stranger.get(GetRequest { job_id: ours.clone() }).await.unwrap_err(),
        stranger.cancel(CancelRequest { job_id: ours.clone() }).await.unwrap_err(),
        stranger.watch(WatchRequest { job_id: ours, after_sequence: 0 }).await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::NotFound);
    }
    let listed = stranger.list(ListRequest { active_only: false, limit: 0 }).await.unwrap().into_inner().jobs;
    assert_eq!(listed.iter().map(|job| job.tenant.as_str()).collect::<Vec<_>>(), ["tcp"]);
    // The daemon's own user sees and may cancel all.
    let ended = own.cancel(CancelRequest { job_id: theirs }).await.unwrap().into_inner().job.unwrap();
    assert_eq!(ended.state(), JobState::Cancelled);

    let mut control = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    let status = control.drain(DrainRequest::default()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "OPERATOR_ONLY"));
}

#[tokio::test]
async fn a_full_queue_and_a_drain_have_their_codes() {
    let limits = Limits { running_jobs: 1, queued_jobs: 1, ..Limits::default() };
    let daemon = Daemon::start(0, limits).await;
    let mut client = daemon.generation().await;
    let submit = || SubmitRequest { image: Some(image()) };
    client.submit(submit()).await.unwrap();
    let mut running = daemon.jobs.activity();
    running.wait_for(|activity| activity.running == 1).await.unwrap();
    client.submit(submit()).await.unwrap();
    let status = client.submit(submit()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "QUEUE_FULL"));
    assert!(status.get_error_details().retry_info().is_some());

    let mut control = daemon.control().await;
    let timeout = Some(prost_types::Duration { seconds: 0, nanos: 1_000_000 });
    let drained = control.drain(DrainRequest { timeout }).await.unwrap().into_inner();
    assert_eq!((drained.jobs_finished, drained.jobs_cancelled), (0, 2));
    assert!(daemon.ended.is_cancelled(), "a drain ends the daemon");
    let status = client.submit(submit()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "DRAINING"));
    assert!(control.get_status(GetStatusRequest {}).await.unwrap().into_inner().draining);
}

#[tokio::test]
async fn models_are_listed_with_their_problems() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut control = daemon.control().await;
    let models = control.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    let names: Vec<_> = models.iter().map(|model| (model.name.as_str(), model.is_default)).collect();
    assert_eq!(names, [("broken", false), ("default", false), ("mine", true)]);
    assert!(models[0].problem.contains("conv_in.weight is missing") && models[0].family.is_empty());
    assert_eq!((models[2].family.as_str(), models[2].default_steps, models[2].problem.as_str()), ("sd1", 20, ""));
    assert_eq!(models[2].components.iter().map(|c| c.stage.as_str()).collect::<Vec<_>>(), ["text", "diffusion", "vae"]);
    let request = InspectModelRequest { model: String::new() };
    let model = control.inspect_model(request).await.unwrap().into_inner().model.unwrap();
    assert_eq!(model, models[2]);

    // A folder that changes is described anew.
    std::fs::remove_file(daemon.folder.path().join("models/broken/bad")).unwrap();
    let models = control.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((models[0].problem.as_str(), models[0].family.as_str()), ("", "sd1"));
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody() {
    let daemon = Daemon::start(0, Limits { running_jobs: 1, ..Limits::default() }).await;
    let mut slow = daemon.generation().await;
    let large = ImageRequest { width: 512, height: 512, count: 20, ..image() };
    // Opened and never read, on a connection of its own.
    let unread = slow.generate(generate(large, true)).await.unwrap().into_inner();
    let mut client = daemon.generation().await;
    let mut stream = client.generate(generate(image(), false)).await.unwrap().into_inner();
    daemon.steps.add_permits(41 + 3);
    let mut last = None;
    while let Some(response) = stream.message().await.unwrap() {
        last = response.event.and_then(|event| event.event);
    }
    assert!(matches!(last, Some(job_event::Event::Succeeded(_))), "{last:?}");
    drop(unread);
}

fn decided(job: &str, text: &str) -> Decision {
    let kind = DecisionKind::Waits as i32;
    Decision { kind, job_id: job.into(), text: text.into(), bytes: 7, ..Decision::default() }
}

fn follow(job_id: &str) -> WatchDecisionsRequest {
    WatchDecisionsRequest { job_id: job_id.into(), follow: true }
}

async fn next_text(stream: &mut tonic::Streaming<WatchDecisionsResponse>) -> Option<String> {
    Some(stream.message().await.unwrap()?.decision.unwrap().text)
}

#[tokio::test]
async fn decisions_about_a_job_are_its_events_and_explain_it_to_its_owner_alone() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let mut stream = client.generate(generate(image(), true)).await.unwrap().into_inner();
    let job_id = stream.message().await.unwrap().unwrap().event.unwrap().job_id;
    daemon.jobs.activity().wait_for(|activity| activity.running == 1).await.unwrap();
    daemon.journal.record(decided("another", "is not told"));
    daemon.journal.record(decided(&job_id, "waits for 7 B"));
    let told = loop {
        let event = stream.message().await.unwrap().unwrap().event.unwrap().event;
        if let Some(job_event::Event::Decision(decision)) = event {
            break decision;
        }
    };
    assert_eq!((told.text.as_str(), told.sequence, told.kind()), ("waits for 7 B", 2, DecisionKind::Waits));
    daemon.steps.add_permits(3);
    while stream.message().await.unwrap().is_some() {}
    // After its last event a job takes no more; the explanation has it nevertheless.
    daemon.journal.record(decided(&job_id, "released 7 B"));

    let mut control = daemon.control().await;
    let explain = ExplainJobRequest { job_id: job_id.clone() };
    let explained = control.explain_job(explain.clone()).await.unwrap().into_inner();
    assert_eq!(explained.job.unwrap().state(), JobState::Succeeded);
    let texts: Vec<&str> = explained.decisions.iter().map(|decision| decision.text.as_str()).collect();
    assert_eq!(texts, ["waits for 7 B", "released 7 B"]);

    let mut stranger = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    let status = stranger.explain_job(explain).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_JOB"));
    let status = stranger.watch_decisions(follow(&job_id)).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test]
async fn operators_follow_all_decisions_and_others_those_of_their_jobs_until_the_daemon_ends() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let theirs = daemon.tcp().await.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    let ours = daemon.generation().await.submit(SubmitRequest { image: Some(image()) }).await.unwrap();
    let ours = ours.into_inner().job_id;
    daemon.journal.record(decided(&ours, "past"));
    let mut operator = daemon.control().await.watch_decisions(follow("")).await.unwrap().into_inner();
    let mut stranger = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    let mut tenant = stranger.watch_decisions(follow("")).await.unwrap().into_inner();
    for (job, text) in [(ours.as_str(), "ours"), ("", "of the device"), (theirs.as_str(), "theirs")] {
        daemon.journal.record(decided(job, text));
    }
    for text in ["past", "ours", "of the device", "theirs"] {
        assert_eq!(next_text(&mut operator).await.as_deref(), Some(text));
    }
    assert_eq!(next_text(&mut tenant).await.as_deref(), Some("theirs"), "and nothing before it");

    // Without `follow` there is an end at once; of one job, when it ends.
    let request = WatchDecisionsRequest { job_id: String::new(), follow: false };
    let mut past = daemon.control().await.watch_decisions(request).await.unwrap().into_inner();
    for text in ["past", "ours", "of the device", "theirs"] {
        assert_eq!(next_text(&mut past).await.as_deref(), Some(text));
    }
    assert_eq!(next_text(&mut past).await, None);
    let mut of_job = stranger.watch_decisions(follow(&theirs)).await.unwrap().into_inner();
    assert_eq!(next_text(&mut of_job).await.as_deref(), Some("theirs"));
    daemon.generation().await.cancel(CancelRequest { job_id: theirs }).await.unwrap();
    assert_eq!(next_text(&mut of_job).await, None);

    daemon.ending.cancel();
    assert_eq!(next_text(&mut operator).await, None);
    assert_eq!(next_text(&mut tenant).await, None);
}

#[tokio::test]
async fn a_reader_that_lags_behind_is_told_how_much_it_missed_and_goes_on() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut stream = daemon.control().await.watch_decisions(follow("")).await.unwrap().into_inner();
    daemon.journal.record(decided("", "first"));
    assert_eq!(next_text(&mut stream).await.as_deref(), Some("first"));
    // More than everything between the journal and this reader can hold, the connection included.
    let long = "x".repeat(2000);
    let mut told = 0;
    for _ in 0..5000 {
        daemon.journal.record(decided("", &long));
    }
    daemon.journal.record(decided("", "last"));
    let mut missed = 0;
    loop {
        let text = next_text(&mut stream).await.unwrap();
        if let Some(rest) = text.strip_suffix(" decisions are missing here: this reader was too slow for them") {
            missed += rest.parse::<u64>().unwrap();
        } else if text == "last" {
            break;
        } else {
            told += 1;
        }
    }
    assert!(missed > 0, "nothing was missed");
    assert_eq!(told + missed, 5000, "what is missing is counted");
}

#[tokio::test]
async fn what_a_request_would_need_is_told_without_running_it_and_so_is_the_configuration() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut control = daemon.control().await;
    let ask = |width, mode: i32| FitRequest {
        image: Some(ImageRequest {
            width,
            height: 512,
            memory: Some(MemoryRequest { mode, ..MemoryRequest::default() }),
            ..ImageRequest::default()
        }),
    };
    let fit = control.fit(ask(512, 0)).await.unwrap().into_inner();
    assert!(fit.fits && fit.advice.is_empty(), "{fit:?}");
    assert_eq!((fit.mode.as_str(), fit.fitting_mode.as_str(), fit.budget_bytes), ("auto", "none", 60_000_000));
    assert_eq!(
        (fit.stages.len(), fit.stages[0].source.as_str(), fit.stages[0].working_set_bytes),
        (1, "formula", 26_214_400)
    );
    let fit = control.fit(ask(2048, 3)).await.unwrap().into_inner();
    assert!(!fit.fits && fit.mode == "cond_only" && fit.fitting_mode.is_empty(), "{fit:?}");
    assert!(fit.largest_width > 512 && fit.advice.contains(&fit.largest_width.to_string()), "{fit:?}");
    let refused = control.fit(ask(513, 0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);

    let shown = control.show_config(ShowConfigRequest {}).await.unwrap().into_inner().values;
    assert_eq!(
        (shown[0].key.as_str(), shown[0].value.as_str(), shown[0].origin.as_str()),
        ("threads", "2", "--threads")
    );
}

#[tokio::test]
async fn operators_load_unload_pin_and_release() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut control = daemon.control().await;
    let load = |stages: &[&str]| LoadModelRequest {
        model: "mine".into(),
        stages: stages.iter().map(|stage| (*stage).to_owned()).collect(),
    };
    let loaded = control.load_model(load(&["diffusion", "text"])).await.unwrap().into_inner().stages;
    let told: Vec<_> = loaded.iter().map(|s| (s.stage.as_str(), s.incarnation, s.weights_bytes)).collect();
    assert_eq!(told, [("text", 7, 9), ("diffusion", 7, 9)], "in the order of a job");
    assert!(loaded.iter().all(|stage| stage.weights_total_bytes > 9));
    // A stage that fails says so by its reason; what came before it stays.
    let status = control.load_model(load(&[])).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "DOES_NOT_FIT"));

    let unload = UnloadModelRequest { model: "mine".into(), stages: vec!["vae".into()] };
    let freed = control.unload_model(unload).await.unwrap().into_inner();
    assert_eq!((freed.workers, freed.bytes), (2, 11));
    control.pin_model(PinModelRequest { model: String::new(), pinned: true }).await.unwrap();
    // A model whose files are bad can still be unloaded; its pin has no folder to be known by.
    control.unload_model(UnloadModelRequest { model: "broken".into(), stages: Vec::new() }).await.unwrap();
    control.unload_model(UnloadModelRequest { model: "mine".into(), stages: Vec::new() }).await.unwrap();
    let hold = Some(prost_types::Duration { seconds: 600, nanos: 0 });
    let release = ReleaseDeviceRequest { device: String::new(), hold };
    assert_eq!(control.release_device(release).await.unwrap().into_inner().bytes, 13);
    let tenant = own_tenant();
    let expected = [
        format!("load STAGE_ENCODE of mine for {tenant}"),
        format!("load STAGE_DENOISE of mine for {tenant}"),
        format!("load STAGE_ENCODE of mine for {tenant}"),
        format!("load STAGE_DENOISE of mine for {tenant}"),
        format!("load STAGE_DECODE of mine for {tenant}"),
        "unload [Vae] of mine in true".into(),
        "pin mine true".into(),
        "unload [] of broken in false".into(),
        "pin mine false".into(),
        "unload [] of mine in true".into(),
        "release cpu Some(600s)".into(),
    ];
    assert_eq!(*daemon.operator.asked.lock().unwrap(), expected);
    let (past, _) = daemon.journal.follow();
    assert!(past.iter().any(|decision| decision.text.starts_with("mine is pinned")), "{past:?}");

    let status = control.load_model(load(&["sampler"])).await.unwrap_err();
    assert_eq!((status.code(), field_names(&status)), (Code::InvalidArgument, vec!["stages".to_owned()]));
    let absent = ReleaseDeviceRequest { device: "gpu7".into(), hold: None };
    let status = control.release_device(absent).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_DEVICE"));
    assert!(status.message().contains("there are cpu"), "{}", status.message());
}

#[tokio::test]
async fn nobody_but_operators_moves_models() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut stranger = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    for status in [
        stranger.load_model(LoadModelRequest::default()).await.unwrap_err(),
        stranger.unload_model(UnloadModelRequest::default()).await.unwrap_err(),
        stranger.pin_model(PinModelRequest::default()).await.unwrap_err(),
        stranger.release_device(ReleaseDeviceRequest::default()).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "OPERATOR_ONLY"));
    }
    assert!(daemon.operator.asked.lock().unwrap().is_empty());
}

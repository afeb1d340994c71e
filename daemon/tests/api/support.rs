//! A daemon of the real services over jobs and devices of pretence.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::generation_client::GenerationClient;
use sd_proto::v1::{Failure, GenerateRequest, ImageRequest, MemoryRequest, NumericPlan, ProgressPhase, Stage};
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
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_types::StatusExt as _;

pub(crate) const REPORT: &str = include_str!("../../src/models/sample_report.json");

/// Describes every folder that has a `model_index.json` by the sample; a folder with a file `bad` is a bad model.
pub(crate) struct FakeInspector;

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
pub(crate) struct FakeRunner {
    steps: Arc<Semaphore>,
    stopped: Arc<Semaphore>,
}

#[derive(Clone)]
pub(crate) struct Size(u32, u32);

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
pub(crate) struct FakeFits;

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

pub(crate) struct FakeOverview;

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
pub(crate) struct FakeOperator {
    pub(crate) asked: std::sync::Mutex<Vec<String>>,
}

impl FakeOperator {
    pub(crate) fn note(&self, text: String) {
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

pub(crate) struct Daemon {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) steps: Arc<Semaphore>,
    pub(crate) stopped: Arc<Semaphore>,
    pub(crate) jobs: Jobs,
    pub(crate) ended: CancellationToken,
    pub(crate) journal: Journal,
    pub(crate) operator: Arc<FakeOperator>,
    pub(crate) ending: CancellationToken,
    pub(crate) tcp: std::net::SocketAddr,
}

impl Daemon {
    /// Serves on a Unix socket and on TCP. `steps` stage runs go through; more when permits are added.
    pub(crate) async fn start(steps: usize, limits: Limits) -> Self {
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

    pub(crate) async fn channel(&self) -> Channel {
        let path = self.folder.path().join("s");
        let connect = tower::service_fn(move |_| {
            let path = path.clone();
            async move { Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(UnixStream::connect(path).await?)) }
        });
        Endpoint::from_static("http://daemon").connect_with_connector(connect).await.unwrap()
    }

    pub(crate) async fn generation(&self) -> GenerationClient<Channel> {
        GenerationClient::new(self.channel().await).max_decoding_message_size(sd_proto::MAX_MESSAGE_BYTES)
    }

    pub(crate) async fn control(&self) -> ControlClient<Channel> {
        ControlClient::new(self.channel().await)
    }

    pub(crate) async fn tcp(&self) -> GenerationClient<Channel> {
        GenerationClient::connect(format!("http://{}", self.tcp)).await.unwrap()
    }
}

pub(crate) fn image() -> ImageRequest {
    ImageRequest { prompt: "a red heart".into(), width: 64, height: 64, ..ImageRequest::default() }
}

pub(crate) fn generate(image: ImageRequest, keep: bool) -> GenerateRequest {
    GenerateRequest { image: Some(image), keep }
}

pub(crate) fn own_tenant() -> String {
    format!("uid:{}", nix::unistd::geteuid())
}

pub(crate) fn field_names(status: &Status) -> Vec<String> {
    let details = status.get_error_details();
    let bad = details.bad_request().map(|bad| bad.field_violations.clone()).unwrap_or_default();
    bad.into_iter().map(|violation| violation.field).collect()
}

pub(crate) fn reason(status: &Status) -> String {
    status.get_error_details().error_info().map(|info| info.reason.clone()).unwrap_or_default()
}

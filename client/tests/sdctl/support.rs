//! A daemon of pretence in the test's process, and `sdctl` as a child.

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sd_client::proto::control_server::{Control, ControlServer};
use sd_client::proto::generation_server::{Generation, GenerationServer};
use sd_client::proto::job_event::Event;
use sd_client::proto::*;
use tokio::net::UnixListener;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Id of every job of the pretence.
pub(crate) const JOB: &str = "j1";

type Events = mpsc::Sender<Result<GenerateResponse, Status>>;

/// What the daemon does is in the prompt: `ok`, `fail N` (a failure reason's number), `refuse`, `model`, `hang` (until
/// cancelled), `stubborn` (not even then), `vanish` (ends the events early), `later` (refused at first), `cancelled` (by somebody else).
#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) requests: Mutex<Vec<ImageRequest>>,
    pub(crate) cancels: Mutex<Vec<String>>,
    pub(crate) hanging: Mutex<Option<Events>>,
    pub(crate) draining: bool,
    pub(crate) refusals: AtomicU32,
    /// What operators asked for, as text.
    pub(crate) operated: Mutex<Vec<String>>,
    pub(crate) fits: Mutex<Vec<ImageRequest>>,
    /// Leases of the next answers, the last of them for ever; none: one lease.
    pub(crate) leases: Mutex<Vec<Vec<Lease>>>,
    /// Decisions that are yet to come, for those who follow; the stream ends when the sender is dropped.
    pub(crate) news: Mutex<Option<mpsc::Receiver<Decision>>>,
}

impl Fake {
    fn note(&self, text: String) {
        self.operated.lock().unwrap().push(text);
    }
}

/// A decision as the pretence remembers it.
pub(crate) fn decision(sequence: u64, kind: DecisionKind, text: &str) -> Decision {
    let time = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: sequence as i32 * 1_000_000 });
    let (job_id, device) = (JOB.into(), "cpu".into());
    let (text, rung) = (text.into(), "retire".into());
    Decision { sequence, time, kind: kind.into(), job_id, device, bytes: 3 << 20, rung, text, ..Default::default() }
}

pub(crate) fn lease(id: u64, bytes: u64) -> Lease {
    let (purpose, state) = (LeasePurpose::Weights.into(), LeaseState::Granted.into());
    Lease { id, device: "cpu".into(), purpose, state, bytes, ..Default::default() }
}

/// A picture of `index`, as bytes of a PNG file.
pub(crate) fn png(index: u32) -> Vec<u8> {
    let colour = image::Rgb([index as u8, 128, 255]);
    let mut file = Cursor::new(Vec::new());
    image::DynamicImage::from(image::RgbImage::from_pixel(8, 8, colour))
        .write_to(&mut file, image::ImageFormat::Png)
        .unwrap();
    file.into_inner()
}

fn duration(milliseconds: u64) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(Duration::from_millis(milliseconds)).ok()
}

fn picture_events(request: &ImageRequest, index: u32) -> Vec<Event> {
    let seed = request.seed.unwrap() + u64::from(index);
    let mut events = Vec::new();
    for stage in [Stage::Denoise, Stage::Decode] {
        let stage = stage.into();
        events.push(Event::StageStarted(StageStarted { stage, image_index: index, incarnation: 1, number: 1, of: 4 }));
        let phase = ProgressPhase::Computing.into();
        events.push(Event::Progress(Progress { stage, image_index: index, phase, done: 1, total: 2 }));
        events.push(Event::StageFinished(StageFinished { stage, image_index: index, timing: None }));
    }
    let parameters = format!("Seed: {seed}");
    events.push(Event::Image(ImageReady { index, seed, width: 8, height: 8, png: png(index), parameters }));
    events
}

async fn play(request: ImageRequest, fake: Arc<Fake>, out: Events) {
    let mut sequence = 0;
    let mut wrap = |event| {
        sequence += 1;
        Ok(GenerateResponse { event: Some(JobEvent { job_id: JOB.into(), sequence, time: None, event: Some(event) }) })
    };
    let mut events = vec![Event::Queued(Queued { effective: Some(request.clone()), ..Default::default() })];
    let (verb, rest) = request.prompt.split_once(' ').unwrap_or((&request.prompt, ""));
    match verb {
        "fail" => events.push(Event::Failed(Failure {
            reason: rest.parse().unwrap(),
            stage: Stage::Denoise.into(),
            message: "it broke \u{1b}[31m".into(),
            stderr: vec!["last line".into()],
        })),
        "cancelled" => events.push(Event::Cancelled(Cancelled { reason: "by somebody".into() })),
        "hang" | "stubborn" | "vanish" => {}
        _ => {
            for index in 0..request.count.max(1) {
                events.extend(picture_events(&request, index));
            }
            let stage = StageTiming { stage: Stage::Denoise.into(), computed: duration(1500), ..Default::default() };
            let timings = JobTimings { queued: duration(0), total: duration(2000), stages: vec![stage] };
            events.push(Event::Succeeded(Succeeded { timings: Some(timings), ..Default::default() }));
        }
    }
    for event in events {
        let _ = out.send(wrap(event)).await;
    }
    if ["hang", "stubborn"].contains(&verb) {
        *fake.hanging.lock().unwrap() = Some(out);
    }
}

/// The services; a type of its own because of the orphan rule.
#[derive(Clone)]
struct Served(Arc<Fake>);

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Generation for Served {
    type GenerateStream = ReceiverStream<Result<GenerateResponse, Status>>;
    type WatchStream = Boxed<WatchResponse>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let image = request.into_inner().image.unwrap();
        if image.prompt == "refuse" {
            let mut details = ErrorDetails::new();
            details.add_bad_request_violation("width", "width must be a multiple of 8, is 9");
            return Err(Status::with_error_details(
                Code::InvalidArgument,
                "width must be a multiple of 8, is 9",
                details,
            ));
        }
        if image.prompt == "later" && self.0.refusals.fetch_add(1, Ordering::SeqCst) == 0 {
            return Err(Status::unavailable("the daemon is ending"));
        }
        if image.prompt == "model" {
            return Err(Status::not_found("no model named x: use one of default"));
        }
        self.0.requests.lock().unwrap().push(image.clone());
        let (out, events) = mpsc::channel(64);
        tokio::spawn(play(image, self.0.clone(), out));
        Ok(Response::new(ReceiverStream::new(events)))
    }

    async fn submit(&self, _: Request<SubmitRequest>) -> Result<Response<SubmitResponse>, Status> {
        Ok(Response::new(SubmitResponse { job_id: JOB.into() }))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (out, events) = mpsc::channel(64);
        tokio::spawn(play(job().request.unwrap(), self.0.clone(), out));
        let events = ReceiverStream::new(events).map(|event| event.map(|event| WatchResponse { event: event.event }));
        Ok(Response::new(Box::pin(events)))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        match request.into_inner().job_id.as_str() {
            JOB => Ok(Response::new(GetResponse { job: Some(job()) })),
            other => Err(Status::not_found(format!("no job {other}"))),
        }
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let jobs = if request.into_inner().active_only { Vec::new() } else { vec![job()] };
        Ok(Response::new(ListResponse { jobs }))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<CancelResponse>, Status> {
        let id = request.into_inner().job_id;
        let stubborn = self.0.requests.lock().unwrap().last().is_some_and(|request| request.prompt == "stubborn");
        self.0.cancels.lock().unwrap().push(id);
        if stubborn {
            std::future::pending::<()>().await;
        }
        let out = self.0.hanging.lock().unwrap().take();
        if let Some(out) = out {
            let event = Some(Event::Cancelled(Cancelled { reason: "asked to".into() }));
            let event = Some(JobEvent { job_id: JOB.into(), sequence: 2, time: None, event });
            let _ = out.send(Ok(GenerateResponse { event })).await;
        }
        let job = Job { state: JobState::Cancelled.into(), ..job() };
        Ok(Response::new(CancelResponse { job: Some(job) }))
    }
}

fn job() -> Job {
    let request = ImageRequest {
        prompt: "ok then".into(),
        count: 2,
        seed: Some(5),
        model: "default".into(),
        ..Default::default()
    };
    Job {
        id: JOB.into(),
        state: JobState::Succeeded.into(),
        request: Some(request),
        images_done: 2,
        ..Default::default()
    }
}

fn model() -> Model {
    let component = Component { stage: "text".into(), class_name: "CLIPTextModel".into(), ..Default::default() };
    Model {
        name: "tiny".into(),
        is_default: true,
        family: "sd1".into(),
        file_bytes: 25 << 20,
        components: vec![component],
        ..Default::default()
    }
}

#[tonic::async_trait]
impl Control for Served {
    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        let device = Device { id: "cpu".into(), total_bytes: 4 << 30, budget_bytes: 3 << 30, ..Default::default() };
        Ok(Response::new(GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            devices: vec![device],
            draining: self.0.draining,
            ..Default::default()
        }))
    }

    async fn list_models(&self, _: Request<ListModelsRequest>) -> Result<Response<ListModelsResponse>, Status> {
        Ok(Response::new(ListModelsResponse { models: vec![model()] }))
    }

    async fn inspect_model(&self, _: Request<InspectModelRequest>) -> Result<Response<InspectModelResponse>, Status> {
        Ok(Response::new(InspectModelResponse { model: Some(model()) }))
    }

    async fn list_workers(&self, _: Request<ListWorkersRequest>) -> Result<Response<ListWorkersResponse>, Status> {
        let state = WorkerState::Idle.into();
        let worker =
            Worker { incarnation: 3, pid: 77, stage: "vae".into(), state, leased_bytes: 1 << 20, ..Default::default() };
        Ok(Response::new(ListWorkersResponse { workers: vec![worker] }))
    }

    async fn list_leases(&self, _: Request<ListLeasesRequest>) -> Result<Response<ListLeasesResponse>, Status> {
        let mut answers = self.0.leases.lock().unwrap();
        let leases = match answers.len() {
            0 => vec![lease(9, 3 << 20)],
            1 => answers[0].clone(),
            _ => answers.remove(0),
        };
        Ok(Response::new(ListLeasesResponse { leases }))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        Ok(Response::new(DrainResponse { jobs_finished: 2, jobs_cancelled: 1, jobs_kept: 0 }))
    }

    async fn load_model(&self, request: Request<LoadModelRequest>) -> Result<Response<LoadModelResponse>, Status> {
        let LoadModelRequest { model, stages } = request.into_inner();
        self.0.note(format!("load {model} {stages:?}"));
        if model == "huge" {
            let mut details = ErrorDetails::new();
            details.set_error_info("DOES_NOT_FIT", "sdd", std::collections::HashMap::<String, String>::new());
            return Err(Status::with_error_details(Code::ResourceExhausted, "it needs more than there is", details));
        }
        let stage =
            LoadedStage { stage: "vae".into(), incarnation: 3, weights_bytes: 1 << 20, weights_total_bytes: 2 << 20 };
        Ok(Response::new(LoadModelResponse { stages: vec![stage] }))
    }

    async fn unload_model(
        &self,
        request: Request<UnloadModelRequest>,
    ) -> Result<Response<UnloadModelResponse>, Status> {
        let UnloadModelRequest { model, stages } = request.into_inner();
        self.0.note(format!("unload {model} {stages:?}"));
        let workers = if model == "absent" { 0 } else { 2 };
        Ok(Response::new(UnloadModelResponse { bytes: 5 << 20, workers }))
    }

    async fn pin_model(&self, request: Request<PinModelRequest>) -> Result<Response<PinModelResponse>, Status> {
        let PinModelRequest { model, pinned } = request.into_inner();
        self.0.note(format!("pin {model} {pinned}"));
        if model == "forbidden" {
            return Err(Status::permission_denied("only the daemon's own user and root may do this"));
        }
        Ok(Response::new(PinModelResponse {}))
    }

    async fn release_device(
        &self,
        request: Request<ReleaseDeviceRequest>,
    ) -> Result<Response<ReleaseDeviceResponse>, Status> {
        let ReleaseDeviceRequest { device, hold } = request.into_inner();
        self.0.note(format!("release {device} {:?}", hold.map(|hold| hold.seconds)));
        Ok(Response::new(ReleaseDeviceResponse { bytes: 7 << 20, workers: 1 }))
    }

    async fn fit(&self, request: Request<FitRequest>) -> Result<Response<FitResponse>, Status> {
        let image = request.into_inner().image.unwrap();
        let fits = image.width <= 512;
        self.0.fits.lock().unwrap().push(image);
        let stage = StageFit {
            stage: Stage::Decode.into(),
            device: "cpu".into(),
            context_bytes: 1 << 20,
            weights_bytes: 6 << 20,
            weights_floor_bytes: 2 << 20,
            working_set_bytes: 4 << 20,
            source: "formula".into(),
        };
        Ok(Response::new(FitResponse {
            fits,
            stages: vec![stage],
            device: "cpu".into(),
            budget_bytes: 1 << 30,
            mode: "none".into(),
            fitting_mode: if fits { "none".into() } else { "layer_streaming".into() },
            largest_width: 512,
            largest_height: 512,
            advice: "decode in tiles".into(),
            plan: None,
        }))
    }

    async fn show_config(&self, _: Request<ShowConfigRequest>) -> Result<Response<ShowConfigResponse>, Status> {
        let value = |key: &str, value: &str, origin: &str| ConfigValue {
            key: key.into(),
            value: value.into(),
            origin: origin.into(),
        };
        let values = vec![value("threads", "4", "default"), value("memory.offload", "\"ram\"", "preset 16gb")];
        Ok(Response::new(ShowConfigResponse { values }))
    }

    async fn explain_job(&self, request: Request<ExplainJobRequest>) -> Result<Response<ExplainJobResponse>, Status> {
        if request.into_inner().job_id != JOB {
            return Err(Status::not_found("there is no such job"));
        }
        let decisions = vec![
            decision(1, DecisionKind::Waits, "vae of tiny waits for 3.0 MiB"),
            decision(2, DecisionKind::TakesBack, "text of tiny must retire (3.0 MiB) for vae of tiny"),
        ];
        let stage = StageTiming { stage: Stage::Encode.into(), cached: true, ..Default::default() };
        let timings = JobTimings { queued: duration(0), total: duration(2000), stages: vec![stage] };
        let submitted = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 });
        let job = Job { timings: Some(timings), submitted, finished: submitted, ..job() };
        Ok(Response::new(ExplainJobResponse { job: Some(job), decisions }))
    }

    async fn list_quarantine(
        &self,
        _: Request<ListQuarantineRequest>,
    ) -> Result<Response<ListQuarantineResponse>, Status> {
        let entry = Quarantined {
            model: "tiny".into(),
            stage: "vae".into(),
            deaths: 3,
            reason: "killed by SIGSEGV".into(),
            stderr: vec!["last words".into()],
            ..Default::default()
        };
        Ok(Response::new(ListQuarantineResponse { entries: vec![entry] }))
    }

    async fn clear_quarantine(
        &self,
        request: Request<ClearQuarantineRequest>,
    ) -> Result<Response<ClearQuarantineResponse>, Status> {
        let ClearQuarantineRequest { model, stage } = request.into_inner();
        self.0.note(format!("clear {model:?} {stage:?}"));
        Ok(Response::new(ClearQuarantineResponse { cleared: 1 }))
    }

    type WatchDecisionsStream = Pin<Box<dyn Stream<Item = Result<WatchDecisionsResponse, Status>> + Send>>;

    async fn watch_decisions(
        &self,
        request: Request<WatchDecisionsRequest>,
    ) -> Result<Response<Self::WatchDecisionsStream>, Status> {
        let wrap = |decision| Ok(WatchDecisionsResponse { decision: Some(decision) });
        let past =
            tokio_stream::iter([decision(1, DecisionKind::Granted, "vae of tiny was granted 3.0 MiB")]).map(wrap);
        let follow = request.into_inner().follow;
        let news = if follow { self.0.news.lock().unwrap().take() } else { None };
        Ok(Response::new(match news {
            Some(news) => Box::pin(past.chain(ReceiverStream::new(news).map(wrap))),
            None => Box::pin(past),
        }))
    }
}

/// One test's world: folders of its own, and a daemon of pretence that listens in it.
pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) fake: Arc<Fake>,
    pub(crate) socket: PathBuf,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(Fake::default(), "fake.sock")
    }

    /// With the daemon's socket at a path below the test's folder.
    pub(crate) fn with(fake: Fake, socket: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["run", "locks", "work", "cache"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let socket = dir.path().join(socket);
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let fake = Arc::new(fake);
        let served = Served(fake.clone());
        let server = tonic::transport::Server::builder()
            .add_service(GenerationServer::new(served.clone()))
            .add_service(ControlServer::new(served))
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::spawn(server);
        Self { dir, fake, socket }
    }

    /// Serves on TCP besides; returns `HOST:PORT`.
    pub(crate) async fn tcp(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let served = Served(self.fake.clone());
        let server = tonic::transport::Server::builder()
            .add_service(GenerationServer::new(served.clone()))
            .add_service(ControlServer::new(served))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        address
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `sdctl` in the test's working folder, with no daemon named and none of the user's in sight.
    pub(crate) fn sdctl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sdctl"));
        command
            .args(arguments)
            .current_dir(self.path("work"))
            .env_remove("SDCTL_ENDPOINT")
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("SDD_LOCK_DIR", self.path("locks"))
            .env("SDCTL_SDD", "/nonexistent/sdd")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// As [`World::sdctl`], sent to the daemon of pretence.
    pub(crate) fn to_fake(&self, arguments: &[&str]) -> Command {
        let mut command = self.sdctl(arguments);
        command.arg("--endpoint").arg(format!("unix:{}", self.socket.display()));
        command
    }

    pub(crate) async fn run(&self, arguments: &[&str]) -> Run {
        finish(self.to_fake(arguments).spawn().unwrap()).await
    }

    /// Names in the working folder, sorted.
    pub(crate) fn files(&self) -> Vec<String> {
        names(&self.path("work"))
    }

    /// A program that stands in for `sdd`: a shell script that finds its flags as `$owner`, `$ready` and `$dir`.
    pub(crate) fn stand_in(&self, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let file = self.path("sdd");
        let flags = "while [ $# -gt 0 ]; do case $1 in --private-owner-fd) owner=$2;; --ready-fd) ready=$2;; \
                     --runtime-dir) dir=$2;; --version) echo sdd 0.1.0; exit 0;; esac; shift; done";
        std::fs::write(&file, format!("#!/bin/sh\n{flags}\n{text}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file
    }
}

/// Names in a folder, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// How a run of `sdctl` ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Waits for the end, with a bound that only a hang meets.
pub(crate) async fn finish(child: Child) -> Run {
    let waited = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output());
    let Output { status, stdout, stderr } = waited.await.expect("sdctl hangs").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Run { code: status.code(), out: text(&stdout), bytes: stdout, err: text(&stderr) }
}

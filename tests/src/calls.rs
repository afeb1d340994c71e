//! Calls of a daemon over its own socket, for tests that look at events and messages rather than at `sdctl`'s words.

use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use sd_proto::MAX_MESSAGE_BYTES;
use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::generation_client::GenerationClient;
use sd_proto::v1::{
    FitRequest, FitResponse, GenerateRequest, GetRequest, ImageRequest, Job, JobEvent, job_event::Event,
};
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::daemon::Daemon;

/// A connection.
#[derive(Debug, Clone)]
pub struct Calls {
    /// Jobs.
    pub generation: GenerationClient<Channel>,
    /// Everything else.
    pub control: ControlClient<Channel>,
}

/// How one job went.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Every event, in order.
    pub events: Vec<JobEvent>,
    /// The pictures' files.
    pub pictures: Vec<Vec<u8>>,
}

impl Ran {
    /// The terminal event's name, and for a failure its text.
    pub fn end(&self) -> String {
        match self.events.last().and_then(|event| event.event.as_ref()) {
            Some(Event::Succeeded(_)) => "succeeded".into(),
            Some(Event::Failed(failure)) => format!("failed: {}", failure.message),
            Some(Event::Cancelled(cancelled)) => format!("cancelled: {}", cancelled.reason),
            other => format!("no terminal event but {other:?}"),
        }
    }
}

impl Calls {
    /// Connects to a daemon of a test.
    ///
    /// # Panics
    /// It does not answer.
    pub async fn connect(daemon: &Daemon) -> Self {
        let socket: PathBuf = daemon.socket();
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://sdd.invalid");
        let channel = endpoint.connect_with_connector(connector).await.expect("the daemon answers");
        Self {
            generation: GenerationClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            control: ControlClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES),
        }
    }

    /// Runs a job to its end; `on_event` sees each event as it comes.
    ///
    /// # Errors
    /// The daemon refuses the request, or its stream breaks.
    pub async fn run(&self, image: ImageRequest, mut on_event: impl FnMut(&JobEvent)) -> Result<Ran, Status> {
        let request = GenerateRequest { image: Some(image), keep: false };
        let mut stream = self.generation.clone().generate(request).await?.into_inner();
        let mut ran = Ran { events: Vec::new(), pictures: Vec::new() };
        while let Some(response) = stream.message().await? {
            let Some(event) = response.event else { continue };
            on_event(&event);
            if let Some(Event::Image(image)) = &event.event {
                ran.pictures.push(image.png.clone());
            }
            ran.events.push(event);
        }
        Ok(ran)
    }

    /// Runs a job until an event for which `enough` is true, and goes away then; the job, where it ended before.
    ///
    /// # Errors
    /// The daemon refuses the request, or its stream breaks.
    pub async fn run_until(
        &self,
        image: ImageRequest,
        mut enough: impl FnMut(&JobEvent) -> bool,
    ) -> Result<Option<Ran>, Status> {
        let request = GenerateRequest { image: Some(image), keep: false };
        let mut stream = self.generation.clone().generate(request).await?.into_inner();
        let mut events = Vec::new();
        while let Some(response) = stream.message().await? {
            let Some(event) = response.event else { continue };
            if enough(&event) {
                return Ok(None);
            }
            events.push(event);
        }
        Ok(Some(Ran { events, pictures: Vec::new() }))
    }

    /// A job as it stands.
    ///
    /// # Errors
    /// There is none of that name.
    pub async fn job(&self, id: &str) -> Result<Job, Status> {
        let got = self.generation.clone().get(GetRequest { job_id: id.into() }).await?.into_inner();
        got.job.ok_or_else(|| Status::internal("an answer without a job"))
    }

    /// What a request would need.
    ///
    /// # Errors
    /// The daemon refuses the request.
    pub async fn fit(&self, image: ImageRequest) -> Result<FitResponse, Status> {
        Ok(self.control.clone().fit(FitRequest { image: Some(image) }).await?.into_inner())
    }
}

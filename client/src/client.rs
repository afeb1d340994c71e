//! One connection to a daemon.

use std::future::Future;
use std::time::Duration;

use sd_proto::MAX_MESSAGE_BYTES;
use sd_proto::endpoint::Endpoint;
use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::generation_client::GenerationClient;
use sd_proto::v1::{
    CancelRequest, DrainRequest, DrainResponse, GenerateRequest, GetRequest, GetStatusRequest, GetStatusResponse,
    ImageRequest, InspectModelRequest, Job, Lease, ListLeasesRequest, ListModelsRequest, ListRequest,
    ListWorkersRequest, Model, SubmitRequest, WatchRequest, Worker,
};
use tonic::transport::Channel;
use tonic::{Response, Status};

use crate::connect::{self, ConnectError, Trust};
use crate::{CallError, Events};

/// For calls that the daemon answers from memory.
pub(crate) const QUICK: Duration = Duration::from_secs(10);
/// For calls that read model files first, possibly from a cold disk.
pub(crate) const SLOW: Duration = Duration::from_secs(120);
/// The daemon's bound on a cancellation is a few seconds; more means that it hangs.
const CANCEL: Duration = Duration::from_secs(15);

/// A connection to one daemon. Clones share it. It is never opened anew: once it is lost, calls give
/// [`CallError::Lost`].
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) endpoint: Endpoint,
    generation: GenerationClient<Channel>,
    pub(crate) control: ControlClient<Channel>,
}

impl Client {
    /// Connects to the daemon that listens at `endpoint`, whoever runs it.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        Self::connect_trusting(endpoint, Trust::Named).await
    }

    /// Connects where the owner of the socket is somebody whom `trust` allows.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect_trusting(endpoint: &Endpoint, trust: Trust) -> Result<Self, ConnectError> {
        let channel = connect::connect(endpoint, trust).await?;
        Ok(Self {
            endpoint: endpoint.clone(),
            generation: GenerationClient::new(channel.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
            control: ControlClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES),
        })
    }

    /// Which daemon this is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(crate) async fn call<T>(
        &self,
        what: &'static str,
        limit: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CallError> {
        match tokio::time::timeout(limit, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(CallError::from_status(&self.endpoint, status)),
            Err(_) => Err(CallError::Silent { endpoint: self.endpoint.clone(), what, after: limit }),
        }
    }

    fn part<T>(&self, what: &'static str, missing: &'static str, part: Option<T>) -> Result<T, CallError> {
        part.ok_or_else(|| CallError::Malformed { endpoint: self.endpoint.clone(), what, missing })
    }

    /// Submits a job and gives its events up to the terminal one. Dropping the events cancels the job unless `keep`.
    ///
    /// # Errors
    /// The daemon refuses the request (bad fields, unknown model, does not fit) or is gone.
    pub async fn generate(&self, image: ImageRequest, keep: bool) -> Result<Events, CallError> {
        let request = GenerateRequest { image: Some(image), keep };
        match self.generation.clone().generate(request).await {
            Ok(response) => Ok(Events::of_generate(self.endpoint.clone(), response.into_inner())),
            Err(status) => Err(CallError::from_status(&self.endpoint, status)),
        }
    }

    /// Submits a job that runs whether anybody watches or not; returns its id.
    ///
    /// # Errors
    /// As [`Client::generate`].
    pub async fn submit(&self, image: ImageRequest) -> Result<String, CallError> {
        let request = SubmitRequest { image: Some(image) };
        Ok(self.call("submit", SLOW, self.generation.clone().submit(request)).await?.job_id)
    }

    /// A job's events after `after_sequence` (0: all), the past ones first. Dropping them changes nothing for the job.
    ///
    /// # Errors
    /// No such job of this user, or the daemon is gone.
    pub async fn watch(&self, job_id: &str, after_sequence: u64) -> Result<Events, CallError> {
        let request = WatchRequest { job_id: job_id.to_owned(), after_sequence };
        match self.generation.clone().watch(request).await {
            Ok(response) => Ok(Events::of_watch(self.endpoint.clone(), response.into_inner())),
            Err(status) => Err(CallError::from_status(&self.endpoint, status)),
        }
    }

    /// One job.
    ///
    /// # Errors
    /// No such job of this user, or the daemon is gone.
    pub async fn get(&self, job_id: &str) -> Result<Job, CallError> {
        let request = GetRequest { job_id: job_id.to_owned() };
        let response = self.call("get", QUICK, self.generation.clone().get(request)).await?;
        self.part("get", "a job", response.job)
    }

    /// This user's jobs, newest first; at most `limit` of them (0: the daemon's own limit).
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn list(&self, active_only: bool, limit: u32) -> Result<Vec<Job>, CallError> {
        let request = ListRequest { active_only, limit };
        Ok(self.call("list", QUICK, self.generation.clone().list(request)).await?.jobs)
    }

    /// Cancels a job and returns it once it has ended.
    ///
    /// # Errors
    /// No such job of this user, or the daemon is gone.
    pub async fn cancel(&self, job_id: &str) -> Result<Job, CallError> {
        let request = CancelRequest { job_id: job_id.to_owned() };
        let response = self.call("cancel", CANCEL, self.generation.clone().cancel(request)).await?;
        self.part("cancel", "a job", response.job)
    }

    /// The daemon's state, devices and counts.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn status(&self) -> Result<GetStatusResponse, CallError> {
        self.status_within(QUICK).await
    }

    /// As [`Client::status`], with a bound of the caller's.
    ///
    /// # Errors
    /// The daemon is gone or silent.
    pub async fn status_within(&self, limit: Duration) -> Result<GetStatusResponse, CallError> {
        self.call("status", limit, self.control.clone().get_status(GetStatusRequest {})).await
    }

    /// The models that the daemon offers.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn models(&self) -> Result<Vec<Model>, CallError> {
        Ok(self.call("models", SLOW, self.control.clone().list_models(ListModelsRequest {})).await?.models)
    }

    /// What a model is made of.
    ///
    /// # Errors
    /// No such model, it cannot be read, or the daemon is gone.
    pub async fn inspect(&self, model: &str) -> Result<Model, CallError> {
        let request = InspectModelRequest { model: model.to_owned() };
        let response = self.call("inspect", SLOW, self.control.clone().inspect_model(request)).await?;
        self.part("inspect", "a model", response.model)
    }

    /// The daemon's worker processes.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn workers(&self) -> Result<Vec<Worker>, CallError> {
        Ok(self.call("workers", QUICK, self.control.clone().list_workers(ListWorkersRequest {})).await?.workers)
    }

    /// The leases on devices.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn leases(&self) -> Result<Vec<Lease>, CallError> {
        Ok(self.call("leases", QUICK, self.control.clone().list_leases(ListLeasesRequest {})).await?.leases)
    }

    /// Refuses new jobs, lets accepted ones end within `timeout` (absent: the daemon's own grace), and ends the daemon.
    ///
    /// # Errors
    /// Not permitted, or the daemon is gone.
    pub async fn drain(&self, timeout: Option<Duration>) -> Result<DrainResponse, CallError> {
        let request = DrainRequest { timeout: timeout.map(|t| prost_types::Duration::try_from(t).unwrap_or_default()) };
        // The daemon bounds this itself; ours only catches one that is frozen, which keepalive finds much earlier.
        let limit = timeout.unwrap_or(Duration::from_secs(3600)) + Duration::from_secs(60);
        self.call("drain", limit, self.control.clone().drain(request)).await
    }
}

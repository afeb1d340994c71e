//! `sd.v1.Generation`: jobs and their events.

use std::pin::Pin;

use sd_proto::v1::generation_server::Generation;
use sd_proto::v1::{
    CancelRequest, CancelResponse, GenerateRequest, GenerateResponse, GetRequest, GetResponse, ImageRequest, JobEvent,
    ListRequest, ListResponse, SubmitRequest, SubmitResponse, WatchRequest, WatchResponse,
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::status::{of_admission, of_not_found, of_submit};
use crate::ids::JobId;
use crate::jobs::{Admission, Jobs, Watcher};

/// Events that may wait for a slow client beside the log: the next ones stay in the log until it has read these.
const AHEAD: usize = 2;
/// Jobs in a list where the caller does not say.
const LIST_DEFAULT: usize = 100;
/// Jobs in a list at most.
const LIST_MOST: usize = 1000;

/// The service.
#[derive(Debug, Clone)]
pub struct GenerationService {
    jobs: Jobs,
    admission: Admission,
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl GenerationService {
    /// A service over these jobs.
    pub fn new(jobs: Jobs, admission: Admission) -> Self {
        Self { jobs, admission }
    }

    async fn submit_image(
        &self,
        caller: Caller,
        image: Option<ImageRequest>,
        keep: bool,
    ) -> Result<(JobId, Watcher), Status> {
        let image = image.ok_or_else(|| Status::invalid_argument("the call has no image request: fill in `image`"))?;
        // Refused before the request is looked at, which may mean inspecting a model.
        if self.jobs.activity().borrow().draining {
            return Err(of_submit(&crate::jobs::SubmitError::Draining));
        }
        let (admitted, grouping) =
            self.admission.admit(image, caller.asker()).await.map_err(|error| of_admission(&error))?;
        let submitted = match keep {
            true => self.jobs.submit_kept(caller.tenant(), admitted, grouping).await,
            false => self.jobs.submit(caller.tenant(), admitted, grouping).await,
        };
        submitted.map_err(|error| of_submit(&error))
    }
}

/// Sends a job's events to one client until the terminal one, at the client's own pace. `gone` runs where the client
/// leaves before that.
fn events<T: Send + 'static>(
    mut watcher: Watcher,
    wrap: fn(JobEvent) -> T,
    gone: impl FnOnce() + Send + 'static,
) -> EventStream<T> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                biased;
                // The receiver is dropped with the call: by the client's reset, or its connection's end.
                () = sender.closed() => break gone(),
                event = watcher.next() => event,
            };
            let Some(event) = event else { break };
            if sender.send(Ok(wrap(JobEvent::clone(&event)))).await.is_err() {
                break gone();
            }
        }
    });
    Box::pin(ReceiverStream::new(receiver))
}

#[tonic::async_trait]
impl Generation for GenerationService {
    type GenerateStream = EventStream<GenerateResponse>;
    type WatchStream = EventStream<WatchResponse>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let caller = Caller::of(request.extensions());
        let GenerateRequest { image, keep } = request.into_inner();
        let (job, watcher) = self.submit_image(caller, image, keep).await?;
        let jobs = self.jobs.clone();
        let gone = move || {
            if !keep {
                jobs.abandon(job, "the client went away");
            }
        };
        Ok(Response::new(events(watcher, |event| GenerateResponse { event: Some(event) }, gone)))
    }

    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<SubmitResponse>, Status> {
        let caller = Caller::of(request.extensions());
        let (job, _) = self.submit_image(caller, request.into_inner().image, true).await?;
        Ok(Response::new(SubmitResponse { job_id: job.to_string() }))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let viewer = Caller::of(request.extensions()).viewer();
        let WatchRequest { job_id, after_sequence } = request.into_inner();
        let watcher =
            self.jobs.watch(JobId::from(job_id), viewer, after_sequence).await.map_err(|error| of_not_found(&error))?;
        Ok(Response::new(events(watcher, |event| WatchResponse { event: Some(event) }, || {})))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let viewer = Caller::of(request.extensions()).viewer();
        let job = JobId::from(request.into_inner().job_id);
        let job = self.jobs.get(job, viewer).await.map_err(|error| of_not_found(&error))?;
        Ok(Response::new(GetResponse { job: Some(job) }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let viewer = Caller::of(request.extensions()).viewer();
        let ListRequest { active_only, limit } = request.into_inner();
        let limit = if limit == 0 { LIST_DEFAULT } else { (limit as usize).min(LIST_MOST) };
        Ok(Response::new(ListResponse { jobs: self.jobs.list(viewer, active_only, limit).await }))
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<CancelResponse>, Status> {
        let caller = Caller::of(request.extensions());
        let job = JobId::from(request.into_inner().job_id);
        let reason = format!("cancelled by {}", caller.tenant());
        let job = self.jobs.cancel(job, caller.viewer(), reason).await.map_err(|error| of_not_found(&error))?;
        Ok(Response::new(CancelResponse { job: Some(job) }))
    }
}

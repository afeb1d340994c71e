//! The events of one job as a stream that ends in exactly one terminal event or in an error.

use std::pin::Pin;
use std::task::{Context, Poll};

use sd_proto::endpoint::Endpoint;
use sd_proto::v1::{GenerateResponse, JobEvent, WatchResponse, job_event::Event};
use tokio_stream::{Stream, StreamExt};
use tonic::{Status, Streaming};

use crate::CallError;

type Inner = Pin<Box<dyn Stream<Item = Result<Option<JobEvent>, Status>> + Send>>;

/// A job's events. Dropping it closes the call: a job made with `generate` and without `keep` is then cancelled.
pub struct Events {
    inner: Option<Inner>,
    endpoint: Endpoint,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("endpoint", &self.endpoint).field("ended", &self.inner.is_none()).finish()
    }
}

impl Events {
    pub(crate) fn of_generate(endpoint: Endpoint, stream: Streaming<GenerateResponse>) -> Self {
        Self { inner: Some(Box::pin(stream.map(|item| item.map(|response| response.event)))), endpoint }
    }

    pub(crate) fn of_watch(endpoint: Endpoint, stream: Streaming<WatchResponse>) -> Self {
        Self { inner: Some(Box::pin(stream.map(|item| item.map(|response| response.event)))), endpoint }
    }

    /// The next event; `None` after the terminal one or after an error.
    ///
    /// # Errors
    /// The daemon refused the job, went away, or ended the stream before the terminal event.
    pub async fn next(&mut self) -> Option<Result<JobEvent, CallError>> {
        StreamExt::next(self).await
    }
}

/// Whether an event is a job's last.
pub(crate) fn is_terminal(event: &JobEvent) -> bool {
    match &event.event {
        Some(Event::Succeeded(_) | Event::Failed(_) | Event::Cancelled(_)) => true,
        Some(
            Event::Queued(_)
            | Event::StageStarted(_)
            | Event::Progress(_)
            | Event::StageFinished(_)
            | Event::Image(_)
            | Event::Note(_)
            | Event::Decision(_),
        )
        | None => false,
    }
}

impl Stream for Events {
    type Item = Result<JobEvent, CallError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(inner) = self.inner.as_mut() else { return Poll::Ready(None) };
        let item = std::task::ready!(inner.as_mut().poll_next(context));
        let (item, ended) = match item {
            Some(Ok(Some(event))) => {
                let ended = is_terminal(&event);
                (Ok(event), ended)
            }
            Some(Ok(None)) => {
                let endpoint = self.endpoint.clone();
                (Err(CallError::Malformed { endpoint, what: "events", missing: "an event" }), true)
            }
            Some(Err(status)) => (Err(CallError::from_status(&self.endpoint, status)), true),
            None => (Err(CallError::Incomplete { endpoint: self.endpoint.clone() }), true),
        };
        if ended {
            self.inner = None;
        }
        Poll::Ready(Some(item))
    }
}

//! Why things happened: the journal of decisions, for one job or as it is written.

use std::pin::Pin;

use sd_proto::v1::{ExplainJobRequest, ExplainJobResponse, WatchDecisionsRequest, WatchDecisionsResponse};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::control::ControlService;

pub(super) type DecisionStream = Pin<Box<dyn Stream<Item = Result<WatchDecisionsResponse, Status>> + Send>>;

pub(super) async fn explain(
    _: &ControlService,
    _: Request<ExplainJobRequest>,
) -> Result<Response<ExplainJobResponse>, Status> {
    Err(Status::unimplemented("explain"))
}

pub(super) async fn watch(
    _: &ControlService,
    _: Request<WatchDecisionsRequest>,
) -> Result<Response<DecisionStream>, Status> {
    Err(Status::unimplemented("watch"))
}

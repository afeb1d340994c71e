//! What a request would need, and the effective configuration.

use sd_proto::v1::{FitRequest, FitResponse, ShowConfigRequest, ShowConfigResponse};
use tonic::{Request, Response, Status};

use super::control::ControlService;

pub(super) async fn fit(_: &ControlService, _: Request<FitRequest>) -> Result<Response<FitResponse>, Status> {
    Err(Status::unimplemented("fit"))
}

pub(super) fn show_config(
    _: &ControlService,
    _: Request<ShowConfigRequest>,
) -> Result<Response<ShowConfigResponse>, Status> {
    Err(Status::unimplemented("show_config"))
}

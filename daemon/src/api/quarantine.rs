//! Quarantined stages: listed and cleared.

use sd_proto::v1::{ClearQuarantineRequest, ClearQuarantineResponse, ListQuarantineRequest, ListQuarantineResponse};
use tonic::{Request, Response, Status};

use super::control::ControlService;

pub(super) fn list(
    _: &ControlService,
    _: Request<ListQuarantineRequest>,
) -> Result<Response<ListQuarantineResponse>, Status> {
    Err(Status::unimplemented("list"))
}

pub(super) fn clear(
    _: &ControlService,
    _: Request<ClearQuarantineRequest>,
) -> Result<Response<ClearQuarantineResponse>, Status> {
    Err(Status::unimplemented("clear"))
}

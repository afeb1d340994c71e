//! Quarantined stages: listed and cleared.

use sd_proto::v1::{ClearQuarantineRequest, ClearQuarantineResponse, ListQuarantineRequest, ListQuarantineResponse};
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::control::ControlService;
use super::status::operator_only;

pub(super) fn list(
    service: &ControlService,
    _: Request<ListQuarantineRequest>,
) -> Result<Response<ListQuarantineResponse>, Status> {
    Ok(Response::new(ListQuarantineResponse { entries: service.backing.quarantine.list() }))
}

pub(super) fn clear(
    service: &ControlService,
    request: Request<ClearQuarantineRequest>,
) -> Result<Response<ClearQuarantineResponse>, Status> {
    if !Caller::of(request.extensions()).is_operator() {
        return Err(operator_only());
    }
    let ClearQuarantineRequest { model, stage } = request.into_inner();
    if !["", "text", "diffusion", "vae"].contains(&stage.as_str()) {
        let problem = format!("there is no stage {stage:?}: name text, diffusion or vae, or none for all");
        return Err(Status::invalid_argument(problem));
    }
    let cleared = service.backing.quarantine.clear(&model, &stage);
    tracing::info!(model, stage, cleared, "quarantine cleared");
    Ok(Response::new(ClearQuarantineResponse { cleared }))
}

//! What operators do to models and devices while jobs run: load, unload, pin, release.

use sd_proto::v1::{
    LoadModelRequest, LoadModelResponse, PinModelRequest, PinModelResponse, ReleaseDeviceRequest,
    ReleaseDeviceResponse, UnloadModelRequest, UnloadModelResponse,
};
use tonic::{Request, Response, Status};

use super::control::ControlService;

pub(super) async fn load(
    _: &ControlService,
    _: Request<LoadModelRequest>,
) -> Result<Response<LoadModelResponse>, Status> {
    Err(Status::unimplemented("load"))
}

pub(super) async fn unload(
    _: &ControlService,
    _: Request<UnloadModelRequest>,
) -> Result<Response<UnloadModelResponse>, Status> {
    Err(Status::unimplemented("unload"))
}

pub(super) async fn pin(_: &ControlService, _: Request<PinModelRequest>) -> Result<Response<PinModelResponse>, Status> {
    Err(Status::unimplemented("pin"))
}

pub(super) async fn release(
    _: &ControlService,
    _: Request<ReleaseDeviceRequest>,
) -> Result<Response<ReleaseDeviceResponse>, Status> {
    Err(Status::unimplemented("release"))
}

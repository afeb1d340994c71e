//! What operators do to models and devices while jobs run: load, unload, pin, release.

use std::sync::Arc;
use std::time::Duration;

use sd_proto::v1::{
    Decision, DecisionKind, ImageRequest, LoadModelRequest, LoadModelResponse, LoadedStage, PinModelRequest,
    PinModelResponse, ReleaseDeviceRequest, ReleaseDeviceResponse, Stage, UnloadModelRequest, UnloadModelResponse,
};
use sd_proto::worker::v1::WorkerStage;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::control::ControlService;
use super::status::{bad_field, of_admission, of_failure, operator_only, unknown_device};
use crate::ids::{DeviceId, JobId};
use crate::jobs::admission::AdmissionError;
use crate::jobs::viewer::new_job_id;
use crate::models::ModelError;
use crate::stages::operate::{LoadOrder, Which};
use crate::workers::stage_name;

/// The stages in the order of a job, each with what its process is called.
const STAGES: [(Stage, WorkerStage); 3] =
    [(Stage::Encode, WorkerStage::Text), (Stage::Denoise, WorkerStage::Diffusion), (Stage::Decode, WorkerStage::Vae)];
/// Edge, in latent pixels, of the picture that a load is asked for with: as small as diffusion models take, so that a load needs
/// little beside the weights.
const LOAD_LATENT_EDGE: u32 = 8;

/// Refuses everybody but operators.
fn operator<T>(request: &Request<T>) -> Result<Caller, Status> {
    let caller = Caller::of(request.extensions());
    if caller.is_operator() { Ok(caller) } else { Err(operator_only()) }
}

/// The stages that are named; none: all.
fn stages(names: &[String]) -> Result<Vec<(Stage, WorkerStage)>, Status> {
    if let Some(unknown) = names.iter().find(|name| !STAGES.iter().any(|(_, stage)| stage_name(*stage) == *name)) {
        return Err(bad_field("stages", format!("there is no stage {unknown:?}: write text, diffusion or vae")));
    }
    let named = |stage: WorkerStage| names.is_empty() || names.iter().any(|name| name == stage_name(stage));
    Ok(STAGES.into_iter().filter(|(_, stage)| named(*stage)).collect())
}

pub(super) async fn load(
    service: &ControlService,
    request: Request<LoadModelRequest>,
) -> Result<Response<LoadModelResponse>, Status> {
    let caller = operator(&request)?;
    let LoadModelRequest { model, stages: names } = request.into_inner();
    let wanted = stages(&names)?;
    let admission = &service.backing.admission;
    let edge = {
        let model = admission.model(&model, caller.asker()).await.map_err(|error| of_admission(&error))?;
        LOAD_LATENT_EDGE * model.report.scale_factor()
    };
    let image =
        ImageRequest { model, prompt: "load".into(), width: edge, height: edge, steps: Some(1), ..Default::default() };
    let (admitted, _) = admission.admit(image, caller.asker()).await.map_err(|error| of_admission(&error))?;
    let request = Arc::new(admitted);
    let job = JobId::from(format!("load-{}", new_job_id()));
    let mut loaded = Vec::new();
    // One after the other: together they might wait for each other's room.
    for (stage, kind) in wanted {
        let order = LoadOrder { job: job.clone(), tenant: caller.tenant(), request: request.clone(), stage };
        let done = service.backing.operator.load(order).await.map_err(|failure| of_failure(&failure))?;
        loaded.push(LoadedStage {
            stage: stage_name(kind).into(),
            incarnation: done.incarnation,
            weights_bytes: done.weights_bytes,
            weights_total_bytes: request.model.report.task(stage).map_or(0, |(_, task)| task.weights_bytes),
        });
    }
    tracing::info!(model = request.model.name, %job, stages = loaded.len(), "loaded for an operator");
    Ok(Response::new(LoadModelResponse { stages: loaded }))
}

/// The processes of a model, even where its files cannot be used any more.
async fn which(
    service: &ControlService,
    caller: Caller,
    name: &str,
    stages: Vec<WorkerStage>,
) -> Result<Which, Status> {
    match service.backing.admission.model(name, caller.asker()).await {
        Ok(model) => Ok(Which { model: model.name.clone(), dir: Some(model.dir.clone()), stages }),
        Err(AdmissionError::Model(
            ModelError::Unreadable { .. } | ModelError::Unusable { .. } | ModelError::Inspection { .. },
        )) => Ok(Which { model: name.into(), dir: None, stages }),
        Err(error) => Err(of_admission(&error)),
    }
}

pub(super) async fn unload(
    service: &ControlService,
    request: Request<UnloadModelRequest>,
) -> Result<Response<UnloadModelResponse>, Status> {
    let caller = operator(&request)?;
    let UnloadModelRequest { model, stages: names } = request.into_inner();
    let wanted =
        if names.is_empty() { Vec::new() } else { stages(&names)?.into_iter().map(|(_, kind)| kind).collect() };
    let whole = wanted.is_empty();
    let which = which(service, caller, &model, wanted).await?;
    // A pin that outlived what it kept would bind the next process to the device.
    if let (true, Some(dir)) = (whole, &which.dir) {
        service.backing.operator.pin(dir, false);
    }
    let freed = service.backing.operator.unload(which).await;
    tracing::info!(model, workers = freed.workers, bytes = freed.bytes, "unloaded for an operator");
    Ok(Response::new(UnloadModelResponse { bytes: freed.bytes, workers: freed.workers }))
}

pub(super) async fn pin(
    service: &ControlService,
    request: Request<PinModelRequest>,
) -> Result<Response<PinModelResponse>, Status> {
    let caller = operator(&request)?;
    let PinModelRequest { model, pinned } = request.into_inner();
    let model = service.backing.admission.model(&model, caller.asker()).await.map_err(|error| of_admission(&error))?;
    service.backing.operator.pin(&model.dir, pinned);
    let what = if pinned { "is pinned: it is not taken off for others" } else { "is no longer pinned" };
    service.backing.journal.record(Decision {
        kind: DecisionKind::Keeps as i32,
        text: format!("{} {what} ({})", model.name, caller.tenant()),
        ..Decision::default()
    });
    Ok(Response::new(PinModelResponse {}))
}

pub(super) async fn release(
    service: &ControlService,
    request: Request<ReleaseDeviceRequest>,
) -> Result<Response<ReleaseDeviceResponse>, Status> {
    operator(&request)?;
    let ReleaseDeviceRequest { device, hold } = request.into_inner();
    let hold = match hold {
        Some(hold) => {
            Some(Duration::try_from(hold).map_err(|_| bad_field("hold", "a negative time is no time to wait".into()))?)
        }
        None => None,
    };
    let there_are: Vec<DeviceId> =
        service.backing.overview.devices().await.into_iter().map(|device| device.device).collect();
    let named = there_are.iter().find(|id| device.is_empty() || id.as_str() == device);
    let Some(device) = named.cloned() else { return Err(unknown_device(&device, &there_are)) };
    let freed = service.backing.operator.release(device.clone(), hold).await;
    tracing::info!(%device, ?hold, workers = freed.workers, bytes = freed.bytes, "released for an operator");
    Ok(Response::new(ReleaseDeviceResponse { bytes: freed.bytes, workers: freed.workers }))
}

//! What a request would need, and the effective configuration.

use sd_proto::v1::{ConfigValue, FitRequest, FitResponse, ShowConfigRequest, ShowConfigResponse, StageFit};
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::control::ControlService;
use super::status::of_admission;
use crate::jobs::admission::{StageNeed, Verdict};

pub(super) async fn fit(
    service: &ControlService,
    request: Request<FitRequest>,
) -> Result<Response<FitResponse>, Status> {
    let asker = Caller::of(request.extensions()).asker();
    let mut image = request.into_inner().image.unwrap_or_default();
    // What is asked is how much it takes; what is painted decides nothing but the number of tokens.
    if image.prompt.trim().is_empty() {
        image.prompt = "a picture".into();
    }
    let verdict = service.backing.admission.judge(image, asker).await.map_err(|error| of_admission(&error))?;
    Ok(Response::new(response(&verdict)))
}

fn response(verdict: &Verdict) -> FitResponse {
    let request = &verdict.request;
    let largest = match &verdict.outcome {
        Ok(_) => (request.width, request.height),
        Err(error) => error.largest.unwrap_or_default(),
    };
    FitResponse {
        fits: verdict.outcome.is_ok(),
        stages: verdict.needs.iter().map(|need| stage(need, &verdict.device)).collect(),
        device: verdict.device.clone(),
        budget_bytes: verdict.limit,
        mode: request.memory.mode.to_string(),
        fitting_mode: verdict.fitting.map(|mode| mode.to_string()).unwrap_or_default(),
        largest_width: largest.0,
        largest_height: largest.1,
        advice: verdict.outcome.as_ref().err().map(ToString::to_string).unwrap_or_default(),
        plan: Some(request.plan.clone()),
    }
}

fn stage(need: &StageNeed, device: &str) -> StageFit {
    StageFit {
        stage: need.stage as i32,
        device: device.into(),
        context_bytes: need.context,
        weights_bytes: need.weights,
        weights_floor_bytes: need.floor,
        working_set_bytes: need.working_set,
        source: need.source.name().into(),
    }
}

pub(super) fn show_config(
    service: &ControlService,
    _: Request<ShowConfigRequest>,
) -> Result<Response<ShowConfigResponse>, Status> {
    let values = service.backing.config.iter().map(|value| ConfigValue {
        key: value.key.clone(),
        value: value.value.clone().unwrap_or_default(),
        origin: value.source.clone(),
    });
    Ok(Response::new(ShowConfigResponse { values: values.collect() }))
}

//! `sd.v1.Control`: models, workers, leases, drain.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::v1::control_server::Control;
use sd_proto::v1::{
    ClearQuarantineRequest, ClearQuarantineResponse, Component, DrainRequest, DrainResponse, ExplainJobRequest,
    ExplainJobResponse, FitRequest, FitResponse, GetStatusRequest, GetStatusResponse, InspectModelRequest,
    InspectModelResponse, ListLeasesRequest, ListLeasesResponse, ListModelsRequest, ListModelsResponse,
    ListQuarantineRequest, ListQuarantineResponse, ListWorkersRequest, ListWorkersResponse, LoadModelRequest,
    LoadModelResponse, Model as ModelMessage, PinModelRequest, PinModelResponse, ReleaseDeviceRequest,
    ReleaseDeviceResponse, ShowConfigRequest, ShowConfigResponse, UnloadModelRequest, UnloadModelResponse,
    WatchDecisionsRequest,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::overview::{self, Overview};
use super::status::{of_admission, operator_only};
use super::{decisions, fit, operate, quarantine};
use crate::config::Value;
use crate::jobs::{Admission, Jobs};
use crate::journal::Journal;
use crate::models::{Listed, Model};
use crate::stages::Quarantine;
use crate::stages::operate::Operator;

/// What a daemon says of itself.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its instance's id.
    pub instance: String,
    /// Where it listens.
    pub endpoint: String,
    /// Since when.
    pub started: SystemTime,
}

/// What the service shows and acts upon.
#[derive(Clone)]
pub struct Backing {
    /// Jobs.
    pub jobs: Jobs,
    /// Models and what fits.
    pub admission: Admission,
    /// Processes and memory.
    pub overview: Arc<dyn Overview>,
    /// What was decided about memory.
    pub journal: Journal,
    /// Who does what operators ask for.
    pub operator: Arc<dyn Operator>,
    /// Stages that are not started any more.
    pub quarantine: Quarantine,
    /// Fires when the daemon ends: streams without an end of their own end then.
    pub ending: CancellationToken,
    /// To be fired to end the daemon.
    pub shutdown: CancellationToken,
    /// What a drain gives jobs where the caller does not say.
    pub drain_grace: Duration,
    /// The effective configuration, for show.
    pub config: Arc<Vec<Value>>,
}

/// The service.
#[derive(Clone)]
pub struct ControlService {
    identity: Identity,
    pub(super) backing: Backing,
}

impl std::fmt::Debug for ControlService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlService").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Backing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Backing").finish_non_exhaustive()
    }
}

impl ControlService {
    /// A service over these.
    pub fn new(identity: Identity, backing: Backing) -> Self {
        Self { identity, backing }
    }
}

fn described(model: &Model, is_default: bool) -> ModelMessage {
    let report = &model.report;
    ModelMessage {
        name: model.name.clone(),
        path: model.dir.display().to_string(),
        is_default,
        family: report.family.clone(),
        file_bytes: report.components.iter().map(|component| component.file_bytes).sum(),
        precision: report.precision().into(),
        default_width: report.defaults.width,
        default_height: report.defaults.height,
        default_steps: report.defaults.steps,
        default_guidance_scale: report.defaults.guidance_scale,
        components: report
            .components
            .iter()
            .map(|component| Component {
                stage: component.stage.clone(),
                class_name: component.class_name.clone(),
                tensors: component.tensors,
                file_bytes: component.file_bytes,
                weights_bytes: component.weights_bytes,
                precision: component.precision.clone(),
            })
            .collect(),
        problem: String::new(),
        default_sampler: report.defaults.sampler.clone(),
    }
}

fn listed(listed: Listed) -> ModelMessage {
    match listed.model {
        Ok(model) => described(&model, listed.is_default),
        Err(error) => ModelMessage {
            name: listed.name,
            path: listed.dir.display().to_string(),
            is_default: listed.is_default,
            problem: error.to_string(),
            ..ModelMessage::default()
        },
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        let activity = *self.backing.jobs.activity().borrow();
        let memory = self.backing.overview.shared_memory();
        Ok(Response::new(GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            instance: self.identity.instance.clone(),
            pid: std::process::id(),
            started: Some(self.identity.started.into()),
            devices: self.backing.overview.devices().await.iter().map(overview::device).collect(),
            queued_jobs: activity.queued as u32,
            running_jobs: activity.running as u32,
            draining: activity.draining,
            shared_memory_bytes: memory.bytes,
            shared_memory_free_bytes: memory.free,
            endpoint: self.identity.endpoint.clone(),
        }))
    }

    async fn list_models(&self, _: Request<ListModelsRequest>) -> Result<Response<ListModelsResponse>, Status> {
        let models = self.backing.admission.registry().list().await.into_iter().map(listed).collect();
        Ok(Response::new(ListModelsResponse { models }))
    }

    async fn inspect_model(
        &self,
        request: Request<InspectModelRequest>,
    ) -> Result<Response<InspectModelResponse>, Status> {
        let asker = Caller::of(request.extensions()).asker();
        let name = request.into_inner().model;
        let model = self.backing.admission.model(&name, asker).await.map_err(|error| of_admission(&error))?;
        let is_default = model.name == self.backing.admission.registry().default_name();
        Ok(Response::new(InspectModelResponse { model: Some(described(&model, is_default)) }))
    }

    async fn list_workers(&self, _: Request<ListWorkersRequest>) -> Result<Response<ListWorkersResponse>, Status> {
        let devices = self.backing.overview.devices().await;
        Ok(Response::new(ListWorkersResponse { workers: overview::workers(self.backing.overview.workers(), &devices) }))
    }

    async fn list_leases(&self, _: Request<ListLeasesRequest>) -> Result<Response<ListLeasesResponse>, Status> {
        let devices = self.backing.overview.devices().await;
        Ok(Response::new(ListLeasesResponse { leases: devices.iter().flat_map(overview::leases).collect() }))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        if !Caller::of(request.extensions()).is_operator() {
            return Err(operator_only());
        }
        let grace = match request.into_inner().timeout {
            Some(timeout) => Duration::try_from(timeout)
                .map_err(|_| Status::invalid_argument("timeout: a negative time is no time to wait"))?,
            None => self.backing.drain_grace,
        };
        let drained = self.backing.jobs.drain(grace).await;
        self.backing.shutdown.cancel();
        Ok(Response::new(DrainResponse {
            jobs_finished: drained.finished,
            jobs_cancelled: drained.cancelled,
            jobs_kept: drained.kept,
        }))
    }

    type WatchDecisionsStream = decisions::DecisionStream;

    async fn load_model(&self, request: Request<LoadModelRequest>) -> Result<Response<LoadModelResponse>, Status> {
        operate::load(self, request).await
    }

    async fn unload_model(
        &self,
        request: Request<UnloadModelRequest>,
    ) -> Result<Response<UnloadModelResponse>, Status> {
        operate::unload(self, request).await
    }

    async fn pin_model(&self, request: Request<PinModelRequest>) -> Result<Response<PinModelResponse>, Status> {
        operate::pin(self, request).await
    }

    async fn release_device(
        &self,
        request: Request<ReleaseDeviceRequest>,
    ) -> Result<Response<ReleaseDeviceResponse>, Status> {
        operate::release(self, request).await
    }

    async fn fit(&self, request: Request<FitRequest>) -> Result<Response<FitResponse>, Status> {
        fit::fit(self, request).await
    }

    async fn show_config(&self, request: Request<ShowConfigRequest>) -> Result<Response<ShowConfigResponse>, Status> {
        fit::show_config(self, request)
    }

    async fn explain_job(&self, request: Request<ExplainJobRequest>) -> Result<Response<ExplainJobResponse>, Status> {
        decisions::explain(self, request).await
    }

    async fn watch_decisions(
        &self,
        request: Request<WatchDecisionsRequest>,
    ) -> Result<Response<Self::WatchDecisionsStream>, Status> {
        decisions::watch(self, request).await
    }

    async fn list_quarantine(
        &self,
        request: Request<ListQuarantineRequest>,
    ) -> Result<Response<ListQuarantineResponse>, Status> {
        quarantine::list(self, request)
    }

    async fn clear_quarantine(
        &self,
        request: Request<ClearQuarantineRequest>,
    ) -> Result<Response<ClearQuarantineResponse>, Status> {
        quarantine::clear(self, request)
    }
}

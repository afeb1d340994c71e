//! What operators ask of a daemon, and why it did what it did.

use std::time::Duration;

use sd_proto::endpoint::Endpoint;
use sd_proto::v1::{
    ClearQuarantineRequest, ConfigValue, Decision, ExplainJobRequest, ExplainJobResponse, FitRequest, FitResponse,
    ImageRequest, ListQuarantineRequest, LoadModelRequest, LoadedStage, PinModelRequest, Quarantined,
    ReleaseDeviceRequest, ReleaseDeviceResponse, ShowConfigRequest, UnloadModelRequest, UnloadModelResponse,
    WatchDecisionsRequest, WatchDecisionsResponse,
};
use tonic::Streaming;

use crate::client::{QUICK, SLOW};
use crate::{CallError, Client};

/// For calls that wait for tasks to end and weights to come or go; the daemon bounds each of these itself.
const PATIENT: Duration = Duration::from_secs(3600);

impl Client {
    /// Brings stages of a model ("text", "diffusion", "vae"; none: all) onto their devices.
    ///
    /// # Errors
    /// Not permitted, no such model, it does not fit, or the daemon is gone.
    pub async fn load(&self, model: &str, stages: &[String]) -> Result<Vec<LoadedStage>, CallError> {
        let request = LoadModelRequest { model: model.to_owned(), stages: stages.to_vec() };
        Ok(self.call("load", PATIENT, self.control.clone().load_model(request)).await?.stages)
    }

    /// Takes stages of a model off their devices: busy ones when their task has ended. Answers when that is proven.
    ///
    /// # Errors
    /// Not permitted, no such model, or the daemon is gone.
    pub async fn unload(&self, model: &str, stages: &[String]) -> Result<UnloadModelResponse, CallError> {
        let request = UnloadModelRequest { model: model.to_owned(), stages: stages.to_vec() };
        self.call("unload", PATIENT, self.control.clone().unload_model(request)).await
    }

    /// Keeps a model's stages from being taken off for others, or ends that.
    ///
    /// # Errors
    /// Not permitted, no such model, or the daemon is gone.
    pub async fn pin(&self, model: &str, pinned: bool) -> Result<(), CallError> {
        let request = PinModelRequest { model: model.to_owned(), pinned };
        self.call("pin", SLOW, self.control.clone().pin_model(request)).await.map(|_| ())
    }

    /// Gives a device to other programs: every stage leaves it, and nothing is granted there for `hold`.
    ///
    /// # Errors
    /// Not permitted, no such device, or the daemon is gone.
    pub async fn release(&self, device: &str, hold: Option<Duration>) -> Result<ReleaseDeviceResponse, CallError> {
        let hold = hold.map(|hold| prost_types::Duration::try_from(hold).unwrap_or_default());
        let request = ReleaseDeviceRequest { device: device.to_owned(), hold };
        self.call("release", PATIENT, self.control.clone().release_device(request)).await
    }

    /// What a request would need and whether it fits.
    ///
    /// # Errors
    /// Bad fields, no such model, or the daemon is gone.
    pub async fn fit(&self, image: ImageRequest) -> Result<FitResponse, CallError> {
        self.call("fit", SLOW, self.control.clone().fit(FitRequest { image: Some(image) })).await
    }

    /// The daemon's effective configuration.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn config(&self) -> Result<Vec<ConfigValue>, CallError> {
        Ok(self.call("config", QUICK, self.control.clone().show_config(ShowConfigRequest {})).await?.values)
    }

    /// A job with everything that was decided about memory for it, oldest first.
    ///
    /// # Errors
    /// No such job of this user, or the daemon is gone.
    pub async fn explain(&self, job_id: &str) -> Result<ExplainJobResponse, CallError> {
        let request = ExplainJobRequest { job_id: job_id.to_owned() };
        self.call("explain", QUICK, self.control.clone().explain_job(request)).await
    }

    /// Decisions about memory: those that are remembered, then, with `follow`, those to come. Only of one job where one is
    /// named.
    ///
    /// # Errors
    /// No such job of this user, or the daemon is gone.
    pub async fn decisions(&self, job_id: &str, follow: bool) -> Result<Decisions, CallError> {
        let request = WatchDecisionsRequest { job_id: job_id.to_owned(), follow };
        match self.control.clone().watch_decisions(request).await {
            Ok(response) => Ok(Decisions { endpoint: self.endpoint.clone(), stream: response.into_inner() }),
            Err(status) => Err(CallError::from_status(&self.endpoint, status)),
        }
    }

    /// Stages that are not started any more because they kill their workers.
    ///
    /// # Errors
    /// The daemon is gone.
    pub async fn quarantine(&self) -> Result<Vec<Quarantined>, CallError> {
        let mut control = self.control.clone();
        Ok(self.call("quarantine", QUICK, control.list_quarantine(ListQuarantineRequest {})).await?.entries)
    }

    /// Lets quarantined stages be started again: of one model, of one stage of it, or (both empty) all. Returns how many.
    ///
    /// # Errors
    /// Not permitted, or the daemon is gone.
    pub async fn clear_quarantine(&self, model: &str, stage: &str) -> Result<u32, CallError> {
        let request = ClearQuarantineRequest { model: model.to_owned(), stage: stage.to_owned() };
        Ok(self.call("clear quarantine", QUICK, self.control.clone().clear_quarantine(request)).await?.cleared)
    }
}

/// Decisions about memory, as they are made.
#[derive(Debug)]
pub struct Decisions {
    endpoint: Endpoint,
    stream: Streaming<WatchDecisionsResponse>,
}

impl Decisions {
    /// The next decision; `None` after the last one that was asked for, or when the daemon ends. Cancel-safe.
    ///
    /// # Errors
    /// The daemon went away.
    pub async fn next(&mut self) -> Option<Result<Decision, CallError>> {
        loop {
            match self.stream.message().await {
                Ok(Some(WatchDecisionsResponse { decision: Some(decision) })) => return Some(Ok(decision)),
                // An answer of a newer daemon.
                Ok(Some(WatchDecisionsResponse { decision: None })) => {}
                Ok(None) => return None,
                Err(status) => return Some(Err(CallError::from_status(&self.endpoint, status))),
            }
        }
    }
}

//! What requests need and what there is: the trait between admission and what knows devices.

use std::future::Future;
use std::pin::Pin;

use sd_proto::v1::{MemoryRequest, NumericPlan, Stage};

use crate::jobs::request::Admitted;
use crate::models::Model;
use crate::residency::estimate::Source;
use crate::stages::memory::MemoryPlan;

/// What one stage of a request needs on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageNeed {
    /// The stage.
    pub stage: Stage,
    /// The process before it holds a weight.
    pub context: u64,
    /// All its weights.
    pub weights: u64,
    /// The least of them with which it runs.
    pub floor: u64,
    /// Activations and workspaces.
    pub working_set: u64,
    /// Where that comes from.
    pub source: Source,
}

impl StageNeed {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.context.saturating_add(self.weights).saturating_add(self.working_set)
    }

    /// The least with which it runs.
    pub fn least(&self) -> u64 {
        self.context.saturating_add(self.floor).saturating_add(self.working_set)
    }
}

/// Says what requests need and what there is. Depends on configuration alone, never on what is free at the moment.
pub trait Fits: Send + Sync + 'static {
    /// What each stage of a request needs; one entry a process.
    fn needs(&self, request: &Admitted) -> Vec<StageNeed>;
    /// Bytes that leases of the device may hold together for this request.
    fn limit(&self, request: &Admitted) -> u64;
    /// The device's id.
    fn device(&self) -> String;
    /// How a model's request uses memory, and the numeric choices for it; tiles are not chosen yet.
    fn plans(&self, model: &Model, asked: Option<&MemoryRequest>) -> (MemoryPlan, NumericPlan);
    /// Chooses whether the VAE works in tiles, and of what size: from request, configuration and budget alone.
    fn choose_tiles(&self, _request: &mut Admitted) {}
    /// Finds out what is not known yet of a request's needs. To be awaited before [`Fits::needs`].
    fn prepare<'a>(&'a self, _request: &'a Admitted) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(std::future::ready(()))
    }
}

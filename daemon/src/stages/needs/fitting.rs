//! Admission's questions, answered: needs by process, limits, and the choice of tiles.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;

use sd_proto::v1::{MemoryRequest, NumericPlan};

use super::{DeviceNeeds, type_name};
use crate::jobs::admission::{Fits, StageNeed};
use crate::jobs::request::Admitted;
use crate::models::Model;
use crate::stages::dryrun::{DryRunner, Found, Question};
use crate::stages::memory::{MemoryPlan, TILES};
use crate::stages::plan::{Grouping, StagePlan, worker_stage};

impl Fits for DeviceNeeds {
    fn needs(&self, request: &Admitted) -> Vec<StageNeed> {
        let plan = StagePlan::of(&Admitted { count: 1, ..request.clone() }, Grouping::ByStage);
        let mut needs: Vec<StageNeed> = Vec::new();
        for run in plan.runs() {
            let Some(need) = self.need(request, run.stage) else { continue };
            // Both halves of the autoencoder run in one process: the larger need counts.
            match needs.iter_mut().find(|other| worker_stage(other.stage) == worker_stage(run.stage)) {
                Some(other) if other.total() < need.total() => *other = need,
                Some(_) => {}
                None => needs.push(need),
            }
        }
        needs
    }

    fn limit(&self, request: &Admitted) -> u64 {
        self.limit_of(request)
    }

    fn device(&self) -> String {
        self.device.to_string()
    }

    fn plans(&self, model: &Model, asked: Option<&MemoryRequest>) -> (MemoryPlan, NumericPlan) {
        let memory = MemoryPlan::resolve(&self.memory.of(&model.name), asked);
        let plan = NumericPlan {
            version: model.report.numerics_version,
            device: self.device.to_string(),
            dtype: "f32".into(),
            backend: model.report.backend.clone(),
            batch: 1,
            vae_tile: 0,
            vae_tile_overlap: 0,
            vae_dtype: type_name(memory.vae.element_type).into(),
        };
        (memory, plan)
    }

    fn choose_tiles(&self, request: &mut Admitted) {
        let tiling = request.memory.tiling;
        let with = |request: &mut Admitted, edge| {
            let Admitted { memory, plan, width, height, .. } = request;
            // A picture that is no larger than a tile is whole.
            memory.set_tiles(plan, if edge < (*width).max(*height) { edge } else { 0 });
        };
        let named = (tiling.size > 0).then_some(tiling.size);
        match tiling.wanted {
            Some(false) => with(request, 0),
            Some(true) => match named {
                Some(edge) => with(request, edge),
                None => self.first_that_fits(request),
            },
            None => {
                with(request, 0);
                if !self.vae_fits(request) {
                    match named {
                        Some(edge) => with(request, edge),
                        None => self.first_that_fits(request),
                    }
                }
            }
        }
    }

    fn prepare<'a>(&'a self, request: &'a Admitted) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(self.dry_run(request))
    }
}

impl DeviceNeeds {
    /// The largest tiles that fit, else the smallest there are; one at a time where several do not fit.
    fn first_that_fits(&self, request: &mut Admitted) {
        let batch = request.memory.vae.batch;
        for edge in TILES {
            for batch in [batch, 1] {
                request.memory.vae.batch = batch;
                let Admitted { memory, plan, .. } = request;
                memory.set_tiles(plan, edge);
                if self.vae_fits(request) {
                    return;
                }
            }
        }
    }
}

/// Runs the worker program's dry run.
impl DryRunner for crate::workers::Workers {
    fn dry_run<'a>(&'a self, folder: &'a Path, question: &'a Question) -> Found<'a> {
        Box::pin(async move {
            let report = self.estimate(folder, &question.arguments()).await.map_err(|error| error.to_string())?;
            crate::stages::dryrun::answer(&report)
        })
    }
}

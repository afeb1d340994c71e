//! From a record back to a job, at the daemon's start: the same request is admitted again, and only if it would give the
//! same bytes does it run.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sd_proto::v1::{Failure, FailureReason, ImageRequest, MemoryRequest, NumericPlan};

use super::{DurableJob, Store};
use crate::jobs::Jobs;
use crate::jobs::admission::{Admission, AdmissionError, Asker};
use crate::jobs::request::Admitted;
use crate::models::ModelError;
use crate::stages::plan::Grouping;

/// Runs of a job during which the daemon was killed, after which it is not tried again: it may well be the reason.
const BROKEN_RUNS: u32 = 3;
/// Whoever had it recorded was allowed to name its model.
const ASKER: Asker = Asker { may_name_paths: true };

/// A record, and what has become of it.
#[derive(Debug)]
pub struct TakenUp {
    /// The record.
    pub job: DurableJob,
    /// The request admitted again, or why it cannot go on.
    pub outcome: Result<(Admitted, Grouping), Failure>,
}

impl TakenUp {
    /// What its events say about it.
    pub fn note(&self) -> String {
        let submitted = self.job.submitted.duration_since(UNIX_EPOCH).unwrap_or_default();
        let ago = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(submitted);
        let begins = match (self.job.progress.told(), self.job.broken_runs) {
            (told, _) if !told.is_empty() => format!(": {told}"),
            (_, 0) => String::new(),
            (_, _) => ", begun before and begun anew".into(),
        };
        format!("taken up again after a restart of the daemon, submitted {} s ago{begins}", ago.as_secs())
    }
}

/// Reads the store, admits every recorded job again, and hands all to `jobs` in their order. Returns how many there were.
///
/// A store that cannot be read is told in the log, and no more: the daemon can serve without what it holds.
pub async fn take_up(store: Arc<dyn Store>, admission: &Admission, jobs: &Jobs) -> usize {
    let loaded = tokio::task::spawn_blocking(move || store.load()).await;
    let loaded = match loaded.map_err(|error| error.to_string()).and_then(|loaded| loaded.map_err(|e| e.to_string())) {
        Ok(loaded) => loaded,
        Err(error) => {
            tracing::error!(error, "recorded jobs cannot be read");
            return 0;
        }
    };
    for damaged in &loaded.damaged {
        tracing::warn!(
            record = damaged.name,
            problem = damaged.problem,
            "a recorded job cannot be taken up: moved to the folder damaged"
        );
    }
    let count = loaded.jobs.len();
    let mut taken = Vec::with_capacity(count);
    for job in loaded.jobs {
        let outcome = admit_again(admission, &job).await;
        tracing::info!(job = %job.id, tenant = %job.tenant, model = job.model.name, goes_on = outcome.is_ok(), "job taken up");
        taken.push(TakenUp { job, outcome });
    }
    jobs.take_up(taken).await;
    count
}

fn failure(reason: FailureReason, problem: impl std::fmt::Display) -> Failure {
    let message = format!("after a restart of the daemon this job cannot go on: {problem}: submit it again");
    Failure { reason: reason as i32, message, ..Failure::default() }
}

/// Admits a recorded request again.
async fn admit_again(admission: &Admission, job: &DurableJob) -> Result<(Admitted, Grouping), Failure> {
    if job.broken_runs >= BROKEN_RUNS {
        let problem = format!("the daemon was killed {} times while it ran", job.broken_runs);
        return Err(failure(FailureReason::Internal, problem));
    }
    let model = same_model(admission, job).await?;
    let request = ImageRequest {
        model,
        init_image: job.image.as_ref().map(|file| file.bytes().to_vec()).unwrap_or_default(),
        mask: job.mask.as_ref().map(|file| file.bytes().to_vec()).unwrap_or_default(),
        memory: Some(pinned(job.request.memory.unwrap_or_default(), &job.plan)),
        ..job.request.clone()
    };
    let (mut admitted, grouping) = admission.admit(request, ASKER).await.map_err(|error| of_admission(&error))?;
    admitted.asked_memory = job.request.memory;
    let differences = differences(&job.plan, &admitted.plan);
    if !differences.is_empty() {
        let problem = format!("its numeric plan cannot be kept, so its picture would be another: {differences}");
        return Err(failure(FailureReason::Internal, problem));
    }
    let again = ImageRequest { model: job.request.model.clone(), ..admitted.to_proto() };
    if again != job.request {
        let problem = "this program would read the request in another way than the one that accepted it";
        return Err(failure(FailureReason::InvalidRequest, problem));
    }
    Ok((admitted, grouping))
}

/// The name or path under which the model of a record is found, with the files that it had.
async fn same_model(admission: &Admission, job: &DurableJob) -> Result<String, Failure> {
    let mut problem = None;
    // A model may have been named by its folder, or moved and registered under its name.
    for name in [&job.model.name, &job.model.dir] {
        match admission.model(name, ASKER).await {
            Ok(model) if model.report.fingerprint == job.model.fingerprint => return Ok(name.clone()),
            Ok(model) => {
                let text = format!("the files of model {} have changed since it was submitted", model.name);
                problem.get_or_insert_with(|| failure(FailureReason::Model, text));
            }
            Err(error) => {
                problem.get_or_insert_with(|| of_admission(&error));
            }
        }
    }
    Err(problem.unwrap_or_else(|| failure(FailureReason::Model, "its model has no name")))
}

fn of_admission(error: &AdmissionError) -> Failure {
    let reason = match error {
        AdmissionError::Invalid(_) => FailureReason::InvalidRequest,
        AdmissionError::Model(ModelError::Inspection { .. }) | AdmissionError::Broken(_) => FailureReason::Internal,
        AdmissionError::Model(_) | AdmissionError::PathNotAllowed(_) => FailureReason::Model,
        AdmissionError::DoesNotFit(_) => FailureReason::DoesNotFit,
    };
    failure(reason, error)
}

/// The request's wishes about memory, with the tiles that were chosen at its first admission: a budget that has changed since
/// must not choose others, which would change the picture.
fn pinned(asked: MemoryRequest, plan: &NumericPlan) -> MemoryRequest {
    MemoryRequest {
        vae_tiling: Some(plan.vae_tile > 0),
        vae_tile_size: plan.vae_tile,
        vae_tile_overlap: plan.vae_tile_overlap,
        ..asked
    }
}

/// What differs between two numeric plans, for people; empty: nothing.
fn differences(recorded: &NumericPlan, now: &NumericPlan) -> String {
    // Every field, so that a new one is not forgotten.
    let NumericPlan { version, device, dtype, backend, batch, vae_tile, vae_tile_overlap, vae_dtype } = recorded;
    let number = |number: &u32| number.to_string();
    [
        ("version", number(version), number(&now.version)),
        ("device", device.clone(), now.device.clone()),
        ("dtype", dtype.clone(), now.dtype.clone()),
        ("backend", backend.clone(), now.backend.clone()),
        ("batch", number(batch), number(&now.batch)),
        ("vae tile", number(vae_tile), number(&now.vae_tile)),
        ("vae tile overlap", number(vae_tile_overlap), number(&now.vae_tile_overlap)),
        ("vae dtype", vae_dtype.clone(), now.vae_dtype.clone()),
    ]
    .into_iter()
    .filter(|(_, recorded, now)| recorded != now)
    .map(|(name, recorded, now)| format!("{name} was {recorded} and is {now}"))
    .collect::<Vec<_>>()
    .join(", ")
}

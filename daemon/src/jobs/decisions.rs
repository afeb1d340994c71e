//! What was decided about memory for a job becomes an event of that job.

use std::sync::Arc;

use sd_proto::v1::Decision;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use super::state::Entry;
use crate::ids::JobId;

/// Hands every decision about a job to the owner of the jobs, until either side is gone. Decisions about processes that
/// no job caused, and those of operators, belong to no job and are passed over there.
pub(super) async fn feed(mut news: Receiver<Arc<Decision>>, entries: mpsc::Sender<(JobId, Entry)>) {
    loop {
        let decision = match news.recv().await {
            Ok(decision) => decision,
            Err(RecvError::Lagged(missed)) => {
                tracing::warn!(
                    missed,
                    "decisions came faster than jobs could note them: some are missing in their events"
                );
                continue;
            }
            Err(RecvError::Closed) => return,
        };
        if decision.job_id.is_empty() {
            continue;
        }
        let job = JobId::from(decision.job_id.as_str());
        if entries.send((job, Entry::Decision(Box::new(Decision::clone(&decision))))).await.is_err() {
            return;
        }
    }
}

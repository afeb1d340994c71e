//! Why things happened: the journal of decisions, for one job or as it is written.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use sd_proto::v1::{Decision, ExplainJobRequest, ExplainJobResponse, WatchDecisionsRequest, WatchDecisionsResponse};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::control::ControlService;
use super::status::of_not_found;
use crate::ids::JobId;
use crate::jobs::{EventLog, Jobs, Viewer};

/// Decisions that may wait for a slow client beside the journal's own bound.
const AHEAD: usize = 16;

pub(super) type DecisionStream = Pin<Box<dyn Stream<Item = Result<WatchDecisionsResponse, Status>> + Send>>;

pub(super) async fn explain(
    service: &ControlService,
    request: Request<ExplainJobRequest>,
) -> Result<Response<ExplainJobResponse>, Status> {
    let viewer = Caller::of(request.extensions()).viewer();
    let id = JobId::from(request.into_inner().job_id);
    let jobs = &service.backing.jobs;
    let log = jobs.log(id.clone(), viewer.clone()).await.map_err(|error| of_not_found(&error))?;
    let job = jobs.get(id.clone(), viewer).await.map_err(|error| of_not_found(&error))?;
    // The journal knows what came after the job's last event, the job's events what the journal has forgotten since.
    let mut decisions = log.decisions();
    decisions.extend(service.backing.journal.of_job(id.as_str()).iter().map(|decision| Decision::clone(decision)));
    decisions.sort_by_key(|decision| decision.sequence);
    decisions.dedup_by_key(|decision| decision.sequence);
    Ok(Response::new(ExplainJobResponse { job: Some(job), decisions }))
}

pub(super) async fn watch(
    service: &ControlService,
    request: Request<WatchDecisionsRequest>,
) -> Result<Response<DecisionStream>, Status> {
    let viewer = Caller::of(request.extensions()).viewer();
    let WatchDecisionsRequest { job_id, follow } = request.into_inner();
    let jobs = service.backing.jobs.clone();
    let of_job = if job_id.is_empty() {
        None
    } else {
        Some(jobs.log(JobId::from(job_id.as_str()), viewer.clone()).await.map_err(|error| of_not_found(&error))?)
    };
    let (past, news) = service.backing.journal.follow();
    let (out, stream) = mpsc::channel(AHEAD);
    let reader = Reader { sight: Sight { jobs, viewer, job_id, known: HashMap::new() }, out };
    let ending = service.backing.ending.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = reader.read(past, follow.then_some(news), of_job) => {}
            () = ending.cancelled() => {}
        }
    });
    Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
}

/// Which decisions exist for a reader.
struct Sight {
    jobs: Jobs,
    viewer: Viewer,
    /// Only of this job; empty: of all that it may see.
    job_id: String,
    /// Jobs that were asked about. Whose a job is never changes.
    known: HashMap<String, bool>,
}

impl Sight {
    async fn shows(&mut self, decision: &Decision) -> bool {
        if !self.job_id.is_empty() {
            return decision.job_id == self.job_id;
        }
        match self.viewer {
            Viewer::Operator(_) => true,
            // What no job caused is about everybody's processes.
            Viewer::Tenant(_) if decision.job_id.is_empty() => false,
            Viewer::Tenant(_) => match self.known.get(&decision.job_id) {
                Some(shown) => *shown,
                None => {
                    let job = JobId::from(decision.job_id.as_str());
                    let shown = self.jobs.log(job, self.viewer.clone()).await.is_ok();
                    self.known.insert(decision.job_id.clone(), shown);
                    shown
                }
            },
        }
    }
}

/// One reader of the journal, at its client's pace.
struct Reader {
    sight: Sight,
    out: mpsc::Sender<Result<WatchDecisionsResponse, Status>>,
}

/// The client has gone.
struct Gone;

impl Reader {
    async fn tell(&mut self, decision: &Decision) -> Result<(), Gone> {
        if !self.sight.shows(decision).await {
            return Ok(());
        }
        self.send(decision.clone()).await
    }

    async fn send(&self, decision: Decision) -> Result<(), Gone> {
        self.out.send(Ok(WatchDecisionsResponse { decision: Some(decision) })).await.map_err(|_| Gone)
    }

    /// What was missed is said in the place of what was missed.
    async fn say_missed(&self, missed: u64) -> Result<(), Gone> {
        let text = format!("{missed} decisions are missing here: this reader was too slow for them");
        self.send(Decision { time: Some(std::time::SystemTime::now().into()), text, ..Decision::default() }).await
    }

    /// Tells what is remembered, then what comes; of one job until it has ended.
    async fn read(
        mut self,
        past: Vec<Arc<Decision>>,
        news: Option<Receiver<Arc<Decision>>>,
        of_job: Option<Arc<EventLog>>,
    ) -> Result<(), Gone> {
        for decision in past {
            self.tell(&decision).await?;
        }
        let Some(mut news) = news else { return Ok(()) };
        let out = self.out.clone();
        let ended = async {
            match of_job {
                Some(log) => log.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(ended);
        loop {
            tokio::select! {
                biased;
                () = out.closed() => return Err(Gone),
                decision = news.recv() => match decision {
                    Ok(decision) => self.tell(&decision).await?,
                    Err(RecvError::Lagged(missed)) => self.say_missed(missed).await?,
                    Err(RecvError::Closed) => return Ok(()),
                },
                () = &mut ended => break,
            }
        }
        loop {
            match news.try_recv() {
                Ok(decision) => self.tell(&decision).await?,
                Err(TryRecvError::Lagged(missed)) => self.say_missed(missed).await?,
                Err(TryRecvError::Empty | TryRecvError::Closed) => return Ok(()),
            }
        }
    }
}

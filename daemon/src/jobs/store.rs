//! What is remembered of each job, living and ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sd_proto::v1::{self, ImageRequest, JobTimings, NumericPlan, StageTiming};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::durable::{DurableJob, Handover, Progress};
use super::log::{EventLog, Retention};
use super::request::Admitted;
use super::state::{Ending, State};
use super::viewer::Viewer;
use crate::ids::{JobId, Tenant};
use crate::stages::plan::StagePlan;

/// Decisions about one job that become its events: a log that is kept whole must not grow with a job's length.
pub const DECISIONS: usize = 256;

/// What only a living job has.
#[derive(Debug)]
pub struct Living {
    /// The request with its image files.
    pub request: Arc<Admitted>,
    /// Its stage runs.
    pub plan: Arc<StagePlan>,
    /// Tells its driver to stop.
    pub stop: CancellationToken,
    /// What is done of it, between two daemons.
    pub handover: Handover,
}

/// One job.
#[derive(Debug)]
pub struct Record {
    /// Its id.
    pub id: JobId,
    /// Whose.
    pub tenant: Tenant,
    /// Where it stands.
    pub state: State,
    /// Its events.
    pub log: Arc<EventLog>,
    /// Until it ends.
    pub living: Option<Living>,
    /// Its place in the order of recorded jobs; `None`: it is not recorded on disk.
    pub recorded: Option<u64>,
    /// The request as shown.
    shown: ImageRequest,
    numeric_plan: NumericPlan,
    submitted: (SystemTime, Instant),
    started: Option<Instant>,
    finished: Option<(SystemTime, Instant)>,
    stages: Vec<StageTiming>,
    /// Decisions among its events.
    decisions: usize,
}

impl Record {
    /// A job that was submitted now.
    pub fn new(id: JobId, tenant: Tenant, request: Admitted, plan: StagePlan) -> Self {
        Self {
            log: EventLog::new(id.as_str()),
            id,
            tenant,
            state: State::Queued,
            shown: request.to_proto(),
            numeric_plan: request.plan.clone(),
            living: Some(Living {
                request: Arc::new(request),
                plan: Arc::new(plan),
                stop: CancellationToken::new(),
                handover: Handover::default(),
            }),
            recorded: None,
            submitted: (SystemTime::now(), Instant::now()),
            started: None,
            finished: None,
            stages: Vec::new(),
            decisions: 0,
        }
    }

    /// A job that was recorded before the daemon's restart and cannot go on: it has nothing of a living one.
    pub fn lost(job: &DurableJob) -> Self {
        Self {
            log: EventLog::new(job.id.as_str()),
            id: job.id.clone(),
            tenant: job.tenant.clone(),
            state: State::Queued,
            shown: job.request.clone(),
            numeric_plan: job.plan.clone(),
            living: None,
            recorded: Some(job.order),
            submitted: (job.submitted, Instant::now()),
            started: None,
            finished: None,
            stages: Vec::new(),
            decisions: 0,
        }
    }

    /// The job that a record on disk has become, with the time at which it was first submitted.
    #[must_use]
    pub fn taken_up(mut self, job: &DurableJob) -> Self {
        self.recorded = Some(job.order);
        self.submitted.0 = job.submitted;
        if let Some(living) = &mut self.living {
            living.handover = Handover::new(job.progress.clone());
        }
        self
    }

    /// The job as it is recorded on disk, with what is done of it; `None` for one that is not recorded, or has ended.
    pub fn durable(&self) -> Option<DurableJob> {
        let (order, living) = (self.recorded?, self.living.as_ref()?);
        let job = DurableJob::of(self.id.clone(), self.tenant.clone(), order, self.submitted.0, &living.request);
        let progress = match living.handover.take() {
            Some(left) => Progress { pictures: self.log.pictures(), ..left },
            None => Progress::default(),
        };
        Some(DurableJob { progress, ..job })
    }

    /// The request as it is shown, without image files.
    pub fn shown(&self) -> &ImageRequest {
        &self.shown
    }

    /// The numeric plan.
    pub fn numeric_plan(&self) -> &NumericPlan {
        &self.numeric_plan
    }

    /// Notes when a driver was started.
    pub fn note_start(&mut self) {
        self.started.get_or_insert_with(Instant::now);
    }

    /// Whether a driver was started.
    pub fn has_run(&self) -> bool {
        self.started.is_some()
    }

    /// Notes a finished stage run.
    pub fn note_stage(&mut self, timing: StageTiming) {
        self.stages.push(timing);
    }

    /// Counts a decision about it; false where it has told so many that this one is left out of its events.
    pub fn takes_decision(&mut self) -> bool {
        self.decisions += 1;
        self.decisions <= DECISIONS
    }

    /// Stage runs finished.
    pub fn finished_runs(&self) -> usize {
        self.stages.len()
    }

    /// Notes the end, and lets go of what only a living job needs.
    pub fn note_end(&mut self) {
        self.finished = Some((SystemTime::now(), Instant::now()));
        self.living = None;
    }

    /// Durations so far.
    pub fn timings(&self) -> JobTimings {
        let end = self.finished.map_or_else(Instant::now, |(_, instant)| instant);
        let since = |instant: Instant| duration(instant - self.submitted.1);
        JobTimings {
            queued: Some(since(self.started.unwrap_or(end))),
            total: Some(since(end)),
            stages: self.stages.clone(),
        }
    }

    /// The job as clients see it.
    pub fn to_proto(&self, position: Option<u32>) -> v1::Job {
        let failure = match &self.state {
            State::Ended { ending: Ending::Failed(failure), .. } => Some(failure.clone()),
            State::Queued | State::Running { .. } | State::Stopping { .. } | State::Ended { .. } => None,
        };
        v1::Job {
            id: self.id.to_string(),
            tenant: self.tenant.to_string(),
            state: self.state.to_proto() as i32,
            request: Some(self.shown.clone()),
            submitted: Some(self.submitted.0.into()),
            finished: self.finished.map(|(time, _)| time.into()),
            position: position.unwrap_or(0),
            stage: self.state.stage() as i32,
            failure,
            images_done: self.state.images(),
            plan: Some(self.numeric_plan.clone()),
            timings: Some(self.timings()),
        }
    }
}

/// A duration on the wire.
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: duration.subsec_nanos().cast_signed(),
    }
}

/// All jobs that can be looked up.
#[derive(Debug, Default)]
pub struct Store {
    records: HashMap<JobId, Record>,
    /// In the order of submission.
    order: VecDeque<JobId>,
    ended: VecDeque<JobId>,
    retention: Retention,
}

impl Store {
    /// Takes a new job.
    pub fn insert(&mut self, record: Record) {
        self.order.push_back(record.id.clone());
        self.records.insert(record.id.clone(), record);
    }

    /// The job of an id.
    pub fn get(&self, id: &JobId) -> Option<&Record> {
        self.records.get(id)
    }

    /// The job of an id.
    pub fn get_mut(&mut self, id: &JobId) -> Option<&mut Record> {
        self.records.get_mut(id)
    }

    /// The job of an id, if it exists for this viewer.
    pub fn visible(&self, id: &JobId, viewer: &Viewer) -> Option<&Record> {
        self.get(id).filter(|record| viewer.sees(&record.tenant))
    }

    /// A viewer's jobs, newest first.
    pub fn newest<'a>(&'a self, viewer: &'a Viewer) -> impl Iterator<Item = &'a Record> {
        self.order.iter().rev().filter_map(|id| self.visible(id, viewer))
    }

    /// The living jobs.
    pub fn living(&self) -> impl Iterator<Item = &Record> {
        self.records.values().filter(|record| !record.state.is_ended())
    }

    /// Notes that a job has ended, and forgets the oldest ended ones above `jobs`, and pictures above `bytes`.
    pub fn ended(&mut self, id: &JobId, jobs: usize, bytes: usize) {
        let Some(record) = self.records.get(id) else { return };
        self.retention.ended(record.log.clone(), bytes);
        self.ended.push_back(id.clone());
        while self.ended.len() > jobs.max(1) {
            if let Some(oldest) = self.ended.pop_front() {
                self.retention.forget_oldest();
                self.records.remove(&oldest);
                self.order.retain(|id| *id != oldest);
            }
        }
    }
}

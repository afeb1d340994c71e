//! Offload modes as policies around stage runs: who leaves the device before a stage or after it, who is kept there, who comes
//! back after the job.
//!
//! The ledger takes from idle processes what somebody needs in any case. A mode moves stages before that is necessary, or
//! (mode none) keeps them from being moved at all. Nothing here can make a run fail: what does not move in time is taken by the
//! ledger.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sd_proto::v1::{Decision, DecisionKind, Stage};
use sd_proto::worker::v1::WorkerStage;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::dispatch::{Dispatcher, Key};
use super::memory::Leaves;
use super::operate::LoadOrder;
use super::runner::{StageNews, StageOrder};
use super::segments::Tensor;
use crate::config::placement::ByStage;
use crate::ids::{JobId, Tenant};
use crate::jobs::request::Admitted;
use crate::residency::Bytes;

/// What has to be free beside the next stage's need for another stage to stay.
const ROOM_TO_SPARE: u64 = 300_000_000;
/// How long a stage that moves out is waited for; past it the ledger sees to the room.
const MOVING: Duration = Duration::from_secs(2);

/// The stages that a model has, in the order in which they leave.
const KINDS: [WorkerStage; 3] = [WorkerStage::Text, WorkerStage::Vae, WorkerStage::Diffusion];

/// What the modes have done for the jobs that are under way.
#[derive(Debug)]
pub(super) struct Moves {
    jobs: Mutex<HashMap<JobId, JobMoves>>,
    /// Jobs that keep all their stages take turns: two of them that each had a part of the device would wait for ever.
    turn: Arc<Semaphore>,
    /// Told when such a job has ended.
    unpinned: Notify,
}

#[derive(Debug)]
struct JobMoves {
    request: Arc<Admitted>,
    tenant: Tenant,
    /// Held by a job in mode none.
    _turn: Option<OwnedSemaphorePermit>,
    /// Processes that stay because of it.
    pinned: BTreeSet<u64>,
    /// Stages that left because of its mode.
    moved: Vec<WorkerStage>,
}

impl Default for Moves {
    fn default() -> Self {
        Self { jobs: Mutex::default(), turn: Arc::new(Semaphore::new(1)), unpinned: Notify::new() }
    }
}

impl Moves {
    fn jobs(&self) -> MutexGuard<'_, HashMap<JobId, JobMoves>> {
        // Plain data that every statement leaves whole.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another job than this keeps stages where they are.
    fn others_stay(&self, job: &JobId) -> bool {
        self.jobs().iter().any(|(other, moves)| other != job && !moves.pinned.is_empty())
    }
}

/// A stage that could move, and the process that runs it.
struct Candidate {
    kind: WorkerStage,
    incarnation: u64,
}

impl Dispatcher {
    /// Notes that a job is under way. A job in mode none waits here for its turn. `false` where it was stopped meanwhile.
    async fn enter(&self, order: &StageOrder<Tensor>) -> bool {
        if self.moves.jobs().contains_key(&order.job) {
            return true;
        }
        let turn = if order.request.memory.stays() {
            let turn = tokio::select! {
                biased;
                () = order.stop.cancelled() => return false,
                turn = self.moves.turn.clone().acquire_owned() => turn,
            };
            turn.ok()
        } else {
            None
        };
        let (request, tenant) = (order.request.clone(), order.tenant.clone());
        let moves = JobMoves { request, tenant, _turn: turn, pinned: BTreeSet::new(), moved: Vec::new() };
        self.moves.jobs().insert(order.job.clone(), moves);
        for notice in &order.request.memory.notices {
            let _ = order.news.send(StageNews::Note(notice.clone())).await;
        }
        true
    }

    /// Before a stage's request for memory: moves out what its mode says, where the smart check finds no room beside it.
    pub(super) async fn make_way(&self, order: &StageOrder<Tensor>, key: &Key) {
        if !self.enter(order).await {
            return;
        }
        let memory = &order.request.memory;
        for kind in KINDS.into_iter().filter(|kind| *kind != key.stage && *memory.leaves.of(*kind) == Leaves::WhenShort)
        {
            let Some(candidate) = self.candidate(&order.request, kind) else { continue };
            let (need, free) = self.room_for(order, key).await;
            if need.saturating_add(ROOM_TO_SPARE) <= free {
                self.record_kept(order, key, &candidate, need, free);
                continue;
            }
            self.move_out(order, key, candidate).await;
            let (need, free) = self.room_for(order, key).await;
            if need > free
                && let Some(still_there) = self.candidate(&order.request, kind)
            {
                // Its context is in the way as well.
                let gone = self.residency.retire(still_there.incarnation);
                self.forget(&Key::of(&order.request, kind), still_there.incarnation);
                tokio::select! {
                    () = order.stop.cancelled() => {}
                    _ = timeout(MOVING, gone.proven()) => {}
                }
            }
        }
    }

    /// The process of a stage of the request's model, where it runs and holds weights.
    fn candidate(&self, request: &Admitted, kind: WorkerStage) -> Option<Candidate> {
        let wanted = Key::of(request, kind);
        let incarnation = self.chosen_of(|key| *key == wanted).into_iter().next()?;
        self.workers.get(incarnation)?;
        Some(Candidate { kind, incarnation })
    }

    /// Bytes that a stage needs beyond what its process holds, and those that are free.
    pub(super) async fn room_for(&self, order: &StageOrder<Tensor>, key: &Key) -> (u64, u64) {
        let parts = self.parts_of(order);
        let want = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.want));
        let held = self.held_by(key).await;
        let free = self.residency.available(self.device_of()).await.unwrap_or(0);
        (want.saturating_sub(held), free)
    }

    async fn move_out(&self, order: &StageOrder<Tensor>, key: &Key, candidate: Candidate) {
        let Candidate { kind, incarnation } = candidate;
        if order.request.memory.log {
            let (stage, before) = (crate::workers::stage_name(kind), crate::workers::stage_name(key.stage));
            tracing::info!(job = %order.job, stage, incarnation, before, "moved out of its device");
        }
        let released = self.residency.park(incarnation);
        if let Some(moves) = self.moves.jobs().get_mut(&order.job)
            && !moves.moved.contains(&kind)
        {
            moves.moved.push(kind);
        }
        tokio::select! {
            () = order.stop.cancelled() => {}
            _ = timeout(MOVING, released.proven()) => {}
        }
    }

    fn record_kept(&self, order: &StageOrder<Tensor>, key: &Key, candidate: &Candidate, need: u64, free: u64) {
        let model = &order.request.model.name;
        let holder = format!("{} of {model}", crate::workers::stage_name(candidate.kind));
        let wanted_by = format!("{} of {model}", crate::workers::stage_name(key.stage));
        let text = format!(
            "{holder} stays: {wanted_by} needs {}, {} are free, which leaves {} to spare",
            Bytes(need),
            Bytes(free),
            Bytes(ROOM_TO_SPARE)
        );
        if order.request.memory.log {
            tracing::info!(job = %order.job, "{text}");
        }
        self.journal.record(Decision {
            kind: DecisionKind::Keeps as i32,
            device: self.device_of().to_string(),
            job_id: order.job.to_string(),
            incarnation: candidate.incarnation,
            holder,
            bytes: free,
            wanted_by,
            text,
            ..Decision::default()
        });
    }

    /// A stage of a job in mode none was granted its memory: its process stays while the job lives.
    pub(super) fn keep_while_it_runs(&self, order: &StageOrder<Tensor>, incarnation: u64) {
        if !order.request.memory.stays() {
            return;
        }
        if let Some(moves) = self.moves.jobs().get_mut(&order.job)
            && moves.pinned.insert(incarnation)
        {
            self.residency.pin(incarnation, true);
        }
    }

    /// What is pinned beside a request may be so for a job's sake alone: then its end is waited for. `false` where nothing is to
    /// be waited for.
    pub(super) async fn wait_for_unpinning(&self, order: &StageOrder<Tensor>) -> bool {
        let unpinned = self.moves.unpinned.notified();
        tokio::pin!(unpinned);
        unpinned.as_mut().enable();
        if !self.moves.others_stay(&order.job) {
            return false;
        }
        tokio::select! {
            () = order.stop.cancelled() => {}
            () = unpinned => {}
        }
        true
    }

    /// After a run that ended well: moves its stage out where the mode says so and no later run of the job comes right after it.
    pub(super) async fn after_run(&self, order: &StageOrder<Tensor>, key: &Key) {
        let memory = &order.request.memory;
        let last = order.run.stage == Stage::Encode || order.run.image + 1 == order.request.count;
        if last
            && *memory.leaves.of(key.stage) == Leaves::AfterUse
            && let Some(candidate) = self.candidate(&order.request, key.stage)
        {
            self.move_out(order, key, candidate).await;
        }
    }

    /// A job has ended, however: what stayed for it may go, and what left for it comes back where there is room.
    pub(super) fn leave(dispatcher: &Arc<Self>, job: &JobId) {
        let Some(moves) = dispatcher.moves.jobs().remove(job) else { return };
        for incarnation in &moves.pinned {
            if !dispatcher.is_pinned(&moves.request) {
                dispatcher.residency.pin(*incarnation, false);
            }
        }
        if !moves.pinned.is_empty() {
            dispatcher.moves.unpinned.notify_waiters();
        }
        let reload: &ByStage<bool> = &moves.request.memory.reload;
        let back: Vec<WorkerStage> = moves.moved.iter().copied().filter(|kind| *reload.of(*kind)).collect();
        if !back.is_empty() {
            let dispatcher = dispatcher.clone();
            let job = job.clone();
            tokio::spawn(async move {
                for kind in back {
                    dispatcher.bring_back(&job, &moves, kind).await;
                }
            });
        }
    }

    /// Loads a stage again that left for a job, if there is room for all of it and nobody has to give way.
    async fn bring_back(&self, job: &JobId, moves: &JobMoves, kind: WorkerStage) {
        let stage = match kind {
            WorkerStage::Text => Stage::Encode,
            WorkerStage::Diffusion => Stage::Denoise,
            WorkerStage::Vae => Stage::Decode,
            WorkerStage::Unspecified => return,
        };
        let request = moves.request.clone();
        let whole = self.whole_of(&request, stage);
        let free = self.residency.available(self.device_of()).await.unwrap_or(0);
        let held = self.held_by(&Key::of(&request, kind)).await;
        if whole.saturating_sub(held).saturating_add(ROOM_TO_SPARE.min(free / 8)) > free {
            return;
        }
        // Not the job itself, which has ended: what is decided for the load is no event of it.
        let stands_for = JobId::from(format!("reload-{job}"));
        let order = LoadOrder { job: stands_for, tenant: moves.tenant.clone(), request, stage };
        match self.load(order, CancellationToken::new()).await {
            Ok(loaded) => {
                tracing::debug!(%job, stage = crate::workers::stage_name(kind), loaded.incarnation, "brought back after the job");
            }
            Err(failure) => tracing::debug!(%job, problem = failure.message, "not brought back after the job"),
        }
    }

    async fn held_by(&self, key: &Key) -> u64 {
        let own = self.chosen_of(|other| other == key);
        let devices = self.residency.snapshot().await;
        let holders = devices.iter().flat_map(|device| &device.holders);
        holders.filter(|holder| own.contains(&holder.incarnation)).map(|holder| holder.leased).sum()
    }
}

//! Keeps the models of this process within the weights lease, also in the middle of a run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sd_engine::ops::Chunks;
use sd_engine::residency::{self, Policy, Residency, RunStats, Storage};
use sd_proto::worker::v1::{Task, TaskMemory, WeightStorage};
use tokio::sync::mpsc;

use crate::leases::{Allowance, Revision};
use crate::memory;

/// Belongs to the model thread: what it holds of weights follows what the link was granted.
pub(crate) struct Governor {
    allowance: Arc<Allowance>,
    /// The memory of each model of this process, the one that runs first.
    models: Mutex<Vec<Arc<Residency>>>,
    given_back: mpsc::UnboundedSender<Revision>,
}

impl Governor {
    /// Of models that are to be said by [`Self::govern`]. What was given back is told to `given_back`.
    pub(crate) fn new(allowance: Arc<Allowance>, given_back: mpsc::UnboundedSender<Revision>) -> Self {
        Self { allowance, models: Mutex::default(), given_back }
    }

    fn models(&self) -> MutexGuard<'_, Vec<Arc<Residency>>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on these models share the lease, the first of them is about to run a task that uses memory so. `Err` is the
    /// lease and the least that would do.
    pub(crate) fn govern(&self, models: &[&Arc<Residency>], policy: Policy) -> Result<(), (u64, u64)> {
        let models: Vec<Arc<Residency>> = models.iter().map(|model| (*model).clone()).collect();
        models.iter().for_each(|model| model.set_policy(policy));
        *self.models() = models;
        self.obey();
        let (weights, models) = (self.allowance.weights(), self.models());
        match models.first().map_or(0, |model| model.floor_bytes()) {
            floor if floor > weights => Err((weights, floor)),
            _ => Ok(()),
        }
    }

    /// Obeys the lease if it has changed, at the boundary of two segments; between two parts of one nothing is asked.
    pub(crate) fn follow(&self) {
        let running = self.models().first().is_some_and(|model| model.is_running());
        if !running && self.allowance.has_changed() {
            self.obey();
        }
    }

    /// Obeys the lease now, and says what was given back once it is.
    fn obey(&self) {
        let revisions = self.allowance.revisions();
        {
            let models = self.models();
            residency::share(self.allowance.weights(), &models);
            models.iter().for_each(|model| model.settle());
        }
        if !revisions.is_empty() {
            memory::trim();
        }
        for revision in revisions {
            // Nobody listens only when the link has ended, and with it this process.
            let _ = self.given_back.send(revision);
        }
    }

    /// After a task: nothing passes through any more.
    pub(crate) fn rest(&self) {
        self.models().iter().for_each(|model| model.rest());
    }

    /// What the models moved since this was asked last, and how many segments the one that ran has.
    pub(crate) fn take_totals(&self) -> (RunStats, usize) {
        let models = self.models();
        let mut totals = models.iter().map(|model| model.take_totals());
        let mut sum = totals.next().unwrap_or_default();
        for other in totals {
            sum.streamed += other.streamed;
            sum.streamed_bytes += other.streamed_bytes;
        }
        (sum, models.first().map_or(0, |model| model.segments().len()))
    }

    /// Scratch memory was given back.
    pub(crate) fn trimmed(&self, revision: Revision) {
        memory::trim();
        let _ = self.given_back.send(revision);
    }

    /// The models are gone.
    pub(crate) fn forget(&self) {
        self.models().clear();
        memory::trim();
    }
}

/// How a task wants the weights' memory used.
pub(crate) fn policy(task: &Task) -> Policy {
    let Some(memory) = &task.memory else { return Policy::default() };
    Policy { prefetch: memory.prefetch, storage: storage(memory), blocks: memory.resident_blocks.map(|n| n as usize) }
}

/// How many rows a task wants to go through at once.
pub(crate) fn chunks(task: &Task) -> Chunks {
    let rows = |of: fn(&TaskMemory) -> u32| task.memory.as_ref().map_or(0, of) as usize;
    Chunks { tokens: rows(|memory| memory.token_chunk), mlp: rows(|memory| memory.mlp_chunk) }
}

fn storage(memory: &TaskMemory) -> Storage {
    match memory.storage() {
        WeightStorage::Disk => Storage::Disk,
        WeightStorage::Ram | WeightStorage::Unspecified => Storage::Ram,
    }
}

//! What the daemon shows of its processes and its memory.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;

use sd_proto::v1;

use crate::arena::{Arena, ArenaUsage};
use crate::jobs::store::duration;
use crate::residency::{DeviceSnapshot, ForeignProcess, Purpose, Residency};
use crate::workers::{WorkerPhase, WorkerView, Workers, stage_name};

/// The daemon's view of its devices, workers and shared memory.
pub trait Overview: Send + Sync + 'static {
    /// Every device with its leases.
    fn devices(&self) -> Pin<Box<dyn Future<Output = Vec<DeviceSnapshot>> + Send + '_>>;
    /// Every worker that is not reaped.
    fn workers(&self) -> Vec<WorkerView>;
    /// Segments of shared memory.
    fn shared_memory(&self) -> ArenaUsage;
}

/// The view of a running daemon.
#[derive(Debug, Clone)]
pub struct Live {
    /// Leases.
    pub residency: Residency,
    /// Processes.
    pub workers: Workers,
    /// Segments.
    pub arena: Arena,
}

impl Overview for Live {
    fn devices(&self) -> Pin<Box<dyn Future<Output = Vec<DeviceSnapshot>> + Send + '_>> {
        Box::pin(self.residency.snapshot())
    }

    fn workers(&self) -> Vec<WorkerView> {
        self.workers.list()
    }

    fn shared_memory(&self) -> ArenaUsage {
        self.arena.usage()
    }
}

/// A device on the wire.
pub fn device(snapshot: &DeviceSnapshot) -> v1::Device {
    v1::Device {
        id: snapshot.device.to_string(),
        name: snapshot.name.clone(),
        total_bytes: snapshot.total,
        budget_bytes: snapshot.budget,
        leased_bytes: snapshot.leased,
        unproven_bytes: snapshot.unproven,
        degraded: snapshot.degraded.is_some(),
        capacity_bytes: snapshot.capacity,
        foreign: snapshot.foreign.iter().map(foreign).collect(),
        held_until: snapshot.held_until.map(Into::into),
    }
}

fn foreign(process: &ForeignProcess) -> v1::ForeignProcess {
    v1::ForeignProcess { pid: process.pid, name: process.name.clone(), bytes: process.bytes }
}

/// A device's leases on the wire.
pub fn leases(snapshot: &DeviceSnapshot) -> impl Iterator<Item = v1::Lease> + '_ {
    snapshot.leases.iter().map(|lease| v1::Lease {
        id: lease.id.0,
        device: snapshot.device.to_string(),
        incarnation: lease.incarnation,
        purpose: lease.purpose.to_public() as i32,
        bytes: lease.bytes,
        state: lease.state as i32,
        age: Some(duration(lease.age)),
        job_id: lease.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        holder: lease.holder.clone(),
    })
}

/// Workers on the wire, with what each has leased.
pub fn workers(views: Vec<WorkerView>, devices: &[DeviceSnapshot]) -> Vec<v1::Worker> {
    let (mut leased, mut weights): (HashMap<u64, u64>, HashMap<u64, u64>) = Default::default();
    for lease in devices.iter().flat_map(|device| &device.leases) {
        *leased.entry(lease.incarnation).or_default() += lease.bytes;
        if lease.purpose == Purpose::Weights {
            *weights.entry(lease.incarnation).or_default() += lease.bytes;
        }
    }
    let holders = devices.iter().flat_map(|device| &device.holders);
    let pinned: HashSet<u64> = holders.filter(|holder| holder.pinned).map(|holder| holder.incarnation).collect();
    let worker = |view: WorkerView| {
        let (state, job) = match &view.phase {
            WorkerPhase::Starting => (v1::WorkerState::Starting, None),
            WorkerPhase::Idle => (v1::WorkerState::Idle, None),
            WorkerPhase::Busy { job, .. } => (v1::WorkerState::Busy, Some(job.to_string())),
            WorkerPhase::Stopping => (v1::WorkerState::Stopping, None),
        };
        v1::Worker {
            incarnation: view.spec.incarnation,
            pid: view.pid,
            stage: stage_name(view.spec.stage).into(),
            model: view.spec.model,
            device: view.spec.device.to_string(),
            state: state as i32,
            leased_bytes: leased.get(&view.spec.incarnation).copied().unwrap_or(0),
            resident_bytes: view.device_bytes,
            age: Some(duration(view.started.elapsed())),
            job_id: job.unwrap_or_default(),
            // What it has given back since its last task is no longer part of its lease.
            weights_bytes: view.weights_bytes.min(weights.get(&view.spec.incarnation).copied().unwrap_or(0)),
            weights_total_bytes: view.spec.weights_total,
            pinned: pinned.contains(&view.spec.incarnation),
        }
    };
    views.into_iter().map(worker).collect()
}

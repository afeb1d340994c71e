//! Processes and a device that are played, and a residency over them.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sdd::arena::{Arena, ArenaLimits};
use sdd::clock::RuntimeClock;
use sdd::ids::{DeviceId, JobId, Tenant};
use sdd::journal::Journal;
use sdd::residency::{
    DeviceConfig, DeviceProbe, GrantedLease, Holders, Incarnation, LeaseId, LeaseKill, LeasePart, LeaseVector, Proof,
    Purpose, Residency, Rules,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Grant(Incarnation, Purpose, u64),
    Revise(Incarnation, LeaseId, u64),
    Proof(Incarnation, u64, Proof),
    Retire(Incarnation),
    Kill(Incarnation, LeaseKill),
}

/// Records what the residency wants of processes, and plays the device: pid = incarnation.
#[derive(Default)]
pub(crate) struct Stage {
    calls: Mutex<Vec<Call>>,
    pub(crate) bytes: Mutex<BTreeMap<u32, u64>>,
    pub(crate) blind: Mutex<bool>,
}

impl Stage {
    pub(crate) fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn record(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    pub(crate) fn holds(&self, pid: u32, bytes: u64) {
        self.bytes.lock().unwrap().insert(pid, bytes);
    }
}

impl Holders for Stage {
    fn grant(&self, incarnation: Incarnation, lease: GrantedLease, _: u64, _: Duration) {
        self.record(Call::Grant(incarnation, lease.purpose, lease.bytes));
    }
    fn revise(&self, incarnation: Incarnation, lease: LeaseId, to: u64, _: Duration) {
        self.record(Call::Revise(incarnation, lease, to));
    }
    fn proof(&self, incarnation: Incarnation, _: LeaseId, bytes: u64, proof: Proof) {
        self.record(Call::Proof(incarnation, bytes, proof));
    }
    fn retire(&self, incarnation: Incarnation) {
        self.record(Call::Retire(incarnation));
    }
    fn kill(&self, incarnation: Incarnation, cause: LeaseKill) {
        self.record(Call::Kill(incarnation, cause));
    }
}

pub(crate) struct Device(pub(crate) Arc<Stage>);

impl DeviceProbe for Device {
    fn process_bytes(&self, pid: u32) -> io::Result<Option<u64>> {
        if *self.0.blind.lock().unwrap() {
            return Err(io::Error::other("the driver does not answer"));
        }
        Ok(self.0.bytes.lock().unwrap().get(&pid).copied())
    }
}

pub(crate) fn vector(incarnation: Incarnation, weights: u64, working_set: u64) -> LeaseVector {
    LeaseVector {
        device: DeviceId::cpu(),
        incarnation,
        tenant: Tenant::from("uid:1"),
        job: JobId::from(format!("job{incarnation}")),
        holder: format!("stage {incarnation}"),
        parts: vec![
            LeasePart::exactly(Purpose::Context, 10),
            LeasePart::exactly(Purpose::Weights, weights),
            LeasePart::exactly(Purpose::WorkingSet, working_set),
        ],
        shared_memory: 0,
    }
}

pub(crate) fn residency(budget: u64) -> (Residency, Arc<Stage>, Arena) {
    let stage = Arc::new(Stage::default());
    let arena = Arena::new(&format!("svc{:08x}{:p}", std::process::id(), &*stage), ArenaLimits { bytes: 1 << 20 });
    let device = DeviceConfig {
        id: DeviceId::cpu(),
        name: "a device".into(),
        total: 2 * budget,
        budget,
        rules: Rules { tolerance: 0, ..Rules::default() },
        probe: Arc::new(Device(stage.clone())),
    };
    let residency = Residency::start(vec![device], arena.clone(), Arc::new(RuntimeClock::new()), Journal::default());
    residency.set_holders(stage.clone());
    (residency, stage, arena)
}

pub(crate) async fn start(residency: &Residency, stage: &Stage, incarnation: Incarnation, bytes: u64) {
    let pid = u32::try_from(incarnation).unwrap();
    stage.holds(pid, bytes);
    residency.holder_spawned(incarnation, pid);
    residency.holder_attached(incarnation).await;
}

//! Processes and a device that are played, and a residency over them.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use sdd::arena::{Arena, ArenaLimits};
use sdd::clock::RuntimeClock;
use sdd::ids::DeviceId;
use sdd::journal::Journal;
use sdd::residency::{DeviceConfig, DeviceProbe, Incarnation, LeaseVector, Residency, Rules};

use super::ledger_support;
pub(crate) use super::ledger_support::calls::Call;
use super::ledger_support::calls::Calls;

/// Records what the residency wants of processes, and plays the device: pid = incarnation.
#[derive(Default)]
pub(crate) struct Stage {
    pub(crate) calls: Arc<Calls>,
    pub(crate) bytes: Mutex<BTreeMap<u32, u64>>,
    pub(crate) blind: Mutex<bool>,
}

impl Stage {
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.take()
    }

    pub(crate) fn holds(&self, pid: u32, bytes: u64) {
        self.bytes.lock().unwrap().insert(pid, bytes);
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

/// A vector with a context of 10 bytes.
pub(crate) fn vector(incarnation: Incarnation, weights: u64, working_set: u64) -> LeaseVector {
    ledger_support::vector(incarnation, 10, weights, working_set)
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
    residency.set_holders(stage.calls.clone());
    (residency, stage, arena)
}

pub(crate) async fn start(residency: &Residency, stage: &Stage, incarnation: Incarnation, bytes: u64) {
    let pid = u32::try_from(incarnation).unwrap();
    stage.holds(pid, bytes);
    residency.holder_spawned(incarnation, pid);
    residency.holder_attached(incarnation).await;
}

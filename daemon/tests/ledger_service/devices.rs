//! What the device shows: what others use of it, what it does not tell, and what it tells of a process that lies.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sdd::arena::{Arena, ArenaLimits};
use sdd::clock::RuntimeClock;
use sdd::ids::DeviceId;
use sdd::journal::Journal;
use sdd::residency::{
    Afterwards, DeviceConfig, DeviceProbe, DeviceReading, LeaseKill, ProbeError, Processes, Refusal, Residency, Rules,
};
use tokio::time::timeout;

use super::SECOND;
use super::played::*;

/// A device that others use as well.
struct Shared {
    stage: Arc<Stage>,
    free: Mutex<Result<u64, ProbeError>>,
    readings: Mutex<u32>,
}

impl DeviceProbe for Shared {
    fn process_bytes(&self, pid: u32) -> io::Result<Option<u64>> {
        Ok(self.stage.bytes.lock().unwrap().get(&pid).copied())
    }

    fn reading(&self, own: &[u32]) -> Result<Option<DeviceReading>, ProbeError> {
        *self.readings.lock().unwrap() += 1;
        let free = self.free.lock().unwrap().clone()?;
        let bytes = self.stage.bytes.lock().unwrap();
        let own = own.iter().filter_map(|pid| bytes.get(pid)).sum();
        Ok(Some(DeviceReading { total: 100, free, own: Some(own), margin: 0, processes: Processes::NotListed }))
    }
}

#[tokio::test(start_paused = true)]
async fn capacity_follows_what_others_use() {
    let stage = Arc::new(Stage::default());
    let probe = Arc::new(Shared { stage: stage.clone(), free: Mutex::new(Ok(100)), readings: Mutex::new(0) });
    let device = DeviceConfig {
        id: DeviceId::cpu(),
        name: "a device".into(),
        total: 100,
        budget: 100,
        rules: Rules { tolerance: 0, ..Rules::default() },
        probe: probe.clone(),
    };
    let arena = Arena::new(&format!("cap{:08x}", std::process::id()), ArenaLimits { bytes: 1 << 20 });
    let residency = Residency::start(vec![device], arena, Arc::new(RuntimeClock::new()), Journal::default());
    residency.set_holders(stage.calls.clone());
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(*probe.readings.lock().unwrap(), 0, "nobody holds anything and nobody waits");
    // Sixty are a stranger's when the request comes: it waits, and is granted when they have been free for a while.
    *probe.free.lock().unwrap() = Ok(40);
    let mut request = Box::pin(residency.request(vector(1, 30, 40)));
    assert!(timeout(SECOND, &mut request).await.is_err());
    assert_eq!(residency.snapshot().await[0].capacity, 40);
    let while_waiting = *probe.readings.lock().unwrap();
    assert!((3..=6).contains(&while_waiting), "{while_waiting} readings in a second of waiting");
    *probe.free.lock().unwrap() = Ok(100);
    let granted = timeout(4 * SECOND, request).await.expect("grown").unwrap();
    start(&residency, &stage, 1, 80).await;
    *probe.free.lock().unwrap() = Ok(20);
    drop(granted);
    // The stranger comes back: the idle process leaves room at once, by the next reading.
    stage.calls();
    *probe.free.lock().unwrap() = Ok(0);
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(residency.snapshot().await[0].capacity, 80, "what is our own counts as ours");
    assert_eq!(stage.calls(), []);
    stage.holds(1, 50);
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(residency.snapshot().await[0].capacity, 50);
    assert!(stage.calls().iter().any(|call| matches!(call, Call::Revise(1, ..))));
    // A device that cannot be asked changes nothing.
    *probe.free.lock().unwrap() = Err(ProbeError::Failed("no answer".into()));
    residency.pulse(1, 50, 50);
    tokio::time::sleep(SECOND).await;
    assert_eq!(residency.snapshot().await[0].capacity, 50);
    // One that is gone leaves nobody waiting.
    let waiting = residency.request(vector(3, 30, 40));
    let losing = async {
        tokio::time::sleep(SECOND).await;
        *probe.free.lock().unwrap() = Err(ProbeError::Lost("it fell off the bus".into()));
    };
    let (refused, ()) = tokio::join!(timeout(4 * SECOND, waiting), losing);
    let refusal = refused.expect("answered").unwrap_err();
    assert!(matches!(refusal, Refusal::Unusable { .. }) && refusal.to_string().contains("off the bus"), "{refusal}");
}

#[tokio::test(start_paused = true)]
async fn a_device_that_does_not_answer_proves_nothing() {
    let (residency, stage, _) = residency(100);
    let granted = residency.request(vector(1, 30, 40)).await.unwrap();
    start(&residency, &stage, 1, 80).await;
    granted.finish(Afterwards::ReturnWorkingSet);
    residency.snapshot().await;
    let lease = stage.calls().iter().find_map(|call| match call {
        Call::Revise(1, lease, 0) => Some(*lease),
        _ => None,
    });
    *stage.blind.lock().unwrap() = true;
    stage.holds(1, 40);
    residency.returned(1, lease.unwrap(), 0);
    for _ in 0..12 {
        tokio::time::sleep(SECOND).await;
        residency.pulse(1, 40, 80);
    }
    let view = residency.snapshot().await.remove(0);
    assert_eq!((view.leased, view.degraded.as_deref()), (80, Some("the release of 40 B by stage 1 is not proven")));
    *stage.blind.lock().unwrap() = false;
    tokio::time::sleep(SECOND).await;
    let view = residency.snapshot().await.remove(0);
    assert_eq!((view.leased, view.degraded), (40, None));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_lies_about_its_bytes_is_found_out_by_the_device() {
    let (residency, stage, _) = residency(100);
    let granted = residency.request(vector(1, 30, 40)).await.unwrap();
    start(&residency, &stage, 1, 95).await;
    for _ in 0..6 {
        residency.pulse(1, 80, 80);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let kill = Call::Kill(1, LeaseKill::OverLease { measured: 95, leased: 80 });
    assert!(stage.calls().contains(&kill), "it says 80, the device 95");
    drop(granted);
}

//! The owner task: what callers see, with time that stands still and processes that are played.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sd_proto::v1;
use sd_proto::worker::v1::ElementType;
use sdd::arena::{Arena, ArenaLimits};
use sdd::clock::RuntimeClock;
use sdd::ids::{DeviceId, JobId, Tenant};
use sdd::journal::Journal;
use sdd::residency::{
    Afterwards, DecisionKind, DeviceConfig, DeviceProbe, DeviceReading, GrantedLease, Holders, Incarnation, LeaseId,
    LeaseKill, LeasePart, LeaseVector, LifeView, ProbeError, Processes, Proof, Purpose, Refusal, Residency, Rules,
    invariants,
};
use tokio::time::{Instant, timeout};

const SECOND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Grant(Incarnation, Purpose, u64),
    Revise(Incarnation, LeaseId, u64),
    Proof(Incarnation, u64, Proof),
    Retire(Incarnation),
    Kill(Incarnation, LeaseKill),
}

/// Records what the residency wants of processes, and plays the device: pid = incarnation.
#[derive(Default)]
struct Stage {
    calls: Mutex<Vec<Call>>,
    bytes: Mutex<BTreeMap<u32, u64>>,
    blind: Mutex<bool>,
}

impl Stage {
    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn record(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn holds(&self, pid: u32, bytes: u64) {
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

struct Device(Arc<Stage>);

impl DeviceProbe for Device {
    fn process_bytes(&self, pid: u32) -> io::Result<Option<u64>> {
        if *self.0.blind.lock().unwrap() {
            return Err(io::Error::other("the driver does not answer"));
        }
        Ok(self.0.bytes.lock().unwrap().get(&pid).copied())
    }
}

fn vector(incarnation: Incarnation, weights: u64, working_set: u64) -> LeaseVector {
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

fn residency(budget: u64) -> (Residency, Arc<Stage>, Arena) {
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

async fn start(residency: &Residency, stage: &Stage, incarnation: Incarnation, bytes: u64) {
    let pid = u32::try_from(incarnation).unwrap();
    stage.holds(pid, bytes);
    residency.holder_spawned(incarnation, pid);
    residency.holder_attached(incarnation).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_is_granted_in_the_turn_of_the_proof() {
    let (residency, stage, _) = residency(100);
    let first = residency.request(vector(1, 30, 40)).await.unwrap();
    assert_eq!((first.bytes(Purpose::Weights), first.bytes(Purpose::WorkingSet)), (30, 40));
    start(&residency, &stage, 1, 80).await;
    let told = stage.calls();
    assert_eq!(
        told,
        [
            Call::Grant(1, Purpose::Context, 10),
            Call::Grant(1, Purpose::Weights, 30),
            Call::Grant(1, Purpose::WorkingSet, 40)
        ]
    );
    drop(first);

    let waiting = tokio::spawn({
        let residency = residency.clone();
        async move { residency.request(vector(2, 20, 30)).await }
    });
    // The request's command is queued when its task has been polled once, and the snapshot's behind it.
    tokio::task::yield_now().await;
    let view = residency.snapshot().await.remove(0);
    assert_eq!((view.waiters[0].need, view.leased, view.budget, view.total), (60, 80, 100, 200));
    let [Call::Revise(1, lease, 0)] = stage.calls()[..] else { panic!("the idle process shrinks") };

    residency.returned(1, lease, 0);
    // It only says so: the device shows 80, and is asked again.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiting.is_finished());
    assert_eq!(residency.snapshot().await[0].unproven, 40);
    stage.holds(1, 40);
    let before = Instant::now();
    let granted = waiting.await.unwrap().unwrap();
    assert!(before.elapsed() <= Duration::from_millis(400), "measured again within {:?}", before.elapsed());
    assert_eq!(granted.incarnation, 2);
    assert_eq!(stage.calls(), [Call::Proof(1, 40, Proof::Measured)]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_request_is_withdrawn_and_a_dropped_grant_released() {
    let (residency, stage, _) = residency(100);
    let first = residency.request(vector(1, 40, 40)).await.unwrap();
    {
        let second = residency.request(vector(2, 40, 40));
        assert!(timeout(SECOND, second).await.is_err(), "it waits");
    }
    assert!(residency.snapshot().await[0].waiters.is_empty());
    drop(first);
    assert_eq!(residency.snapshot().await[0].leased, 0, "no process was ever started");
    // Granted and dropped in the same moment, before the caller has looked.
    let mut future = Box::pin(residency.request(vector(3, 40, 40)));
    assert!(futures_poll_once(&mut future).await.is_none());
    tokio::task::yield_now().await;
    drop(future);
    assert_eq!(residency.snapshot().await[0].leased, 0);
    assert!(stage.calls().iter().all(|call| matches!(call, Call::Proof(..))));
}

async fn futures_poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    std::future::poll_fn(|context| {
        let polled = std::pin::Pin::new(&mut *future).poll(context);
        std::task::Poll::Ready(match polled {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        })
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_is_refused_at_once() {
    let (residency, _, _) = residency(100);
    let refusal = residency.request(vector(1, 60, 60)).await.unwrap_err();
    assert!(matches!(refusal, Refusal::DoesNotFit { need: 130, limit: 100, .. }), "{refusal}");
    let nowhere = LeaseVector { device: "GPU-1".into(), ..vector(1, 1, 1) };
    let refusal = residency.request(nowhere).await.unwrap_err();
    assert_eq!(refusal.to_string(), "there is no device GPU-1: known are cpu");
    assert!(residency.compute(&"GPU-1".into(), &"j".into()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_process_that_falls_silent_is_killed_and_charged_until_reaped() {
    let (residency, stage, _) = residency(100);
    let granted = residency.request(vector(1, 30, 40)).await.unwrap();
    start(&residency, &stage, 1, 80).await;
    for _ in 0..10 {
        tokio::time::sleep(SECOND).await;
        residency.pulse(1, 80, 80);
    }
    stage.calls();
    tokio::time::sleep(Rules::default().term + SECOND).await;
    assert_eq!(stage.calls(), [Call::Kill(1, LeaseKill::TermExpired(Rules::default().term))]);
    let view = residency.snapshot().await.remove(0);
    assert_eq!((view.leased, view.unproven, view.holders[0].life), (80, 80, LifeView::Dying));
    residency.holder_reaped(1);
    assert_eq!(residency.snapshot().await[0].leased, 0);
    drop(granted);
    assert_eq!(residency.snapshot().await[0].leased, 0);
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_start_is_killed_when_it_shows_up() {
    let (residency, stage, _) = residency(100);
    drop(residency.request(vector(1, 30, 40)).await.unwrap());
    residency.snapshot().await;
    stage.calls();
    residency.holder_spawned(1, 1);
    residency.snapshot().await;
    assert_eq!(stage.calls(), [Call::Kill(1, LeaseKill::NoLease)]);
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
async fn one_computes_at_a_time() {
    let (residency, _, _) = residency(100);
    let (device, job) = (DeviceId::cpu(), JobId::from("a"));
    let first = residency.compute(&device, &job).await.unwrap();
    assert!(timeout(SECOND, residency.compute(&device, &"b".into())).await.is_err());
    assert_eq!(residency.snapshot().await[0].computing, Some(job));
    drop(first);
    let third = timeout(SECOND, residency.compute(&device, &"c".into())).await.unwrap().unwrap();
    assert_eq!(residency.snapshot().await[0].computing, Some("c".into()), "who gave up is skipped");
    drop(third);
    assert_eq!(residency.snapshot().await[0].computing, None);
}

#[tokio::test(start_paused = true)]
async fn shared_memory_comes_with_the_grant_and_wakes_who_waits_for_it() {
    let (residency, _, arena) = residency(100);
    let all = 1 << 20;
    let mut first = residency.request(LeaseVector { shared_memory: all, ..vector(1, 1, 1) }).await.unwrap();
    assert_eq!((arena.usage().bytes, arena.usage().segments), (all, 0));
    let over = arena.create(ElementType::U8, 1, 0, "x").unwrap_err();
    assert!(over.to_string().contains("wait for running jobs"), "promised bytes are not given away: {over}");
    let segment = arena.create_reserved(&mut first.shared_memory, ElementType::U8, 100_000, 1, "x").unwrap();
    assert_eq!(first.shared_memory.bytes(), all - segment.bytes());
    drop(first);
    assert_eq!(arena.usage().bytes, segment.bytes(), "an output outlives its task, the rest goes back");

    let mut second = Box::pin(residency.request(LeaseVector { shared_memory: all, ..vector(2, 1, 1) }));
    assert!(timeout(SECOND, &mut second).await.is_err());
    drop(segment);
    let second = timeout(SECOND, second).await.expect("woken").unwrap();
    assert_eq!(second.shared_memory.bytes(), all);
}

#[tokio::test(start_paused = true)]
async fn a_request_for_a_process_that_dies_is_refused_and_a_new_one_granted() {
    let (residency, stage, _) = residency(100);
    let first = residency.request(vector(1, 30, 40)).await.unwrap();
    start(&residency, &stage, 1, 80).await;
    let mut second = Box::pin(residency.request(vector(1, 30, 40)));
    assert!(timeout(SECOND, &mut second).await.is_err(), "the process is busy");
    residency.holder_lost(1);
    let refusal = second.await.unwrap_err();
    assert!(matches!(refusal, Refusal::HolderGone { incarnation: 1, .. }), "{refusal}");
    residency.holder_reaped(1);
    residency.request(vector(2, 30, 40)).await.unwrap();
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn decisions_are_told() {
    let (residency, stage, _) = residency(100);
    let mut decisions = residency.decisions();
    drop(residency.request(vector(1, 30, 40)).await.unwrap());
    let granted = decisions.recv().await.unwrap();
    assert_eq!(granted.to_string(), "stage 1 was granted 80 B on cpu after 0.0ns");
    assert_eq!(granted.job, Some("job1".into()));
    drop(residency.request(vector(2, 60, 60)).await);
    let refused = async {
        loop {
            if let DecisionKind::Refused(refusal) = decisions.recv().await.unwrap().kind {
                break refusal;
            }
        }
    };
    let refusal = timeout(SECOND, refused).await.expect("told");
    assert!(matches!(refusal, Refusal::DoesNotFit { need: 130, .. }), "{refusal}");
    drop(stage);
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_back_is_answered_when_it_is_proven() {
    let (residency, stage, _) = residency(100);
    let granted = residency.request(vector(1, 30, 40)).await.unwrap();
    start(&residency, &stage, 1, 80).await;
    let parked = residency.park(1);
    residency.snapshot().await;
    stage.calls();
    drop(granted);
    residency.snapshot().await;
    let revised: Vec<(LeaseId, u64)> = stage
        .calls()
        .iter()
        .filter_map(|call| match call {
            Call::Revise(1, lease, to) => Some((*lease, *to)),
            _ => None,
        })
        .collect();
    assert_eq!(revised.len(), 2, "when its task has ended");
    stage.holds(1, 10);
    revised.iter().for_each(|(lease, _)| residency.returned(1, *lease, 0));
    assert_eq!(timeout(SECOND, parked.proven()).await.unwrap(), 70);
    assert_eq!(residency.available(&DeviceId::cpu()).await, Some(90));
    assert_eq!(residency.available(&"GPU-1".into()).await, None);
    // Nothing is left to be given back, and an unknown process has nothing.
    assert_eq!(timeout(SECOND, residency.shrink(1).proven()).await.unwrap(), 0);
    assert_eq!(timeout(SECOND, residency.retire(77).proven()).await.unwrap(), 0);
    let held = residency.hold(&DeviceId::cpu(), Some(5 * SECOND));
    assert_eq!(residency.available(&DeviceId::cpu()).await, Some(0));
    assert!(residency.snapshot().await[0].held_until.is_some());
    residency.holder_reaped(1);
    assert_eq!(timeout(SECOND, held.proven()).await.unwrap(), 10);
    let waiting = residency.request(vector(2, 30, 40));
    assert!(timeout(7 * SECOND, waiting).await.is_ok(), "the hold ends by itself");
}

#[tokio::test(start_paused = true)]
async fn a_step_boundary_gives_way_to_another_tenant() {
    let (residency, stage, _) = residency(100);
    let other = LeaseVector { tenant: Tenant::from("uid:2"), ..vector(2, 10, 10) };
    let (one, two) = (residency.request(vector(1, 10, 10)).await.unwrap(), residency.request(other).await.unwrap());
    let first = residency.compute(&DeviceId::cpu(), &"job1".into()).await.unwrap();
    tokio::time::sleep(SECOND).await;
    timeout(SECOND, first.offer()).await.expect("nobody else wants it").unwrap();
    let device = DeviceId::cpu();
    let job = JobId::from("job2");
    let mut second = Box::pin(residency.compute(&device, &job));
    assert!(futures_poll_once(&mut second).await.is_none());
    let mut boundary = Box::pin(first.offer());
    assert!(futures_poll_once(&mut boundary).await.is_none());
    let second = timeout(SECOND, second).await.expect("its turn").unwrap();
    assert_eq!(residency.snapshot().await[0].computing, Some("job2".into()));
    drop(second);
    timeout(SECOND, boundary).await.expect("and back").unwrap();
    assert_eq!(residency.snapshot().await[0].computing, Some("job1".into()));
    drop((one, two, stage));
}

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
    residency.set_holders(stage.clone());
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

#[tokio::test(start_paused = true)]
async fn every_decision_stands_in_the_journal() {
    let journal = Journal::default();
    let stage = Arc::new(Stage::default());
    let arena = Arena::new(&format!("jrn{:08x}", std::process::id()), ArenaLimits { bytes: 1 << 20 });
    let device = DeviceConfig {
        id: DeviceId::cpu(),
        name: "a device".into(),
        total: 200,
        budget: 100,
        rules: Rules { tolerance: 0, ..Rules::default() },
        probe: Arc::new(Device(stage.clone())),
    };
    let residency = Residency::start(vec![device], arena, Arc::new(RuntimeClock::new()), journal.clone());
    residency.set_holders(stage.clone());
    drop(residency.request(vector(1, 30, 40)).await.unwrap());
    drop(residency.request(vector(2, 60, 60)).await);
    residency.snapshot().await;
    let of = |job| journal.of_job(job).iter().map(|decision| (decision.kind(), decision.bytes)).collect::<Vec<_>>();
    assert_eq!(of("job1"), [(v1::DecisionKind::Granted, 80)]);
    assert_eq!(of("job2"), [(v1::DecisionKind::Refused, 130)]);
}

#[test]
fn a_segment_is_never_used_twice() {
    let arena = Arena::new(&format!("r8{:08x}", std::process::id()), ArenaLimits { bytes: 64 << 20 });
    let mut numbers = Vec::new();
    let mut names = std::collections::BTreeSet::new();
    for round in 0..20 {
        // Freed before the next round: nothing of it comes back.
        let segments: Vec<_> = (0..5).map(|_| arena.create(ElementType::U8, 64, round, "x").unwrap()).collect();
        for segment in &segments {
            let message = segment.message(&[64]);
            numbers.push(message.sequence);
            assert!(names.insert(message.name.clone()), "{} came twice", message.name);
        }
    }
    assert_eq!(invariants::segments_are_new(&numbers), Ok(()));
    numbers.push(numbers[7]);
    assert_eq!(invariants::segments_are_new(&numbers).unwrap_err().id, "R8");
}

//! Requests: granted, refused, withdrawn and released, with shared memory and the token to compute.

use std::time::Duration;

use sd_proto::worker::v1::ElementType;
use sdd::arena::{Arena, ArenaLimits};
use sdd::ids::{DeviceId, JobId, Tenant};
use sdd::residency::{LeaseVector, Proof, Purpose, Refusal, invariants};
use tokio::time::{Instant, timeout};

use super::SECOND;
use super::played::*;

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

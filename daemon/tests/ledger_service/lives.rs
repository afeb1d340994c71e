//! Lives of processes: silent ones are killed, bytes that are asked back are waited for.

use sdd::ids::DeviceId;
use sdd::residency::{LeaseId, LeaseKill, LifeView, Rules};
use tokio::time::timeout;

use super::SECOND;
use super::played::*;

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

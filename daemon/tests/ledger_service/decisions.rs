//! Decisions: told to who listens, and kept in the journal.

use std::sync::Arc;

use sd_proto::v1;
use sdd::arena::{Arena, ArenaLimits};
use sdd::clock::RuntimeClock;
use sdd::ids::DeviceId;
use sdd::journal::Journal;
use sdd::residency::{DecisionKind, DeviceConfig, Refusal, Residency, Rules};
use tokio::time::timeout;

use super::SECOND;
use super::played::*;

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
    residency.set_holders(stage.calls.clone());
    drop(residency.request(vector(1, 30, 40)).await.unwrap());
    drop(residency.request(vector(2, 60, 60)).await);
    residency.snapshot().await;
    let of = |job| journal.of_job(job).iter().map(|decision| (decision.kind(), decision.bytes)).collect::<Vec<_>>();
    assert_eq!(of("job1"), [(v1::DecisionKind::Granted, 80)]);
    assert_eq!(of("job2"), [(v1::DecisionKind::Refused, 130)]);
}

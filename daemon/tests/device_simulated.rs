//! Ledger, service and GPU probe together, over a driver that is played and with time that stands still: what counts as proof, what
//! a stranger takes, and what becomes of those who wait when a device is lost.

mod ledger_support;
mod simulated;

use std::time::Duration;

use sdd::ids::DeviceId;
use sdd::residency::device::HostFacts;
use sdd::residency::{LifeView, Proof, Purpose, Refusal, Rules};
use simulated::{Call, GIB, Host, Showing};
use tokio::time::{Instant, timeout};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_release_counts_when_the_device_shows_neither_process_nor_bytes() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm(1, 16 * GIB).await;
    let waiting = host.wait_for(2, 16 * GIB).await;
    assert_eq!(host.calls(), [Call::Retire(1)]);
    // The process is reaped at once; the driver takes three seconds to free what it held.
    host.gpu.leaves_after(1, 3 * SECOND);
    let began = Instant::now();
    host.residency.holder_reaped(1);
    tokio::time::sleep(2 * SECOND).await;
    assert!(!waiting.is_finished(), "the process is gone, its bytes are not");
    let view = host.view().await;
    assert_eq!((view.leased, view.unproven, view.holders[0].life), (16 * GIB, 16 * GIB, LifeView::Reaped));
    let granted = waiting.await.unwrap().unwrap();
    assert!(began.elapsed() >= 3 * SECOND && began.elapsed() < 4 * SECOND, "{:?}", began.elapsed());
    assert_eq!(granted.bytes(Purpose::Weights), 16 * GIB);
    assert_eq!(host.calls(), [Call::Proof(1, 16 * GIB, Proof::Measured)]);
}

#[tokio::test(start_paused = true)]
async fn without_proof_the_device_is_degraded_and_the_bytes_stay_charged() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm(1, 16 * GIB).await;
    let waiting = host.wait_for(2, 16 * GIB).await;
    host.gpu.leaves_after(1, 20 * SECOND);
    host.residency.holder_reaped(1);
    tokio::time::sleep(11 * SECOND).await;
    let view = host.view().await;
    assert!(view.degraded.is_some_and(|why| why.contains("16.00 GiB") && why.contains("stage 1")), "it is said");
    assert_eq!(view.leased, 16 * GIB, "no byte is given away");
    assert!(!waiting.is_finished());
    waiting.await.unwrap().unwrap();
    assert_eq!(host.view().await.degraded, None);
}

#[tokio::test(start_paused = true)]
async fn a_process_that_lies_about_what_it_gave_back_proves_nothing_and_is_ended() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm_with(1, 10 * GIB, 6 * GIB).await;
    let waiting = host.wait_for(2, 12 * GIB).await;
    let [Call::Revise(1, lease, 0)] = host.calls()[..] else { panic!("the working set is asked back first") };
    host.residency.returned(1, lease, 0);
    tokio::time::sleep(2 * SECOND).await;
    assert!(!waiting.is_finished(), "it says so, and the device shows 16 GiB");
    assert_eq!(host.calls(), [Call::Retire(1)], "its end is sure to be proven");
    host.gpu.leaves_after(1, Duration::ZERO);
    host.residency.holder_reaped(1);
    assert_eq!(waiting.await.unwrap().unwrap().bytes(Purpose::Weights), 12 * GIB);
}

#[tokio::test(start_paused = true)]
async fn what_a_stranger_takes_cannot_be_leased_and_comes_back_when_it_leaves() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm(1, 8 * GIB).await;
    let stranger = std::process::id();
    host.gpu.holds(stranger, 10 * GIB);
    let waiting = host.wait_for(2, 10 * GIB).await;
    let view = host.view().await;
    assert!(view.capacity < 14 * GIB && view.capacity > 13 * GIB, "{} of 24 GiB", view.capacity);
    let [foreign] = &view.foreign[..] else { panic!("one stranger: {:?}", view.foreign) };
    assert!(foreign.pid == stranger && foreign.bytes == Some(10 * GIB) && !foreign.name.is_empty(), "{foreign:?}");
    // Six of the thirteen are not enough: the idle one goes, and so there is room.
    assert_eq!(host.calls(), [Call::Retire(1)]);
    host.gpu.leaves_after(1, Duration::ZERO);
    host.residency.holder_reaped(1);
    drop(waiting.await.unwrap().unwrap());

    let second = host.wait_for(3, 20 * GIB).await;
    tokio::time::sleep(3 * SECOND).await;
    assert!(!second.is_finished(), "the stranger is still there");
    host.gpu.leaves_after(stranger, Duration::ZERO);
    timeout(5 * SECOND, second).await.expect("capacity grows again").unwrap().unwrap();
    assert_eq!(host.view().await.foreign, []);
}

#[tokio::test(start_paused = true)]
async fn a_growing_stranger_takes_idle_stages_off_even_when_nobody_waits() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm(1, 16 * GIB).await;
    host.gpu.holds(900, 7 * GIB);
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(host.calls(), [], "there is room for both");
    host.gpu.holds(900, 8 * GIB);
    tokio::time::sleep(3 * SECOND).await;
    assert_eq!(host.calls(), [Call::Retire(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_device_refuses_what_comes_and_fails_what_waits() {
    let host = Host::new(24 * GIB, HostFacts::default());
    let running = host.start(1, 16 * GIB).await;
    let waiting = host.wait_for(2, 16 * GIB).await;
    host.gpu.shows(Showing::Lost("Xid 79: fell off the bus".into()));
    let refusal = timeout(5 * SECOND, waiting).await.expect("nobody is left waiting").unwrap().unwrap_err();
    let Refusal::Unusable { ref device, ref why, .. } = refusal else { panic!("{refusal}") };
    assert!(*device == host.id() && why.contains("Xid 79") && why.contains("restart"), "{refusal}");
    let refusal = host.residency.request(host.vector(3, GIB, 0)).await.unwrap_err();
    assert!(matches!(refusal, Refusal::Unusable { .. }), "{refusal}");
    // Its process dies of it. Nothing is proven by a device that does not answer.
    host.residency.holder_lost(1);
    host.residency.holder_reaped(1);
    tokio::time::sleep(12 * SECOND).await;
    let view = host.view().await;
    assert!(view.leased == 16 * GIB && view.degraded.is_some(), "{view:?}");
    drop(running);
    // The driver was restarted.
    host.gpu.leaves_after(1, Duration::ZERO);
    host.gpu.shows(Showing::Everything);
    tokio::time::sleep(3 * SECOND).await;
    timeout(5 * SECOND, host.residency.request(host.vector(4, 16 * GIB, 0))).await.expect("it answers again").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_process_that_cannot_be_killed_keeps_its_bytes() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm(1, 16 * GIB).await;
    let waiting = host.wait_for(2, 16 * GIB).await;
    // Retired, it does not exit; killed, it hangs in the driver and is never reaped.
    tokio::time::sleep(60 * SECOND).await;
    let calls = host.calls();
    assert!(matches!(calls[..], [Call::Retire(1), Call::Kill(1, _)]), "{calls:?}");
    let view = host.view().await;
    assert!(view.degraded.is_some() && !waiting.is_finished(), "{view:?}");
    assert_eq!((view.leased, view.holders[0].life), (16 * GIB, LifeView::Dying));
    host.gpu.leaves_after(1, Duration::ZERO);
    host.residency.holder_reaped(1);
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn where_no_process_is_shown_the_free_bytes_must_rise_by_what_was_held() {
    for (showing, facts) in [
        (Showing::NoProcess, HostFacts::default()),
        (Showing::Everything, HostFacts { wsl: true, nested_processes: false }),
    ] {
        let host = Host::new(24 * GIB, facts);
        host.gpu.shows(showing);
        host.warm(1, 16 * GIB).await;
        // What it says of itself is all that is known of it.
        host.residency.pulse(1, 16 * GIB, 16 * GIB);
        let waiting = host.wait_for(2, 16 * GIB).await;
        assert_eq!(host.calls(), [Call::Retire(1)]);
        host.residency.holder_reaped(1);
        tokio::time::sleep(2 * SECOND).await;
        assert!(!waiting.is_finished(), "a reaped process proves nothing on a device");
        host.gpu.leaves_after(1, Duration::ZERO);
        waiting.await.unwrap().unwrap();
        assert_eq!(host.calls(), [Call::Proof(1, 16 * GIB, Proof::Inferred)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_fails_for_a_moment_neither_proves_nor_refuses() {
    let host = Host::new(24 * GIB, HostFacts::default());
    host.warm(1, 16 * GIB).await;
    let waiting = host.wait_for(2, 16 * GIB).await;
    host.gpu.leaves_after(1, Duration::ZERO);
    host.gpu.shows(Showing::Nothing("busy".into()));
    host.residency.holder_reaped(1);
    tokio::time::sleep(2 * SECOND).await;
    assert!(!waiting.is_finished());
    host.gpu.shows(Showing::Everything);
    timeout(SECOND, waiting).await.expect("it is asked again").unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_device_that_is_only_observed_refuses_with_the_reason() {
    let host = Host::observed(24 * GIB, "no CUDA in this build");
    let refusal = host.residency.request(host.vector(1, GIB, 0)).await.unwrap_err();
    let text = refusal.to_string();
    assert!(text.contains("stage 1 cannot use device GPU-") && text.contains("no CUDA in this build"), "{text}");
    host.gpu.holds(900, 10 * GIB);
    let view = host.view().await;
    assert!(view.capacity < 14 * GIB && view.foreign.len() == 1, "observed all the same: {view:?}");
    assert_eq!(Rules::default().proof_time, 10 * SECOND);
    assert_ne!(host.id(), DeviceId::cpu());
}

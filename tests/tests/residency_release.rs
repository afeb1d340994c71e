//! Tearing down one stage gives back that process's bytes, all of them and no others': by retiring it and by killing it.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::Signal;
use sd_proto::v1::{
    GetStatusRequest, ImageRequest, ListLeasesRequest, ListWorkersRequest, ProgressPhase, Stage, UnloadModelRequest,
    Worker, job_event::Event,
};
use sd_tests::calls::Calls;
use sd_tests::daemon::Options;
use sd_tests::process::{Process, eventually};
use sd_tests::{Daemon, Sandbox, png_text};

/// Bounds a failure alone.
const LIMIT: Duration = Duration::from_secs(30);
/// What an idle process may come to hold of itself: a page of a stack, a buffer of its link.
const IDLE: u64 = 4 << 20;
const STAGES: [&str; 3] = ["text", "diffusion", "vae"];

fn request(steps: u32) -> ImageRequest {
    ImageRequest {
        prompt: "a red heart".into(),
        width: 128,
        height: 128,
        steps: Some(steps),
        seed: Some(3),
        ..ImageRequest::default()
    }
}

/// A daemon that encodes each prompt anew, so that every job uses every stage.
fn daemon(sandbox: &Sandbox) -> Daemon {
    Daemon::start(sandbox, &Options::default().set("cache.conditioning=0"))
}

fn pixels(picture: &[u8]) -> Vec<u8> {
    png_text::read(picture).unwrap().pixels
}

fn resident(worker: &Worker) -> u64 {
    Process { pid: worker.pid as i32, arguments: Vec::new() }.resident().expect("the process lives")
}

async fn workers(calls: &Calls) -> BTreeMap<String, Worker> {
    let list = calls.control.clone().list_workers(ListWorkersRequest {}).await.unwrap().into_inner();
    list.workers.into_iter().map(|worker| (worker.stage.clone(), worker)).collect()
}

async fn leased(calls: &Calls) -> u64 {
    let status = calls.control.clone().get_status(GetStatusRequest {}).await.unwrap().into_inner();
    status.devices.iter().map(|device| device.leased_bytes).sum()
}

/// Bytes of the leases that an incarnation has.
async fn leases_of(calls: &Calls, incarnation: u64) -> u64 {
    let list = calls.control.clone().list_leases(ListLeasesRequest {}).await.unwrap().into_inner();
    list.leases.iter().filter(|lease| lease.incarnation == incarnation).map(|lease| lease.bytes).sum()
}

async fn unload(calls: &Calls, stage: &str) -> u64 {
    let request = UnloadModelRequest { model: "default".into(), stages: vec![stage.into()] };
    calls.control.clone().unload_model(request).await.unwrap().into_inner().bytes
}

#[tokio::test]
async fn a_stage_that_is_retired_or_killed_gives_back_its_bytes_and_no_others() {
    let sandbox = Sandbox::new();
    let daemon = daemon(&sandbox);
    let calls = Calls::connect(&daemon).await;
    let first = pixels(&calls.run(request(2), |_| {}).await.unwrap().pictures[0]);
    for stage in STAGES {
        for kill in [false, true] {
            let before = workers(&calls).await;
            assert_eq!(before.keys().collect::<Vec<_>>(), ["diffusion", "text", "vae"], "all stages are warm");
            let held: BTreeMap<&String, u64> = before.iter().map(|(name, worker)| (name, resident(worker))).collect();
            let (gone, total) = (&before[stage], leased(&calls).await);
            let bytes = leases_of(&calls, gone.incarnation).await;
            assert!(bytes > 1 << 20 && bytes < total, "{stage} has {bytes} of {total}");
            if kill {
                Process { pid: gone.pid as i32, arguments: Vec::new() }.signal(Signal::SIGKILL);
                let deadline = tokio::time::Instant::now() + LIMIT;
                while leases_of(&calls, gone.incarnation).await > 0 {
                    assert!(tokio::time::Instant::now() < deadline, "leases of a killed {stage} worker are left");
                    tokio::task::yield_now().await;
                }
            } else {
                assert_eq!(unload(&calls, stage).await, bytes, "what is told of a retired {stage} worker");
            }
            assert_eq!(leased(&calls).await, total - bytes, "{stage}: leases of the device");
            assert!(
                sandbox.processes().iter().all(|process| process.pid != gone.pid as i32),
                "{stage}: a process is left"
            );
            let after = workers(&calls).await;
            assert!(!after.contains_key(stage), "{stage} is listed");
            for (name, worker) in &after {
                assert_eq!((worker.pid, worker.leased_bytes), (before[name].pid, before[name].leased_bytes), "{name}");
                let (now, then) = (resident(worker), held[name]);
                assert!(now.abs_diff(then) <= IDLE, "{name} held {then} bytes and holds {now} without {stage}");
            }
            let again = calls.run(request(2), |_| {}).await.unwrap();
            assert_eq!(again.end(), "succeeded");
            assert!(pixels(&again.pictures[0]) == first, "another picture after {stage} was gone");
        }
    }
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn an_idle_stage_that_goes_while_a_job_computes_costs_that_job_nothing() {
    let sandbox = Sandbox::new();
    let daemon = daemon(&sandbox);
    let calls = Calls::connect(&daemon).await;
    let undisturbed = calls.run(request(40), |_| {}).await.unwrap();
    let warm = workers(&calls).await;
    // In the middle of sampling one idle stage is killed and the other is retired.
    let (tell, begun) = tokio::sync::oneshot::channel();
    let mut tell = Some(tell);
    let computes = move |event: &sd_proto::v1::JobEvent| {
        if let Some(Event::Progress(progress)) = &event.event
            && (progress.stage(), progress.phase()) == (Stage::Denoise, ProgressPhase::Computing)
            && let Some(tell) = tell.take()
        {
            let _ = tell.send(());
        }
    };
    let disturb = async {
        begun.await.expect("the job computes");
        Process { pid: warm["text"].pid as i32, arguments: Vec::new() }.signal(Signal::SIGKILL);
        assert!(unload(&calls, "vae").await > 0);
    };
    let (ran, ()) = tokio::join!(calls.run(request(40), computes), disturb);
    let ran = ran.unwrap();
    assert_eq!(ran.end(), "succeeded");
    assert!(pixels(&ran.pictures[0]) == pixels(&undisturbed.pictures[0]), "another picture");
    let retried = ran.events.iter().any(|event| match &event.event {
        Some(Event::StageFinished(finished)) => finished.timing.as_ref().is_some_and(|timing| timing.retries > 0),
        _ => false,
    });
    assert!(!retried, "a stage was run again");
    assert!(
        eventually(LIMIT, || (!sandbox.processes().iter().any(|p| p.pid == warm["text"].pid as i32)).then_some(()))
            .is_some()
    );
    let now = workers(&calls).await;
    assert_eq!(now["diffusion"].pid, warm["diffusion"].pid, "the stage that computed is the same process");
    assert_ne!(now["vae"].pid, warm["vae"].pid, "and another one decoded");
    assert!(daemon.stop().success());
}

//! Two daemons that share the CPU by budget: both do all their work at once, nobody's workers are taken off for the other's sake,
//! and a third one is refused with the numbers.

use std::collections::BTreeSet;
use std::process::Stdio;

use sd_proto::v1::{DecisionKind, ImageRequest, ListWorkersRequest, WatchDecisionsRequest};
use sd_tests::calls::Calls;
use sd_tests::daemon::Options;
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox, programs};

/// Jobs of each daemon.
const JOBS: u64 = 25;

fn request(seed: u64) -> ImageRequest {
    ImageRequest {
        prompt: "a red heart".into(),
        width: 64,
        height: 64,
        steps: Some(1),
        seed: Some(seed),
        ..ImageRequest::default()
    }
}

/// Options of a daemon that has its own sockets and state in the sandbox, and the sandbox's locks in common with others.
fn options(sandbox: &Sandbox, name: &str) -> Options {
    let path = |folder: &str| sandbox.path().join(folder).join(name);
    Options::default()
        .set(format!("listen=unix:{}.sock", path("run").display()))
        .set(format!("runtime_dir={}", path("run").display()))
        .set(format!("state_dir={}", path("home").display()))
}

async fn workers(calls: &Calls) -> BTreeSet<u64> {
    let workers = calls.control.clone().list_workers(ListWorkersRequest {}).await.unwrap().into_inner().workers;
    workers.iter().map(|worker| worker.incarnation).collect()
}

/// Runs all jobs one after the other; the workers after the first job are those after the last.
async fn work(calls: &Calls) {
    let mut first = BTreeSet::new();
    for seed in 0..JOBS {
        let ran = calls.run(request(seed), |_| {}).await.unwrap();
        assert_eq!(ran.end(), "succeeded", "job {seed}");
        if seed == 0 {
            first = workers(calls).await;
        }
    }
    assert_eq!(first.len(), 3, "a worker a stage stays");
    assert_eq!(workers(calls).await, first, "a worker was taken off");
}

/// Decisions to take something back that were made so far.
async fn taken_back(calls: &Calls) -> Vec<String> {
    let request = WatchDecisionsRequest { job_id: String::new(), follow: false };
    let mut stream = calls.control.clone().watch_decisions(request).await.unwrap().into_inner();
    let (mut seen, mut taken) = (0, Vec::new());
    while let Some(response) = stream.message().await.unwrap() {
        let Some(decision) = response.decision else { continue };
        seen += 1;
        if decision.kind() == DecisionKind::TakesBack {
            taken.push(decision.text);
        }
    }
    assert!(seen > 0, "the daemon remembers no decision");
    taken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_daemons_share_the_cpu_by_budget_and_neither_disturbs_the_other() {
    let sandbox = Sandbox::new();
    let alone = Daemon::start(&sandbox, &options(&sandbox, "alone"));
    let fit = Calls::connect(&alone).await.fit(request(0)).await.unwrap();
    assert!(alone.stop().success());
    let need = |stage: &sd_proto::v1::StageFit| stage.context_bytes + stage.weights_bytes + stage.working_set_bytes;
    // Enough for one model's stages together and not for a second set of them.
    let budget = fit.stages.iter().map(need).sum::<u64>() * 5 / 4;

    let share = |name: &str, budget: u64| {
        options(&sandbox, name).set(format!("devices.cpu.budget={budget}")).set("devices.cpu.share=true")
    };
    let daemons = ["one", "two"].map(|name| Daemon::start(&sandbox, &share(name, budget)));
    let [one, two] = [Calls::connect(&daemons[0]).await, Calls::connect(&daemons[1]).await];
    tokio::join!(work(&one), work(&two));
    for calls in [&one, &two] {
        assert_eq!(taken_back(calls).await, [""; 0]);
    }

    let doctor = text(&sandbox.sdctl(["doctor"]).output().unwrap());
    for word in ["cpu is shared by sdd pid", &format!("pid {}", daemons[1].pid()), "gpu driver"] {
        assert!(doctor.contains(word), "{word}: {doctor}");
    }
    // More than the host has left, and one that wants the device to itself.
    let devices = sandbox.command(&programs::programs().sdd).arg("--devices").output().unwrap().stdout;
    let devices: serde_json::Value = serde_json::from_slice(&devices).unwrap();
    let total = devices["cpu"]["memory"]["total"].as_u64().expect("the host's memory");
    let refused = |options: &[String]| {
        let mut command = sandbox.command(&programs::programs().sdd);
        for option in options {
            command.args(["--set", option]);
        }
        let output = command.stdout(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{}", text(&output));
        text(&output)
    };
    let message = refused(&share("three", total - budget).set);
    for word in [&(2 * budget).to_string(), &format!("is {budget} too much"), "devices.cpu.budget"] {
        assert!(message.contains(word), "{word}: {message}");
    }
    let message = refused(&options(&sandbox, "four").set);
    assert!(message.contains("device cpu is held by sdd with pid"), "{message}");
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
}

//! The same mixed load in every mode: forty jobs of three models under a budget that holds one model and little more. Jobs a
//! minute, bytes that left the device, evictions, waits. Prints a table and ratios to the
//! best manual mode, and asserts nothing but that every job succeeds.
//!
//! `cargo bench -p sd-tests --bench residency [-- JOBS]`

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use sd_proto::v1::{DecisionKind, ImageRequest, WatchDecisionsRequest};
use sd_tests::calls::Calls;
use sd_tests::daemon::Options;
use sd_tests::random::Random;
use sd_tests::readings::Readings;
use sd_tests::{Daemon, Sandbox};

const MODELS: [&str; 3] = ["one", "two", "three"];
const CLIENTS: usize = 6;
const MODES: [&str; 6] = ["auto", "none", "cond_only", "cond_diffusion", "aggressive", "layer_streaming"];

/// The load: models in runs of one to three, sizes and steps mixed, the same for every mode.
fn load(jobs: usize) -> Vec<ImageRequest> {
    let mut random = Random::new(40);
    let mut list = Vec::new();
    while list.len() < jobs {
        let model = MODELS[random.below(3) as usize];
        for _ in 0..=random.below(3) {
            let edge = 128 + 64 * random.below(3) as u32;
            list.push(ImageRequest {
                model: model.into(),
                prompt: ["a red heart", "a robot", "pizza"][random.below(3) as usize].into(),
                width: edge,
                height: edge,
                steps: Some(2 + random.below(5) as u32),
                seed: Some(random.below(1000)),
                ..ImageRequest::default()
            });
        }
    }
    list.truncate(jobs);
    list
}

#[derive(Debug, Default)]
struct Row {
    seconds: f64,
    waits: u64,
    taken: BTreeMap<String, u64>,
    moved: u64,
    peak: u64,
}

async fn measure(sandbox: &Arc<Sandbox>, options: &Options, requests: &[ImageRequest]) -> Row {
    let daemon = Daemon::start(sandbox, options);
    let calls = Calls::connect(&daemon).await;
    let readings = Readings::start(Arc::clone(sandbox));
    let queued: Vec<ImageRequest> = requests.into();
    let queue = Arc::new(tokio::sync::Mutex::new(queued.into_iter()));
    let started = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let (calls, queue) = (calls.clone(), Arc::clone(&queue));
        clients.spawn(async move {
            loop {
                let Some(request) = queue.lock().await.next() else { return };
                let ran = calls.run(request, |_| {}).await.expect("the daemon takes it");
                assert_eq!(ran.end(), "succeeded");
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.expect("a client");
    }
    let mut row = Row { seconds: started.elapsed().as_secs_f64(), peak: readings.peak().0, ..Row::default() };
    let request = WatchDecisionsRequest { job_id: String::new(), follow: false };
    let mut stream = calls.control.clone().watch_decisions(request).await.expect("the journal").into_inner();
    while let Some(response) = stream.message().await.expect("the journal") {
        let Some(decision) = response.decision else { continue };
        match decision.kind() {
            DecisionKind::Waits => row.waits += 1,
            DecisionKind::TakesBack => *row.taken.entry(decision.rung).or_default() += 1,
            DecisionKind::Proven => row.moved += decision.bytes,
            _ => {}
        }
    }
    assert!(daemon.stop().success());
    row
}

#[tokio::main]
async fn main() {
    let jobs = std::env::args().skip(1).find_map(|text| text.parse().ok()).unwrap_or(40);
    let sandbox = Arc::new(Sandbox::new());
    let mut options = Options::default();
    for name in MODELS {
        options = options.model(name, sandbox.default_model_as(name));
    }
    let requests = load(jobs);
    let daemon = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&daemon).await;
    let mut budget = 0;
    for request in &requests {
        let fit = calls.fit(request.clone()).await.expect("fit");
        let need: u64 =
            fit.stages.iter().map(|stage| stage.context_bytes + stage.weights_bytes + stage.working_set_bytes).sum();
        budget = need.max(budget);
    }
    assert!(daemon.stop().success());
    let budget = budget + budget / 20;
    let options = options.set(format!("devices.cpu.budget={budget}"));
    println!("\n{jobs} jobs of three models, {CLIENTS} clients, budget {} MiB\n", budget >> 20);
    println!(
        "| mode | jobs a minute | left the device MiB | shrink, park, retire | waits | peak MiB |\n|---|---|---|---|---|---|"
    );
    let mut rates = BTreeMap::new();
    let modes = MODES.map(|mode| (mode, options.clone().set(format!("memory.offload_mode={mode}"))));
    for (mode, options) in modes {
        let row = measure(&sandbox, &options, &requests).await;
        let rate = 60.0 * jobs as f64 / row.seconds;
        rates.insert(mode, rate);
        let taken = |rung: &str| row.taken.get(rung).copied().unwrap_or(0);
        println!(
            "| {mode} | {rate:.1} | {} | {}, {}, {} | {} | {} |",
            row.moved >> 20,
            taken("shrink"),
            taken("park"),
            taken("retire"),
            row.waits,
            row.peak >> 20
        );
    }
    let manual = MODES[1..].iter().filter_map(|mode| rates.get(mode)).copied().fold(0.0, f64::max);
    println!("\nauto against the best manual mode: {:.3}", rates["auto"] / manual);
}

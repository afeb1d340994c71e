//! Whole calls against diffusers, in one run: the default model at its defaults, cold (nothing running) and warm (a daemon
//! with loaded workers), and what the parts of a call take. It prints ratios and asserts nothing.
//!
//! `SDD_PEER_PYTHON=PATH cargo bench -p sd-tests --bench main_job` with a Python that has torch and diffusers.

use std::process::Command;
use std::time::{Duration, Instant};

use sd_tests::daemon::Options;
use sd_tests::programs::repository;
use sd_tests::{Daemon, Sandbox};
use serde::Deserialize;

const ROUNDS: usize = 7;
const STEPS: usize = 20;

#[derive(Debug, Deserialize)]
struct Stage {
    stage: String,
    computed: f64,
    loaded: f64,
    waited: f64,
    total: f64,
}

#[derive(Debug, Deserialize)]
struct Timings {
    stages: Vec<Stage>,
    total: f64,
}

/// One call: what the client's user waits, and what the daemon says of it.
struct Call {
    wall: f64,
    timings: Timings,
}

fn call(sandbox: &Sandbox, endpoint: Option<&str>) -> Call {
    let mut command = sandbox.sdctl(["generate", "a red heart", "--seed", "1", "--json", "--force", "-o", "x.png"]);
    command.args(["--steps", &STEPS.to_string()]);
    if let Some(endpoint) = endpoint {
        command.args(["--endpoint", endpoint]);
    }
    let started = Instant::now();
    let output = command.output().expect("sdctl runs");
    let wall = started.elapsed().as_secs_f64();
    assert!(output.status.success(), "{}", sd_tests::sandbox::text(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    let end = text.lines().rfind(|line| line.contains("\"succeeded\"")).expect("a terminal event");
    let event: serde_json::Value = serde_json::from_str(end).expect("JSON");
    Call { wall, timings: serde_json::from_value(event["timings"].clone()).expect("timings") }
}

/// diffusers' figures, in seconds, from `main_job_peer.py`.
#[derive(Debug, Deserialize)]
struct Peer {
    cold: f64,
    encode: f64,
    step: f64,
    decode: f64,
    warm: f64,
}

fn peer(sandbox: &Sandbox) -> Option<Peer> {
    let python = std::env::var_os("SDD_PEER_PYTHON")?;
    let mut command = Command::new(python);
    command.arg(repository().join("tests/benches/main_job_peer.py")).arg(repository().join("models/default"));
    let output = command.args([STEPS.to_string(), ROUNDS.to_string()]).current_dir(sandbox.out()).output().ok()?;
    assert!(output.status.success(), "the peer failed: {}", sd_tests::sandbox::text(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last()?).ok()
}

fn least(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::INFINITY, f64::min)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn row(what: &str, ours: f64, theirs: Option<f64>) {
    match theirs {
        Some(theirs) => {
            println!("| {what} | {:.1} | {:.1} | {:.2} |", ours * 1e3, theirs * 1e3, ours / theirs);
        }
        None => println!("| {what} | {:.1} | | |", ours * 1e3),
    }
}

fn main() {
    let sandbox = Sandbox::new();
    let cold: Vec<Call> = (0..3).map(|_| call(&sandbox, None)).collect();
    let daemon = Daemon::start(&sandbox, &Options::default());
    let settled = std::thread::spawn({
        let process = daemon.process();
        move || {
            std::thread::sleep(Duration::from_secs(1));
            process.anonymous()
        }
    })
    .join()
    .ok()
    .flatten();
    call(&sandbox, Some(&daemon.endpoint));
    let warm: Vec<Call> = (0..ROUNDS).map(|_| call(&sandbox, Some(&daemon.endpoint))).collect();
    let after = daemon.process().anonymous();
    let peer = peer(&sandbox);

    let stage = |name: &str, part: fn(&Stage) -> f64| {
        least(warm.iter().flat_map(|call| call.timings.stages.iter().filter(|s| s.stage == name).map(part)))
    };
    let computed = |call: &Call| call.timings.stages.iter().map(|stage| stage.computed).sum::<f64>();
    println!(
        "\n| default model, 256², {STEPS} steps, guidance, f32 | sdd ms | diffusers ms | ratio |\n|---|---|---|---|"
    );
    row("encode, prompt and negative", stage("encode", |s| s.computed), peer.as_ref().map(|p| p.encode));
    row("one denoising step", stage("denoise", |s| s.computed) / STEPS as f64, peer.as_ref().map(|p| p.step));
    row("decode", stage("decode", |s| s.computed), peer.as_ref().map(|p| p.decode));
    row("whole call, warm", least(warm.iter().map(|call| call.wall)), peer.as_ref().map(|p| p.warm));
    row("whole call, cold", least(cold.iter().map(|call| call.wall)), peer.as_ref().map(|p| p.cold));
    println!("\n| overhead of a warm call | ms |\n|---|---|");
    row_of(
        "job beyond the sum of its stages' computing, median",
        median(warm.iter().map(|c| c.timings.total - computed(c))),
    );
    row_of("sdctl beyond that sum, median", median(warm.iter().map(|call| call.wall - computed(call))));
    let hand_off =
        |call: &Call| call.timings.stages.iter().map(|s| s.total - s.computed - s.loaded - s.waited).sum::<f64>();
    row_of("hand-off: stages' totals beyond waiting, loading and computing, median", median(warm.iter().map(hand_off)));
    let share = median(warm.iter().map(|call| hand_off(call) / call.wall));
    println!("| hand-off as a share of the call | {:.2} % |", share * 100.0);
    let mib =
        |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64));
    println!(
        "| sdd's own memory (RssAnon), idle | {} |\n| after {} calls | {} |",
        mib(settled),
        ROUNDS + 1,
        mib(after)
    );
}

fn row_of(what: &str, seconds: f64) {
    println!("| {what} | {:.2} |", seconds * 1e3);
}

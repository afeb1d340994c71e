//! What operators do while jobs run, and what idleness does, with real programs.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use sd_tests::daemon::Options;
use sd_tests::process::eventually;
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox, png_text};
use serde_json::Value;

/// Bounds a failure alone.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon and the calls of its operator.
struct Host {
    sandbox: Sandbox,
    daemon: Daemon,
}

impl Host {
    fn start(options: &Options) -> Self {
        let sandbox = Sandbox::new();
        let daemon = Daemon::start(&sandbox, options);
        Self { sandbox, daemon }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.sandbox.sdctl(arguments);
        command.arg("--endpoint").arg(&self.daemon.endpoint);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let line: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        serde_json::from_str(&self.ok(&line)).unwrap()
    }

    /// `generate`, with the pictures in the sandbox's folder.
    fn generate(&self, name: &str, more: &[&str]) -> Child {
        let line = ["generate", "a red heart", "--steps", "4", "--seed", "3", "-W", "64", "-H", "64", "-q", "-o", name];
        let line: Vec<&str> = line.iter().copied().chain(more.iter().copied()).collect();
        self.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn pixels(&self, name: &str) -> Vec<u8> {
        png_text::read(&std::fs::read(self.sandbox.out().join(name)).unwrap()).unwrap().pixels
    }

    /// Stages of the workers that run, by the kernel's own list of processes.
    fn stages(&self) -> Vec<String> {
        let workers = self.sandbox.processes_of("sd-worker");
        let mut stages: Vec<String> =
            workers.iter().filter_map(|worker| worker.argument("--stage").map(str::to_owned)).collect();
        stages.sort();
        stages
    }

    fn expect_nothing(&self) {
        assert_eq!(self.stages(), [""; 0]);
        assert_eq!(self.json(&["leases"]), Value::Array(Vec::new()));
    }
}

fn finished(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

fn follow(host: &Host) -> (Child, impl Iterator<Item = Value> + use<>) {
    let mut child = host.command(&["events", "--follow", "--json", "-q"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()))
}

#[test]
fn models_come_and_go_while_jobs_run_and_no_picture_changes() {
    let host = Host::start(&Options::default());
    let loaded = host.json(&["load", "default", "--stage", "text", "--stage", "vae"]);
    let stages: Vec<&str> = loaded.as_array().unwrap().iter().map(|s| s["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["text", "vae"]);
    for stage in loaded.as_array().unwrap() {
        assert!(stage["weights_bytes"].as_u64().unwrap() > 0, "{stage}");
    }
    assert_eq!(host.stages(), ["text", "vae"], "loaded, and nothing else was");
    let freed = host.json(&["unload", "default"]);
    assert!(freed["workers"] == 2 && freed["bytes"].as_u64().unwrap() > 1 << 20, "{freed}");
    host.expect_nothing();

    finished(host.generate("alone.png", &["-n", "1"]));
    // Jobs run by turns while everything is taken from under them and brought back.
    let jobs = [host.generate("one-{n}.png", &["-n", "4"]), host.generate("two-{n}.png", &["-n", "4"])];
    for _ in 0..2 {
        host.ok(&["unload", "default"]);
        host.ok(&["load", "default", "--stage", "diffusion", "--pin"]);
        host.ok(&["release", "cpu"]);
        host.ok(&["unpin", "default"]);
    }
    jobs.into_iter().for_each(finished);
    for name in ["one-1.png", "two-1.png"] {
        assert_eq!(host.pixels(name), host.pixels("alone.png"), "{name}");
    }
    assert_eq!(host.pixels("one-4.png"), host.pixels("two-4.png"));
    host.ok(&["unload", "default"]);
    host.expect_nothing();
    assert!(host.daemon.stop().success());
}

#[test]
fn a_released_device_is_left_and_jobs_wait_until_it_is_given_back() {
    let host = Host::start(&Options::default());
    finished(host.generate("before.png", &[]));
    let freed = host.json(&["release", "cpu", "--for", "1h"]);
    assert!(freed["workers"] == 3 && freed["bytes"].as_u64().unwrap() > 1 << 20, "{freed}");
    host.expect_nothing();
    let device = host.json(&["status"])["devices"][0].clone();
    assert!(device["held_until"].is_string(), "{device}");

    let (mut following, events) = follow(&host);
    let waiting = host.generate("after.png", &[]);
    let waits = events.into_iter().find(|event| event["kind"] == "waits").expect("the events end without a wait");
    let job = waits["job_id"].as_str().unwrap();
    host.expect_nothing();
    host.ok(&["release", "cpu", "--for", "0s"]);
    finished(waiting);
    assert_eq!(host.pixels("after.png"), host.pixels("before.png"));
    assert!(host.json(&["status"])["devices"][0]["held_until"].is_null());
    let story = host.ok(&["why", job]);
    assert!(story.contains("cpu is given to other programs") && story.contains("succeeded"), "{story}");
    following.kill().unwrap();
    following.wait().unwrap();
    assert!(host.daemon.stop().success());
}

#[test]
fn idle_workers_go_after_their_time_down_to_no_byte_and_no_process() {
    let host = Host::start(&Options::default().set("deadlines.keep_alive=300ms"));
    let (following, mut events) = follow(&host);
    finished(host.generate("x.png", &[]));
    // Each of the three processes says good-bye with the proof that it is gone.
    let mut gone = std::collections::BTreeSet::new();
    while gone.len() < 3 {
        let event = events.next().expect("the events end before every process is gone");
        if event["kind"] == "proven" && event["proof"] == "reaped" {
            gone.insert(event["incarnation"].as_u64().unwrap());
        }
    }
    host.expect_nothing();
    // The daemon's end is that of those who follow it.
    let Host { sandbox, daemon } = host;
    assert!(daemon.stop().success());
    let ended = eventually(LIMIT, || sandbox.processes_of("sdctl").is_empty().then_some(()));
    assert!(ended.is_some(), "a follower outlives the daemon");
    let status = following.wait_with_output().unwrap().status;
    assert!(status.success(), "{status}");
    assert!(Path::new(&sandbox.out().join("x.png")).exists());
}

/// Encoder and diffusion model do not fit side by side here, nothing is streamed, and no mode moves anything ahead of need: so the one
/// must give way to the other within one job.
#[test]
fn a_job_is_explained_by_what_was_taken_back_for_it_and_its_events_say_the_same() {
    let host = Host::start(&Options::default().set("devices.cpu.budget=80MiB"));
    let output =
        host.run(&["generate", "a red heart", "--steps", "1", "--seed", "3", "-W", "64", "-H", "64", "--json"]);
    assert!(output.status.success(), "{}", text(&output));
    let events: Vec<Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let job = events[0]["job_id"].as_str().unwrap();
    let explained = host.json(&["why"]);
    assert_eq!(explained["job"]["id"], job, "the newest job is explained where none is named");
    let decisions = explained["decisions"].as_array().unwrap();
    let taken: Vec<&Value> = decisions.iter().filter(|decision| decision["kind"] == "takes_back").collect();
    assert!(!taken.is_empty(), "nothing was taken back: {decisions:#?}");
    for decision in taken {
        let rung = decision["rung"].as_str().unwrap();
        assert!(["shrink", "park", "retire"].contains(&rung), "{decision}");
        assert!(decision["bytes"].as_u64().unwrap() > 0 && decision["job_id"] == job, "{decision}");
        assert!(decision["wanted_by"].as_str().unwrap().ends_with(" of default"), "{decision}");
        let told =
            |event: &&Value| event["event"] == "decision" && event["decision"]["sequence"] == decision["sequence"];
        assert!(events.iter().any(|event| told(&event)), "no event of the job says {decision}");
    }
    assert!(decisions.iter().any(|decision| decision["kind"] == "granted"), "{decisions:#?}");
    let story = host.ok(&["why", job]);
    assert!(story.contains("Memory was taken back for it"), "{story}");
    assert!(host.daemon.stop().success());
}

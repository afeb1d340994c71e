//! What happens when a program dies, hangs or lies, with real processes: one clear terminal event in bounded time, the next
//! call works, nothing is left.

use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use sd_proto::exit::ProgramExit;
use sd_tests::daemon::Options;
use sd_tests::faults::worker_at_random_moment;
use sd_tests::process::{Process, eventually};
use sd_tests::random::Random;
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox};

/// A job that runs long enough to be hit in any stage.
const JOB: [&str; 6] = ["generate", "a robot", "--seed", "5", "--steps", "12"];
/// Long enough for any job here on a loaded machine; only a failure takes it.
const LONG: Duration = Duration::from_secs(120);

fn job(sandbox: &Sandbox, daemon: &Daemon, name: &str) -> std::process::Command {
    job_of(sandbox, daemon, name, "12")
}

fn job_of(sandbox: &Sandbox, daemon: &Daemon, name: &str, steps: &str) -> std::process::Command {
    let mut command = sandbox.sdctl(&JOB[..5]);
    command.arg(steps);
    command.args(["--endpoint", &daemon.endpoint, "--force", "-o", name]);
    command
}

#[test]
fn a_worker_killed_at_any_moment_costs_its_job_alone() {
    let mut random = Random::from_environment("killed workers");
    let sandbox = Sandbox::new();
    // Each job is to encode its prompt.
    let daemon = Daemon::start(&sandbox, &Options::default().set("cache.conditioning=0"));
    for stage in ["text", "diffusion", "vae", "diffusion", "text"] {
        // No warm worker: each round sees one start.
        for worker in sandbox.processes_of("sd-worker") {
            worker.signal(Signal::SIGKILL);
        }
        let child = job(&sandbox, &daemon, "x.png").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let worker = worker_at_random_moment(&sandbox, stage, &mut random);
        worker.signal(Signal::SIGKILL);
        let killed = Instant::now();
        let output = child.wait_with_output().unwrap();
        let said = text(&output);
        // The stage is run again in another process; a worker that was hit after its task was idle.
        assert!(output.status.success(), "{stage}: {said}");
        assert!(killed.elapsed() < Duration::from_secs(30), "{stage}: the job ended after {:?}", killed.elapsed());
        if said.contains("run again") {
            assert!(said.contains("worker") && said.contains("SIGKILL"), "{stage}: {said}");
        }
        let next = job(&sandbox, &daemon, "y.png").output().unwrap();
        assert!(next.status.success(), "the call after a killed {stage} worker: {}", text(&next));
        let [hit, after] = ["x.png", "y.png"].map(|name| std::fs::read(sandbox.out().join(name)).unwrap());
        assert!(hit == after, "{stage}: the job that was hit made another picture");
    }
    assert!(daemon.stop().success());
    sandbox.expect_no_process(Duration::from_secs(3));
}

#[test]
fn a_frozen_worker_is_noticed_and_killed() {
    let mut random = Random::from_environment("frozen workers");
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().set("deadlines.pulse=1s"));
    let mut long = job_of(&sandbox, &daemon, "x.png", "60");
    let child = long.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let worker = worker_at_random_moment(&sandbox, "diffusion", &mut random);
    worker.signal(Signal::SIGSTOP);
    let frozen = Instant::now();
    let output = child.wait_with_output().unwrap();
    // Another process goes on where it was frozen.
    assert!(output.status.success(), "{}", text(&output));
    assert!(frozen.elapsed() < LONG, "noticed after {:?}", frozen.elapsed());
    assert!(sandbox.processes().iter().all(|process| process.pid != worker.pid), "the frozen worker lives");
    let next = job(&sandbox, &daemon, "y.png").output().unwrap();
    assert!(next.status.success(), "{}", text(&next));
}

#[test]
fn a_worker_that_lies_or_ends_costs_itself_and_one_job() {
    for fault in [
        "text:lying-shape",
        "diffusion:lying-writer",
        "vae:garbage",
        "diffusion:unsealed",
        "vae:exit-zero",
        "text:abort",
        "diffusion:other-task",
        "vae:frozen",
        "text:wrong-token",
        "diffusion:silent",
    ] {
        let sandbox = Sandbox::new();
        let options = Options::default().fault(fault).set("deadlines.pulse=1s").set("deadlines.handshake=2s");
        let daemon = Daemon::start(&sandbox, &options);
        let started = Instant::now();
        let output = job(&sandbox, &daemon, "x.png").output().unwrap();
        assert!(!output.status.success(), "{fault}: the job succeeded");
        assert!(started.elapsed() < Duration::from_secs(60), "{fault}: {:?}", started.elapsed());
        let said = text(&output);
        assert!(said.contains("worker") || said.contains("segment"), "{fault}: {said}");
        // Every worker of the stage does it: the third death is the last one.
        assert!(said.contains("quarantine clear"), "{fault}: {said}");
        // The daemon lives and answers; the other stages' workers were not harmed.
        let status = sandbox.sdctl(["status", "--endpoint", &daemon.endpoint]).output().unwrap();
        assert!(status.status.success(), "{fault}: {}", text(&status));
        let instances = sandbox.instances();
        assert!(daemon.stop().success(), "{fault}");
        sandbox.expect_no_process(Duration::from_secs(3));
        assert_eq!(Sandbox::segments(&instances), Vec::<String>::new(), "{fault}: segments are left");
    }
}

#[test]
fn a_killed_daemon_takes_its_workers_along_and_the_next_start_sweeps_up() {
    let mut random = Random::from_environment("killed daemon");
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default());
    let socket = daemon.socket();
    let child = job(&sandbox, &daemon, "x.png").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    worker_at_random_moment(&sandbox, "diffusion", &mut random);
    let instances = sandbox.instances();
    assert_eq!(instances.len(), 1);
    daemon.signal(Signal::SIGKILL);
    let killed = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(killed.elapsed() < Duration::from_secs(10), "the client noticed after {:?}", killed.elapsed());
    assert!(!output.status.success(), "{}", text(&output));
    sandbox.expect_no_process(Duration::from_secs(3));
    // Any program sweeps at its start; the client is the first one here.
    let status = sandbox.sdctl(["status"]).output().unwrap();
    assert_eq!(status.status.code(), Some(ProgramExit::Unavailable.code()), "{}", text(&status));
    assert_eq!(Sandbox::segments(&instances), Vec::<String>::new(), "segments of the dead daemon are left");
    let next = Daemon::start(&sandbox, &Options::default());
    assert_eq!(next.socket(), socket, "the stale socket was replaced");
    assert!(sandbox.instances().iter().all(|id| !instances.contains(id)), "its lock file is left");
    let output = job(&sandbox, &next, "y.png").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn a_private_daemon_that_is_killed_leaves_nothing_either() {
    let mut random = Random::from_environment("killed private daemon");
    let sandbox = Sandbox::new();
    let mut command = sandbox.sdctl(JOB);
    let child = command.args(["-o", "x.png"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    worker_at_random_moment(&sandbox, "diffusion", &mut random);
    let instances = sandbox.instances();
    let daemon = sandbox.processes_of("sdd").pop().expect("a private daemon");
    daemon.signal(Signal::SIGKILL);
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", text(&output));
    sandbox.expect_no_process(Duration::from_secs(3));
    assert_eq!(Sandbox::segments(&instances), Vec::<String>::new());
    assert_eq!(sandbox.instances(), Vec::<String>::new());
    assert_eq!(std::fs::read_dir(sandbox.path().join("run")).unwrap().count(), 0);
}

#[test]
fn ctrl_c_cancels_the_job_and_the_next_call_works() {
    let mut random = Random::from_environment("ctrl-c");
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default());
    for _ in 0..3 {
        let mut long = job_of(&sandbox, &daemon, "x.png", "300");
        let child = long.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        worker_at_random_moment(&sandbox, "diffusion", &mut random);
        let client = Process { pid: child.id() as i32, arguments: vec!["sdctl".into()] };
        client.signal(Signal::SIGINT);
        let asked = Instant::now();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(ProgramExit::Interrupted.code()), "{}", text(&output));
        assert!(asked.elapsed() < Duration::from_secs(10), "cancelled after {:?}", asked.elapsed());
        let jobs = sandbox.sdctl_ok(["jobs", "--all", "--endpoint", &daemon.endpoint]);
        assert!(text(&jobs).contains("cancelled"), "{}", text(&jobs));
    }
    let next = job(&sandbox, &daemon, "y.png").output().unwrap();
    assert!(next.status.success(), "{}", text(&next));
}

#[test]
fn a_client_that_vanishes_cancels_its_job_unless_it_asked_to_keep_it() {
    let mut random = Random::from_environment("vanished client");
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default());
    let jobs = || text(&sandbox.sdctl_ok(["jobs", "--all", "--endpoint", &daemon.endpoint]));
    let mut vanish = |steps: &str, more: &[&str]| {
        let mut long = job_of(&sandbox, &daemon, "x.png", steps);
        let mut child = long.args(more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        worker_at_random_moment(&sandbox, "diffusion", &mut random);
        child.kill().unwrap();
        child.wait().unwrap();
    };
    vanish("300", &[]);
    let cancelled = eventually(Duration::from_secs(10), || jobs().contains("cancelled").then_some(()));
    assert!(cancelled.is_some(), "the job runs on: {}", jobs());
    vanish("100", &["--keep"]);
    let kept = eventually(LONG, || jobs().contains("succeeded").then_some(()));
    assert!(kept.is_some(), "the kept job did not end: {}", jobs());
}

#[test]
fn a_worker_that_holds_more_than_its_leases_is_killed_and_its_job_fails_as_out_of_memory() {
    let sandbox = Sandbox::new();
    let plan = sandbox.path().join("plan");
    std::fs::write(&plan, "diffusion:greedy").unwrap();
    let options = Options::default().fault(&format!("@{}", plan.display()));
    let daemon = Daemon::start(&sandbox, &options);
    let output = job(&sandbox, &daemon, "x.png").output().unwrap();
    assert!(!output.status.success(), "{}", text(&output));
    let said = text(&output);
    assert!(said.contains("holds") && said.contains("are leased"), "how much it held, of how much: {said}");
    assert_eq!(output.status.code(), Some(ProgramExit::Capacity.code()), "out of memory: {said}");
    // What it held is charged to nobody any more, and the next job has a worker that keeps to its leases.
    std::fs::write(&plan, "").unwrap();
    let next = job(&sandbox, &daemon, "y.png").output().unwrap();
    assert!(next.status.success(), "{}", text(&next));
    let instances = sandbox.instances();
    assert!(daemon.stop().success());
    sandbox.expect_no_process(Duration::from_secs(3));
    assert_eq!(Sandbox::segments(&instances), Vec::<String>::new(), "segments are left");
}

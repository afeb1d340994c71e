//! Several callers at once: of one daemon, and of none.

use std::process::Stdio;
use std::time::Duration;

use sd_tests::daemon::Options;
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox, png_text};

fn pixels(sandbox: &Sandbox, name: &str) -> Vec<u8> {
    png_text::read(&std::fs::read(sandbox.out().join(name)).unwrap()).unwrap().pixels
}

const CALLS: [(&str, &str); 3] = [("a red heart", "1"), ("pizza", "2"), ("sailboat", "3")];

/// Runs all calls at the same time and returns their pictures.
fn at_once(sandbox: &Sandbox, name: &str, more: &[&str]) -> Vec<Vec<u8>> {
    let children: Vec<_> = CALLS
        .iter()
        .map(|(prompt, seed)| {
            let mut command = sandbox.sdctl(["generate", prompt, "--seed", seed, "--steps", "6", "-o"]);
            command.arg(format!("{name}-{seed}.png")).args(more);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
    }
    CALLS.iter().map(|(_, seed)| pixels(sandbox, &format!("{name}-{seed}.png"))).collect()
}

#[test]
fn three_clients_of_one_daemon_and_three_shells_without_one_get_the_same_pictures() {
    let sandbox = Sandbox::new();
    // No daemon runs: one shell starts one, the others join it or wait for it; the device is never held twice.
    let shells = at_once(&sandbox, "shell", &[]);
    sandbox.expect_no_process(Duration::from_secs(5));
    assert_eq!(sandbox.instances(), Vec::<String>::new());
    let daemon = Daemon::start(&sandbox, &Options::default());
    let clients = at_once(&sandbox, "client", &["--endpoint", &daemon.endpoint]);
    assert_eq!(shells, clients);
    assert_ne!(clients[0], clients[1]);
}

#[test]
fn a_second_daemon_on_the_same_device_ends_with_75_and_names_the_first() {
    let sandbox = Sandbox::new();
    let first = Daemon::start(&sandbox, &Options::default());
    let other = sandbox.path().join("other.sock");
    let output = sandbox
        .command(&sd_tests::programs::programs().sdd)
        .arg("--listen")
        .arg(format!("unix:{}", other.display()))
        .arg("--runtime-dir")
        .arg(sandbox.path().join("other-run"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", text(&output));
    let said = text(&output);
    assert!(said.contains(&first.pid().to_string()) && said.contains(&first.endpoint), "{said}");
    assert!(!other.exists(), "a socket was bound");
}

/// A budget that holds one stage at a time: every stage is retired before the next, and the pictures are the same.
#[test]
fn a_budget_for_one_stage_at_a_time_gives_the_same_pictures() {
    let sandbox = Sandbox::new();
    let ample = Daemon::start(&sandbox, &Options::default());
    let expected = at_once(&sandbox, "ample", &["--endpoint", &ample.endpoint]);
    assert!(ample.stop().success());
    let tight = Daemon::start(&sandbox, &Options::default().set("devices.cpu.budget=260MiB"));
    assert_eq!(at_once(&sandbox, "tight", &["--endpoint", &tight.endpoint]), expected);
}

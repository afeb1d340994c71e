//! A client in another language that learns the interface from server reflection: `tests/foreign/client.py` with grpcio.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use sd_tests::daemon::Options;
use sd_tests::programs::{programs, repository};
use sd_tests::{Daemon, Sandbox};

/// A Python with grpcio: `SD_TEST_PYTHON`, else a virtual environment beside the built programs, made on first use.
fn python() -> PathBuf {
    if let Some(python) = std::env::var_os("SD_TEST_PYTHON") {
        return python.into();
    }
    let environment = programs().sdd.parent().unwrap().join("test-python");
    let python = environment.join("bin").join("python");
    let has = |python: &PathBuf| {
        Command::new(python).args(["-c", "import grpc_reflection"]).output().is_ok_and(|o| o.status.success())
    };
    if !has(&python) {
        let run = |command: &mut Command| {
            let output =
                command.output().expect("python3 is needed for the foreign client: install python3 and python3-venv");
            assert!(output.status.success(), "{command:?}: {}", sd_tests::sandbox::text(&output));
        };
        run(Command::new("python3").args(["-m", "venv"]).arg(&environment));
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "grpcio>=1.70", "grpcio-reflection>=1.70"]));
    }
    python
}

#[test]
fn a_python_client_submits_watches_cancels_and_saves_the_same_bytes_as_sdctl() {
    let python = python();
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default());
    let foreign = |arguments: &[&str]| -> serde_json::Value {
        let output = sandbox
            .command(&python)
            .arg(repository().join("tests/foreign/client.py"))
            .arg(daemon.socket())
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", sd_tests::sandbox::text(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let generated = foreign(&["generate", "a red heart", "11", "generated.png"]);
    assert_eq!(generated["kinds"].as_array().unwrap().first().unwrap(), "queued");
    let services = generated["services"].to_string();
    assert!(services.contains("sd.v1.Generation") && services.contains("sd.v1.Control"), "{services}");
    assert!(!services.contains("sd.worker"), "the private link is not offered: {services}");
    let submitted = foreign(&["submit", "a red heart", "11", "submitted.png"]);
    assert_eq!(submitted["kinds"], submitted["again"], "a replay is what was streamed");
    let cancelled = foreign(&["cancel", "pizza"]);
    assert_eq!(cancelled["last"], "cancelled");
    sandbox.sdctl_ok(["generate", "a red heart", "--seed", "11", "-o", "ours.png", "--endpoint", &daemon.endpoint]);
    let bytes = |name: &str| fs::read(sandbox.out().join(name)).unwrap();
    assert_eq!(bytes("generated.png"), bytes("ours.png"));
    assert_eq!(bytes("submitted.png"), bytes("ours.png"));
}

//! The pages for users: every command on them is run as it stands there.
//!
//! A block that begins with ```` ```sh ```` is a script of a shell whose `sdctl` finds a running daemon. What follows `sh` says more:
//! `exit=N` how it ends, `daemon` that it starts a daemon (which is to serve, and to end cleanly when asked to), `follow` that it goes on
//! until Ctrl-C. `CONFIGS` is the folder `configs`.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sd_tests::daemon::Options;
use sd_tests::process::eventually;
use sd_tests::programs::{programs, repository};
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox};

/// Bounds a failure alone.
const LIMIT: Duration = Duration::from_secs(60);

/// How a block is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// To its end.
    Script { exit: i32 },
    /// Until it serves, then asked to end.
    Daemon,
    /// Until it has said something, then interrupted.
    Follow,
}

#[derive(Debug)]
struct Block {
    line: usize,
    kind: Kind,
    script: String,
}

fn kind(words: &str) -> Option<Kind> {
    match words {
        "" => Some(Kind::Script { exit: 0 }),
        "daemon" => Some(Kind::Daemon),
        "follow" => Some(Kind::Follow),
        other => Some(Kind::Script { exit: other.strip_prefix("exit=")?.parse().ok()? }),
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut open = false;
    for (index, line) in page.lines().enumerate() {
        if let Some(words) = line.strip_prefix("```sh").filter(|_| !open) {
            let kind = kind(words.trim()).unwrap_or_else(|| panic!("line {}: {words:?} says nothing", index + 1));
            found.push(Block { line: index + 1, kind, script: String::new() });
            open = true;
        } else if line.starts_with("```") {
            open = false;
        } else if let (true, Some(block)) = (open, found.last_mut()) {
            block.script.push_str(line);
            block.script.push('\n');
        }
    }
    found
}

/// A shell that sees the programs under test first, and only this sandbox.
fn shell(sandbox: &Sandbox, script: &str) -> Command {
    let folder = programs().sdctl.parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = sandbox.command("/bin/sh");
    command.args(["-euc", script]).env("PATH", path).env("CONFIGS", repository().join("configs"));
    command
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

/// A daemon's block is one command, which takes the shell's place.
fn start_and_stop(block: &Block) {
    let sandbox = Sandbox::new();
    let socket = sandbox.path().join("run/sdd.sock");
    let mut command = shell(&sandbox, &format!("exec {}", block.script));
    command.env("SDD_LISTEN", format!("unix:{}", socket.display()));
    command.env("SDD_RUNTIME_DIR", sandbox.path().join("run/sdd"));
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let serves = eventually(LIMIT, || {
        let ended = child.try_wait().unwrap().is_some();
        let answer =
            sandbox.sdctl(["status", "--endpoint"]).arg(format!("unix:{}", socket.display())).output().unwrap();
        (ended || answer.status.success()).then_some(!ended)
    });
    if serves == Some(true) {
        signal(&child, Signal::SIGTERM);
    } else {
        let _ = child.kill();
    }
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let status = child.wait().unwrap();
    assert!(serves == Some(true) && status.success(), "line {}: {status}: {log}", block.line);
}

/// What follows says something, and leaves when it is interrupted.
fn follow(sandbox: &Sandbox, endpoint: &str, block: &Block) {
    let mut command = shell(sandbox, &format!("exec {}", block.script));
    let mut child = command.env("SDCTL_ENDPOINT", endpoint).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.next();
    signal(&child, Signal::SIGINT);
    let status = child.wait().unwrap();
    assert!(first.is_some_and(|line| line.is_ok()), "line {}: it says nothing: {status}", block.line);
    assert_eq!(status.code(), Some(130), "line {}", block.line);
}

fn run_page(page: &Path) {
    let blocks = blocks(&fs::read_to_string(page).unwrap());
    assert!(!blocks.is_empty(), "{} has no command", page.display());
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().set("devices.cpu.budget=1GiB"));
    for block in &blocks {
        match block.kind {
            Kind::Script { exit } => {
                let mut command = shell(&sandbox, &block.script);
                let output = command.env("SDCTL_ENDPOINT", &daemon.endpoint).output().unwrap();
                let (page, line) = (page.display(), block.line);
                assert_eq!(output.status.code(), Some(exit), "{page}:{line}\n{}{}", block.script, text(&output));
            }
            Kind::Daemon => start_and_stop(block),
            Kind::Follow => follow(&sandbox, &daemon.endpoint, block),
        }
    }
    assert!(daemon.stop().success());
}

#[test]
fn every_command_of_the_page_on_offloading_works() {
    run_page(&repository().join("docs/offloading.md"));
}

#[test]
fn the_page_on_offloading_has_the_presets_numbers() {
    let page = fs::read_to_string(repository().join("docs/offloading.md")).unwrap();
    let row = |key: &str| -> Vec<String> {
        let start = format!("| `{key}` |");
        let line = page.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no row of {key}"));
        line.trim_matches('|').split('|').skip(1).map(|cell| cell.trim().replace('−', "-")).collect()
    };
    let of = |preset: &str, key: &str| -> String {
        let file = fs::read_to_string(repository().join(format!("configs/{preset}.toml"))).unwrap();
        let start = format!("{key} = ");
        // Values stand there as comments, so that none becomes a user's own before it is changed.
        let value = file.lines().find_map(|line| line.trim_start_matches("# ").strip_prefix(&start));
        let value = value.unwrap_or_else(|| panic!("no {key}"));
        value.trim_matches('"').to_owned()
    };
    for key in ["dit_gpu_blocks", "te_gpu_layers", "offload", "vae_tile_batch", "vae_resident"] {
        let expected = ["auto", "24gb", "16gb", "12gb", "8gb", "minimal"].map(|preset| of(preset, key));
        assert_eq!(row(key), expected, "{key}");
    }
}

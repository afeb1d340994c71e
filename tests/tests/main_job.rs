//! The main job: a picture from a prompt, with nothing running before and nothing left after.

use std::fs;
use std::path::Path;
use std::time::Duration;

use sd_tests::daemon::Options;
use sd_tests::png_text::{self, Picture};
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox};

fn pictures(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

fn read(path: &Path) -> Picture {
    png_text::read(&fs::read(path).unwrap()).unwrap()
}

/// A fresh machine: no daemon, no model, no option. The picture has content, says how it was made, and nothing is left.
#[test]
fn one_call_makes_a_picture_and_leaves_nothing_behind() {
    let sandbox = Sandbox::new();
    let output = sandbox.sdctl(["generate", "a red heart", "--seed", "1"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let found = pictures(&sandbox.out());
    assert_eq!(found.len(), 1, "{found:?}");
    let name = found[0].file_name().unwrap().to_str().unwrap();
    assert!(name.contains("red-heart"), "{name}");
    let picture = read(&found[0]);
    assert_eq!((picture.width, picture.height), (256, 256));
    let centre = &picture.pixels[3 * (128 * 256 + 128)..][..3];
    assert!(centre[0] > 150 && centre[1] < 120, "the heart's centre is red: {centre:?}");
    assert!(picture.pixels[..3].iter().all(|value| *value > 200), "the corner is bright: {:?}", &picture.pixels[..3]);
    let parameters = &picture.text["parameters"];
    assert!(parameters.starts_with("a red heart\n"), "{parameters}");
    assert!(parameters.contains("Seed: 1,") && parameters.contains("Size: 256x256"), "{parameters}");
    sandbox.expect_no_process(Duration::from_secs(3));
    assert_eq!(sandbox.instances(), Vec::<String>::new(), "a lock file is left");
    assert_eq!(fs::read_dir(sandbox.path().join("run")).unwrap().count(), 0, "a socket is left");
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_the_count_the_threads_and_the_daemon() {
    let sandbox = Sandbox::new();
    let run = |name: &str, more: &[&str]| {
        let path = sandbox.out().join(name);
        let mut arguments = vec!["generate", "a green apple", "--steps", "6", "-o"];
        let pattern = path.to_str().unwrap();
        arguments.push(pattern);
        arguments.extend(more);
        arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>()
    };
    sandbox.sdctl_ok(run("alone.png", &["--seed", "7"]));
    let mut one_thread = sandbox.sdctl(run("thread.png", &["--seed", "8"]));
    let output = one_thread.env("SDD_THREADS", "1").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let daemon = Daemon::start(&sandbox, &Options::default());
    let endpoint = ["--endpoint", daemon.endpoint.as_str()];
    sandbox.sdctl_ok(run("two-{index}.png", &[&["--seed", "7", "-n", "2"], &endpoint[..]].concat()));
    sandbox.sdctl_ok(run("warm.png", &[&["--seed", "7"], &endpoint[..]].concat()));
    let pixels = |name: &str| read(&sandbox.out().join(name)).pixels;
    let bytes = |name: &str| fs::read(sandbox.out().join(name)).unwrap();
    let first =
        pictures(&sandbox.out()).into_iter().filter(|path| path.to_string_lossy().contains("two-")).collect::<Vec<_>>();
    assert_eq!(first.len(), 2, "{first:?}");
    assert_eq!(read(&first[0]).pixels, pixels("alone.png"), "count 2, first image, against a call alone");
    assert_eq!(
        read(&first[1]).pixels,
        pixels("thread.png"),
        "count 2, second image on all threads, against a call on one"
    );
    assert_eq!(bytes("warm.png"), bytes("alone.png"), "warm daemon against a private one, file for file");
    assert_ne!(pixels("alone.png"), pixels("thread.png"), "another seed is another picture");
    assert!(daemon.stop().success());
    sandbox.expect_no_process(Duration::from_secs(3));
}

#[test]
fn json_says_what_a_script_needs_and_pictures_are_never_overwritten_silently() {
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default());
    let call = |more: &[&str]| {
        let mut command = sandbox.sdctl(["generate", "pizza", "--steps", "2", "--seed", "3", "--endpoint"]);
        command.arg(&daemon.endpoint).args(more).output().unwrap()
    };
    let output = call(&["--json", "-o", "x.png"]);
    assert!(output.status.success(), "{}", text(&output));
    let lines: Vec<serde_json::Value> =
        String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!lines.is_empty());
    let all = serde_json::Value::Array(lines).to_string();
    assert!(all.contains("x.png") && all.contains("\"seed\":3"), "{all}");
    let before = fs::read(sandbox.out().join("x.png")).unwrap();
    let output = call(&["-o", "x.png"]);
    assert!(!output.status.success(), "an existing file was overwritten");
    assert!(text(&output).contains("--force"), "{}", text(&output));
    assert_eq!(fs::read(sandbox.out().join("x.png")).unwrap(), before);
    assert!(call(&["-o", "x.png", "--force"]).status.success());
    let piped = call(&["-o", "-"]);
    assert!(piped.status.success(), "{}", text(&piped));
    assert_eq!(png_text::read(&piped.stdout).unwrap(), png_text::read(&before).unwrap());
}

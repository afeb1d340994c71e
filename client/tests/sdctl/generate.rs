//! `sdctl generate` and `watch` against a daemon of pretence.

use std::process::Stdio;

use crate::support::{Fake, JOB, World, finish, names, png};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Child;

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn pictures_are_saved_under_sensible_names_and_their_paths_printed() {
    let world = World::new();
    let run = world.run(&["generate", "ok, a red heart!", "-n", "2", "--seed", "7"]).await;
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.out, "ok-a-red-heart-7.png\nok-a-red-heart-8.png\n");
    assert_eq!(world.files(), ["ok-a-red-heart-7.png", "ok-a-red-heart-8.png"]);
    assert_eq!(std::fs::read(world.path("work/ok-a-red-heart-8.png")).unwrap(), png(1));
    assert!(run.err.contains("2 pictures in 2.0 s, seeds 7 to 8: denoise 1.5 s"), "{}", run.err);
    // Again: the taken names are passed over.
    let run = world.run(&["generate", "ok, a red heart!", "--seed", "7", "-q"]).await;
    assert_eq!((run.out.as_str(), run.err.as_str()), ("ok-a-red-heart-7-2.png\n", ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn json_is_one_event_a_line_up_to_the_terminal_one() {
    let world = World::new();
    let run = world.run(&["generate", "ok", "--json", "--sampler", "Euler a", "-o", "x.png"]).await;
    let events = json_lines(&run.out);
    let kinds: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], *kinds.last().unwrap()), ("queued", "succeeded"));
    assert_eq!(events[0]["request"]["sampler"], "euler_a");
    let image = events.iter().find(|event| event["event"] == "image").unwrap();
    assert_eq!((&image["path"], &image["seed"]), (&"x.png".into(), &events[0]["request"]["seed"]));
    assert_eq!(events.last().unwrap()["timings"]["total"], 2.0);
    assert_eq!(world.files(), ["x.png"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_has_its_exit_code_and_one_clear_text() {
    let world = World::new();
    for (prompt, code, part) in [
        ("fail 1", 64, "invalid"),
        ("fail 2", 65, "it broke"),
        ("fail 3", 71, "it broke"),
        ("fail 4", 71, "it broke"),
        ("fail 5", 1, "last lines of the worker:\n  last line"),
        ("fail 6", 1, "in stage denoise"),
        ("fail 7", 1, "it broke"),
        ("fail 8", 69, "it broke"),
        ("fail 9", 70, "it broke"),
        ("refuse", 64, "sdctl: width must be a multiple of 8, is 9\n"),
        ("model", 69, "use one of default"),
        ("vanish", 69, "before its last one"),
        ("cancelled", 1, "by somebody"),
    ] {
        let run = world.run(&["generate", prompt, "--json"]).await;
        assert_eq!(run.code, Some(code), "{prompt}: {run:?}");
        assert!(run.err.contains(part) || part == "invalid", "{prompt}: {}", run.err);
        assert!(!run.err.contains('\u{1b}'), "what steers the terminal is shown, not obeyed: {:?}", run.err);
        let last = json_lines(&run.out).pop().unwrap();
        let expected: &[&str] = match prompt {
            "cancelled" => &["cancelled"],
            p if p.starts_with("fail") => &["failed"],
            _ => &["error"],
        };
        assert!(expected.contains(&last["event"].as_str().unwrap()), "{prompt}: {last}");
    }
    assert!(world.files().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_written_is_told_before_the_job_is_submitted() {
    let world = World::new();
    std::fs::write(world.path("work/x.png"), "mine").unwrap();
    for (arguments, code, part) in [
        (&["-o", "x.png"][..], 73, "--force"),
        (&["-o", "absent/x.png"], 73, "does not exist"),
        (&["-o", "x.jpg"], 64, "PNG"),
        (&["-o", "{sed}"], 64, "{seed}"),
        (&["-o", "-", "-n", "2"], 64, "one picture"),
        (&["-o", "-", "--json"], 64, "stdout"),
        (&["--init-img", "x.png"], 65, "no picture"),
        (&["-m", "./absent"], 69, "./absent"),
        (&["--sampler", "plms"], 64, "dpmpp_2m_sde"),
    ] {
        let line: Vec<&str> = ["generate", "ok"].iter().chain(arguments).copied().collect();
        let run = world.run(&line).await;
        assert_eq!(run.code, Some(code), "{arguments:?}: {run:?}");
        assert!(run.err.contains(part), "{arguments:?}: {}", run.err);
    }
    assert!(world.fake.requests.lock().unwrap().is_empty());
    assert_eq!(std::fs::read(world.path("work/x.png")).unwrap(), b"mine");
    let run = world.run(&["generate", "ok", "-o", "x.png", "--force"]).await;
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(std::fs::read(world.path("work/x.png")).unwrap(), png(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_picture_on_stdout_is_the_file_and_nothing_else() {
    let world = World::new();
    let run = world.run(&["generate", "ok", "-o", "-"]).await;
    assert_eq!((run.code, run.bytes), (Some(0), png(0)));
    assert!(world.files().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_may_come_from_stdin_and_a_picture_from_a_file() {
    let world = World::new();
    std::fs::write(world.path("work/start.png"), png(3)).unwrap();
    let arguments = ["generate", "-", "--init-img", "start.png", "--strength", "0.5", "-o", "{model}-{n:02}"];
    let mut child = world.to_fake(&arguments).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all("ok\nüber\n".as_bytes()).await.unwrap();
    drop(stdin);
    let run = finish(child).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "tiny-01.png\n"), "{run:?}");
    let requests = world.fake.requests.lock().unwrap();
    assert_eq!((requests[0].prompt.as_str(), requests[0].strength), ("ok\nüber", Some(0.5)));
    assert_eq!(requests[0].init_image, png(3));
    assert!(requests[0].seed.is_some());
}

/// Starts a job that does not end by itself, and returns once the daemon has it.
async fn hanging(world: &World, prompt: &str, more: &[&str]) -> Child {
    let mut child = world.to_fake(&["generate", prompt, "--json"]).args(more).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().unwrap();
    assert!(line.contains("\"queued\""), "{line}");
    // The rest goes to nobody, but the pipe stays open as long as the child is looked at.
    child.stdout = Some(lines.into_inner().into_inner());
    child
}

fn interrupt(child: &Child) {
    kill(Pid::from_raw(child.id().unwrap() as i32), Signal::SIGINT).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_cancels_the_job_and_says_so() {
    let world = World::new();
    let child = hanging(&world, "hang", &[]).await;
    interrupt(&child);
    let run = finish(child).await;
    assert_eq!(run.code, Some(130), "{run:?}");
    assert!(run.err.contains("cancelled"), "{run:?}");
    assert_eq!(json_lines(&run.out).pop().unwrap()["event"], "cancelled");
    assert_eq!(*world.fake.cancels.lock().unwrap(), [JOB]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_ctrl_c_leaves_at_once() {
    let world = World::new();
    let mut child = world.to_fake(&["generate", "stubborn", "--verbose"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    while world.fake.requests.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    // The signal may come before the job's first event, which is a withdrawal at once; so it is sent until it is seen.
    interrupt(&child);
    let first = lines.next_line().await.unwrap().unwrap();
    if first.contains("press Ctrl-C again") {
        interrupt(&child);
        let second = lines.next_line().await.unwrap().unwrap();
        assert!(second.contains("left at once"), "{second}");
    } else {
        assert!(first.contains("cancelled"), "{first}");
    }
    child.stderr = Some(lines.into_inner().into_inner());
    assert_eq!(finish(child).await.code, Some(130));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let world = World::new();
    let mut shell = tokio::process::Command::new("sh");
    shell.arg("-c").arg("trap '' HUP; exec \"$@\"").arg("sh").arg(env!("CARGO_BIN_EXE_sdctl"));
    shell.args(["generate", "hang", "--json", "--endpoint"]).arg(format!("unix:{}", world.socket.display()));
    let mut child = shell.current_dir(world.path("work")).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next_line().await.unwrap().unwrap().contains("queued"));
    let process = Pid::from_raw(child.id().unwrap() as i32);
    kill(process, Signal::SIGHUP).unwrap();
    kill(process, Signal::SIGTERM).unwrap();
    // Were both taken, this would be a second interrupt, which leaves without the daemon's last event.
    assert!(lines.next_line().await.unwrap().unwrap().contains("asked to"));
    assert_eq!(child.wait().await.unwrap().code(), Some(130));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_job_goes_on_after_ctrl_c() {
    let world = World::new();
    let child = hanging(&world, "hang", &["--keep"]).await;
    interrupt(&child);
    let run = finish(child).await;
    assert_eq!(run.code, Some(130));
    assert!(run.err.contains("sdctl watch j1"), "{run:?}");
    assert!(world.fake.cancels.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn watching_saves_all_pictures_of_a_job() {
    let world = World::new();
    let run = world.run(&["watch", JOB]).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "ok-then-5.png\nok-then-6.png\n"), "{run:?}");
    let run = world.run(&["watch", JOB, "-o", "same.png"]).await;
    assert_eq!(run.out, "same-1.png\nsame-2.png\n");
    let run = world.run(&["watch", "absent"]).await;
    assert_eq!(run.code, Some(69), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_users_socket_is_found_without_being_named() {
    let world = World::with(Fake::default(), "run/sdd/sdd.sock");
    let run = finish(world.sdctl(&["generate", "ok", "-o", "x"]).spawn().unwrap()).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "x.png\n"), "{run:?}");
    let mut elsewhere = world.sdctl(&["generate", "ok"]);
    let run = finish(elsewhere.env("SDCTL_ENDPOINT", "unix:/nonexistent/x.sock").spawn().unwrap()).await;
    assert_eq!(run.code, Some(69));
    assert!(run.err.contains("/nonexistent/x.sock") && run.err.contains("SDCTL_ENDPOINT"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_daemon_is_passed_over() {
    let fake = Fake { draining: true, ..Fake::default() };
    let world = World::with(fake, "run/sdd/sdd.sock");
    let run = finish(world.sdctl(&["generate", "ok"]).spawn().unwrap()).await;
    // None is there to be started in its place.
    assert_eq!(run.code, Some(69), "{run:?}");
    assert!(run.err.contains("SDCTL_SDD"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_daemon_serves_one_call_and_leaves_nothing() {
    let world = World::new();
    let text = format!(
        "echo unix:{} > /proc/self/fd/$ready; read line < /proc/self/fd/$owner; touch $dir/left-behind; exit 0",
        world.socket.display()
    );
    let sdd = world.stand_in(&text);
    let run = finish(world.sdctl(&["generate", "ok", "-o", "x"]).env("SDCTL_SDD", &sdd).spawn().unwrap()).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "x.png\n"), "{run:?}");
    assert_eq!(names(&world.path("run")), [""; 0]);
    let run = finish(world.sdctl(&["generate", "ok", "--keep"]).env("SDCTL_SDD", &sdd).spawn().unwrap()).await;
    assert_eq!(run.code, Some(64));
    assert!(run.err.contains("start one with `sdd`"), "{run:?}");
    assert_eq!(names(&world.path("run")), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_daemon_that_dies_has_its_last_lines_shown() {
    let world = World::new();
    let text = format!(
        "touch $dir/left-behind; echo out of luck >&2; echo unix:{} > /proc/self/fd/$ready; kill -9 $$",
        world.socket.display()
    );
    let sdd = world.stand_in(&text);
    let run = finish(world.sdctl(&["generate", "vanish"]).env("SDCTL_SDD", &sdd).spawn().unwrap()).await;
    assert_eq!(run.code, Some(69), "{run:?}");
    assert!(run.err.contains("killed by SIGKILL") && run.err.contains("\n  out of luck"), "{run:?}");
    assert_eq!(names(&world.path("run")), [""; 0]);
    let sdd = world.stand_in("echo budget is no number >&2; exit 64");
    let run = finish(world.sdctl(&["generate", "ok"]).env("SDCTL_SDD", &sdd).spawn().unwrap()).await;
    assert_eq!(run.code, Some(64), "{run:?}");
    assert!(run.err.contains("budget is no number"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_that_holds_the_device_is_joined() {
    let world = World::new();
    let holder = sd_proto::instance::Holder {
        pid: std::process::id(),
        uid: nix::unistd::getuid().as_raw(),
        endpoint: format!("unix:{}", world.socket.display()),
        runtime_dir: world.path("run"),
        private: true,
    };
    let _lock = sd_proto::instance::DeviceLock::acquire(&world.path("locks"), "cpu", &holder).unwrap();
    let sdd = world.stand_in("echo device cpu is held by another >&2; exit 75");
    let run = finish(world.sdctl(&["generate", "ok", "-o", "x", "-v"]).env("SDCTL_SDD", &sdd).spawn().unwrap()).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "x.png\n"), "{run:?}");
    assert!(run.err.contains("joined the daemon at"), "{run:?}");
    // Asking costs no start.
    let run = finish(world.sdctl(&["ps", "--json"]).spawn().unwrap()).await;
    assert_eq!(run.code, Some(0), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_device_that_cannot_be_joined_is_waited_for() {
    let world = World::new();
    let holder = sd_proto::instance::Holder { pid: 1, endpoint: "unix:/nonexistent/x".into(), ..Default::default() };
    let lock = sd_proto::instance::DeviceLock::acquire(&world.path("locks"), "cpu", &holder).unwrap();
    // The stand-in starts once the lock is gone, which it sees by a file.
    let free = world.path("free");
    let text = format!(
        "if [ ! -e {} ]; then echo device cpu is held by sdd with pid 1 >&2; exit 75; fi; \
         echo unix:{} > /proc/self/fd/$ready; read line < /proc/self/fd/$owner; exit 0",
        free.display(),
        world.socket.display()
    );
    let sdd = world.stand_in(&text);
    let mut child = world.sdctl(&["generate", "ok", "-o", "x"]).env("SDCTL_SDD", &sdd).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().unwrap();
    assert!(line.contains("held by sdd with pid 1; waiting for its end"), "{line}");
    std::fs::write(&free, "").unwrap();
    drop(lock);
    child.stderr = Some(lines.into_inner().into_inner());
    let run = finish(child).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "x.png\n"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_goes_away_before_it_takes_the_job_is_looked_for_anew() {
    let world = World::with(Fake::default(), "run/sdd/sdd.sock");
    let run = finish(world.sdctl(&["generate", "later", "-o", "x"]).spawn().unwrap()).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "x.png\n"), "{run:?}");
    assert!(run.err.contains("looking for another"), "{run:?}");
    // One that was named is not replaced.
    let world = World::new();
    let run = world.run(&["generate", "later"]).await;
    assert_eq!(run.code, Some(69), "{run:?}");
    assert!(run.err.contains("the daemon is ending"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_is_reached_over_tcp_and_a_silent_one_is_told() {
    let world = World::new();
    let address = world.tcp().await;
    let run = finish(world.sdctl(&["generate", "ok", "-o", "x", "--endpoint", &address]).spawn().unwrap()).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), "x.png\n"), "{run:?}");
    // Accepted by the system, and nobody reads: what a stopped process looks like.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let run = finish(world.sdctl(&["status", "--endpoint", &address]).spawn().unwrap()).await;
    assert_eq!(run.code, Some(69), "{run:?}");
    assert!(run.err.contains("did not answer status within 5 s"), "{run:?}");
}

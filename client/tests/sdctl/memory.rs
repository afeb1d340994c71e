//! The commands about memory, against a daemon of pretence: what explains, and what operators do.

use std::process::Stdio;

use sd_client::proto::{DecisionKind, OffloadMode};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::sync::mpsc;

use crate::support::{Fake, JOB, World, decision, finish, lease};

#[tokio::test(flavor = "multi_thread")]
async fn what_explains_is_text_for_people_and_json_for_programs() {
    let world = World::new();
    for (arguments, parts, pointer, value) in [
        (&["why"][..], &["job j1 succeeded"][..], "/job/id", JOB.into()),
        (
            &["why", JOB][..],
            &["job j1 succeeded", "taken back for it 1 time", "must retire", "1 stage's result was remembered"][..],
            "/decisions/1/kind",
            Value::from("takes_back"),
        ),
        (
            &["fit", "tiny"],
            &["It fits in mode none", "1.00 GiB", "7.00 MiB to 11.0 MiB"],
            "/stages/0/weights_floor_bytes",
            (2 << 20).into(),
        ),
        (&["config", "show"], &["KEY", "memory.offload", "preset 16gb"], "/1/origin", "preset 16gb".into()),
        (&["quarantine"], &["vae of tiny is held back", "3 deaths", "SIGSEGV", "last words"], "/0/deaths", 3.into()),
        (&["quarantine", "list"], &["vae of tiny"], "/0/stage", "vae".into()),
    ] {
        let run = world.run(arguments).await;
        assert_eq!(run.code, Some(0), "{arguments:?}: {run:?}");
        for part in parts {
            assert!(run.out.contains(part), "{arguments:?} lacks {part:?}: {}", run.out);
        }
        let with_json: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        let run = world.run(&with_json).await;
        let parsed: Value =
            serde_json::from_str(&run.out).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {}", run.out));
        assert_eq!(parsed.pointer(pointer), Some(&value), "{arguments:?}: {parsed:#}");
    }
    let run = world.run(&["why", "nonsense"]).await;
    assert_eq!(run.code, Some(69), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fit_exits_71_where_it_does_not_and_says_what_would() {
    let world = World::new();
    let line = ["fit", "tiny", "-W", "1024", "-H", "1024", "--cfg", "1", "--offload-mode", "none", "--vae-tiling"];
    let run = world.run(&line).await;
    assert_eq!(run.code, Some(71), "{run:?}");
    for part in
        ["does not fit in mode none", "--offload-mode layer_streaming", "512x512", "decode in tiles", "7.00 MiB to"]
    {
        assert!(run.out.contains(part), "{part}: {}", run.out);
    }
    let asked = world.fake.fits.lock().unwrap().pop().unwrap();
    assert_eq!((asked.width, asked.height, asked.guidance_scale), (1024, 1024, Some(1.0)));
    let memory = asked.memory.unwrap();
    assert_eq!((memory.mode(), memory.vae_tiling), (OffloadMode::None, Some(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn generate_asks_for_memory_only_where_the_user_does() {
    let world = World::new();
    world.run(&["generate", "ok", "--seed", "1"]).await;
    world.run(&["generate", "ok", "--seed", "2", "--offload-mode", "aggressive", "--no-vae-tiling"]).await;
    let requests = world.fake.requests.lock().unwrap().clone();
    assert_eq!(requests[0].memory, None);
    let memory = requests[1].memory.unwrap();
    assert_eq!((memory.mode(), memory.vae_tiling), (OffloadMode::Aggressive, Some(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_commands_ask_what_they_say_and_tell_what_was_done() {
    let world = World::new();
    for (arguments, asked, said) in [
        (&["load", "tiny"][..], &["load tiny []"][..], "vae"),
        (
            &["load", "tiny", "-s", "text", "-s", "vae", "--pin"],
            &["pin tiny true", "load tiny [\"text\", \"vae\"]"],
            "2.00 MiB",
        ),
        (
            &["unload", "tiny", "--stage", "diffusion"],
            &["unload tiny [\"diffusion\"]"],
            "2 processes, 5.00 MiB are free",
        ),
        (&["pin", "tiny"], &["pin tiny true"], "tiny is pinned"),
        (&["unpin", "tiny"], &["pin tiny false"], "may be taken off"),
        (&["release", "cpu"], &["release cpu None"], "1 process, 7.00 MiB are free"),
        (&["release", "cpu", "--for", "10m"], &["release cpu Some(600)"], "7.00 MiB"),
        (&["quarantine", "clear"], &["clear \"\" \"\""], "1 stage"),
        (&["quarantine", "clear", "tiny", "vae"], &["clear \"tiny\" \"vae\""], "1 stage"),
    ] {
        let run = world.run(arguments).await;
        assert_eq!(run.code, Some(0), "{arguments:?}: {run:?}");
        assert!(run.out.contains(said), "{arguments:?}: {}", run.out);
        assert_eq!(std::mem::take(&mut *world.fake.operated.lock().unwrap()), asked, "{arguments:?}");
        let quiet: Vec<&str> = arguments.iter().copied().chain(["--quiet"]).collect();
        let run = world.run(&quiet).await;
        assert_eq!((run.code, run.out.as_str(), run.err.as_str()), (Some(0), "", ""), "{quiet:?}");
        world.fake.operated.lock().unwrap().clear();
        let with_json: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        let run = world.run(&with_json).await;
        assert!(serde_json::from_str::<Value>(&run.out).is_ok(), "{arguments:?}: {}", run.out);
        world.fake.operated.lock().unwrap().clear();
    }
    let run = world.run(&["release", "cpu", "--for", "10m"]).await;
    assert!(run.err.contains("nothing is granted on cpu for 10 min"), "{run:?}");
    let run = world.run(&["unload", "absent"]).await;
    assert!(run.code == Some(0) && run.err.contains("nothing of absent was on a device"), "{run:?}");
    assert_eq!(world.run(&["pin", "forbidden"]).await.code, Some(77));
    assert_eq!(world.run(&["load", "huge"]).await.code, Some(71));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_told_as_they_come_until_the_daemon_ends() {
    let (news, to_come) = mpsc::channel(4);
    let world = World::with(Fake { news: Some(to_come).into(), ..Fake::default() }, "fake.sock");
    let run = world.run(&["events"]).await;
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.out, "2027-01-15T08:00:00.001Z  j1            granted      vae of tiny was granted 3.0 MiB\n");

    let mut child = world.to_fake(&["events", "--follow", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || serde_json::from_str::<Value>(&lines.next_line().await.unwrap().unwrap()).unwrap();
    assert_eq!(next().await["kind"], "granted");
    news.send(decision(2, DecisionKind::Killed, "vae of tiny is killed")).await.unwrap();
    let told = next().await;
    assert_eq!((&told["kind"], &told["sequence"], &told["job_id"]), (&"killed".into(), &2.into(), &JOB.into()));
    drop(news);
    let run = finish(child).await;
    assert!(run.code == Some(0) && run.err.contains("the daemon has ended"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn watched_leases_are_lines_of_changes_where_nobody_can_redraw() {
    let (news, to_come) = mpsc::channel(4);
    let answers =
        vec![vec![lease(1, 1 << 20)], vec![lease(1, 1 << 20)], vec![lease(1, 2 << 20), lease(2, 1 << 20)], vec![]];
    let fake = Fake { news: Some(to_come).into(), leases: answers.into(), ..Fake::default() };
    let world = World::with(fake, "fake.sock");
    let mut child = world.to_fake(&["leases", "--watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut told = Vec::new();
    for _ in 0..5 {
        told.push(lines.next_line().await.unwrap().unwrap());
    }
    let starts: Vec<&str> = told.iter().map(|line| line.split(" (").next().unwrap()).collect();
    assert_eq!(
        starts,
        ["new      lease 1", "changed  lease 1", "new      lease 2", "gone     lease 1", "gone     lease 2"],
        "{told:#?}"
    );
    assert!(told[1].ends_with("1.00 MiB to 2.00 MiB granted"), "{told:#?}");
    drop(news);
    let run = finish(child).await;
    assert_eq!((run.code, run.err.as_str()), (Some(0), "sdctl: the daemon has ended\n"));
}

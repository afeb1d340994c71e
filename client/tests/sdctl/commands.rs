//! The commands that ask and tell, against a daemon of pretence.

use crate::support::{JOB, World, finish};
use serde_json::Value;

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_tables_for_people_and_json_for_programs() {
    let world = World::new();
    for (arguments, heading, cell, pointer, value) in [
        (&["models"][..], "NAME", "tiny (default)", "/0/family", Value::from("sd1")),
        (&["jobs", "--all"], "JOB", "2/2", "/0/request/seed", 5.into()),
        (&["ps"], "WORKER", "1.00 MiB", "/0/state", "idle".into()),
        (&["leases"], "LEASE", "3.00 MiB", "/0/purpose", "weights".into()),
        (&["inspect", "tiny"], "MODEL", "CLIPTextModel", "/components/0/stage", "text".into()),
        (&["status"], "DEVICE", "3.00 GiB", "/devices/0/id", "cpu".into()),
        (&["cancel", JOB], "", "job j1 is cancelled", "/state", "cancelled".into()),
        (&["drain"], "", "2 jobs finished, 1 cancelled", "/jobs_finished", 2.into()),
    ] {
        let run = world.run(arguments).await;
        assert_eq!(run.code, Some(0), "{arguments:?}: {run:?}");
        assert!(run.out.contains(heading) && run.out.contains(cell), "{arguments:?}: {}", run.out);
        let with_json: Vec<&str> = arguments.iter().copied().chain(["--json"]).collect();
        let run = world.run(&with_json).await;
        let parsed: Value =
            serde_json::from_str(&run.out).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {}", run.out));
        assert_eq!(parsed.pointer(pointer), Some(&value), "{arguments:?}: {parsed:#}");
    }
    let run = world.run(&["jobs"]).await;
    assert_eq!((run.code, run.out.as_str()), (Some(0), ""));
    assert!(run.err.contains("--all"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_a_running_daemon_says_how_to_start_one() {
    let world = World::new();
    for command in ["jobs", "ps", "leases", "status"] {
        let run = finish(world.sdctl(&[command]).spawn().unwrap()).await;
        assert_eq!(run.code, Some(69), "{command}: {run:?}");
        assert!(run.err.contains("no daemon runs") && run.err.contains("`sdd`"), "{run:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_programs_daemon_and_leftovers() {
    let world = World::new();
    let sdd = world.stand_in("exit 1");
    std::fs::write(world.path("locks/instance-0123456789abcdef.lock"), "").unwrap();
    let doctor = |more: &'static [&'static str]| {
        let mut command = world.to_fake(&["doctor", "--json"]);
        finish(command.args(more).env("SDCTL_SDD", &sdd).spawn().unwrap())
    };
    let level = |run: &crate::support::Run, name: &str| {
        let checks: Vec<Value> = serde_json::from_str(&run.out).unwrap();
        let check =
            checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}: {}", run.out));
        check["level"].as_str().unwrap().to_owned()
    };
    let run = doctor(&[]).await;
    for name in ["sdd", "daemon", "lock folder", "cache folder"] {
        assert_eq!(level(&run, name), "ok", "{name}: {}", run.out);
    }
    assert_eq!(level(&run, "leftovers"), "warn");
    let run = doctor(&["--sweep"]).await;
    assert_eq!(level(&run, "swept"), "ok");
    assert_eq!(crate::support::names(&world.path("locks")), [""; 0]);
    // A daemon that is named and not there is a failure.
    let mut absent = world.sdctl(&["doctor", "--endpoint", "unix:/nonexistent/x.sock"]);
    let run = finish(absent.env("SDCTL_SDD", &sdd).spawn().unwrap()).await;
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.out.contains("fail  daemon"), "{run:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn help_teaches_and_completions_are_scripts() {
    let world = World::new();
    let run = finish(world.sdctl(&["--help"]).spawn().unwrap()).await;
    assert_eq!(run.code, Some(0));
    for part in ["generate", "doctor", "Examples:", "SDCTL_ENDPOINT", "Exit codes:"] {
        assert!(run.out.contains(part), "{part}: {}", run.out);
    }
    for (shell, part) in [("bash", "_sdctl()"), ("zsh", "#compdef sdctl"), ("fish", "complete -c sdctl")] {
        let run = finish(world.sdctl(&["completions", shell]).spawn().unwrap()).await;
        assert!(run.code == Some(0) && run.out.contains(part), "{shell}");
    }
    let run = finish(world.sdctl(&["generate"]).spawn().unwrap()).await;
    assert_eq!(run.code, Some(64), "{run:?}");
}

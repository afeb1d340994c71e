//! Jobs survive the death of any stage: a fault of every kind at a seeded random moment, with real processes. What should
//! finish has the undisturbed picture, every job has exactly one end, and afterwards nothing is left.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use sd_proto::v1::{
    CancelRequest, ClearQuarantineRequest, FailureReason, ImageRequest, JobEvent, JobState, ListQuarantineRequest,
    ProgressPhase, Quarantined, Sampler, Stage, StageTiming, job_event::Event,
};
use sd_tests::calls::{Calls, Ran};
use sd_tests::daemon::Options;
use sd_tests::process::{Process, eventually};
use sd_tests::random::Random;
use sd_tests::{Daemon, Sandbox, png_text};
use tokio::runtime::Runtime;

/// Bound of any one job here, on a loaded machine.
const LONG: Duration = Duration::from_secs(60);
/// Workers by their stages.
const STAGES: [&str; 3] = ["text", "diffusion", "vae"];

/// A daemon whose workers misbehave as a file says.
struct World {
    runtime: Runtime,
    calls: Calls,
    daemon: Daemon,
    sandbox: Sandbox,
    instances: Vec<String>,
}

fn image() -> ImageRequest {
    ImageRequest {
        prompt: "a robot".into(),
        seed: Some(5),
        width: 128,
        height: 128,
        steps: Some(8),
        ..ImageRequest::default()
    }
}

impl World {
    fn new(more: &[&str]) -> Self {
        let sandbox = Sandbox::new();
        let plan = format!("@{}", sandbox.path().join("fault").display());
        let options = Options::default().fault(&plan).set("deadlines.pulse=1s").set("deadlines.handshake=3s");
        let options = more.iter().fold(options, |options, value| options.set(*value));
        let daemon = Daemon::start(&sandbox, &options);
        let runtime = Runtime::new().unwrap();
        let calls = runtime.block_on(Calls::connect(&daemon));
        let instances = sandbox.instances();
        Self { runtime, calls, daemon, sandbox, instances }
    }

    /// Without remembered conditioning: each job encodes its prompt.
    fn forgetful() -> Self {
        Self::new(&["cache.conditioning=0"])
    }

    /// How workers misbehave that are started from now on.
    fn fault(&self, plan: &str) {
        let (path, new) = (self.sandbox.path().join("fault"), self.sandbox.path().join("fault.new"));
        std::fs::write(&new, plan).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    fn workers(&self, stage: &str) -> Vec<Process> {
        let mut workers = self.sandbox.processes();
        workers.retain(|process| {
            matches!(process.program(), "sd-worker" | "faulty-worker") && process.argument("--stage") == Some(stage)
        });
        workers
    }

    /// Ends the idle workers of a stage, so that the next task starts a new one.
    fn end_idle(&self, stage: &str) {
        let before = self.workers(stage);
        before.iter().for_each(|worker| worker.signal(Signal::SIGKILL));
        let gone = || (!self.workers(stage).iter().any(|living| before.contains(living))).then_some(());
        assert!(eventually(LONG, gone).is_some(), "killed {stage} workers are still there");
    }

    /// Runs a job; checks that it has exactly one end, in bounded time.
    fn run(&self, image: ImageRequest, on_event: impl FnMut(&JobEvent)) -> Ran {
        let began = Instant::now();
        let ran = self.runtime.block_on(self.calls.run(image, on_event)).expect("the daemon takes the job");
        assert!(began.elapsed() < LONG, "a job took {:?}", began.elapsed());
        let ends = ran.events.iter().filter(|event| is_end(event)).count();
        assert_eq!((ends, ran.events.last().is_some_and(is_end)), (1, true), "{:?}", ran.events);
        ran
    }

    fn quarantined(&self) -> Vec<Quarantined> {
        let mut control = self.calls.control.clone();
        let listed = self.runtime.block_on(control.list_quarantine(ListQuarantineRequest {}));
        listed.expect("an answer").into_inner().entries
    }

    /// Ends the daemon; checks that nothing is left.
    fn end(self) {
        let Self { calls, daemon, sandbox, instances, runtime } = self;
        drop((calls, runtime));
        assert!(daemon.stop().success());
        sandbox.expect_no_process(Duration::from_secs(3));
        assert_eq!(Sandbox::segments(&instances), Vec::<String>::new(), "segments are left");
        assert_eq!(sandbox.instances(), Vec::<String>::new(), "a lock is left");
    }
}

fn is_end(event: &JobEvent) -> bool {
    matches!(event.event, Some(Event::Succeeded(_) | Event::Failed(_) | Event::Cancelled(_)))
}

fn timings(ran: &Ran) -> Vec<StageTiming> {
    let timing = |event: &JobEvent| match &event.event {
        Some(Event::StageFinished(finished)) => finished.timing,
        _ => None,
    };
    ran.events.iter().filter_map(timing).collect()
}

fn retries(ran: &Ran) -> u32 {
    timings(ran).iter().map(|timing| timing.retries).sum()
}

fn resumed_at(ran: &Ran) -> u32 {
    timings(ran).iter().map(|timing| timing.resumed_at).max().unwrap_or(0)
}

fn notes(ran: &Ran) -> Vec<String> {
    let text = |event: &'_ JobEvent| match &event.event {
        Some(Event::Note(note)) => Some(note.text.clone()),
        _ => None,
    };
    ran.events.iter().filter_map(text).collect()
}

fn failure(ran: &Ran) -> (FailureReason, &str, &[String]) {
    match ran.events.last().and_then(|event| event.event.as_ref()) {
        Some(Event::Failed(failure)) => (failure.reason(), &failure.message, &failure.stderr),
        other => panic!("the job did not fail: {other:?}"),
    }
}

/// A step of the denoiser that an event tells of; 0: none.
fn step(event: &JobEvent) -> u64 {
    match &event.event {
        Some(Event::Progress(progress))
            if progress.stage() == Stage::Denoise && progress.phase() == ProgressPhase::Computing =>
        {
            progress.done
        }
        _ => 0,
    }
}

#[test]
fn a_stage_that_is_lost_once_is_run_again_and_the_picture_is_the_undisturbed_one() {
    let mut random = Random::from_environment("lost once");
    let world = World::forgetful();
    let undisturbed = world.run(image(), |_| {});
    assert_eq!((undisturbed.end().as_str(), retries(&undisturbed)), ("succeeded", 0));
    let mut faults = Vec::new();
    for stage in STAGES {
        for fault in ["abort", "exit-zero", "out-of-memory"] {
            faults.push((stage, fault));
        }
    }
    let any = |random: &mut Random| STAGES[random.below(3) as usize];
    for fault in ["lying-shape", "lying-writer", "garbage", "unsealed", "frozen", "silent", "exit-memory"] {
        faults.push((any(&mut random), fault));
    }
    faults.push(("diffusion", "lying-checkpoint"));
    for (stage, fault) in faults {
        let what = format!("{stage}:{fault}:1");
        world.end_idle(stage);
        world.fault(&what);
        let ran = world.run(image(), |_| {});
        assert_eq!(ran.end(), "succeeded", "{what}");
        assert_eq!(ran.pictures, undisturbed.pictures, "{what}");
        assert_eq!(retries(&ran), 1, "{what}: {:?}", timings(&ran));
        let told = notes(&ran).iter().filter(|note| note.contains("the stage is run")).count();
        assert_eq!(told, 1, "{what}: {:?}", notes(&ran));
        let dropped = notes(&ran).iter().filter(|note| note.contains("was dropped")).count();
        assert_eq!(dropped, if fault == "lying-checkpoint" { 2 } else { 0 }, "{what}: {:?}", notes(&ran));
        assert_eq!(resumed_at(&ran), 0, "{what}: nothing was there to go on from");
    }
    world.end();
}

#[test]
fn a_denoiser_that_is_killed_goes_on_at_its_step_with_the_identical_picture() {
    let mut random = Random::from_environment("killed denoisers");
    let world = World::forgetful();
    // Every sampler is interrupted at every step in the engine's own tests; here the stochastic ones and one with a memory.
    let (mut resumed, samplers) = (0, [Sampler::EulerAncestral, Sampler::Dpmpp2mSde, Sampler::Unipc]);
    for sampler in samplers {
        let image = || ImageRequest { sampler: sampler as i32, steps: Some(30), ..image() };
        let undisturbed = world.run(image(), |_| {});
        assert_eq!(undisturbed.end(), "succeeded");
        let (at, mut killed) = (1 + random.below(12), false);
        let ran = world.run(image(), |event| {
            if !killed && step(event) >= at {
                killed = true;
                world.workers("diffusion").iter().for_each(|worker| worker.signal(Signal::SIGKILL));
            }
        });
        assert_eq!(ran.end(), "succeeded", "{sampler:?} killed at step {at}");
        assert_eq!(ran.pictures, undisturbed.pictures, "{sampler:?} killed at step {at}");
        // A machine that stood still may have let it finish before the signal came.
        if retries(&ran) > 0 {
            resumed += 1;
            assert!(u64::from(resumed_at(&ran)) >= at, "{sampler:?} killed at {at} went on at {}", resumed_at(&ran));
        }
    }
    assert!(resumed > 0, "no signal came in time");
    world.end();
}

#[test]
fn a_worker_that_is_killed_or_frozen_at_any_moment_costs_no_job() {
    let mut random = Random::from_environment("killed or frozen");
    let world = World::forgetful();
    let undisturbed = world.run(image(), |_| {});
    for stage in STAGES {
        for signal in [Signal::SIGKILL, Signal::SIGKILL, Signal::SIGSTOP] {
            STAGES.iter().for_each(|stage| world.end_idle(stage));
            let pause = Duration::from_micros(random.below(300_000));
            let ran = std::thread::scope(|scope| {
                let hit = scope.spawn(|| {
                    let workers = || Some(world.workers(stage)).filter(|workers| !workers.is_empty());
                    let workers = eventually(LONG, workers).expect("a worker of the stage starts");
                    std::thread::sleep(pause);
                    workers.iter().for_each(|worker| worker.signal(signal));
                });
                let ran = world.run(image(), |_| {});
                hit.join().unwrap();
                ran
            });
            assert_eq!(ran.end(), "succeeded", "{signal} of {stage} after {pause:?}");
            assert_eq!(ran.pictures, undisturbed.pictures, "{signal} of {stage} after {pause:?}");
        }
    }
    // Whoever was hit while idle is found out by the next call at the latest.
    assert_eq!(world.run(image(), |_| {}).pictures, undisturbed.pictures);
    world.end();
}

#[test]
fn a_cancelled_or_abandoned_job_ends_at_every_stage_in_bounded_time_and_nothing_is_retried() {
    let world = World::new(&["cache.conditioning=0", "deadlines.cancel=500ms"]);
    // An initial image has the autoencoder work before the denoiser.
    let picture = world.run(image(), |_| {}).pictures.remove(0);
    let from_image = ImageRequest { init_image: picture.clone(), ..image() };
    for (worker, stage, request) in [
        ("text", Stage::Encode, image()),
        ("vae", Stage::VaeEncode, from_image),
        ("diffusion", Stage::Denoise, image()),
        ("vae", Stage::Decode, image()),
    ] {
        let begun =
            |event: &JobEvent| matches!(&event.event, Some(Event::StageStarted(started)) if started.stage() == stage);
        // Somebody else cancels it.
        world.end_idle(worker);
        world.fault(&format!("{worker}:deaf:1"));
        let mut asked = None;
        let ran = world.run(request.clone(), |event| {
            if begun(event) && asked.is_none() {
                asked = Some(Instant::now());
                let (job_id, mut generation) = (event.job_id.clone(), world.calls.generation.clone());
                world.runtime.spawn(async move { generation.cancel(CancelRequest { job_id }).await });
            }
        });
        let took = asked.expect("the stage began").elapsed();
        assert!(ran.end().starts_with("cancelled"), "{stage:?}: {}", ran.end());
        assert!(took < Duration::from_secs(10), "{stage:?}: cancelled after {took:?}");
        assert!(notes(&ran).iter().all(|note| !note.contains("the stage is run")), "{stage:?}: {:?}", notes(&ran));

        // Its client goes away.
        world.end_idle(worker);
        world.fault(&format!("{worker}:deaf:1"));
        let mut job = String::new();
        let leave = |event: &JobEvent| {
            job.clone_from(&event.job_id);
            begun(event)
        };
        let ended = world.runtime.block_on(world.calls.run_until(request, leave)).expect("the job is taken");
        assert!(ended.is_none(), "{stage:?}: the job ended before its client could leave");
        let left = Instant::now();
        let ended = eventually(LONG, || {
            let job = world.runtime.block_on(world.calls.job(&job)).expect("the job is known");
            job.finished.is_some().then_some(job)
        });
        assert_eq!(ended.expect("the job ends").state(), JobState::Cancelled, "{stage:?}");
        assert!(left.elapsed() < Duration::from_secs(10), "{stage:?}: ended after {:?}", left.elapsed());
    }
    world.fault("");
    assert_eq!(world.run(image(), |_| {}).pictures, [picture]);
    assert_eq!(world.quarantined(), [], "kills by decision do not count");
    world.end();
}

#[test]
fn a_stage_whose_workers_die_again_and_again_is_quarantined_until_it_is_cleared() {
    let world = World::forgetful();
    let undisturbed = world.run(image(), |_| {});
    for stage in STAGES {
        world.end_idle(stage);
        world.fault(&format!("{stage}:abort"));
        let first = world.run(image(), |_| {});
        let (reason, message, stderr) = failure(&first);
        assert_eq!(reason, FailureReason::WorkerDied, "{stage}");
        assert!(message.contains("SIGABRT") && message.contains("sdctl quarantine clear"), "{stage}: {message}");
        assert!(stderr.iter().any(|line| line.contains("aborts on purpose")), "{stage}: {stderr:?}");
        let told = notes(&first).iter().filter(|note| note.contains("the stage is run again")).count();
        assert_eq!(told, 2, "{stage}: three deaths, two retries: {:?}", notes(&first));

        let second = world.run(image(), |_| {});
        let (reason, message, _) = failure(&second);
        assert!(reason == FailureReason::WorkerDied && message.contains("quarantined"), "{stage}: {message}");
        assert!(world.workers(stage).is_empty(), "{stage}: a worker was started all the same");

        let listed = world.quarantined();
        let entries: Vec<_> = listed.iter().map(|e| (e.model.as_str(), e.stage.as_str(), e.deaths)).collect();
        assert_eq!(entries, [("default", stage, 3)]);
        world.fault("");
        let clear = ClearQuarantineRequest { model: "default".into(), stage: stage.into() };
        let cleared = world.runtime.block_on(world.calls.control.clone().clear_quarantine(clear));
        assert_eq!(cleared.unwrap().into_inner().cleared, 1);
        assert_eq!(world.run(image(), |_| {}).pictures, undisturbed.pictures, "{stage}");
    }
    world.end();
}

#[test]
fn a_lack_of_memory_hurts_one_job_and_ends_with_advice() {
    let world = World::forgetful();
    // A picture that is decoded in tiles is another one, and says so.
    let wide = || ImageRequest { width: 256, steps: Some(2), ..image() };
    let whole = world.run(wide(), |_| {});
    world.end_idle("vae");
    world.fault("vae:exit-memory:1");
    let tiled = world.run(wide(), |_| {});
    assert_eq!(retries(&tiled), 1, "{:?}", timings(&tiled));
    let Some(Event::Succeeded(succeeded)) = tiled.events.last().and_then(|event| event.event.clone()) else {
        panic!("{}", tiled.end())
    };
    assert!(succeeded.degraded.contains("tiles"), "{:?}", succeeded.degraded);
    let record = |ran: &Ran| -> serde_json::Value {
        serde_json::from_str(&png_text::read(&ran.pictures[0]).unwrap().text["sd"]).unwrap()
    };
    assert_eq!(record(&tiled)["degraded"].as_str(), Some(succeeded.degraded.as_str()));
    assert!(record(&whole).get("degraded").is_none());
    for (stage, fault) in [("diffusion", "out-of-memory"), ("vae", "exit-memory")] {
        world.end_idle(stage);
        world.fault(&format!("{stage}:{fault}:2"));
        let ran = world.run(image(), |_| {});
        let (reason, message, _) = failure(&ran);
        assert_eq!(reason, FailureReason::OutOfMemory, "{stage}: {message}");
        assert!(message.contains("smaller picture"), "{stage}: {message}");
        // That counts against no stage.
        assert_eq!(world.run(image(), |_| {}).end(), "succeeded", "{stage}");
    }
    world.end();
}

#[test]
fn the_same_prompt_again_runs_no_text_encoder_and_gives_the_same_picture() {
    let world = World::new(&[]);
    let first = world.run(image(), |_| {});
    world.end_idle("text");
    let again = world.run(image(), |_| {});
    assert_eq!(again.pictures, first.pictures);
    let cached = |ran: &Ran| timings(ran).iter().map(|timing| timing.cached).collect::<Vec<_>>();
    assert_eq!((cached(&first), cached(&again)), (vec![false; 3], vec![true, false, false]));
    assert!(world.workers("text").is_empty(), "a text encoder was started");
    let other = world.run(ImageRequest { prompt: "pizza".into(), ..image() }, |_| {});
    assert_eq!(cached(&other), [false; 3]);
    let larger = world.run(ImageRequest { width: 192, seed: Some(9), steps: Some(3), ..image() }, |_| {});
    assert_eq!(cached(&larger), [true, false, false], "the size decides nothing of it");
    world.end();
}

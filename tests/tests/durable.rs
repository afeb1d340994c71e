//! Accepted jobs outlive their daemon: one that is killed at a random moment, and one that is told to end in the middle of a job.
//! Every job ends with the picture that an undisturbed daemon makes.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::Signal;
use sd_proto::v1::job_event::Event;
use sd_proto::v1::{
    FailureReason, ImageRequest, JobEvent, ListRequest, Stage, StageTiming, SubmitRequest, WatchRequest,
};
use sd_tests::calls::{Calls, Ran};
use sd_tests::daemon::Options;
use sd_tests::random::Random;
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox, png_text};
use tokio::sync::mpsc;

/// Long enough for any end here on a loaded machine; only a failure takes it.
const LONG: Duration = Duration::from_secs(60);

fn request(seed: u64, steps: u32) -> ImageRequest {
    ImageRequest {
        prompt: "a red heart".into(),
        width: 64,
        height: 64,
        steps: Some(steps),
        seed: Some(seed),
        ..ImageRequest::default()
    }
}

fn pixels(png: &[u8]) -> Vec<u8> {
    png_text::read(png).expect("a picture").pixels
}

async fn submit(calls: &Calls, image: ImageRequest) -> String {
    let submitted = calls.generation.clone().submit(SubmitRequest { image: Some(image) }).await;
    submitted.expect("the daemon takes it").into_inner().job_id
}

/// A job's events until its end or that of its daemon; `None` where the daemon does not know it.
async fn watch(calls: &Calls, job: &str, mut on_event: impl FnMut(&JobEvent)) -> Option<Ran> {
    let request = WatchRequest { job_id: job.into(), after_sequence: 0 };
    let mut stream = calls.generation.clone().watch(request).await.ok()?.into_inner();
    let mut ran = Ran { events: Vec::new(), pictures: Vec::new() };
    while let Ok(Some(response)) = stream.message().await {
        let Some(event) = response.event else { continue };
        on_event(&event);
        if let Some(Event::Image(image)) = &event.event {
            ran.pictures.push(image.png.clone());
        }
        ran.events.push(event);
    }
    Some(ran)
}

/// Ids of the jobs that lie in the store.
fn recorded(sandbox: &Sandbox) -> Vec<String> {
    let entries = std::fs::read_dir(sandbox.path().join("state/sdd/jobs")).expect("the store").flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.strip_suffix(".job").map(str::to_owned)).collect()
}

async fn listed(calls: &Calls) -> Vec<String> {
    let list = calls.generation.clone().list(ListRequest { active_only: true, limit: 0 }).await.unwrap().into_inner();
    list.jobs.into_iter().rev().map(|job| job.id).collect()
}

fn notes(ran: &Ran) -> String {
    let note = |event: &JobEvent| match &event.event {
        Some(Event::Note(note)) => Some(note.text.clone()),
        Some(_) | None => None,
    };
    ran.events.iter().filter_map(note).collect::<Vec<_>>().join("; ")
}

fn timing(event: &JobEvent) -> Option<StageTiming> {
    match &event.event {
        Some(Event::StageFinished(finished)) => finished.timing,
        Some(_) | None => None,
    }
}

#[tokio::test]
async fn a_killed_daemon_loses_no_accepted_job_and_makes_each_as_it_would_have_been() {
    let mut random = Random::from_environment("a killed daemon's queue");
    let sandbox = Sandbox::new();
    let options = Options::default().set("limits.running_jobs=1");
    let daemon = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&daemon).await;
    // The last one starts from a picture, which must outlive the daemon too.
    // The two last are long: whenever the daemon is killed below, they are not done by far.
    let mut requests: Vec<ImageRequest> = (0..4).zip([20, 20, 20, 150]).map(|(seed, n)| request(seed, n)).collect();
    let mut expected = Vec::new();
    for n in 0..5 {
        if n == 4 {
            let init_image = expected.first().cloned().unwrap_or_default();
            requests.push(ImageRequest { init_image, strength: Some(0.5), ..request(9, 100) });
        }
        expected.push(calls.run(requests[n].clone(), |_| {}).await.unwrap().pictures.remove(0));
    }
    assert_eq!(recorded(&sandbox), Vec::<String>::new(), "whose client waits is not recorded");

    let mut ids = Vec::new();
    let (begun, mut begins) = mpsc::unbounded_channel();
    let mut watching = Vec::new();
    for (n, request) in requests.iter().enumerate() {
        let id = submit(&calls, request.clone()).await;
        let (calls, job, begun) = (calls.clone(), id.clone(), begun.clone());
        watching.push(tokio::spawn(async move {
            watch(&calls, &job, |event| {
                if let Some(Event::StageStarted(_)) = &event.event {
                    let _ = begun.send(n);
                }
            })
            .await
        }));
        ids.push(id);
    }
    // In the first or the second job, or soon after it.
    let during = random.below(2) as usize;
    while begins.recv().await.expect("jobs run") < during {}
    tokio::time::sleep(Duration::from_micros(random.below(300_000))).await;
    daemon.signal(Signal::SIGKILL);
    let mut ended = BTreeMap::new();
    for (id, watcher) in ids.iter().zip(watching) {
        if let Some(ran) = watcher.await.unwrap().filter(|ran| ran.end() == "succeeded") {
            ended.insert(id.clone(), ran);
        }
    }
    drop(daemon);
    let left: Vec<String> = ids.iter().filter(|id| recorded(&sandbox).contains(id)).cloned().collect();
    assert!(left.len() >= 2 && ids.ends_with(&left), "{left:?} of {ids:?} are recorded, {} had ended", ended.len());

    let daemon = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&daemon).await;
    // What is listed may have shrunk already, but its order is that of the first submission.
    let active = listed(&calls).await;
    assert!(left.ends_with(&active), "{active:?} of {left:?}");
    for (n, id) in ids.iter().enumerate().filter(|(_, id)| left.contains(id)) {
        let ran = watch(&calls, id, |_| {}).await.expect("it is known under its id");
        assert_eq!(ran.end(), "succeeded", "job {n}");
        assert!(notes(&ran).contains("taken up again after a restart"), "{}", notes(&ran));
        assert_eq!(ran.pictures.len(), 1);
        assert_eq!(pixels(&ran.pictures[0]), pixels(&expected[n]), "job {n} is another picture");
    }
    for (id, ran) in &ended {
        let n = ids.iter().position(|other| other == id).unwrap();
        assert_eq!(pixels(&ran.pictures[0]), pixels(&expected[n]), "job {n} is another picture");
    }
    assert!(daemon.stop().success());
    assert_eq!(recorded(&sandbox), Vec::<String>::new());
    sandbox.expect_no_process(Duration::from_secs(3));
}

#[tokio::test]
async fn a_daemon_that_is_told_to_end_keeps_its_queue_for_the_next() {
    let sandbox = Sandbox::new();
    let options = Options::default().set("limits.running_jobs=1").set("deadlines.drain=50ms");
    let mut daemon = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&daemon).await;
    // So many that they take a hundred times as long as an event takes to get here.
    const STEPS: u32 = 200;
    const EARLY: u32 = 5;
    let image = request(3, STEPS);
    let expected = calls.run(image.clone(), |_| {}).await.unwrap().pictures.remove(0);
    let running = submit(&calls, image).await;
    let (waiting, unwanted) = (submit(&calls, request(4, 1)).await, submit(&calls, request(5, 300)).await);
    // In the middle of denoising, at a step that leaves many.
    let mut told = false;
    let ran = watch(&calls, &running, |event| {
        if let Some(Event::Progress(progress)) = &event.event
            && progress.total == STEPS.into()
            && progress.done >= EARLY.into()
            && !std::mem::replace(&mut told, true)
        {
            daemon.signal(Signal::SIGTERM);
        }
    })
    .await
    .unwrap();
    let Some(Event::Failed(failure)) = ran.events.last().and_then(|event| event.event.clone()) else {
        panic!("{}", ran.end());
    };
    assert_eq!(failure.reason(), FailureReason::Shutdown);
    assert!(failure.message.contains("goes on, under this id"), "{}", failure.message);
    assert!(daemon.wait(LONG).success());
    sandbox.expect_no_process(Duration::from_secs(3));

    let daemon = Daemon::start(&sandbox, &options);
    let endpoint = ["--endpoint", daemon.endpoint.as_str()];
    let cancelled = sandbox.sdctl_ok([&["cancel", unwanted.as_str()], &endpoint[..]].concat());
    assert!(text(&cancelled).contains("is cancelled"), "{}", text(&cancelled));
    let jobs = text(&sandbox.sdctl_ok([&["jobs", "--all"], &endpoint[..]].concat()));
    assert!([&running, &waiting, &unwanted].iter().all(|id| jobs.contains(id.as_str())), "{jobs}");
    sandbox.sdctl_ok([&["watch", running.as_str(), "-o", "it.png"], &endpoint[..]].concat());
    let picture = std::fs::read(sandbox.out().join("it.png")).unwrap();
    assert_eq!(pixels(&picture), pixels(&expected), "another picture than the undisturbed one");
    let calls = Calls::connect(&daemon).await;
    let ran = watch(&calls, &running, |_| {}).await.unwrap();
    assert!(notes(&ran).contains("denoising goes on after step"), "{}", notes(&ran));
    let stages: Vec<StageTiming> = ran.events.iter().filter_map(timing).collect();
    assert!(stages.iter().all(|timing| timing.stage() != Stage::Encode), "the prompt was encoded again: {stages:?}");
    let resumed = stages.iter().find(|timing| timing.stage() == Stage::Denoise).expect("it was denoised").resumed_at;
    assert!((EARLY..STEPS).contains(&resumed), "it went on at step {resumed}");
    let ran = watch(&calls, &waiting, |_| {}).await.unwrap();
    assert_eq!(ran.end(), "succeeded");
    assert!(daemon.stop().success());
    assert_eq!(recorded(&sandbox), Vec::<String>::new());
}

//! Jobs: their events, codes and owners.

use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::{
    CancelRequest, DrainRequest, GetRequest, ImageRequest, JobEvent, JobState, ListRequest, SubmitRequest,
    WatchRequest, job_event,
};
use sdd::jobs::Limits;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::support::*;

#[tokio::test]
async fn generate_streams_every_event_and_the_picture() {
    let daemon = Daemon::start(100, Limits::default()).await;
    let mut client = daemon.generation().await;
    let request = ImageRequest { count: 2, seed: Some(40), ..image() };
    let mut stream = client.generate(generate(request, false)).await.unwrap().into_inner();
    let mut events: Vec<JobEvent> = Vec::new();
    while let Some(response) = stream.message().await.unwrap() {
        events.push(response.event.unwrap());
    }
    assert_eq!(events.iter().map(|e| e.sequence).collect::<Vec<_>>(), (1..=events.len() as u64).collect::<Vec<_>>());
    let Some(job_event::Event::Queued(queued)) = &events[0].event else { panic!("{:?}", events[0]) };
    let effective = queued.effective.as_ref().unwrap();
    assert_eq!((effective.model.as_str(), effective.steps, effective.seed), ("mine", Some(20), Some(40)));
    assert_eq!(queued.plan.as_ref().unwrap().device, "cpu");
    let images: Vec<_> = events
        .iter()
        .filter_map(|event| match &event.event {
            Some(job_event::Event::Image(image)) => Some(image),
            _ => None,
        })
        .collect();
    assert_eq!(images.iter().map(|image| (image.index, image.seed)).collect::<Vec<_>>(), [(0, 40), (1, 41)]);
    let reader = png::Decoder::new(std::io::Cursor::new(&images[1].png)).read_info().unwrap();
    assert_eq!((reader.info().width, reader.info().height), (64, 64));
    assert!(images[1].parameters.contains("Seed: 41"));
    assert!(matches!(events.last().unwrap().event, Some(job_event::Event::Succeeded(_))));

    let job_id = events[0].job_id.clone();
    let job = client.get(GetRequest { job_id: job_id.clone() }).await.unwrap().into_inner().job.unwrap();
    assert_eq!((job.state(), job.images_done, job.tenant), (JobState::Succeeded, 2, own_tenant()));
    // Everything again for one who comes late, and the rest for one who was there.
    let watch = WatchRequest { job_id, after_sequence: 2 };
    let mut late = client.watch(watch).await.unwrap().into_inner();
    let mut replayed = Vec::new();
    while let Some(response) = late.message().await.unwrap() {
        replayed.push(response.event.unwrap());
    }
    assert_eq!(replayed, events[2..]);
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_its_job_unless_it_keeps_it() {
    let daemon = Daemon::start(0, Limits { running_jobs: 1, ..Limits::default() }).await;
    for keep in [false, true] {
        let mut client = daemon.generation().await;
        let mut stream = client.generate(generate(image(), keep)).await.unwrap().into_inner();
        let job_id = stream.message().await.unwrap().unwrap().event.unwrap().job_id;
        drop(stream);
        drop(client);
        let mut other = daemon.generation().await;
        if keep {
            daemon.steps.add_permits(3);
        } else {
            // Its stage was told to stop: nothing else ends this wait.
            daemon.stopped.acquire().await.unwrap().forget();
        }
        let mut watched = other.watch(WatchRequest { job_id, after_sequence: 0 }).await.unwrap().into_inner();
        let mut last = None;
        while let Some(response) = watched.message().await.unwrap() {
            last = response.event.and_then(|event| event.event);
        }
        match last {
            Some(job_event::Event::Succeeded(_)) => assert!(keep),
            Some(job_event::Event::Cancelled(cancelled)) => {
                assert!(!keep && cancelled.reason.contains("went away"), "{cancelled:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn submitted_jobs_run_unwatched_and_cancel_answers_with_the_end() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let job_id = client.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    let listed = client.list(ListRequest { active_only: true, limit: 0 }).await.unwrap().into_inner().jobs;
    assert_eq!(listed.iter().map(|job| job.id.clone()).collect::<Vec<_>>(), std::slice::from_ref(&job_id));
    let ended = client.cancel(CancelRequest { job_id }).await.unwrap().into_inner().job.unwrap();
    assert_eq!(ended.state(), JobState::Cancelled);
    assert!(client.list(ListRequest { active_only: true, limit: 0 }).await.unwrap().into_inner().jobs.is_empty());
}

#[tokio::test]
async fn bad_requests_are_refused_with_their_fields() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let bad = ImageRequest { width: 65, steps: Some(0), guidance_scale: Some(f64::NAN), ..image() };
    let status = client.submit(SubmitRequest { image: Some(bad) }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "INVALID_REQUEST"));
    assert_eq!(field_names(&status), ["width", "steps", "guidance_scale"]);
    assert!(status.message().contains("64") && status.message().contains("72"), "{}", status.message());

    // 100 bytes a pixel and a million more than 60 million: 768 × 768 is the largest square.
    let large = ImageRequest { width: 1024, height: 1024, ..image() };
    let status = client.submit(SubmitRequest { image: Some(large) }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, "DOES_NOT_FIT"));
    let facts = status.get_error_details().error_info().unwrap().metadata.clone();
    assert_eq!((facts["largest_width"].as_str(), facts["largest_height"].as_str()), ("768", "768"));
    assert_eq!(facts["limit_bytes"], "60000000");
    assert_eq!(facts["need_bytes"], (1_000_000 + 100 * 1024 * 1024).to_string());

    let status = client.submit(SubmitRequest { image: None }).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let status = client.get(GetRequest { job_id: "nonsense".into() }).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_JOB"));
}

#[tokio::test]
async fn peers_over_tcp_are_another_tenant() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let (mut own, mut stranger) = (daemon.generation().await, daemon.tcp().await);
    let ours = own.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    let theirs = stranger.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    for status in [
        stranger.get(GetRequest { job_id: ours.clone() }).await.unwrap_err(),
        stranger.cancel(CancelRequest { job_id: ours.clone() }).await.unwrap_err(),
        stranger.watch(WatchRequest { job_id: ours, after_sequence: 0 }).await.unwrap_err(),
    ] {
        assert_eq!(status.code(), Code::NotFound);
    }
    let listed = stranger.list(ListRequest { active_only: false, limit: 0 }).await.unwrap().into_inner().jobs;
    assert_eq!(listed.iter().map(|job| job.tenant.as_str()).collect::<Vec<_>>(), ["tcp"]);
    // The daemon's own user sees and may cancel all.
    let ended = own.cancel(CancelRequest { job_id: theirs }).await.unwrap().into_inner().job.unwrap();
    assert_eq!(ended.state(), JobState::Cancelled);

    let mut control = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    let status = control.drain(DrainRequest::default()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "OPERATOR_ONLY"));
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody() {
    let daemon = Daemon::start(0, Limits { running_jobs: 1, ..Limits::default() }).await;
    let mut slow = daemon.generation().await;
    let large = ImageRequest { width: 512, height: 512, count: 20, ..image() };
    // Opened and never read, on a connection of its own.
    let unread = slow.generate(generate(large, true)).await.unwrap().into_inner();
    let mut client = daemon.generation().await;
    let mut stream = client.generate(generate(image(), false)).await.unwrap().into_inner();
    daemon.steps.add_permits(41 + 3);
    let mut last = None;
    while let Some(response) = stream.message().await.unwrap() {
        last = response.event.and_then(|event| event.event);
    }
    assert!(matches!(last, Some(job_event::Event::Succeeded(_))), "{last:?}");
    drop(unread);
}

//! Decisions about memory: explained, followed, and kept from others.

use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::{
    CancelRequest, Decision, DecisionKind, ExplainJobRequest, JobState, SubmitRequest, WatchDecisionsRequest,
    WatchDecisionsResponse, job_event,
};
use sdd::jobs::Limits;
use tonic::Code;

use super::support::*;

fn decided(job: &str, text: &str) -> Decision {
    let kind = DecisionKind::Waits as i32;
    Decision { kind, job_id: job.into(), text: text.into(), bytes: 7, ..Decision::default() }
}

fn follow(job_id: &str) -> WatchDecisionsRequest {
    WatchDecisionsRequest { job_id: job_id.into(), follow: true }
}

async fn next_text(stream: &mut tonic::Streaming<WatchDecisionsResponse>) -> Option<String> {
    Some(stream.message().await.unwrap()?.decision.unwrap().text)
}

#[tokio::test]
async fn decisions_about_a_job_are_its_events_and_explain_it_to_its_owner_alone() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let mut stream = client.generate(generate(image(), true)).await.unwrap().into_inner();
    let job_id = stream.message().await.unwrap().unwrap().event.unwrap().job_id;
    daemon.jobs.activity().wait_for(|activity| activity.running == 1).await.unwrap();
    daemon.journal.record(decided("another", "is not told"));
    daemon.journal.record(decided(&job_id, "waits for 7 B"));
    let told = loop {
        let event = stream.message().await.unwrap().unwrap().event.unwrap().event;
        if let Some(job_event::Event::Decision(decision)) = event {
            break decision;
        }
    };
    assert_eq!((told.text.as_str(), told.sequence, told.kind()), ("waits for 7 B", 2, DecisionKind::Waits));
    daemon.steps.add_permits(3);
    while stream.message().await.unwrap().is_some() {}
    // After its last event a job takes no more; the explanation has it nevertheless.
    daemon.journal.record(decided(&job_id, "released 7 B"));

    let mut control = daemon.control().await;
    let explain = ExplainJobRequest { job_id: job_id.clone() };
    let explained = control.explain_job(explain.clone()).await.unwrap().into_inner();
    assert_eq!(explained.job.unwrap().state(), JobState::Succeeded);
    let texts: Vec<&str> = explained.decisions.iter().map(|decision| decision.text.as_str()).collect();
    assert_eq!(texts, ["waits for 7 B", "released 7 B"]);

    let mut stranger = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    let status = stranger.explain_job(explain).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_JOB"));
    let status = stranger.watch_decisions(follow(&job_id)).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test]
async fn operators_follow_all_decisions_and_others_those_of_their_jobs_until_the_daemon_ends() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let theirs = daemon.tcp().await.submit(SubmitRequest { image: Some(image()) }).await.unwrap().into_inner().job_id;
    let ours = daemon.generation().await.submit(SubmitRequest { image: Some(image()) }).await.unwrap();
    let ours = ours.into_inner().job_id;
    daemon.journal.record(decided(&ours, "past"));
    let mut operator = daemon.control().await.watch_decisions(follow("")).await.unwrap().into_inner();
    let mut stranger = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    let mut tenant = stranger.watch_decisions(follow("")).await.unwrap().into_inner();
    for (job, text) in [(ours.as_str(), "ours"), ("", "of the device"), (theirs.as_str(), "theirs")] {
        daemon.journal.record(decided(job, text));
    }
    for text in ["past", "ours", "of the device", "theirs"] {
        assert_eq!(next_text(&mut operator).await.as_deref(), Some(text));
    }
    assert_eq!(next_text(&mut tenant).await.as_deref(), Some("theirs"), "and nothing before it");

    // Without `follow` there is an end at once; of one job, when it ends.
    let request = WatchDecisionsRequest { job_id: String::new(), follow: false };
    let mut past = daemon.control().await.watch_decisions(request).await.unwrap().into_inner();
    for text in ["past", "ours", "of the device", "theirs"] {
        assert_eq!(next_text(&mut past).await.as_deref(), Some(text));
    }
    assert_eq!(next_text(&mut past).await, None);
    let mut of_job = stranger.watch_decisions(follow(&theirs)).await.unwrap().into_inner();
    assert_eq!(next_text(&mut of_job).await.as_deref(), Some("theirs"));
    daemon.generation().await.cancel(CancelRequest { job_id: theirs }).await.unwrap();
    assert_eq!(next_text(&mut of_job).await, None);

    daemon.ending.cancel();
    assert_eq!(next_text(&mut operator).await, None);
    assert_eq!(next_text(&mut tenant).await, None);
}

#[tokio::test]
async fn a_reader_that_lags_behind_is_told_how_much_it_missed_and_goes_on() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut stream = daemon.control().await.watch_decisions(follow("")).await.unwrap().into_inner();
    daemon.journal.record(decided("", "first"));
    assert_eq!(next_text(&mut stream).await.as_deref(), Some("first"));
    // More than everything between the journal and this reader can hold, the connection included.
    let long = "x".repeat(2000);
    let mut told = 0;
    for _ in 0..5000 {
        daemon.journal.record(decided("", &long));
    }
    daemon.journal.record(decided("", "last"));
    let mut missed = 0;
    loop {
        let text = next_text(&mut stream).await.unwrap();
        if let Some(rest) = text.strip_suffix(" decisions are missing here: this reader was too slow for them") {
            missed += rest.parse::<u64>().unwrap();
        } else if text == "last" {
            break;
        } else {
            told += 1;
        }
    }
    assert!(missed > 0, "nothing was missed");
    assert_eq!(told + missed, 5000, "what is missing is counted");
}

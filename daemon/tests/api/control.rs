//! Models, needs, configuration, and what operators alone may do.

use sd_proto::v1::control_client::ControlClient;
use sd_proto::v1::{
    DrainRequest, FitRequest, GetStatusRequest, ImageRequest, InspectModelRequest, ListModelsRequest, LoadModelRequest,
    MemoryRequest, PinModelRequest, ReleaseDeviceRequest, ShowConfigRequest, SubmitRequest, UnloadModelRequest,
};
use sdd::jobs::Limits;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::support::*;

#[tokio::test]
async fn models_are_found_by_name_and_paths_only_by_the_own_user() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut client = daemon.generation().await;
    let with_model = |model: &str| SubmitRequest { image: Some(ImageRequest { model: model.into(), ..image() }) };

    let status = client.submit(with_model("nonsense")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_MODEL"));
    for known in ["mine", "broken", "default"] {
        assert!(status.message().contains(known), "{}", status.message());
    }
    let status = client.submit(with_model("broken")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "MODEL"));
    assert!(status.message().contains("conv_in.weight is missing"), "{}", status.message());
    let status = client.submit(with_model("./relative")).await.unwrap_err();
    assert_eq!((status.code(), field_names(&status)), (Code::InvalidArgument, vec!["model".to_owned()]));
    let status = client.submit(with_model("/nonexistent/model")).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "MODEL"));

    let path = daemon.folder.path().join("models/mine").display().to_string();
    client.submit(with_model(&path)).await.unwrap();
    let mut stranger = daemon.tcp().await;
    let status = stranger.submit(with_model(&path)).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "PATH_NOT_ALLOWED"));
    stranger.submit(with_model("mine")).await.unwrap();
}

#[tokio::test]
async fn a_full_queue_and_a_drain_have_their_codes() {
    let limits = Limits { running_jobs: 1, queued_jobs: 1, ..Limits::default() };
    let daemon = Daemon::start(0, limits).await;
    let mut client = daemon.generation().await;
    let submit = || SubmitRequest { image: Some(image()) };
    client.submit(submit()).await.unwrap();
    let mut running = daemon.jobs.activity();
    running.wait_for(|activity| activity.running == 1).await.unwrap();
    client.submit(submit()).await.unwrap();
    let status = client.submit(submit()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "QUEUE_FULL"));
    assert!(status.get_error_details().retry_info().is_some());

    let mut control = daemon.control().await;
    let timeout = Some(prost_types::Duration { seconds: 0, nanos: 1_000_000 });
    let drained = control.drain(DrainRequest { timeout }).await.unwrap().into_inner();
    assert_eq!((drained.jobs_finished, drained.jobs_cancelled), (0, 2));
    assert!(daemon.ended.is_cancelled(), "a drain ends the daemon");
    let status = client.submit(submit()).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "DRAINING"));
    assert!(control.get_status(GetStatusRequest {}).await.unwrap().into_inner().draining);
}

#[tokio::test]
async fn models_are_listed_with_their_problems() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut control = daemon.control().await;
    let models = control.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    let names: Vec<_> = models.iter().map(|model| (model.name.as_str(), model.is_default)).collect();
    assert_eq!(names, [("broken", false), ("default", false), ("mine", true)]);
    assert!(models[0].problem.contains("conv_in.weight is missing") && models[0].family.is_empty());
    assert_eq!((models[2].family.as_str(), models[2].default_steps, models[2].problem.as_str()), ("sd1", 20, ""));
    assert_eq!(models[2].components.iter().map(|c| c.stage.as_str()).collect::<Vec<_>>(), ["text", "diffusion", "vae"]);
    let request = InspectModelRequest { model: String::new() };
    let model = control.inspect_model(request).await.unwrap().into_inner().model.unwrap();
    assert_eq!(model, models[2]);

    // A folder that changes is described anew.
    std::fs::remove_file(daemon.folder.path().join("models/broken/bad")).unwrap();
    let models = control.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    assert_eq!((models[0].problem.as_str(), models[0].family.as_str()), ("", "sd1"));
}

#[tokio::test]
async fn what_a_request_would_need_is_told_without_running_it_and_so_is_the_configuration() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut control = daemon.control().await;
    let ask = |width, mode: i32| FitRequest {
        image: Some(ImageRequest {
            width,
            height: 512,
            memory: Some(MemoryRequest { mode, ..MemoryRequest::default() }),
            ..ImageRequest::default()
        }),
    };
    let fit = control.fit(ask(512, 0)).await.unwrap().into_inner();
    assert!(fit.fits && fit.advice.is_empty(), "{fit:?}");
    assert_eq!((fit.mode.as_str(), fit.fitting_mode.as_str(), fit.budget_bytes), ("auto", "none", 60_000_000));
    assert_eq!(
        (fit.stages.len(), fit.stages[0].source.as_str(), fit.stages[0].working_set_bytes),
        (1, "formula", 26_214_400)
    );
    let fit = control.fit(ask(2048, 3)).await.unwrap().into_inner();
    assert!(!fit.fits && fit.mode == "cond_only" && fit.fitting_mode.is_empty(), "{fit:?}");
    assert!(fit.largest_width > 512 && fit.advice.contains(&fit.largest_width.to_string()), "{fit:?}");
    let refused = control.fit(ask(513, 0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);

    let shown = control.show_config(ShowConfigRequest {}).await.unwrap().into_inner().values;
    assert_eq!(
        (shown[0].key.as_str(), shown[0].value.as_str(), shown[0].origin.as_str()),
        ("threads", "2", "--threads")
    );
}

#[tokio::test]
async fn operators_load_unload_pin_and_release() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut control = daemon.control().await;
    let load = |stages: &[&str]| LoadModelRequest {
        model: "mine".into(),
        stages: stages.iter().map(|stage| (*stage).to_owned()).collect(),
    };
    let loaded = control.load_model(load(&["diffusion", "text"])).await.unwrap().into_inner().stages;
    let told: Vec<_> = loaded.iter().map(|s| (s.stage.as_str(), s.incarnation, s.weights_bytes)).collect();
    assert_eq!(told, [("text", 7, 9), ("diffusion", 7, 9)], "in the order of a job");
    assert!(loaded.iter().all(|stage| stage.weights_total_bytes > 9));
    // A stage that fails says so by its reason; what came before it stays.
    let status = control.load_model(load(&[])).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "DOES_NOT_FIT"));

    let unload = UnloadModelRequest { model: "mine".into(), stages: vec!["vae".into()] };
    let freed = control.unload_model(unload).await.unwrap().into_inner();
    assert_eq!((freed.workers, freed.bytes), (2, 11));
    control.pin_model(PinModelRequest { model: String::new(), pinned: true }).await.unwrap();
    // A model whose files are bad can still be unloaded; its pin has no folder to be known by.
    control.unload_model(UnloadModelRequest { model: "broken".into(), stages: Vec::new() }).await.unwrap();
    control.unload_model(UnloadModelRequest { model: "mine".into(), stages: Vec::new() }).await.unwrap();
    let hold = Some(prost_types::Duration { seconds: 600, nanos: 0 });
    let release = ReleaseDeviceRequest { device: String::new(), hold };
    assert_eq!(control.release_device(release).await.unwrap().into_inner().bytes, 13);
    let tenant = own_tenant();
    let expected = [
        format!("load STAGE_ENCODE of mine for {tenant}"),
        format!("load STAGE_DENOISE of mine for {tenant}"),
        format!("load STAGE_ENCODE of mine for {tenant}"),
        format!("load STAGE_DENOISE of mine for {tenant}"),
        format!("load STAGE_DECODE of mine for {tenant}"),
        "unload [Vae] of mine in true".into(),
        "pin mine true".into(),
        "unload [] of broken in false".into(),
        "pin mine false".into(),
        "unload [] of mine in true".into(),
        "release cpu Some(600s)".into(),
    ];
    assert_eq!(*daemon.operator.asked.lock().unwrap(), expected);
    let (past, _) = daemon.journal.follow();
    assert!(past.iter().any(|decision| decision.text.starts_with("mine is pinned")), "{past:?}");

    let status = control.load_model(load(&["sampler"])).await.unwrap_err();
    assert_eq!((status.code(), field_names(&status)), (Code::InvalidArgument, vec!["stages".to_owned()]));
    let absent = ReleaseDeviceRequest { device: "gpu7".into(), hold: None };
    let status = control.release_device(absent).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::NotFound, "UNKNOWN_DEVICE"));
    assert!(status.message().contains("there are cpu"), "{}", status.message());
}

#[tokio::test]
async fn nobody_but_operators_moves_models() {
    let daemon = Daemon::start(0, Limits::default()).await;
    let mut stranger = ControlClient::connect(format!("http://{}", daemon.tcp)).await.unwrap();
    for status in [
        stranger.load_model(LoadModelRequest::default()).await.unwrap_err(),
        stranger.unload_model(UnloadModelRequest::default()).await.unwrap_err(),
        stranger.pin_model(PinModelRequest::default()).await.unwrap_err(),
        stranger.release_device(ReleaseDeviceRequest::default()).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status).as_str()), (Code::PermissionDenied, "OPERATOR_ONLY"));
    }
    assert!(daemon.operator.asked.lock().unwrap().is_empty());
}

//! Offload modes and presets: one seed gives one picture whatever they are, and each moves what it says, as a reader of
//! `/proc` sees it that is not the daemon.

use std::time::Duration;

use sd_proto::v1::{
    DecisionKind, ExplainJobRequest, ImageRequest, MemoryRequest, OffloadMode, Stage, job_event::Event,
};
use sd_tests::calls::{Calls, Ran};
use sd_tests::daemon::Options;
use sd_tests::process::eventually;
use sd_tests::readings::of_stage;
use sd_tests::{Daemon, Sandbox, png_text};

const MIB: u64 = 1 << 20;
const MODES: [OffloadMode; 6] = [
    OffloadMode::Auto,
    OffloadMode::None,
    OffloadMode::CondOnly,
    OffloadMode::CondDiffusion,
    OffloadMode::Aggressive,
    OffloadMode::LayerStreaming,
];
/// The default model's diffusion network holds 34.5 MiB of weights; a worker without them some MiB.
const LOADED: u64 = 34 * MIB;
const GONE: u64 = 20 * MIB;

fn request(memory: MemoryRequest) -> ImageRequest {
    ImageRequest {
        prompt: "a red heart".into(),
        width: 128,
        height: 128,
        steps: Some(2),
        seed: Some(3),
        memory: Some(memory),
        ..ImageRequest::default()
    }
}

fn in_mode(mode: OffloadMode) -> MemoryRequest {
    let stay_away = Some(false);
    MemoryRequest {
        mode: mode as i32,
        reload_cond_stage: stay_away,
        reload_diffusion: stay_away,
        ..MemoryRequest::default()
    }
}

fn pixels(ran: &Ran) -> Vec<u8> {
    assert_eq!(ran.end(), "succeeded");
    png_text::read(&ran.pictures[0]).unwrap().pixels
}

#[tokio::test]
async fn one_seed_is_one_picture_in_every_mode_and_under_every_preset() {
    let sandbox = Sandbox::new();
    let folder = sandbox.default_model_as("shared");
    let presets = ["auto", "24gb", "16gb", "12gb", "8gb", "minimal"];
    // Every run encodes its prompt itself.
    let mut options = Options::default().set("cache.conditioning=0");
    for preset in presets {
        options = options.model(preset, &folder).set(format!("model_memory.{preset}.preset={preset}"));
    }
    // Counts that a user writes stream what a preset would not.
    options = options.model("counted", &folder);
    for value in ["dit_gpu_blocks=2", "te_gpu_layers=1", "vae_resident=false"] {
        options = options.set(format!("model_memory.counted.{value}"));
    }
    let roomy = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&roomy).await;
    let expected = pixels(&calls.run(request(in_mode(OffloadMode::None)), |_| {}).await.unwrap());
    let counted = ImageRequest { model: "counted".into(), ..request(MemoryRequest::default()) };
    let ran = calls.run(counted, |_| {}).await.unwrap();
    assert!(pixels(&ran) == expected, "counted blocks");
    let streamed = |stage| {
        let timings = ran.events.iter().filter_map(|event| match &event.event {
            Some(Event::StageFinished(finished)) => finished.timing,
            _ => None,
        });
        timings.filter(|timing| timing.stage() == stage).map(|timing| timing.streamed_bytes).sum::<u64>()
    };
    for stage in [Stage::Encode, Stage::Denoise, Stage::Decode] {
        assert!(streamed(stage) > 0, "{stage:?} did not stream");
    }
    let fit = calls.fit(request(MemoryRequest::default())).await.unwrap();
    assert!(roomy.stop().success());

    let need = |stage: &sd_proto::v1::StageFit| stage.context_bytes + stage.weights_bytes + stage.working_set_bytes;
    let largest = fit.stages.iter().map(need).max().unwrap();
    // Each stage fits alone, all together do not.
    let tight = Daemon::start(&sandbox, &options.set(format!("devices.cpu.budget={}", largest + largest / 10)));
    let calls = Calls::connect(&tight).await;
    for mode in MODES {
        let outcome = calls.run(request(in_mode(mode)), |_| {}).await;
        if mode == OffloadMode::None {
            let refusal = outcome.expect_err("what never moves does not fit here");
            assert!(refusal.message().contains("offload mode none"), "{refusal}");
            assert!(refusal.message().contains("would fit it"), "{refusal}");
        } else {
            assert!(pixels(&outcome.unwrap()) == expected, "{mode:?} changed the picture");
        }
    }
    for preset in presets {
        let request = ImageRequest { model: preset.into(), ..request(MemoryRequest::default()) };
        assert!(pixels(&calls.run(request, |_| {}).await.unwrap()) == expected, "preset {preset} changed the picture");
    }
    assert!(tight.stop().success());
}

/// What the workers hold at the boundaries of a job.
#[derive(Debug, Default)]
struct Held {
    text_at_denoise: u64,
    diffusion_at_decode: u64,
    text: u64,
    diffusion: u64,
}

async fn held(sandbox: &Sandbox, calls: &Calls, memory: MemoryRequest) -> (Held, Ran) {
    let mut held = Held::default();
    let ran = calls
        .run(request(memory), |event| match &event.event {
            Some(Event::StageStarted(started)) if started.stage() == Stage::Denoise => {
                held.text_at_denoise = of_stage(sandbox, "text");
            }
            Some(Event::StageStarted(started)) if started.stage() == Stage::Decode => {
                held.diffusion_at_decode = of_stage(sandbox, "diffusion");
            }
            _ => {}
        })
        .await
        .unwrap();
    assert_eq!(ran.end(), "succeeded");
    (held.text, held.diffusion) = (of_stage(sandbox, "text"), of_stage(sandbox, "diffusion"));
    println!("{:?}: {held:?}", memory.mode());
    (held, ran)
}

#[tokio::test]
async fn each_mode_moves_what_it_says_and_nothing_else() {
    let sandbox = Sandbox::new();
    // All stages fit together, but not with the 300 MB to spare that keep one in its place.
    let daemon = Daemon::start(&sandbox, &Options::default().set("devices.cpu.budget=300MiB"));
    let calls = Calls::connect(&daemon).await;

    let (none, _) = held(&sandbox, &calls, in_mode(OffloadMode::None)).await;
    assert!(none.diffusion_at_decode >= LOADED && none.diffusion >= LOADED, "{none:?}");
    let text_loaded = none.text_at_denoise;

    let (cond_only, _) = held(&sandbox, &calls, in_mode(OffloadMode::CondOnly)).await;
    assert!(cond_only.text_at_denoise * 4 < text_loaded * 3, "{cond_only:?} of {text_loaded}");
    assert!(cond_only.diffusion_at_decode >= LOADED && cond_only.diffusion >= LOADED, "{cond_only:?}");

    let (cond_diffusion, _) = held(&sandbox, &calls, in_mode(OffloadMode::CondDiffusion)).await;
    assert!(cond_diffusion.diffusion_at_decode <= GONE, "{cond_diffusion:?}");

    let (aggressive, _) = held(&sandbox, &calls, in_mode(OffloadMode::Aggressive)).await;
    assert!(aggressive.diffusion_at_decode <= GONE && aggressive.diffusion <= GONE, "{aggressive:?}");
    assert!(aggressive.text * 4 < text_loaded * 3, "{aggressive:?} of {text_loaded}");

    let (streaming, _) = held(&sandbox, &calls, in_mode(OffloadMode::LayerStreaming)).await;
    assert!(streaming.text_at_denoise * 4 < text_loaded * 3, "{streaming:?} of {text_loaded}");
    assert!(streaming.diffusion >= LOADED, "{streaming:?}: what its grant holds whole is not streamed");

    // An override moves one stage whatever the mode, and one keeps it whatever the mode.
    let keeps = MemoryRequest { offload_diffusion: Some(false), ..in_mode(OffloadMode::CondDiffusion) };
    assert!(held(&sandbox, &calls, keeps).await.0.diffusion_at_decode >= LOADED);
    let moves = MemoryRequest { offload_diffusion: Some(true), ..in_mode(OffloadMode::Auto) };
    assert!(held(&sandbox, &calls, moves).await.0.diffusion_at_decode <= GONE);

    // By default what left comes back after the job.
    let back = MemoryRequest { reload_diffusion: None, ..in_mode(OffloadMode::CondDiffusion) };
    let (moved, _) = held(&sandbox, &calls, back).await;
    assert!(moved.diffusion_at_decode <= GONE, "{moved:?}");
    let loaded = || (of_stage(&sandbox, "diffusion") >= LOADED).then_some(());
    assert!(eventually(Duration::from_secs(20), loaded).is_some(), "the diffusion model did not come back");
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn a_stage_stays_where_the_next_finds_room_beside_it_and_that_is_explained() {
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().set("devices.cpu.budget=1GiB"));
    let calls = Calls::connect(&daemon).await;
    let (stayed, ran) = held(&sandbox, &calls, in_mode(OffloadMode::CondDiffusion)).await;
    assert!(stayed.diffusion_at_decode >= LOADED, "{stayed:?}");
    let job_id = ran.events[0].job_id.clone();
    let explained = calls.control.clone().explain_job(ExplainJobRequest { job_id }).await.unwrap().into_inner();
    let kept: Vec<_> = explained.decisions.iter().filter(|decision| decision.kind() == DecisionKind::Keeps).collect();
    let holders: Vec<&str> = kept.iter().map(|decision| decision.holder.as_str()).collect();
    assert!(holders.contains(&"text of default") && holders.contains(&"diffusion of default"), "{kept:?}");
    assert!(kept[0].text.contains("to spare"), "{kept:?}");
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn needs_are_run_dry_at_first_and_known_from_measurement_afterwards_over_a_restart() {
    let sandbox = Sandbox::new();
    let sources =
        |fit: sd_proto::v1::FitResponse| -> Vec<String> { fit.stages.into_iter().map(|stage| stage.source).collect() };
    let asked = || request(MemoryRequest::default());
    let daemon = Daemon::start(&sandbox, &Options::default());
    let calls = Calls::connect(&daemon).await;
    assert_eq!(sources(calls.fit(asked()).await.unwrap()), ["dryrun"; 3]);
    pixels(&calls.run(asked(), |_| {}).await.unwrap());
    assert_eq!(sources(calls.fit(asked()).await.unwrap()), ["learned"; 3]);
    assert!(daemon.stop().success());

    let again = Daemon::start(&sandbox, &Options::default().set("memory.vram_estimation=formula"));
    let calls = Calls::connect(&again).await;
    assert_eq!(sources(calls.fit(asked()).await.unwrap()), ["learned"; 3]);
    let larger = ImageRequest { width: 192, ..asked() };
    assert_eq!(sources(calls.fit(larger).await.unwrap()), ["learned", "formula", "formula"], "another shape");
    assert!(again.stop().success());
}

#[tokio::test]
async fn what_does_not_fit_is_refused_with_the_largest_size_that_does_and_that_size_is_admitted() {
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().set("devices.cpu.budget=200MiB"));
    let calls = Calls::connect(&daemon).await;
    let asked = |width, height| ImageRequest { width, height, ..request(in_mode(OffloadMode::Auto)) };
    let fit = calls.fit(asked(4096, 2048)).await.unwrap();
    assert!(!fit.fits && fit.largest_width > 128, "{fit:?}");
    let refusal = calls.run(asked(4096, 2048), |_| {}).await.expect_err("too large");
    assert_eq!(refusal.message(), fit.advice, "told before and then are the same words");
    let largest = calls.fit(asked(fit.largest_width, fit.largest_height)).await.unwrap();
    assert!(largest.fits, "{largest:?}");
    assert!(largest.plan.unwrap().vae_tile > 0, "that large it fits in tiles only");
    assert_eq!(calls.fit(asked(128, 128)).await.unwrap().plan.unwrap().vae_tile, 0);
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn jobs_that_keep_their_stages_take_turns_and_others_wait_for_them() {
    let sandbox = Sandbox::new();
    let mut options = Options::default();
    for name in ["one", "two"] {
        options = options.model(name, sandbox.default_model_as(name));
    }
    let of = |model: &str, mode| ImageRequest { model: model.into(), ..request(in_mode(mode)) };
    let roomy = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&roomy).await;
    let fit = calls.fit(of("one", OffloadMode::None)).await.unwrap();
    assert!(roomy.stop().success());
    let need = |stage: &sd_proto::v1::StageFit| stage.context_bytes + stage.weights_bytes + stage.working_set_bytes;
    let all: u64 = fit.stages.iter().map(need).sum();
    // All stages of one model fit, and one of the other beside them does not.
    let daemon = Daemon::start(&sandbox, &options.set(format!("devices.cpu.budget={}", all + MIB)));
    let calls = Calls::connect(&daemon).await;
    for (first, second) in [
        (OffloadMode::None, OffloadMode::None),
        (OffloadMode::None, OffloadMode::Auto),
        (OffloadMode::CondOnly, OffloadMode::None),
    ] {
        let (one, two) = tokio::join!(calls.run(of("one", first), |_| {}), calls.run(of("two", second), |_| {}));
        for ran in [one.unwrap(), two.unwrap()] {
            assert_eq!(ran.end(), "succeeded", "{first:?} beside {second:?}");
        }
    }
    assert!(daemon.stop().success());
}

#[tokio::test]
async fn what_is_reserved_or_beyond_the_bound_is_never_leased() {
    let sandbox = Sandbox::new();
    let budget = async |options: Options| {
        let daemon = Daemon::start(&sandbox, &options.set("devices.cpu.budget=1GiB"));
        let mut control = Calls::connect(&daemon).await.control;
        let status = control.get_status(sd_proto::v1::GetStatusRequest {}).await.unwrap().into_inner();
        assert!(daemon.stop().success());
        status.devices.into_iter().find(|device| device.id == "cpu").unwrap().budget_bytes
    };
    assert_eq!(budget(Options::default()).await, 1 << 30);
    assert_eq!(budget(Options::default().set("memory.max_vram=0.25")).await, 256 * MIB);
    assert_eq!(budget(Options::default().set("memory.reserve_gb=0.5")).await, (1 << 30) - 500_000_000);
    assert_eq!(budget(Options::default().set("memory.preset=24gb")).await, 1 << 30, "a preset's reserve is a share");
}

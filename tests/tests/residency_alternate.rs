//! Two models whose stages do not fit together take turns under a budget of the largest stage and a tenth: all their jobs are
//! done, and what the workers hold together, by a reader that is not the daemon, stays below the budget.

use std::sync::Arc;

use sd_proto::v1::ImageRequest;
use sd_tests::calls::Calls;
use sd_tests::daemon::Options;
use sd_tests::readings::Readings;
use sd_tests::{Daemon, Sandbox, png_text};

/// What the device's measure may be off for one process; see the ledger's rules.
const TOLERANCE: u64 = 32 << 20;

/// How often the models take turns: `SD_TEST_ROUNDS` for a long run.
fn rounds() -> u64 {
    std::env::var("SD_TEST_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6)
}

fn request(model: &str, seed: u64) -> ImageRequest {
    ImageRequest {
        model: model.into(),
        prompt: "a red heart".into(),
        width: 128,
        height: 128,
        steps: Some(1),
        seed: Some(seed),
        ..ImageRequest::default()
    }
}

#[tokio::test]
async fn two_models_take_turns_under_a_budget_of_the_largest_stage() {
    let sandbox = Arc::new(Sandbox::new());
    let mut options = Options::default();
    for name in ["one", "two"] {
        options = options.model(name, sandbox.default_model_as(name));
    }
    // What an undisturbed daemon makes, and what its stages need.
    let roomy = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&roomy).await;
    let fit = calls.fit(request("one", 0)).await.unwrap();
    let mut expected = Vec::new();
    for seed in 0..2 {
        let ran = calls.run(request("one", seed), |_| {}).await.unwrap();
        expected.push(png_text::read(&ran.pictures[0]).unwrap().pixels);
    }
    assert!(roomy.stop().success());
    let need = |stage: &sd_proto::v1::StageFit| stage.context_bytes + stage.weights_bytes + stage.working_set_bytes;
    let largest = fit.stages.iter().map(need).max().expect("stages");
    let budget = largest + largest / 10;
    assert!(budget < fit.stages.iter().map(need).sum(), "the stages of one model fit together: {fit:?}");

    let daemon = Daemon::start(&sandbox, &options.set(format!("devices.cpu.budget={budget}")));
    let calls = Calls::connect(&daemon).await;
    let readings = Readings::start(Arc::clone(&sandbox));
    for round in 0..rounds() {
        // Both at once: each stage of the one waits for the other's to go.
        let (one, two) =
            tokio::join!(calls.run(request("one", round % 2), |_| {}), calls.run(request("two", round % 2), |_| {}),);
        for ran in [one.unwrap(), two.unwrap()] {
            assert_eq!(ran.end(), "succeeded", "round {round}");
            let pixels = png_text::read(&ran.pictures[0]).unwrap().pixels;
            assert!(pixels == expected[(round % 2) as usize], "round {round}: another picture than undisturbed");
        }
    }
    let (peak, count) = readings.peak();
    assert!(count > 10, "only {count} readings");
    assert!(peak > largest / 4, "{peak} bytes at most: the readings saw nothing");
    assert!(peak <= budget + TOLERANCE, "{peak} bytes were held under a budget of {budget}");
    println!("peak {peak} of {budget} bytes, {count} readings");
    assert!(daemon.stop().success());
}

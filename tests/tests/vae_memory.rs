//! The autoencoder's memory through the real programs: in tiles, streamed and in short types, and what becomes of a decode that a
//! short type cannot hold.

use std::path::PathBuf;

use sd_engine::testkit::scale_weights;
use sd_proto::v1::job_event::Event;
use sd_proto::v1::{ImageRequest, MemoryRequest};
use sd_tests::calls::{Calls, Ran};
use sd_tests::daemon::Options;
use sd_tests::{Daemon, Sandbox, png_text};

fn request(model: &str) -> ImageRequest {
    ImageRequest {
        model: model.into(),
        prompt: "a red heart".into(),
        width: 200,
        height: 136,
        steps: Some(1),
        seed: Some(7),
        ..ImageRequest::default()
    }
}

fn in_tiles(model: &str, size: u32) -> ImageRequest {
    let memory = MemoryRequest { vae_tiling: Some(true), vae_tile_size: size, ..MemoryRequest::default() };
    ImageRequest { memory: Some(memory), ..request(model) }
}

fn pixels(ran: &Ran) -> Vec<u8> {
    assert_eq!(ran.end(), "succeeded");
    png_text::read(&ran.pictures[0]).unwrap().pixels
}

fn degraded(ran: &Ran) -> String {
    match ran.events.last().and_then(|event| event.event.as_ref()) {
        Some(Event::Succeeded(succeeded)) => succeeded.degraded.clone(),
        other => panic!("{other:?}"),
    }
}

/// The largest difference of two pictures' bytes, and how many differ.
fn difference(a: &[u8], b: &[u8]) -> (u8, usize) {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| a.abs_diff(*b));
    (differences.clone().max().unwrap(), differences.filter(|d| *d > 0).count())
}

/// The default model with a decoder whose feature maps are beyond what f16 holds; their norm hides that from its picture.
fn loud(sandbox: &Sandbox) -> PathBuf {
    let folder = sandbox.default_model_as("loud");
    let file = folder.join("vae/diffusion_pytorch_model.safetensors");
    scale_weights(&file, |name| name.starts_with("decoder.conv_in.").then_some(200_000.0)).unwrap();
    folder
}

#[tokio::test]
async fn tiles_and_streams_give_the_picture_of_the_whole() {
    let sandbox = Sandbox::new();
    let plain = Daemon::start(&sandbox, &Options::default());
    let calls = Calls::connect(&plain).await;
    let whole = pixels(&calls.run(request(""), |_| {}).await.unwrap());
    let tiled = pixels(&calls.run(in_tiles("", 128), |_| {}).await.unwrap());
    let (largest, count) = difference(&tiled, &whole);
    // Statistics that differ in their last bits may move a number over the border of two bytes.
    assert!(largest <= 1 && count * 1000 <= whole.len(), "{count} bytes differ, by {largest} at most");
    assert!(plain.stop().success());

    let options = Options::default().set("memory.vae_resident=false").set("memory.vae_tile_batch=3");
    let streaming = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&streaming).await;
    assert!(pixels(&calls.run(request(""), |_| {}).await.unwrap()) == whole, "streamed");
    assert!(pixels(&calls.run(in_tiles("", 128), |_| {}).await.unwrap()) == tiled, "streamed, three tiles together");
    assert!(streaming.stop().success());
}

#[tokio::test]
async fn what_f16_cannot_hold_is_decoded_again_in_f32_and_marked() {
    let sandbox = Sandbox::new();
    let options = Options::default().model("loud", loud(&sandbox));
    let exact = Daemon::start(&sandbox, &options);
    let calls = Calls::connect(&exact).await;
    let loud_exact = calls.run(request("loud"), |_| {}).await.unwrap();
    assert_eq!(degraded(&loud_exact), "");
    let plain_exact = pixels(&calls.run(request(""), |_| {}).await.unwrap());
    assert!(exact.stop().success());

    let short = Daemon::start(&sandbox, &options.set("memory.vae_dtype=f16"));
    let calls = Calls::connect(&short).await;
    let plain = calls.run(request(""), |_| {}).await.unwrap();
    let (largest, count) = difference(&pixels(&plain), &plain_exact);
    assert!(count > 0 && largest <= 8, "f16 differs from f32 in {count} bytes, by {largest} at most");
    assert_eq!(degraded(&plain), "");
    for round in 0..2 {
        // The second time the worker has f32's weights, and turns to f16 again as it is asked to.
        let loud = calls.run(request("loud"), |_| {}).await.unwrap();
        assert!(pixels(&loud) == pixels(&loud_exact), "round {round}");
        let why = degraded(&loud);
        assert!(why.contains("f16") && why.contains("f32"), "round {round}: {why}");
    }
    assert!(short.stop().success());
}

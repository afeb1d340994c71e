//! Image to image, inpainting and every sampler as diffusers' pipelines run them, through the real programs: the noise, the
//! order in which the generator is drawn from, every step's latents.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use sd_engine::testkit::{Fixture, Layout, fixtures, write_weights};
use sd_tests::daemon::Options;
use sd_tests::{Daemon, Sandbox};
use serde::Deserialize;

const TOLERANCE: f64 = 1e-4;

#[derive(Deserialize)]
struct Painting {
    arguments: serde_json::Value,
    size: u32,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    sampler: String,
    kind: String,
    channels: usize,
    steps: u32,
    strength: Option<f64>,
    seed: u64,
    latents: Vec<Vec<f32>>,
}

fn painting() -> Painting {
    let file = fs::File::open(fixtures().join("painting.json.gz")).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Writes a PNG whose pixels are a formula, the same as in the script that made the fixture.
fn png(path: &Path, size: u32, pixel: impl Fn(u32, u32) -> [u8; 3]) {
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), size, size);
    encoder.set_color(png::ColorType::Rgb);
    let pixels: Vec<u8> =
        (0..size).flat_map(|y| (0..size).map(move |x| (x, y))).flat_map(|(x, y)| pixel(x, y)).collect();
    encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
}

/// The model of the fixture, with as many input channels as asked for: nine see a mask and the masked picture.
fn model(folder: &Path, channels: usize) -> PathBuf {
    let path = folder.join(format!("model-{channels}"));
    let fixture = Fixture::open("sd15").unwrap();
    fixture.write_model(&path).unwrap();
    let config = path.join("unet/config.json");
    let mut unet: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    unet["in_channels"] = channels.into();
    fs::write(&config, unet.to_string()).unwrap();
    let mut tensors = fixture.weights("unet/diffusion_pytorch_model.safetensors").to_vec();
    let first = tensors.iter_mut().find(|tensor| tensor.name == "conv_in.weight").unwrap();
    first.shape[1] = channels;
    let layout = Layout::Single(safetensors::Dtype::F32);
    write_weights(&path.join("unet"), "diffusion_pytorch_model", &tensors, layout).unwrap();
    path
}

/// Latents after each step, from the trace of one run.
fn steps(folder: &Path) -> Vec<Vec<f32>> {
    let mut names: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let mut found = Vec::new();
    for path in names.iter().filter(|path| path.to_string_lossy().contains("-step.")) {
        let bytes = fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (_, view) in file.tensors() {
            found.push(view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect());
        }
    }
    for path in names {
        fs::remove_file(path).unwrap();
    }
    found
}

#[test]
fn every_case_has_diffusers_latents_after_every_step() {
    let painting = painting();
    let sandbox = Sandbox::new();
    let trace = sandbox.path().join("trace");
    fs::create_dir(&trace).unwrap();
    let options = Options::default()
        .model("plain", model(sandbox.path(), 4))
        .model("inpaint", model(sandbox.path(), 9))
        .environment("SDD_WORKER_TRACE", trace.to_str().unwrap());
    let daemon = Daemon::start(&sandbox, &options);
    let (picture, mask) = (sandbox.path().join("picture.png"), sandbox.path().join("mask.png"));
    png(&picture, painting.size, |x, y| [(x * 4) as u8, (y * 4) as u8, ((x + y) * 2) as u8]);
    png(&mask, painting.size, |x, y| if x >= 24 && y < 48 { [255; 3] } else { [0; 3] });
    let text = |key: &str| match &painting.arguments[key] {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let size = painting.size.to_string();
    for case in &painting.cases {
        let name = format!("{} {} of {} channels at {:?}", case.sampler, case.kind, case.channels, case.strength);
        let mut command = sandbox.sdctl(["generate", "--endpoint", &daemon.endpoint, "--no-emphasis", "-o", "x.png"]);
        command.args(["--force", "--width", &size, "--height", &size, "--negative", &text("negative_prompt")]);
        command.args(["--steps", &case.steps.to_string(), "--seed", &case.seed.to_string()]);
        command.args(["--cfg", &text("guidance_scale"), "--sampler", &case.sampler]);
        command.args(["-m", if case.channels == 9 { "inpaint" } else { "plain" }]);
        if let Some(strength) = case.strength {
            command.arg("--init-img").arg(&picture).args(["--strength", &strength.to_string()]);
        }
        if case.kind == "inpaint" {
            command.arg("--mask").arg(&mask);
        }
        let output = command.arg(text("prompt")).output().unwrap();
        assert!(output.status.success(), "{name}: {}", sd_tests::sandbox::text(&output));
        let ours = steps(&trace);
        assert_eq!(ours.len(), case.latents.len(), "{name}: steps");
        for (step, (ours, theirs)) in ours.iter().zip(&case.latents).enumerate() {
            assert_eq!(ours.len(), theirs.len(), "{name}: latents");
            let largest = theirs.iter().fold(0f32, |m, v| m.max(v.abs()));
            let worst = ours.iter().zip(theirs).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            let difference = f64::from(worst / largest);
            assert!(difference < TOLERANCE, "{name}: after step {step} the latents differ by {difference:.1e}");
        }
    }
    assert_eq!(painting.cases.len(), 17);
}

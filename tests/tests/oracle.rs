//! diffusers' own numbers, through the real programs: a daemon with real workers runs the recorded pipelines on model files
//! written from the fixtures, traces every intermediate tensor, and each is compared.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use sd_engine::tensor::{self, Tensor};
use sd_engine::testkit::{Fixture, compare};
use sd_tests::daemon::Options;
use sd_tests::{Daemon, Sandbox, png_text};

/// Largest difference allowed, as a share of the tensor's largest magnitude.
const TOLERANCE: f64 = 1e-4;

/// The traced tensors of all processes, by name.
fn traced(folder: &Path) -> BTreeMap<String, Tensor> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, view) in file.tensors() {
            let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            let tensor = tensor::from_f32(values, view.shape()).unwrap();
            assert!(found.insert(name.clone(), tensor).is_none(), "{name} was traced twice");
        }
    }
    found
}

fn check(name: &str, unet_calls: usize) {
    let fixture = Fixture::open(name).unwrap();
    let sandbox = Sandbox::new();
    let (model, trace) = (sandbox.path().join("model"), sandbox.path().join("trace"));
    fs::create_dir(&trace).unwrap();
    fixture.write_model(&model).unwrap();
    let options = Options::default().model("tiny", &model).environment("SDD_WORKER_TRACE", trace.to_str().unwrap());
    let daemon = Daemon::start(&sandbox, &options);
    let argument = |key: &str| match &fixture.oracle["args"][key] {
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut command = sandbox.sdctl(["generate", "--seed", "0", "--no-emphasis", "-m", "tiny", "-o", "x.png"]);
    command.args(["--endpoint", &daemon.endpoint, "--negative", &argument("negative_prompt")]);
    command.args(["--width", &argument("width"), "--height", &argument("height")]);
    command.args(["--steps", &argument("num_inference_steps"), "--cfg", &argument("guidance_scale")]);
    let output = command.arg(argument("prompt")).output().unwrap();
    assert!(output.status.success(), "{name}: {}", sd_tests::sandbox::text(&output));

    let found = traced(&trace);
    let mut worst = (0.0f64, String::new());
    let mut compared = 0;
    let mut same = |ours: &str, theirs: &str| {
        let tensor = found.get(ours).unwrap_or_else(|| panic!("{name}: {ours} was not traced: {:?}", found.keys()));
        let expected = fixture.tensor(theirs).unwrap();
        let difference = compare(tensor, expected).unwrap_or_else(|error| panic!("{name}: {ours}: {error}"));
        assert!(difference < TOLERANCE, "{name}: {ours} differs by {difference:.1e}");
        compared += 1;
        if difference > worst.0 {
            worst = (difference, ours.to_owned());
        }
    };
    for call in 0.. {
        let key = format!("text_encoder.{call}.out.last_hidden_state");
        if !fixture.has(&key) {
            break;
        }
        same(&key, &key);
    }
    same("prepare_latents.0", "prepare_latents.0");
    for call in 0..unet_calls {
        for part in ["in.0", "out.0"] {
            let key = format!("unet.{call}.{part}");
            // Guidance is ours to apply: what is traced is the network's own output for the pair.
            same(&key, &key);
        }
        let step = format!("step.{call}.latents");
        same(&step, &step);
    }
    same("vae.0.in", "vae.0.in");
    same("vae.0.out", "vae.0.out");
    eprintln!("{name}: {compared} tensors, the worst is {} with {:.1e}", worst.1, worst.0);

    // The picture is the decoder's output rounded to bytes, so no byte may be off by more than one.
    let picture = png_text::read(&fs::read(sandbox.out().join("x.png")).unwrap()).unwrap();
    let image = tensor::to_f32(fixture.tensor("image").unwrap()).unwrap();
    let area = (picture.width * picture.height) as usize;
    for (at, byte) in picture.pixels.iter().enumerate() {
        let expected = image[at % 3 * area + at / 3] * 255.0;
        assert!((f32::from(*byte) - expected).abs() <= 0.6, "{name}: byte {at} is {byte}, expected {expected}");
    }
}

#[test]
fn sd15() {
    check("sd15", 4);
}

#[test]
fn sd15_euler() {
    check("sd15_euler", 4);
}

#[test]
fn sd15_lcm() {
    check("sd15_lcm", 4);
}

#[test]
fn sd21() {
    check("sd21", 4);
}

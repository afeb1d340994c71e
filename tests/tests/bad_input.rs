//! Bad input gets a clear error that names the thing and the remedy, its exit code, and costs nothing: after all of it the same
//! daemon makes a picture.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use sd_engine::testkit::Fixture;
use sd_proto::exit::ProgramExit;
use sd_tests::daemon::Options;
use sd_tests::sandbox::text;
use sd_tests::{Daemon, Sandbox};

struct Bench {
    sandbox: Sandbox,
    daemon: Daemon,
}

impl Bench {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        let daemon = Daemon::start(&sandbox, &Options::default());
        Self { sandbox, daemon }
    }

    /// A call that must fail with this code and say all of these words.
    fn refuses(&self, arguments: &[&str], exit: ProgramExit, words: &[&str]) {
        let mut command = self.sandbox.sdctl(["generate", "--endpoint", &self.daemon.endpoint]);
        let output = command.args(arguments).output().unwrap();
        let said = text(&output);
        let shown: Vec<String> = arguments.iter().map(|a| a.chars().take(60).collect()).collect();
        assert_eq!(output.status.code(), Some(exit.code()), "{shown:?}: {said}");
        for word in words {
            assert!(said.to_lowercase().contains(&word.to_lowercase()), "{shown:?} does not say {word:?}: {said}");
        }
        assert!(!said.contains("panicked"), "{said}");
    }

    fn works(&self) {
        self.sandbox.sdctl_ok([
            "generate",
            "pizza",
            "--steps",
            "2",
            "--force",
            "-o",
            "ok.png",
            "--endpoint",
            &self.daemon.endpoint,
        ]);
    }
}

#[test]
fn requests_that_cannot_be_met() {
    let bench = Bench::new();
    let usage = ProgramExit::Usage;
    bench.refuses(&["x", "--width", "250"], usage, &["width", "250", "248", "256"]);
    bench.refuses(&["x", "--height", "0", "--width", "7"], usage, &["height", "above zero"]);
    bench.refuses(&["x", "--steps", "0"], usage, &["steps"]);
    bench.refuses(&["x", "--steps", "1000000"], usage, &["steps"]);
    bench.refuses(&["x", "--sampler", "magic"], usage, &["magic", "ddim", "euler_a", "unipc"]);
    bench.refuses(&["x", "--schedule", "magic"], usage, &["magic", "karras"]);
    bench.refuses(&["x", "--cfg", "nan"], usage, &["nan"]);
    bench.refuses(&["x", "--strength", "0.5"], usage, &["init"]);
    bench.refuses(&["x", "-n", "100000"], usage, &["count"]);
    bench.refuses(&["x", "-m", "no-such-model"], ProgramExit::Unavailable, &["no-such-model", "default"]);
    bench.refuses(&["x", "--init-img", "absent.png"], ProgramExit::Data, &["absent.png"]);
    let enormous = "word ".repeat(20_000);
    bench.refuses(&[&enormous], usage, &["prompt"]);
    bench.refuses(&["x", "--width", "1048576", "--height", "1048576"], usage, &["width"]);
    fs::write(bench.sandbox.out().join("text.png"), "this is no picture").unwrap();
    bench.refuses(&["x", "--init-img", "text.png"], ProgramExit::Data, &["PNG"]);
    bench.works();
}

#[test]
fn a_size_above_the_budget_is_refused_with_the_numbers_before_anything_runs() {
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().set("devices.cpu.budget=400MiB"));
    let bench = Bench { sandbox, daemon };
    bench.refuses(&["x", "--width", "4096", "--height", "4096"], ProgramExit::Capacity, &["MiB", "fit"]);
    assert!(bench.sandbox.processes_of("sd-worker").is_empty(), "a worker was started for a job that cannot fit");
    bench.works();
}

#[test]
fn an_empty_prompt_and_a_long_one_are_fine() {
    let bench = Bench::new();
    let long = "a red heart, ".repeat(60);
    for prompt in ["", &long] {
        let mut command =
            bench.sandbox.sdctl(["generate", "--endpoint", &bench.daemon.endpoint, "--force", "-o", "x.png"]);
        let output = command.args(["--steps", "2", "--", prompt]).output().unwrap();
        // An empty prompt on the command line is more often a mistake than a wish: it may be refused, by name.
        let refused = output.status.code() == Some(ProgramExit::Usage.code()) && text(&output).contains("prompt");
        assert!(output.status.success() || (prompt.is_empty() && refused), "{}", text(&output));
    }
    bench.works();
}

/// A copy of the tiny model with one thing broken.
fn broken(folder: &Path, name: &str, harm: impl FnOnce(&Path)) -> PathBuf {
    let path = folder.join(name);
    Fixture::open("sd15").unwrap().write_model(&path).unwrap();
    harm(&path);
    path
}

const UNET: &str = "unet/diffusion_pytorch_model.safetensors";

#[test]
fn model_folders_that_are_broken_in_every_way_are_named() {
    let bench = Bench::new();
    let folder = bench.sandbox.path().to_path_buf();
    let edit = |path: &Path, key: &str, value: serde_json::Value| {
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        config[key] = value;
        fs::write(path, config.to_string()).unwrap();
    };
    let cases: Vec<(PathBuf, &[&str])> = vec![
        (folder.join("nowhere"), &["nowhere"]),
        (
            broken(&folder, "truncated", |path| {
                let file = fs::OpenOptions::new().write(true).open(path.join(UNET)).unwrap();
                file.set_len(file.metadata().unwrap().len() / 2).unwrap();
            }),
            &["diffusion_pytorch_model.safetensors", "truncated"],
        ),
        (
            broken(&folder, "lying-header", |path| {
                let file = fs::OpenOptions::new().write(true).open(path.join(UNET)).unwrap();
                file.write_at(&u64::MAX.to_le_bytes(), 0).unwrap();
            }),
            &["diffusion_pytorch_model.safetensors", "header"],
        ),
        (
            broken(&folder, "pickle", |path| {
                fs::remove_file(path.join(UNET)).unwrap();
                fs::write(path.join("unet/diffusion_pytorch_model.bin"), b"PK\x03\x04").unwrap();
            }),
            &["pickle", "safetensors"],
        ),
        (broken(&folder, "no-vae", |path| fs::remove_dir_all(path.join("vae")).unwrap()), &["vae"]),
        (broken(&folder, "no-tokenizer", |path| fs::remove_dir_all(path.join("tokenizer")).unwrap()), &["tokenizer"]),
        (
            broken(&folder, "other-architecture", |path| {
                edit(&path.join("model_index.json"), "_class_name", "FluxPipeline".into());
            }),
            &["FluxPipeline", "StableDiffusionPipeline"],
        ),
        (
            broken(&folder, "wrong-shape", |path| {
                edit(&path.join("unet/config.json"), "cross_attention_dim", 48.into());
            }),
            &["shape", "attn2"],
        ),
        (
            broken(&folder, "unknown-block", |path| {
                edit(&path.join("unet/config.json"), "down_block_types", serde_json::json!(["A", "B", "C"]));
            }),
            &["down_block_types"],
        ),
        (
            broken(&folder, "no-json", |path| fs::write(path.join("vae/config.json"), "{").unwrap()),
            &["vae/config.json"],
        ),
    ];
    for (path, words) in cases {
        let path = path.to_str().unwrap();
        let mut command = bench.sandbox.sdctl(["inspect", path, "--endpoint", &bench.daemon.endpoint]);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{path}: {}", text(&output));
        let exit = if path.ends_with("nowhere") { output.status.code().unwrap() } else { ProgramExit::Data.code() };
        let mut command = bench.sandbox.sdctl(["generate", "--endpoint", &bench.daemon.endpoint, "-m", path]);
        let output = command.args(["--width", "64", "--height", "64", "x"]).output().unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(exit), "{path}: {said}");
        for word in words {
            assert!(said.contains(word), "{path} does not say {word:?}: {said}");
        }
    }
    bench.works();
}

#[test]
fn weights_that_are_not_numbers_are_found_when_the_output_is_not_finite() {
    let bench = Bench::new();
    let path = broken(bench.sandbox.path(), "nan", |path| {
        let bytes = fs::read(path.join(UNET)).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let file = fs::OpenOptions::new().write(true).open(path.join(UNET)).unwrap();
        file.write_at(&f32::NAN.to_le_bytes(), header).unwrap();
    });
    let path = path.to_str().unwrap();
    bench.refuses(&["x", "-m", path, "--width", "64", "--height", "64"], ProgramExit::Data, &["finite", "tensor"]);
    bench.works();
}

#[test]
fn paths_are_taken_from_the_own_user_alone_and_never_over_tcp() {
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().set("listen=127.0.0.1:0"));
    assert!(daemon.endpoint.starts_with("127.0.0.1:"), "{}", daemon.endpoint);
    let model = broken(sandbox.path(), "fine", |_| {});
    let call = |model: &str| {
        let mut command = sandbox.sdctl(["generate", "x", "--steps", "2", "--force", "-o", "x.png", "-m", model]);
        command.args(["--endpoint", &daemon.endpoint]).output().unwrap()
    };
    let output = call(model.to_str().unwrap());
    assert_eq!(output.status.code(), Some(ProgramExit::Permission.code()), "{}", text(&output));
    assert!(text(&output).contains("path"), "{}", text(&output));
    let output = call("default");
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn bad_configuration_ends_with_64_before_anything_is_bound() {
    let sandbox = Sandbox::new();
    let file = sandbox.path().join("bad.toml");
    let socket = sandbox.path().join("run/bad.sock");
    for (content, words) in [
        ("thread = 2\n", &["thread", "bad.toml", "1"][..]),
        ("\n\n[limits]\nsteps = \"many\"\n", &["steps", "bad.toml", "4"]),
        ("threads = 0\n", &["threads"]),
        ("[devices.cpu]\nbudget = \"12 bananas\"\n", &["12 bananas"]),
        ("listen = \"nonsense\"\n", &["nonsense", "unix:PATH"]),
        ("listen = \"0.0.0.0:0\"\n", &["insecure_listen"]),
        ("not toml at all [", &["bad.toml"]),
    ] {
        fs::write(&file, content).unwrap();
        let output = sandbox
            .command(&sd_tests::programs::programs().sdd)
            .arg("--config")
            .arg(&file)
            .arg("--runtime-dir")
            .arg(sandbox.path().join("run/private"))
            .env("SDD_SYSTEM_SOCKET", &socket)
            .output()
            .unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(ProgramExit::Usage.code()), "{content:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{content:?} does not say {word:?}: {said}");
        }
        assert!(!socket.exists() && sandbox.instances().is_empty(), "{content:?}: something was bound");
    }
}

/// A folder may be on a disk that is mounted later, so it does not keep the daemon from serving other models; it is
/// named wherever somebody looks at it or asks for it.
#[test]
fn a_registered_folder_that_is_not_there_is_a_problem_of_that_model_alone() {
    let sandbox = Sandbox::new();
    let daemon = Daemon::start(&sandbox, &Options::default().model("absent", "/no/such/folder"));
    let bench = Bench { sandbox, daemon };
    let models = bench.sandbox.sdctl_ok(["models", "--json", "--endpoint", &bench.daemon.endpoint]);
    let listed = String::from_utf8_lossy(&models.stdout).into_owned();
    let json: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let models = json.as_array().or_else(|| json["models"].as_array()).expect("a list of models");
    let problem = |name: &str| {
        let model = models.iter().find(|model| model["name"] == name).unwrap_or_else(|| panic!("no {name}: {listed}"));
        model["problem"].as_str().unwrap_or_default().to_owned()
    };
    assert!(problem("absent").contains("/no/such/folder"), "{listed}");
    assert_eq!(problem("default"), "", "{listed}");
    bench.refuses(&["x", "-m", "absent"], ProgramExit::Data, &["/no/such/folder"]);
    bench.works();
}

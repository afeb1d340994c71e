//! The configuration as users meet it: through the program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    /// `sdd` in an environment of its own, with a worker program that exists and is never run.
    fn sdd(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sdd"));
        command.env_clear().env("HOME", self.folder.path()).env("SDD_WORKER_BINARY", "/bin/true");
        command.env("SDD_LOCK_DIR", self.path("locks")).env("SDD_RUNTIME_DIR", self.path("run"));
        command
    }

    fn print(&self, change: impl FnOnce(&mut Command) -> &mut Command) -> Output {
        let mut command = self.sdd();
        change(command.arg("--print-config"));
        command.output().unwrap()
    }
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Exit code 64, one message; returns it.
fn refusal(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn line(text: &str, key: &str) -> String {
    let found = text.lines().find(|line| line.starts_with(&format!("{key} = ")));
    found.unwrap_or_else(|| panic!("no {key} in\n{text}")).to_owned()
}

#[test]
fn flags_are_over_the_environment_over_the_file_over_defaults_and_each_says_so() {
    let place = Place::new();
    let file =
        place.write("my.toml", "threads = 3\n\n[deadlines]\npulse = \"4s\"\ncancel = \"1s\"\n[limits]\nsteps = 50\n");
    let text = stdout(&place.print(|sdd| {
        sdd.arg("--config").arg(&file).env("SDD_DEADLINES_PULSE", "5s").env("SDD_LIMITS_STEPS", "60").args([
            "--set",
            "limits.steps=70",
            "--budget",
            "8GiB",
        ])
    }));
    assert_eq!(line(&text, "threads"), format!("threads = 3 # {}:1", file.display()));
    assert_eq!(line(&text, "cancel"), format!("cancel = \"1s\" # {}:5", file.display()));
    assert_eq!(line(&text, "pulse"), "pulse = \"5s\" # SDD_DEADLINES_PULSE");
    assert_eq!(line(&text, "steps"), "steps = 70 # --set");
    assert_eq!(line(&text, "budget"), "budget = \"8GiB\" # --budget");
    assert_eq!(line(&text, "retire"), "retire = \"3s\" # default");
}

#[test]
fn what_is_printed_is_a_configuration_file_that_prints_the_same() {
    let place = Place::new();
    let model = place.path("models/anime");
    let first = stdout(&place.print(|sdd| {
        sdd.args(["--listen", "127.0.0.1:0", "--listen", "unix:/tmp/a b.sock", "--threads", "2", "--budget", "1GiB"])
            .arg("--model")
            .arg(format!("anime={}", model.display()))
    }));
    let file = place.write("printed.toml", &first);
    let second = stdout(&place.print(|sdd| sdd.arg("--config").arg(&file)));
    let values = |text: &str| -> Vec<String> {
        let plain = text.lines().filter(|line| !line.starts_with('#'));
        plain.map(|line| line.rsplit_once(" # ").map_or(line, |(value, _)| value).to_owned()).collect()
    };
    assert_eq!(values(&first), values(&second));
    assert!(values(&first).contains(&format!("\"anime\" = {:?}", model.display().to_string())), "{first}");
}

#[test]
fn unknown_keys_and_wrong_values_name_key_file_and_line() {
    let place = Place::new();
    for (text, at, words) in [
        ("threads = 2\n[deadlines]\npulze = \"3s\"\n", 3, vec!["pulze", "pulse_interval"]),
        ("\n\nthread = 2\n", 3, vec!["thread", "threads"]),
        ("threads = \"many\"\n", 1, vec!["many"]),
        ("[devices.cpu]\nbudget = \"8 parsecs\"\n", 2, vec!["8 parsecs", "8GiB"]),
        ("[memory]\ndit_gpu_block = 3\n", 2, vec!["dit_gpu_block", "dit_gpu_blocks"]),
        ("[memory]\npreset = \"48gb\"\n", 2, vec!["48gb", "minimal"]),
        ("[model_memory.x]\n\nreserve_gb = -1\n", 3, vec!["-1", "gigabytes"]),
        ("[limits\n", 1, vec![]),
        ("threads = 2\nthreads = 3\n", 2, vec!["duplicate"]),
    ] {
        let file = place.write("bad.toml", text);
        let message = refusal(&place.print(|sdd| sdd.arg("--config").arg(&file)));
        assert!(message.contains(&format!("{}:{at}:", file.display())), "{text:?}: {message}");
        for word in words {
            assert!(message.contains(word), "{text:?}: {message}");
        }
    }
    // Values that are of the right type and still cannot be.
    for (text, at, key, word) in [
        ("threads = 0\n", 1, "threads", "at least 1"),
        ("\n[deadlines]\npulse = \"600ms\"\n", 3, "deadlines.pulse", "two pulse intervals"),
        ("[deadlines]\ncancel = \"0s\"\n", 2, "deadlines.cancel", "more than 0"),
        ("listen = []\n", 1, "listen", "nowhere"),
        ("listen = [\"somewhere\"]\n", 1, "listen", "unix:PATH"),
        ("socket_mode = \"0400\"\n", 1, "socket_mode", "0600"),
        ("default_model = \"x\"\n", 1, "default_model", "there are: default"),
        ("[models]\n\"a/b\" = \"/m\"\n", 2, "models.a/b", "slash"),
        ("[devices.tpu]\nbudget = \"1GiB\"\n", 2, "devices.tpu", "is no device"),
        ("[devices.cpu]\nshare = true\n", 2, "devices.cpu.share", "set devices.cpu.budget"),
        ("[devices.cuda0]\nbudget = 1\nshare = true\n", 3, "devices.cuda0.share", "only the CPU"),
        ("[log]\nformat = \"xml\"\n", 2, "log.format", "json"),
        ("[log]\nfilter = \"sdd=loud\"\n", 2, "log.filter", "loud"),
        ("[memory]\nparams_backend = \"text=tape\"\n", 2, "memory.params_backend", "disk"),
        ("[memory]\n\nvae_tile_batch = 0\n", 3, "memory.vae_tile_batch", "at least 1"),
        ("[model_memory.big]\nbackend = \"vae=cuda0\"\n", 2, "model_memory.big.backend", "cannot compute"),
        ("worker_binary = \"missing/sd-worker\"\n", 1, "worker_binary", "missing/sd-worker"),
    ] {
        let file = place.write("bad.toml", text);
        let message = refusal(&place.print(|sdd| {
            if key == "worker_binary" {
                sdd.env_remove("SDD_WORKER_BINARY");
            }
            sdd.arg("--config").arg(&file)
        }));
        assert!(message.contains(key) && message.contains(word), "{text:?}: {message}");
        assert!(message.contains(&format!("{}:{at})", file.display())), "{text:?}: {message}");
    }
    let absent = place.path("absent.toml");
    assert!(refusal(&place.print(|sdd| sdd.arg("--config").arg(&absent))).contains("absent.toml"));
}

#[test]
fn wrong_variables_and_flags_name_themselves() {
    let place = Place::new();
    let message = refusal(&place.print(|sdd| sdd.env("SDD_THREADS", "two")));
    assert!(message.contains("threads (SDD_THREADS)") && message.contains("two"), "{message}");
    for (flags, word) in [
        (["--set", "limits.stepz=3"], "limits.stepz"),
        (["--set", "nothing"], "KEY=VALUE"),
        (["--model", "anime"], "NAME=FOLDER"),
        (["--budget", "lots"], "--budget"),
        (["--listen", "0.0.0.0:7860"], "insecure_listen"),
        (["--listen", "example.org:7860"], "not authenticated"),
        (["--threads", "few"], "threads (--threads)"),
        (["--offload-mode", "sometimes"], "cond_diffusion"),
        (["--max-vram", "much"], "memory.max_vram"),
        (["--backend", "vae=cuda0"], "cannot compute on cuda0"),
        (["--set", "model_memory.big.presett=8gb"], "no such key"),
        (["--set", "memory.vae_tile_size=100"], "multiple of 8"),
        (["--no-such-flag", "x"], "--no-such-flag"),
    ] {
        let message = refusal(&place.print(|sdd| sdd.args(flags)));
        assert!(message.contains(word), "{flags:?}: {message}");
    }
    let long = format!("/{}", "x".repeat(200));
    assert!(refusal(&place.print(|sdd| sdd.args(["--runtime-dir", &long]))).contains("shorter"));
    let open = stdout(&place.print(|sdd| sdd.args(["--listen", "0.0.0.0:7860", "--insecure-listen"])));
    assert!(open.contains("insecure_listen = true # --insecure-listen"));
}

#[test]
fn the_users_file_counts_before_the_systems_and_its_relative_paths_start_there() {
    let place = Place::new();
    let file = place.write(".config/sdd/config.toml", "models_dir = \"models\"\n[models]\nbig = \"../big\"\n");
    let text = stdout(&place.print(|sdd| sdd));
    let folder = file.parent().unwrap();
    assert!(line(&text, "models_dir").contains(&folder.join("models").display().to_string()), "{text}");
    assert!(text.contains(&folder.join("../big").display().to_string()), "{text}");
    let other = place.write("xdg/sdd/config.toml", "threads = 7\n");
    let text = stdout(&place.print(|sdd| sdd.env("XDG_CONFIG_HOME", place.path("xdg"))));
    assert_eq!(line(&text, "threads"), format!("threads = 7 # {}:1", other.display()));
}

#[test]
fn the_worker_is_found_beside_the_daemon_or_in_the_path() {
    use std::os::unix::fs::PermissionsExt as _;
    let place = Place::new();
    let own = place.path("bin/sdd");
    let search = Some(std::env::join_paths([place.path("first"), place.path("second")]).unwrap());
    let find = || sdd::config::find_worker(Some(&own), search.clone());
    let message = find().unwrap_err();
    assert!(message.contains("bin/sd-worker") && message.contains("worker_binary"), "{message}");
    let program = |name: &str, mode| {
        let path = place.write(name, "");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    program("first/sd-worker", 0o644);
    let second = program("second/sd-worker", 0o755);
    assert_eq!(find().unwrap(), second, "what cannot be run is passed over");
    let beside = program("bin/sd-worker", 0o755);
    assert_eq!(find().unwrap(), beside);
}

#[test]
fn bad_configuration_ends_the_daemon_before_anything_is_bound() {
    let place = Place::new();
    let output = place.sdd().args(["--set", "deadlines.pulse=1ms"]).output().unwrap();
    let message = refusal(&output);
    assert!(message.starts_with("sdd: deadlines.pulse (--set)"), "{message}");
    for name in ["run", "locks"] {
        assert!(!Path::new(&place.path(name)).exists(), "{name} was made");
    }
}

/// The line of a value that is set, or shown as a comment where a preset or default gives it.
fn shown(text: &str, key: &str) -> String {
    let found = text.lines().find(|line| line.trim_start_matches("# ").starts_with(&format!("{key} = ")));
    found.unwrap_or_else(|| panic!("no {key} in\n{text}")).to_owned()
}

#[test]
fn every_option_of_memory_has_the_flag_that_users_know() {
    let place = Place::new();
    for (flags, key, value) in [
        (vec!["--preset", "gb16"], "preset", "\"16gb\" # --preset"),
        (vec!["--offload-mode", "cond_only"], "offload_mode", "\"cond_only\" # --offload-mode"),
        (vec!["--offload-cond-stage"], "offload_cond_stage", "true # --offload-cond-stage"),
        (vec!["--no-offload-cond-stage"], "offload_cond_stage", "false # --no-offload-cond-stage"),
        (vec!["--offload-diffusion"], "offload_diffusion", "true # --offload-diffusion"),
        (vec!["--no-offload-diffusion"], "offload_diffusion", "false # --no-offload-diffusion"),
        (vec!["--no-reload-cond-stage"], "reload_cond_stage", "false # --no-reload-cond-stage"),
        (vec!["--no-reload-diffusion", "--reload-diffusion"], "reload_diffusion", "true # --reload-diffusion"),
        (vec!["--offload-log"], "offload_log", "true # --offload-log"),
        (vec!["--vram-estimation", "formula"], "vram_estimation", "\"formula\" # --vram-estimation"),
        (vec!["--streaming-prefetch"], "streaming_prefetch", "1 # --streaming-prefetch"),
        (vec!["--streaming-prefetch", "0"], "streaming_prefetch", "0 # --streaming-prefetch"),
        (vec!["--no-streaming-prefetch"], "streaming_prefetch", "0 # --no-streaming-prefetch"),
        (vec!["--streaming-min-vram", "256"], "streaming_min_vram", "256 # --streaming-min-vram"),
        (vec!["--max-vram", "-1.5"], "max_vram", "-1.5 # --max-vram"),
        (vec!["--vae-tiling"], "vae_tiling", "true # --vae-tiling"),
        (vec!["--no-vae-tiling"], "vae_tiling", "false # --no-vae-tiling"),
        (vec!["--vae-tile-size", "256"], "vae_tile_size", "256 # --vae-tile-size"),
        (vec!["--vae-tile-overlap", "32"], "vae_tile_overlap", "32 # --vae-tile-overlap"),
        (vec!["--params-backend", "text=disk,*=cpu"], "params_backend", "\"text=disk,*=cpu\" # --params-backend"),
        (vec!["--offload-to-cpu"], "params_backend", "\"*=cpu\" # --offload-to-cpu"),
        (vec!["--backend", "text=cpu", "--vae-on-cpu"], "backend", "\"text=cpu,vae=cpu\" # --backend --vae-on-cpu"),
        (vec!["--clip-on-cpu"], "backend", "\"text=cpu\" # --clip-on-cpu"),
    ] {
        let text = stdout(&place.print(|sdd| sdd.args(&flags)));
        assert_eq!(line(&text, key), format!("{key} = {value}"), "{flags:?}");
    }
}

#[test]
fn what_nobody_writes_comes_from_the_preset_and_says_so() {
    let place = Place::new();
    let text = stdout(&place.print(|sdd| sdd));
    assert_eq!(shown(&text, "dit_gpu_blocks"), "# dit_gpu_blocks = -1 # preset auto");
    assert_eq!(shown(&text, "offload_mode"), "# offload_mode = \"auto\" # default");
    assert_eq!(shown(&text, "reload_diffusion"), "# reload_diffusion = true # default");
    let file =
        place.write("my.toml", "[memory]\npreset = \"8gb\"\nmlp_chunk = 7\n[model_memory.\"a.b\"]\ntoken_chunk = 9\n");
    let text = stdout(&place.print(|sdd| sdd.arg("--config").arg(&file).env("SDD_MEMORY_OFFLOAD_MODE", "none")));
    assert_eq!(shown(&text, "token_chunk"), "# token_chunk = 4096 # preset 8gb");
    assert_eq!(line(&text, "mlp_chunk"), format!("mlp_chunk = 7 # {}:3", file.display()));
    assert_eq!(line(&text, "offload_mode"), "offload_mode = \"none\" # SDD_MEMORY_OFFLOAD_MODE");
    assert_eq!(line(&text, "token_chunk"), format!("token_chunk = 9 # {}:5", file.display()), "the model's own");
}

#[test]
fn a_file_for_memory_must_have_its_table_and_stands_on_its_preset_alone() {
    let place = Place::new();
    let config = place.write("my.toml", "[memory]\npreset = \"8gb\"\ntoken_chunk = 5\noffload_mode = \"cond_only\"\n");
    let with = |memory: &Path| place.print(|sdd| sdd.arg("--config").arg(&config).arg("--memory").arg(memory));
    let plain = place.write("plain.toml", "[memory]\nmlp_chunk = 3\n");
    let text = stdout(&with(&plain));
    assert_eq!(line(&text, "mlp_chunk"), format!("mlp_chunk = 3 # {}:2", plain.display()));
    assert_eq!(shown(&text, "token_chunk"), "# token_chunk = 16384 # preset 24gb", "nothing of the table below");
    assert_eq!(line(&text, "preset"), format!("preset = \"24gb\" # {}:1", plain.display()));
    assert!(line(&text, "offload_mode").contains("my.toml:4"), "what presets do not fill stays");
    let named = place.write("named.toml", "[memory]\npreset = \"minimal\"\n");
    assert_eq!(shown(&stdout(&with(&named)), "token_chunk"), "# token_chunk = 2048 # preset minimal");
    for (text, line, word) in [
        ("", 1, "no table [memory]"),
        ("[memory]\nx = 1\n", 2, "dit_gpu_blocks"),
        ("threads = 2\n[memory]\n", 1, "threads"),
    ] {
        let bad = place.write("bad.toml", text);
        let message = refusal(&with(&bad));
        assert!(message.contains(&format!("{}:{line}:", bad.display())) && message.contains(word), "{message}");
    }
    // Those that are delivered are their presets, and make none of their values a user's own.
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    for entry in std::fs::read_dir(configs).unwrap() {
        let path = entry.unwrap().path();
        let preset = path.file_stem().unwrap().to_str().unwrap();
        let text = stdout(&with(&path));
        assert!(line(&text, "preset").starts_with(&format!("preset = \"{preset}\" # ")), "{text}");
        assert!(shown(&text, "reserve_gb").ends_with(&format!("# preset {preset}")), "{text}");
    }
}

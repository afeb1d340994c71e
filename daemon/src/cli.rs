//! The command line of `sdd`.

use std::path::PathBuf;

use clap::Parser;

mod memory;

pub use memory::MemoryFlags;

use crate::config::{Config, ConfigError, Layers, Origin, default_file};

/// What `--help` says below the options.
const EXAMPLES: &str = "\
Examples:
  sdd                                       serve this user: `sdctl generate \"a red heart\"` finds it
  sdd --listen 127.0.0.1:7860               serve programs of this host over TCP (port 0: any free one)
  sdd --model anime=/models/anime-v3        register a model; ask for it with `sdctl generate -m anime …`
  sdd --models-dir /models --budget 8GiB    every folder there is a model; workers may hold 8 GiB together
  sdd --preset 8gb --offload-mode cond_only move the text encoder out before denoising, where room is short
  sdd --print-config > config.toml          all keys, with what they do and where each value comes from

Configuration, later ones over earlier ones:
  1. --config FILE, or SDD_CONFIG, or the first of ~/.config/sdd/config.toml and /etc/sdd/config.toml
  2. the environment: SDD_ and the key, dots as underscores (SDD_DEVICES_CPU_BUDGET=8GiB); RUST_LOG
  3. the command line: the options above, and --set KEY=VALUE for every other key

Signals: SIGTERM and SIGINT let accepted jobs end (deadlines.drain), a second one stops them; recorded ones
go on at the next start.
Exit codes: 0 done, 1 the system refuses something, 64 bad configuration, 75 another daemon holds the device or the socket, 70 a bug.";

/// Serves image generation to local clients: queues jobs, runs their stages in worker processes, and decides how much
/// memory each of them may use.
///
/// By default it listens on a Unix socket: $XDG_RUNTIME_DIR/sdd/sdd.sock (or below the folder for temporary files), root's on
/// /run/sdd/sdd.sock. Clients on a Unix socket are known by their user; those on TCP are not, so TCP is for this host
/// alone unless insecure_listen is set.
#[derive(Debug, Parser)]
#[command(name = "sdd", version, after_help = EXAMPLES)]
pub struct Cli {
    /// Configuration file
    #[arg(long, value_name = "FILE", env = "SDD_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where clients connect: unix:PATH or HOST:PORT; may be repeated
    #[arg(long, value_name = "ENDPOINT")]
    pub listen: Vec<String>,
    /// Allow HOST:PORT that other hosts can reach, although clients are not authenticated
    #[arg(long)]
    pub insecure_listen: bool,
    /// Register a model; may be repeated
    #[arg(long, value_name = "NAME=FOLDER")]
    pub model: Vec<String>,
    /// Folder whose subfolders are models
    #[arg(long, value_name = "FOLDER")]
    pub models_dir: Option<String>,
    /// The model of requests that name none
    #[arg(long, value_name = "NAME")]
    pub default_model: Option<String>,
    /// Bytes that workers may hold on the CPU together, as in 8GiB
    #[arg(long, value_name = "SIZE")]
    pub budget: Option<String>,
    /// Threads that compute
    #[arg(long, value_name = "N")]
    pub threads: Option<String>,
    /// Folder of the sockets
    #[arg(long, value_name = "FOLDER")]
    pub runtime_dir: Option<String>,
    /// Where the model that is built in is written to
    #[arg(long, value_name = "FOLDER")]
    pub cache_dir: Option<String>,
    /// Host-wide folder of the locks on devices
    #[arg(long, value_name = "FOLDER")]
    pub lock_dir: Option<String>,
    /// The worker program
    #[arg(long, value_name = "PROGRAM")]
    pub worker_binary: Option<String>,
    /// What is logged, as RUST_LOG says it: info, sdd=debug, …
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// text or json
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Any other key of the configuration; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub memory_flags: MemoryFlags,
    /// Print the effective configuration, say where each value comes from, and exit
    #[arg(long)]
    pub print_config: bool,
    /// Print the devices of this host as JSON (no daemon is needed) and exit
    #[arg(long, hide = true)]
    pub devices: bool,
    /// Serve one client's call: end when this inherited pipe closes and no other client's job is left
    #[arg(long, value_name = "N", hide = true)]
    pub private_owner_fd: Option<i32>,
    /// Write the endpoint and a newline to this inherited descriptor when serving
    #[arg(long, value_name = "N", hide = true)]
    pub ready_fd: Option<i32>,
}

impl Cli {
    /// Puts file, environment and these flags together. Also returns `SDD_` variables that mean nothing here.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn configuration(
        &self,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<(Config, Vec<String>), ConfigError> {
        let mut layers = Layers::default();
        if let Some(file) = self.config.clone().or_else(default_file) {
            layers.file(&file)?;
        }
        let environment: Vec<(String, String)> = environment.collect();
        if let Some((name, filter)) = environment.iter().find(|(name, text)| name == "RUST_LOG" && !text.is_empty()) {
            layers.set_by_name("log.filter", filter, Origin::Environment(name.clone()))?;
        }
        let unknown = layers.environment(environment.into_iter())?;
        let flags = [
            ("--models-dir", "models_dir", &self.models_dir),
            ("--default-model", "default_model", &self.default_model),
            ("--budget", "devices.cpu.budget", &self.budget),
            ("--threads", "threads", &self.threads),
            ("--runtime-dir", "runtime_dir", &self.runtime_dir),
            ("--cache-dir", "cache_dir", &self.cache_dir),
            ("--lock-dir", "lock_dir", &self.lock_dir),
            ("--worker-binary", "worker_binary", &self.worker_binary),
            ("--log", "log.filter", &self.log),
            ("--log-format", "log.format", &self.log_format),
        ];
        for (flag, key, value) in flags {
            if let Some(value) = value {
                layers.set_by_name(key, value, Origin::Flag(flag.into()))?;
            }
        }
        if !self.listen.is_empty() {
            layers.set_by_name("listen", &self.listen.join(","), Origin::Flag("--listen".into()))?;
        }
        if self.insecure_listen {
            layers.set_by_name("insecure_listen", "true", Origin::Flag("--insecure-listen".into()))?;
        }
        self.memory_flags.lay(&mut layers)?;
        for (flag, prefix, pairs) in [("--model", "models.", &self.model), ("--set", "", &self.set)] {
            for pair in pairs {
                let origin = Origin::Flag(flag.into());
                let Some((key, value)) = pair.split_once('=').filter(|(key, _)| !key.is_empty()) else {
                    let form = if prefix.is_empty() { "KEY=VALUE" } else { "NAME=FOLDER" };
                    let problem = format!("write {flag} {form}");
                    return Err(ConfigError::Value { key: pair.clone(), origin, problem });
                };
                layers.set_by_name(&format!("{prefix}{key}"), value, origin)?;
            }
        }
        let (raw, origins) = layers.finish()?;
        Ok((Config::check(raw, origins)?, unknown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed_and_its_help_names_every_way_to_configure() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        for word in ["--listen", "--budget", "SDD_CONFIG", "RUST_LOG", "--set", "Exit codes", "sdctl generate"] {
            assert!(help.contains(word), "{word}");
        }
        assert!(!help.contains("private-owner-fd"), "what only sdctl uses is not shown");
    }
}

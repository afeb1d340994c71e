//! Configuration: a TOML file, under variables of the environment, under flags, checked into one value.
//!
//! [`Raw`] is what can be written; [`Config`] is what was checked and completed. Between them every value
//! keeps its [`Origin`], so that an error names key, file and line, and `sdd --print-config` says where each value comes
//! from.

mod check;
mod layers;
pub mod memory;
pub mod placement;
mod places;
pub mod presets;
mod print;
mod raw;
mod spellings;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use sd_proto::endpoint::Endpoint;

pub use check::{LEAST_TILE, MOST_TILE, tiles};
pub use layers::{Layers, Origin};
pub use memory::Memory;
pub use places::{default_file, find_worker};
pub use print::Value;
pub use raw::{KEYS, Key, Raw};
pub use values::{ByteSize, Span};

use crate::ids::DeviceId;
use crate::jobs::Limits;
use crate::models::RegistryConfig;
use crate::residency::Budget;
use crate::stages::CacheConfig;
use crate::workers::WorkerLimits;

/// Why the configuration is refused; `sdd` exits with 64 then, before anything is bound.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of another type.
    #[error("{}:{line}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong; names the key.
        problem: String,
    },
    /// A value that cannot be.
    #[error("{key} ({origin}): {problem}")]
    Value {
        /// The key.
        key: String,
        /// Where it was set.
        origin: Origin,
        /// What is wrong and what to do.
        problem: String,
    },
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// A checked configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Where clients connect; at least one, none twice.
    pub listen: Vec<Endpoint>,
    /// Whether TCP beyond this host was asked for although clients are not authenticated.
    pub insecure_listen: bool,
    /// Permissions of the Unix sockets for clients.
    pub socket_mode: u32,
    /// Folder of the sockets; made with mode 0700.
    pub runtime_dir: PathBuf,
    /// Folder of the locks; absent: [`sd_proto::instance::default_lock_dir`].
    pub lock_dir: Option<PathBuf>,
    /// Folder of recorded jobs; absent: none is known that could be it, or jobs are not recorded.
    pub state_dir: Option<PathBuf>,
    /// Where measured peaks of memory are kept.
    pub peaks_file: PathBuf,
    /// Which models there are.
    pub models: RegistryConfig,
    /// Threads that compute on the CPU.
    pub threads: usize,
    /// The worker program; exists and can be run.
    pub worker_binary: PathBuf,
    /// What is remembered of encoded prompts.
    pub cache: CacheConfig,
    /// What may be leased of each device.
    pub devices: BTreeMap<DeviceId, Budget>,
    /// Devices that other daemons may use at the same time, each within its budget.
    pub shared: BTreeSet<DeviceId>,
    /// Bounds on workers.
    pub workers: WorkerLimits,
    /// What accepted jobs may take after a request to end.
    pub drain: Duration,
    /// What workers may take from SIGTERM to their end.
    pub stop: Duration,
    /// How long a worker stays without work.
    pub keep_alive: Duration,
    /// Bounds on clients.
    pub jobs: Limits,
    /// Bytes of shared memory for tensors; absent: what the host has free.
    pub shared_memory: Option<u64>,
    /// How memory is used.
    pub memory: Memory,
    /// What is logged, in the words of `RUST_LOG`.
    pub log_filter: String,
    /// How it is logged.
    pub log_format: LogFormat,
    /// Where each value that is not a default was set, by key.
    pub origins: BTreeMap<String, Origin>,
}

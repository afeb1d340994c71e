//! From what was written to what is meant: defaults filled in, values checked against each other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sd_proto::endpoint::{Endpoint, MAX_SOCKET_PATH};

use super::raw::{Raw, RawDeadlines, RawLimits};
use super::values::{ByteSize, Span};
use super::{Config, ConfigError, LogFormat, Memory, Origin, placement, places};
use crate::ids::DeviceId;
use crate::jobs::Limits;
use crate::models::RegistryConfig;
use crate::residency::Budget;
use crate::stages::CacheConfig;
use crate::workers::WorkerLimits;

/// No deadline is longer: one that never comes is a mistake.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Loading again takes seconds; memory that nobody has used for minutes is worth more to others.
const KEEP_ALIVE: Duration = Duration::from_secs(5 * 60);
/// Name of the longest socket in the runtime folder: the link, with an instance's id.
const LINK_NAME_BYTES: usize = "/link-0123456789abcdef.sock".len();

/// Smallest edge of a tile in pixels: below it most of a tile is overlap.
pub const LEAST_TILE: u32 = 128;
/// Largest edge of a tile in pixels.
pub const MOST_TILE: u32 = 4096;

type Origins = BTreeMap<String, Origin>;

struct Checker<'a> {
    origins: &'a Origins,
}

impl Checker<'_> {
    fn wrong(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        // A table has the origin of its first key.
        let mut within = self
            .origins
            .iter()
            .filter(|(name, _)| name.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')));
        let origin = within.next().map_or(Origin::Default, |(_, origin)| origin.clone());
        ConfigError::Value { key: key.into(), origin, problem: problem.into() }
    }

    fn span(&self, key: &str, value: Option<Span>, default: Duration) -> Result<Duration, ConfigError> {
        let span = value.map_or(default, |span| span.0);
        if span.is_zero() || span > LONGEST {
            return Err(self.wrong(key, format!("a deadline is more than 0 and at most 24h, not {}", Span(span))));
        }
        Ok(span)
    }

    fn number(&self, key: &str, value: Option<u32>, default: usize) -> Result<usize, ConfigError> {
        let number = value.map_or(default, |number| number as usize);
        if number == 0 { Err(self.wrong(key, "0 would allow nothing: write at least 1")) } else { Ok(number) }
    }

    fn bytes(&self, key: &str, value: Option<ByteSize>, default: usize) -> Result<usize, ConfigError> {
        let bytes = value.map_or(default, |bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX));
        if bytes == 0 { Err(self.wrong(key, "0 would allow nothing: write at least 1")) } else { Ok(bytes) }
    }

    fn absolute(&self, key: &str, path: PathBuf) -> Result<PathBuf, ConfigError> {
        if path.as_os_str().is_empty() {
            return Err(self.wrong(key, "a path cannot be empty"));
        }
        std::path::absolute(&path).map_err(|error| self.wrong(key, format!("{}: {error}", path.display())))
    }

    fn listen(&self, raw: &Raw, runtime_dir: Option<&Path>) -> Result<Vec<Endpoint>, ConfigError> {
        let Some(texts) = raw.listen.clone() else {
            let socket = places::socket(runtime_dir);
            self.fits(&socket, "runtime_dir")?;
            return Ok(vec![Endpoint::Unix(socket)]);
        };
        let mut endpoints = Vec::new();
        for text in texts.into_vec() {
            let endpoint: Endpoint =
                text.parse().map_err(|e: sd_proto::endpoint::EndpointError| self.wrong("listen", e.to_string()))?;
            let endpoint = match endpoint {
                Endpoint::Unix(path) => {
                    let path = self.absolute("listen", path)?;
                    self.fits(&path, "listen")?;
                    Endpoint::Unix(path)
                }
                Endpoint::Tcp { host, port } => {
                    if !is_loopback(&host) && raw.insecure_listen != Some(true) {
                        let problem = format!(
                            "{host} can be reached from other hosts, and clients over TCP are not authenticated: listen on \
                             127.0.0.1 (and forward it, by ssh -L), or accept the risk with insecure_listen = true"
                        );
                        return Err(self.wrong("listen", problem));
                    }
                    Endpoint::Tcp { host, port }
                }
            };
            let repeats = !matches!(endpoint, Endpoint::Tcp { port: 0, .. }) && endpoints.contains(&endpoint);
            if repeats {
                return Err(self.wrong("listen", format!("{endpoint} is named twice")));
            }
            endpoints.push(endpoint);
        }
        if endpoints.is_empty() {
            return Err(self.wrong("listen", "a daemon that listens nowhere is of no use: name one endpoint"));
        }
        Ok(endpoints)
    }

    fn fits(&self, path: &Path, key: &str) -> Result<(), ConfigError> {
        let length = path.as_os_str().len();
        if length > MAX_SOCKET_PATH {
            let problem = format!(
                "socket path {} has {length} bytes, at most {MAX_SOCKET_PATH} are possible: choose a shorter one",
                path.display()
            );
            return Err(self.wrong(key, problem));
        }
        Ok(())
    }

    fn deadlines(&self, raw: &RawDeadlines) -> Result<(WorkerLimits, Duration, Duration), ConfigError> {
        let default = WorkerLimits::default();
        let workers = WorkerLimits {
            handshake: self.span("deadlines.handshake", raw.handshake, default.handshake)?,
            pulse_interval: self.span("deadlines.pulse_interval", raw.pulse_interval, default.pulse_interval)?,
            pulse: self.span("deadlines.pulse", raw.pulse, default.pulse)?,
            progress: self.span("deadlines.progress", raw.progress, default.progress)?,
            cancel: self.span("deadlines.cancel", raw.cancel, default.cancel)?,
            retire: self.span("deadlines.retire", raw.retire, default.retire)?,
            inspect: self.span("deadlines.inspect", raw.inspect, default.inspect)?,
        };
        if workers.pulse < workers.pulse_interval * 2 {
            let problem = format!(
                "{} is less than two pulse intervals of {}: every worker would be taken for frozen",
                Span(workers.pulse),
                Span(workers.pulse_interval)
            );
            return Err(self.wrong("deadlines.pulse", problem));
        }
        let drain = self.span("deadlines.drain", raw.drain, Duration::from_secs(30))?;
        let stop = self.span("deadlines.stop", raw.stop, Duration::from_secs(2))?;
        Ok((workers, drain, stop))
    }

    fn limits(&self, raw: &RawLimits, stop: Duration) -> Result<Limits, ConfigError> {
        let default = Limits::default();
        let narrow = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let limits = Limits {
            prompt_bytes: self.bytes("limits.prompt_bytes", raw.prompt_bytes, default.prompt_bytes)?,
            steps: narrow(self.number("limits.steps", raw.steps, default.steps as usize)?),
            count: narrow(self.number("limits.count", raw.count, default.count as usize)?),
            edge: narrow(self.number("limits.edge", raw.edge, default.edge as usize)?),
            image_file_bytes: self.bytes("limits.image_file_bytes", raw.image_file_bytes, default.image_file_bytes)?,
            queued_jobs: self.number("limits.queued_jobs", raw.queued_jobs, default.queued_jobs)?,
            queued_jobs_per_tenant: self.number(
                "limits.queued_jobs_per_tenant",
                raw.queued_jobs_per_tenant,
                default.queued_jobs_per_tenant,
            )?,
            running_jobs: self.number("limits.running_jobs", raw.running_jobs, default.running_jobs)?,
            ended_jobs: self.number("limits.ended_jobs", raw.ended_jobs, default.ended_jobs)?,
            ended_bytes: self.bytes("limits.ended_bytes", raw.ended_bytes, default.ended_bytes)?,
            stop: default.stop.max(stop),
        };
        if limits.image_file_bytes >= sd_proto::MAX_MESSAGE_BYTES / 2 {
            let problem = format!(
                "an image and its mask must fit one message of {}: write less than half of it",
                ByteSize(sd_proto::MAX_MESSAGE_BYTES as u64)
            );
            return Err(self.wrong("limits.image_file_bytes", problem));
        }
        Ok(limits)
    }

    fn state_dir(&self, raw: &Raw) -> Result<Option<PathBuf>, ConfigError> {
        if raw.durable == Some(false) {
            return Ok(None);
        }
        let chosen = raw.state_dir.clone().map(|path| self.absolute("state_dir", path)).transpose()?;
        Ok(chosen.or_else(places::state_dir))
    }

    fn models(&self, raw: &Raw) -> Result<RegistryConfig, ConfigError> {
        let mut models = BTreeMap::new();
        for (name, path) in &raw.models {
            let key = format!("models.{name}");
            if name.is_empty() || name.contains('/') || name == "." || name == ".." {
                return Err(self.wrong(&key, "a model's name has no slash, and is not empty, \".\" or \"..\""));
            }
            models.insert(name.clone(), self.absolute(&key, path.clone())?);
        }
        let folder = raw.models_dir.clone().map(|path| self.absolute("models_dir", path)).transpose()?;
        // Others may appear in the folder while the daemon runs; without one, a name that is not there is a mistake.
        if let Some(default) = raw.default_model.as_ref().filter(|_| folder.is_none())
            && !models.contains_key(default)
            && default != crate::models::registry::EMBEDDED
        {
            let known: Vec<&str> =
                models.keys().map(String::as_str).chain([crate::models::registry::EMBEDDED]).collect();
            let problem = format!("there is no model {default:?}; there are: {}", known.join(", "));
            return Err(self.wrong("default_model", problem));
        }
        let cache_dir = self.absolute("cache_dir", raw.cache_dir.clone().unwrap_or_else(places::cache_dir))?;
        Ok(RegistryConfig { models, folder, default: raw.default_model.clone(), cache_dir })
    }

    /// Budgets. Whether a GPU is there is found out when the daemon starts.
    fn devices(&self, raw: &Raw) -> Result<BTreeMap<DeviceId, Budget>, ConfigError> {
        let mut devices = BTreeMap::from([(DeviceId::cpu(), Budget::Auto)]);
        for (id, device) in &raw.devices {
            let ordinal = id.strip_prefix("cuda").is_some_and(|number| number.parse::<u8>().is_ok());
            if id != DeviceId::cpu().as_str() && !id.starts_with("GPU-") && !ordinal {
                let problem = format!(
                    "{id:?} is no device: write \"cpu\", a GPU's UUID (\"GPU-…\", see `sdctl doctor`) or \"cuda0\""
                );
                return Err(self.wrong(&format!("devices.{id}"), problem));
            }
            if device.budget == Some(ByteSize(0)) {
                return Err(self.wrong(&format!("devices.{id}.budget"), "0 would allow nothing"));
            }
            let budget = device.budget.map_or(Budget::Auto, |budget| Budget::Bytes(budget.0));
            devices.insert(DeviceId::from(id.as_str()), budget);
        }
        Ok(devices)
    }

    fn memory(&self, raw: &Raw) -> Result<Memory, ConfigError> {
        let tables = raw.model_memory.iter().map(|(name, table)| (format!("model_memory.{name}"), table));
        for (table, memory) in std::iter::once(("memory".to_owned(), &raw.memory)).chain(tables) {
            let wrong = |key: &str, problem: String| self.wrong(&format!("{table}.{key}"), problem);
            placement::devices(memory.backend.as_deref()).map_err(|problem| wrong("backend", problem))?;
            placement::storage(memory.params_backend.as_deref()).map_err(|problem| wrong("params_backend", problem))?;
            if memory.vae_tile_batch == Some(0) {
                return Err(wrong("vae_tile_batch", "0 tiles at once paint nothing: write at least 1".into()));
            }
            let (size, overlap) = (memory.vae_tile_size.unwrap_or(0), memory.vae_tile_overlap.unwrap_or(0));
            tiles(size, overlap).map_err(|(key, problem)| wrong(key, problem))?;
        }
        Ok(Memory { daemon: raw.memory.clone(), models: raw.model_memory.clone() })
    }

    fn shared(&self, raw: &Raw) -> Result<BTreeSet<DeviceId>, ConfigError> {
        let mut shared = BTreeSet::new();
        for (id, device) in raw.devices.iter().filter(|(_, device)| device.share == Some(true)) {
            let key = format!("devices.{id}.share");
            if id != DeviceId::cpu().as_str() {
                return Err(self.wrong(&key, "only the CPU can be shared: this build leases nothing of a GPU"));
            }
            if device.budget.is_none() {
                let problem =
                    "daemons that share a device need to know how much each may use: set devices.cpu.budget too";
                return Err(self.wrong(&key, problem));
            }
            shared.insert(DeviceId::from(id.as_str()));
        }
        Ok(shared)
    }

    fn threads(&self, raw: Option<u32>) -> Result<usize, ConfigError> {
        let there_are = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = self.number("threads", raw, there_are)?;
        if threads > 1024 {
            return Err(self.wrong("threads", format!("{threads} threads are too many: at most 1024")));
        }
        Ok(threads)
    }

    fn worker(&self, raw: Option<PathBuf>) -> Result<PathBuf, ConfigError> {
        let Some(path) = raw else {
            let own = std::env::current_exe().ok();
            return places::find_worker(own.as_deref(), std::env::var_os("PATH"))
                .map_err(|problem| self.wrong("worker_binary", problem));
        };
        let path = self.absolute("worker_binary", path)?;
        if !places::is_program(&path) {
            return Err(self.wrong("worker_binary", format!("{} is not a program that can be run", path.display())));
        }
        Ok(path)
    }

    fn socket_mode(&self, raw: Option<&str>) -> Result<u32, ConfigError> {
        let text = raw.unwrap_or("0600");
        match u32::from_str_radix(text.trim_start_matches("0o"), 8) {
            Ok(mode) if mode <= 0o777 && mode & 0o600 == 0o600 => Ok(mode),
            Ok(_) | Err(_) => {
                let problem = format!("{text:?} is not a mode: write octal digits from 0600 to 0777, as in \"0660\"");
                Err(self.wrong("socket_mode", problem))
            }
        }
    }

    fn log(&self, raw: &super::raw::RawLog) -> Result<(String, LogFormat), ConfigError> {
        let filter = raw.filter.clone().unwrap_or_else(|| "info".into());
        filter
            .parse::<tracing_subscriber::filter::EnvFilter>()
            .map_err(|error| self.wrong("log.filter", format!("{filter:?} is not a filter: {error}")))?;
        let format = match raw.format.as_deref() {
            None | Some("text") => LogFormat::Text,
            Some("json") => LogFormat::Json,
            Some(other) => return Err(self.wrong("log.format", format!("{other:?} is neither text nor json"))),
        };
        Ok((filter, format))
    }
}

/// Checks a tile's edge and overlap, in pixels, 0 for either where it is left open. `Err` names the key.
pub fn tiles(size: u32, overlap: u32) -> Result<(), (&'static str, String)> {
    if size != 0 && !(LEAST_TILE..=MOST_TILE).contains(&size) || !size.is_multiple_of(8) {
        let problem =
            format!("{size} is no edge of a tile: write a multiple of 8 from {LEAST_TILE} to {MOST_TILE}, or 0");
        return Err(("vae_tile_size", problem));
    }
    // With the edge left open the overlap must suit the smallest that may be chosen.
    let edge = if size == 0 { LEAST_TILE } else { size };
    if !overlap.is_multiple_of(8) || overlap > edge / 2 {
        let most = edge / 2 / 8 * 8;
        let problem =
            format!("{overlap} is no overlap of tiles of {edge} pixels: write a multiple of 8 up to {most}, or 0");
        return Err(("vae_tile_overlap", problem));
    }
    Ok(())
}

/// Whether only this host can reach a listener there. A name other than `localhost` may mean anything.
fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

impl Config {
    /// Checks and completes what was written.
    ///
    /// # Errors
    /// The first value that cannot be, with its origin.
    pub fn check(raw: Raw, origins: Origins) -> Result<Self, ConfigError> {
        let checker = Checker { origins: &origins };
        let chosen = raw.runtime_dir.clone().map(|path| checker.absolute("runtime_dir", path)).transpose()?;
        let listen = checker.listen(&raw, chosen.as_deref())?;
        let runtime_dir = chosen.unwrap_or_else(places::runtime_dir);
        let length = runtime_dir.as_os_str().len();
        if length + LINK_NAME_BYTES > MAX_SOCKET_PATH {
            let problem = format!(
                "{} has {length} bytes, but its sockets need a path of at most {}: choose a shorter folder",
                runtime_dir.display(),
                MAX_SOCKET_PATH - LINK_NAME_BYTES
            );
            return Err(checker.wrong("runtime_dir", problem));
        }
        let (workers, drain, stop) = checker.deadlines(&raw.deadlines)?;
        let jobs = checker.limits(&raw.limits, workers.cancel * 2 + workers.pulse)?;
        let (log_filter, log_format) = checker.log(&raw.log)?;
        let models = checker.models(&raw)?;
        Ok(Self {
            listen,
            insecure_listen: raw.insecure_listen.unwrap_or(false),
            socket_mode: checker.socket_mode(raw.socket_mode.as_deref())?,
            runtime_dir,
            lock_dir: raw.lock_dir.clone().map(|path| checker.absolute("lock_dir", path)).transpose()?,
            state_dir: checker.state_dir(&raw)?,
            peaks_file: match raw.peaks_file.clone() {
                Some(path) => checker.absolute("peaks_file", path)?,
                None => models.cache_dir.join("peaks.jsonl"),
            },
            models,
            threads: checker.threads(raw.threads)?,
            worker_binary: checker.worker(raw.worker_binary.clone())?,
            devices: checker.devices(&raw)?,
            shared: checker.shared(&raw)?,
            workers,
            drain,
            stop,
            keep_alive: checker.span("deadlines.keep_alive", raw.deadlines.keep_alive, KEEP_ALIVE)?,
            jobs,
            shared_memory: raw.limits.shared_memory.map(|bytes| bytes.0),
            cache: CacheConfig {
                bytes: raw.cache.conditioning.map_or(CacheConfig::default().bytes, |bytes| bytes.0),
                shared: raw.cache.share_conditioning.unwrap_or(false),
            },
            memory: checker.memory(&raw)?,
            log_filter,
            log_format,
            origins,
        })
    }
}

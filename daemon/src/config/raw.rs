//! The configuration as it is written: every key once, every value optional, unknown keys refused.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::memory::RawMemory;
use super::values::{ByteSize, OneOrMany, Span};

/// One layer of configuration, or all of them merged. The documentation of each key is in [`KEYS`].
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct Raw {
    pub listen: Option<OneOrMany>,
    pub insecure_listen: Option<bool>,
    pub socket_mode: Option<String>,
    pub runtime_dir: Option<PathBuf>,
    pub cache_dir: Option<PathBuf>,
    pub lock_dir: Option<PathBuf>,
    pub state_dir: Option<PathBuf>,
    pub durable: Option<bool>,
    pub peaks_file: Option<PathBuf>,
    pub models_dir: Option<PathBuf>,
    pub default_model: Option<String>,
    pub models: BTreeMap<String, PathBuf>,
    pub threads: Option<u32>,
    pub worker_binary: Option<PathBuf>,
    pub devices: BTreeMap<String, RawDevice>,
    pub deadlines: RawDeadlines,
    pub limits: RawLimits,
    pub cache: RawCache,
    pub memory: RawMemory,
    pub model_memory: BTreeMap<String, RawMemory>,
    pub log: RawLog,
}

/// `[devices.ID]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct RawDevice {
    pub budget: Option<ByteSize>,
    pub share: Option<bool>,
}

/// `[deadlines]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct RawDeadlines {
    pub handshake: Option<Span>,
    pub pulse_interval: Option<Span>,
    pub pulse: Option<Span>,
    pub progress: Option<Span>,
    pub cancel: Option<Span>,
    pub retire: Option<Span>,
    pub inspect: Option<Span>,
    pub drain: Option<Span>,
    pub stop: Option<Span>,
    pub keep_alive: Option<Span>,
}

/// `[limits]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct RawLimits {
    pub prompt_bytes: Option<ByteSize>,
    pub steps: Option<u32>,
    pub count: Option<u32>,
    pub edge: Option<u32>,
    pub image_file_bytes: Option<ByteSize>,
    pub queued_jobs: Option<u32>,
    pub queued_jobs_per_tenant: Option<u32>,
    pub running_jobs: Option<u32>,
    pub ended_jobs: Option<u32>,
    pub ended_bytes: Option<ByteSize>,
    pub shared_memory: Option<ByteSize>,
}

/// `[cache]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct RawCache {
    pub conditioning: Option<ByteSize>,
    pub share_conditioning: Option<bool>,
}

/// `[log]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct RawLog {
    pub filter: Option<String>,
    pub format: Option<String>,
}

/// How a value is written in the environment and on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As it is.
    Text,
    /// Several, between commas.
    List,
    /// A whole number.
    Number,
    /// A number, perhaps with a fraction.
    Decimal,
    /// `true` or `false`.
    Switch,
}

/// A key that can be set everywhere: in the file, as `SDD_KEY` with dots as underscores, and by `--set KEY=VALUE`.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// With dots between tables.
    pub name: &'static str,
    /// How it is written outside the file.
    pub kind: Kind,
    /// What it does.
    pub help: &'static str,
}

const fn key(name: &'static str, kind: Kind, help: &'static str) -> Key {
    Key { name, kind, help }
}

/// Every key with a fixed name, in the order in which they are printed. `[models]` (name = folder) comes on top, and
/// `[model_memory.NAME]` with the keys of `[memory]`.
pub const KEYS: &[Key] = &[
    key("listen", Kind::List, "where clients connect: unix:PATH or HOST:PORT (port 0: any free one), several possible"),
    key(
        "insecure_listen",
        Kind::Switch,
        "allow HOST:PORT beyond this host, although clients are not authenticated yet",
    ),
    key("socket_mode", Kind::Text, "permissions of the Unix socket, octal"),
    key("runtime_dir", Kind::Text, "folder of the sockets, entered by this user alone"),
    key("cache_dir", Kind::Text, "where the model that is built in is written to"),
    key("lock_dir", Kind::Text, "host-wide folder of the locks on devices; the same for every user of a host"),
    key("state_dir", Kind::Text, "folder of accepted jobs, entered by this user alone: what a restart finds again"),
    key("durable", Kind::Switch, "record accepted jobs, prompts included, so that they go on after a restart"),
    key("peaks_file", Kind::Text, "where measured peaks of memory are kept over restarts"),
    key("models_dir", Kind::Text, "folder whose subfolders are models, named as they are"),
    key("default_model", Kind::Text, "the model of requests that name none"),
    key("threads", Kind::Number, "threads that compute on the CPU"),
    key("worker_binary", Kind::Text, "the worker program; default: beside sdd, then in PATH"),
    key(
        "devices.cpu.budget",
        Kind::Text,
        "bytes that workers may hold on the CPU, as in 8GiB; default: from what is free",
    ),
    key(
        "devices.cpu.share",
        Kind::Switch,
        "let several daemons use the CPU at once, each with a budget of its own; their sum is bounded by what there is",
    ),
    key("deadlines.handshake", Kind::Text, "from a worker's start to its hello"),
    key("deadlines.pulse_interval", Kind::Text, "how often a worker shows that it lives"),
    key("deadlines.pulse", Kind::Text, "silence after which a worker is taken for frozen and killed"),
    key("deadlines.progress", Kind::Text, "least time without progress after which a task is taken for hung"),
    key("deadlines.cancel", Kind::Text, "what a worker may take to stop a cancelled task"),
    key("deadlines.retire", Kind::Text, "what a worker may take to exit when it is retired"),
    key("deadlines.inspect", Kind::Text, "what an inspection of a model folder may take"),
    key(
        "deadlines.drain",
        Kind::Text,
        "what accepted jobs may take after SIGTERM, before they are cancelled, or kept for the next start",
    ),
    key("deadlines.stop", Kind::Text, "what workers may take from SIGTERM to their end, before SIGKILL"),
    key("deadlines.keep_alive", Kind::Text, "how long a worker stays without work before it goes, with all its memory"),
    key("limits.prompt_bytes", Kind::Text, "bytes of a prompt"),
    key("limits.steps", Kind::Number, "denoising steps of a request"),
    key("limits.count", Kind::Number, "images of a request"),
    key("limits.edge", Kind::Number, "edge of an image in pixels"),
    key("limits.image_file_bytes", Kind::Text, "bytes of an image file in a request"),
    key("limits.queued_jobs", Kind::Number, "jobs that may wait"),
    key("limits.queued_jobs_per_tenant", Kind::Number, "jobs of one client that may wait"),
    key("limits.running_jobs", Kind::Number, "jobs whose stages run by turns"),
    key("limits.ended_jobs", Kind::Number, "ended jobs that can still be looked up"),
    key("limits.ended_bytes", Kind::Text, "bytes of pictures kept of ended jobs"),
    key("limits.shared_memory", Kind::Text, "bytes of shared memory for tensors; default: what /dev/shm has free"),
    key(
        "cache.conditioning",
        Kind::Text,
        "bytes of encoded prompts that are remembered, at most a quarter of shared memory; 0: none",
    ),
    key(
        "cache.share_conditioning",
        Kind::Switch,
        "let one client's encoded prompts serve others: how fast an answer comes then tells what others asked",
    ),
    key(
        "memory.preset",
        Kind::Text,
        "auto, 24gb, 16gb, 12gb, 8gb or minimal: fills what is not written below; its counts stand for bytes",
    ),
    key(
        "memory.dit_gpu_blocks",
        Kind::Number,
        "blocks of the diffusion model that stay on the device at most; -1: as many as are granted",
    ),
    key(
        "memory.te_gpu_layers",
        Kind::Number,
        "layers of the text encoder that stay on the device at most; -1: as many as are granted",
    ),
    key("memory.offload", Kind::Text, "where weights are kept that leave the device: ram or disk"),
    key("memory.te_offload", Kind::Text, "the same for the text encoder: ram, disk, or none for where the others are"),
    key("memory.sequential", Kind::Switch, "written true: every stage leaves its device when it has run"),
    key("memory.token_chunk", Kind::Number, "rows of a matrix product that are computed at once; 0: all"),
    key("memory.mlp_chunk", Kind::Number, "rows of a feed-forward layer that are computed at once; 0: all"),
    key(
        "memory.reserve_gb",
        Kind::Decimal,
        "gigabytes of the budget that stay free; a preset's never cost a model its place",
    ),
    key("memory.vae_tile_batch", Kind::Number, "tiles of the VAE that go through a layer together"),
    key(
        "memory.vae_resident",
        Kind::Switch,
        "whether the VAE's weights may stay; else they are streamed, once a batch of tiles",
    ),
    key(
        "memory.vae_dtype",
        Kind::Text,
        "what the VAE computes in: f32, f16 or bf16; on the CPU f32 unless it is written",
    ),
    key(
        "memory.offload_mode",
        Kind::Text,
        "when stages leave their device: auto, none, cond_only, cond_diffusion, aggressive, layer_streaming",
    ),
    key("memory.offload_cond_stage", Kind::Switch, "the text encoder leaves before denoising; unset: as the mode says"),
    key(
        "memory.offload_diffusion",
        Kind::Switch,
        "the diffusion model leaves before decoding; unset: as the mode says",
    ),
    key(
        "memory.reload_cond_stage",
        Kind::Switch,
        "a text encoder that left for a job comes back after it, where there is room",
    ),
    key(
        "memory.reload_diffusion",
        Kind::Switch,
        "a diffusion model that left for a job comes back after it, where there is room",
    ),
    key("memory.offload_log", Kind::Switch, "log what is moved and what is kept"),
    key("memory.vram_estimation", Kind::Text, "how memory is estimated before it was measured: dryrun or formula"),
    key("memory.streaming_prefetch", Kind::Number, "layers that are read ahead while one runs: 0 or 1"),
    key("memory.streaming_min_vram", Kind::Number, "MB of the device that stay free while a model is streamed"),
    key(
        "memory.max_vram",
        Kind::Decimal,
        "GiB of the device that may be used; below zero: that are spared; 0: no bound",
    ),
    key("memory.vae_tiling", Kind::Switch, "decode and encode in tiles; unset: where the whole does not fit"),
    key("memory.vae_tile_size", Kind::Number, "edge of a tile in pixels; 0: as fits, 512 at most"),
    key("memory.vae_tile_overlap", Kind::Number, "overlap of two tiles in pixels; they fit together without any"),
    key("memory.backend", Kind::Text, "device of each stage, as text=cpu,vae=cpu; * for all"),
    key(
        "memory.params_backend",
        Kind::Text,
        "where each stage's weights are kept, as text=disk,*=cpu; over memory.offload",
    ),
    key("log.filter", Kind::Text, "what is logged, as RUST_LOG says it: info, sdd=debug, …"),
    key("log.format", Kind::Text, "text or json"),
    key("models", Kind::Text, "table of name = folder; on the command line --model NAME=FOLDER"),
];

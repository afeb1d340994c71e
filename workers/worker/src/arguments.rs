//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use sd_proto::worker::v1::WorkerStage;

/// One process for one stage of one diffusion model on one device; started by sdd.
#[derive(Debug, Parser)]
#[command(name = "sd-worker", version)]
pub(crate) struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What this process is for.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve one stage of a model to the daemon that started this process.
    Serve(Serve),
    /// Describe a model folder as JSON: architecture, components, tensors, bytes, precision. Exit code 65 when it cannot be used.
    Inspect {
        /// A model folder in diffusers layout (model_index.json in it).
        folder: PathBuf,
    },
    /// Say as JSON what stages take beside weights at one size, without running them.
    Estimate(Estimate),
}

/// What to estimate.
#[derive(Debug, Clone, Args)]
pub(crate) struct Estimate {
    /// A model folder in diffusers layout.
    pub(crate) folder: PathBuf,
    /// A stage; may be repeated; all without.
    #[arg(long)]
    pub(crate) stage: Vec<EstimatedTask>,
    /// Pixels.
    #[arg(long, default_value_t = 512)]
    pub(crate) width: u64,
    /// Pixels.
    #[arg(long, default_value_t = 512)]
    pub(crate) height: u64,
    /// Prompts together: 2 with guidance.
    #[arg(long, default_value_t = 2)]
    pub(crate) rows: u64,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 77)]
    pub(crate) tokens: u64,
    /// Edge of a tile of the VAE in pixels; 0: whole.
    #[arg(long, default_value_t = 0)]
    pub(crate) tile: u64,
    /// Overlap of two tiles in pixels.
    #[arg(long, default_value_t = 0)]
    pub(crate) overlap: u64,
    /// Tiles together.
    #[arg(long, default_value_t = 1)]
    pub(crate) tile_batch: u64,
    /// What the VAE computes in: f32, f16, bf16. Tensors are kept in f32 whatever it is.
    #[arg(long, default_value = "f32")]
    pub(crate) vae_type: String,
}

/// A task that is estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EstimatedTask {
    /// Prompts to conditioning.
    Encode,
    /// An image to latents.
    VaeEncode,
    /// Noise to latents.
    Denoise,
    /// Latents to an image.
    Decode,
}

/// How to serve.
#[derive(Debug, Clone, Args)]
pub(crate) struct Serve {
    /// The daemon's private socket.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// The number that the daemon knows this process by.
    #[arg(long)]
    pub(crate) incarnation: u64,
    /// Which stage.
    #[arg(long)]
    pub(crate) stage: Stage,
    /// The model's folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// The device: cpu.
    #[arg(long, default_value = "cpu")]
    pub(crate) device: Device,
    /// Computing threads; 0: one a processor.
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
}

/// A stage of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
    /// The text encoder.
    Text,
    /// The diffusion model.
    Diffusion,
    /// The autoencoder, both ways.
    Vae,
}

impl Stage {
    /// As the link writes it.
    pub(crate) fn on_link(self) -> WorkerStage {
        match self {
            Self::Text => WorkerStage::Text,
            Self::Diffusion => WorkerStage::Diffusion,
            Self::Vae => WorkerStage::Vae,
        }
    }
}

/// A device that this build can compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The processors.
    Cpu,
}

impl Device {
    /// The device's id as the daemon knows it.
    pub(crate) fn id(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
        }
    }
}

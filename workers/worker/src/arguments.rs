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

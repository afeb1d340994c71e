//! Arguments of the operators' commands: load, unload, pin, unpin, release, quarantine.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

/// A stage as workers are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum StageName {
    /// The text encoder
    #[value(aliases = ["cond", "clip", "te"])]
    Text,
    /// The diffusion model
    #[value(aliases = ["unet", "dit"])]
    Diffusion,
    /// The autoencoder
    Vae,
}

impl StageName {
    /// As the daemon calls it.
    pub(in crate::cli) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Diffusion => "diffusion",
            Self::Vae => "vae",
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl load sd15                   all its stages, one after the other\n  \
                  sdctl load sd15 --stage text      one of them\n  \
                  sdctl load sd15 --pin             and keep it there, whoever needs room\n\n\
                  Idle stages of other models are taken off where room is short, busy ones never. Jobs go on meanwhile.")]
pub(in crate::cli) struct LoadArgs {
    /// A name from `sdctl models`, or the path of a diffusers folder (own daemon only)
    pub(in crate::cli) model: String,
    /// Only this stage; can be given several times
    #[arg(short, long, value_name = "STAGE")]
    pub(in crate::cli) stage: Vec<StageName>,
    /// Keep it from being taken off for others, until `sdctl unpin`
    #[arg(long)]
    pub(in crate::cli) pin: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl unload sd15                 all its stages, down to zero bytes\n  \
                  sdctl unload sd15 --stage vae     one of them\n\n\
                  A stage that works leaves when its task has ended; the next job brings it back. The answer comes when the \
                  device shows that the bytes are free.")]
pub(in crate::cli) struct UnloadArgs {
    /// A name from `sdctl models`, or the path of a diffusers folder (own daemon only)
    pub(in crate::cli) model: String,
    /// Only this stage; can be given several times
    #[arg(short, long, value_name = "STAGE")]
    pub(in crate::cli) stage: Vec<StageName>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl pin sd15                    it stays, whoever needs room\n  \
                  sdctl unpin sd15                  it may leave again\n\n\
                  A pin holds for stages that are loaded now and later, until `unpin`, `unload` or the daemon's end. It makes \
                  nothing come: `sdctl load --pin` does both.")]
pub(in crate::cli) struct PinArgs {
    /// A name from `sdctl models`, or the path of a diffusers folder (own daemon only)
    pub(in crate::cli) model: String,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl release cpu                 everything leaves; the next job comes back\n  \
                  sdctl release cpu --for 10m       and nothing comes back for ten minutes: jobs wait\n  \
                  sdctl release cpu --for 0s        ends that early\n\n\
                  Devices are those of `sdctl status`. Stages that work leave when their task has ended.")]
pub(in crate::cli) struct ReleaseArgs {
    /// Which device, from `sdctl status`
    pub(in crate::cli) device: String,
    /// How long nothing may be granted there, such as 30s, 10m or 1h
    #[arg(long = "for", value_name = "TIME", value_parser = crate::cli::human::parse_duration)]
    pub(in crate::cli) hold: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  sdctl quarantine                  what is held back, and the last words of its worker\n  \
                  sdctl quarantine clear            start all of it again\n  \
                  sdctl quarantine clear sd15 vae   one stage of one model\n\n\
                  A stage of a model that kills its workers again and again is not started any more, so that it does not take \
                  others with it. Cleared, or with its files replaced, it is tried again."
)]
pub(in crate::cli) struct QuarantineArgs {
    #[command(subcommand)]
    pub(in crate::cli) command: Option<QuarantineCommand>,
}

#[derive(Debug, Subcommand)]
pub(in crate::cli) enum QuarantineCommand {
    /// List what is held back and why
    List,
    /// Let it be started again
    Clear {
        /// Only this model
        model: Option<String>,
        /// Only this stage of it
        stage: Option<StageName>,
    },
}

//! Arguments of the commands that explain: why, events, leases, fit, config.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::MemoryArgs;

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  sdctl why                         the newest of your jobs\n  sdctl why 3f2a                    when it waited for whom, and what was moved for it\n  \
                  sdctl why 3f2a --json | jq '.decisions[] | select(.kind == \"takes_back\")'\n\n\
                  Ids are those of `sdctl jobs --all`."
)]
pub(in crate::cli) struct WhyArgs {
    /// Id of the job, from `sdctl jobs` [default: the newest]
    pub(in crate::cli) job: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl events                      what was decided lately\n  \
                  sdctl events --follow             and what is decided from now on, until Ctrl-C\n  \
                  sdctl events -f --job 3f2a        about one job, until it ends\n  \
                  sdctl events -f --json | jq 'select(.kind == \"killed\")'\n\n\
                  Operators see every decision, others those about their own jobs.")]
pub(in crate::cli) struct EventsArgs {
    /// Go on with new ones as they are made
    #[arg(short, long)]
    pub(in crate::cli) follow: bool,
    /// Only those about one job
    #[arg(short = 'J', long, value_name = "JOB")]
    pub(in crate::cli) job: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl leases                      who holds what now\n  \
                  sdctl leases --watch              redrawn whenever it changes, until Ctrl-C\n  \
                  sdctl leases --watch | tee log    one line for every change\n\n\
                  A revoked lease is to be given back by its deadline; an unproven one was given back, and its bytes stay \
                  charged until the device shows that they are free.")]
pub(in crate::cli) struct LeasesArgs {
    /// Show it anew on every change, until Ctrl-C
    #[arg(short, long)]
    pub(in crate::cli) watch: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl fit sd15 -W 1024 -H 1024    does it fit, and what would\n  \
                  sdctl fit sd15 --offload-mode none\n  \
                  sdctl fit sd15 -W 2048 -H 2048 --vae-tiling --json\n\n\
                  Nothing is run or loaded. Exits 0 where it fits, 71 where it does not.")]
pub(in crate::cli) struct FitArgs {
    /// A name from `sdctl models`, or the path of a diffusers folder (own daemon only)
    pub(in crate::cli) model: String,
    /// Pixels, a multiple of 8 [default: the model's]
    #[arg(short = 'W', long, value_name = "PIXELS")]
    pub(in crate::cli) width: Option<u32>,
    /// Pixels, a multiple of 8 [default: the model's]
    #[arg(short = 'H', long, value_name = "PIXELS")]
    pub(in crate::cli) height: Option<u32>,
    /// How many pictures: it decides no memory, only the order of stages
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(in crate::cli) count: u32,
    /// Classifier-free guidance scale; 1 switches it off [default: the model's]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true)]
    pub(in crate::cli) cfg: Option<f64>,
    /// The prompt, where it is a long one: its tokens count
    #[arg(long, value_name = "PROMPT")]
    pub(in crate::cli) prompt: Option<String>,
    /// Picture to start from: its encoding counts
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) init_img: Option<PathBuf>,
    /// Picture whose white part is painted anew
    #[arg(long, value_name = "FILE", requires = "init_img")]
    pub(in crate::cli) mask: Option<PathBuf>,
    #[command(flatten)]
    pub(in crate::cli) memory: MemoryArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl config show                 every value, and where it was set\n  \
                  sdctl config show --json | jq '.[] | select(.origin != \"default\")'")]
pub(in crate::cli) struct ConfigArgs {
    #[command(subcommand)]
    pub(in crate::cli) command: ConfigCommand,
}

#[derive(Debug, Clone, Copy, Subcommand)]
pub(in crate::cli) enum ConfigCommand {
    /// Show the daemon's effective configuration, and where each value was set
    Show,
}

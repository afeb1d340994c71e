//! What may stand on the command line.

mod explain;
mod memory;
mod operate;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use sd_client::Endpoint;
use sd_client::names;
use sd_client::proto::{Sampler, Schedule};

pub(super) use explain::{ConfigArgs, ConfigCommand, EventsArgs, FitArgs, LeasesArgs, WhyArgs};
pub(super) use memory::MemoryArgs;
pub(super) use operate::{LoadArgs, PinArgs, QuarantineArgs, QuarantineCommand, ReleaseArgs, StageName, UnloadArgs};

const EXAMPLES: &str = "\
Examples:
  sdctl generate \"a red heart\"             one picture into this folder
  sdctl generate \"a cat\" -n 4 -o cats/     four pictures into a folder
  sdctl models                             what can be used with -m
  sdctl jobs --all                         what ran here
  sdctl why JOB                            where its time went, and what was moved for it
  sdctl fit default -W 1024 -H 1024        whether that fits, and what would
  sdctl doctor                             what is wrong with this machine

Where the daemon is looked for: --endpoint, SDCTL_ENDPOINT, the system's socket (/run/sdd/sdd.sock), the user's \
socket ($XDG_RUNTIME_DIR/sdd/sdd.sock, or sdd-UID/sdd.sock in the temporary folder), a daemon that holds the device. \
Where none answers, commands that need one start a private daemon for this call; it leaves nothing behind.

Exit codes: 0 done, 1 the job failed, 64 bad arguments, 65 bad input file or model, 69 no daemon or no such model or \
job, 70 a bug, 71 needs more memory than there is, 73 output cannot be written, 75 another daemon holds the device, \
77 not permitted, 130 cancelled by Ctrl-C.";

/// Makes pictures from words with sdd, and shows what the daemon does.
#[derive(Debug, Parser)]
#[command(name = "sdctl", version, after_help = EXAMPLES, max_term_width = 110, arg_required_else_help = true)]
pub(super) struct Arguments {
    #[command(flatten)]
    pub(super) global: Global,
    #[command(subcommand)]
    pub(super) command: Command,
}

/// What every command knows.
#[derive(Debug, Args)]
pub(super) struct Global {
    /// Daemon to talk to: unix:PATH or HOST:PORT
    #[arg(long, global = true, value_name = "ENDPOINT", help_heading = "Common options")]
    pub(super) endpoint: Option<Endpoint>,
    /// Print JSON on stdout: one object a line for events, one document for lists
    #[arg(long, global = true, help_heading = "Common options")]
    pub(super) json: bool,
    /// Print nothing but results and errors
    #[arg(short, long, global = true, help_heading = "Common options")]
    pub(super) quiet: bool,
    /// Also print what the daemon decides, and a private daemon's log
    #[arg(short, long, global = true, conflicts_with = "quiet", help_heading = "Common options")]
    pub(super) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Make pictures from words
    #[command(visible_alias = "gen")]
    Generate(Box<GenerateArgs>),
    /// Follow a job to its end and save its pictures
    Watch(WatchArgs),
    /// List the models that can be used
    Models,
    /// Show what a model is made of
    Inspect(InspectArgs),
    /// List your jobs
    Jobs(JobsArgs),
    /// List the daemon's worker processes
    Ps,
    /// List who holds how much memory on which device
    Leases(LeasesArgs),
    /// Show the daemon, its devices and their memory
    Status,
    /// Cancel a job
    Cancel(JobArgs),
    /// Let the daemon finish its jobs, take no new ones, and end
    Drain(DrainArgs),
    /// Explain a job: when it waited for whom, what was moved for it, where its time went
    Why(WhyArgs),
    /// Show what is decided about memory
    Events(EventsArgs),
    /// Say whether a request fits, and what would, without running it
    Fit(Box<FitArgs>),
    /// Bring a model onto its device
    Load(LoadArgs),
    /// Take a model off its device
    Unload(UnloadArgs),
    /// Keep a model from being taken off for others
    Pin(PinArgs),
    /// Let a pinned model be taken off again
    Unpin(PinArgs),
    /// Give a device to other programs
    Release(ReleaseArgs),
    /// Show or clear stages that are held back because they kill their workers
    Quarantine(QuarantineArgs),
    /// Show the daemon's configuration
    Config(ConfigArgs),
    /// Check this machine: programs, daemon, memory, leftovers
    Doctor(DoctorArgs),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS)]
    Completions(CompletionsArgs),
}

const GENERATE: &str = "\
Examples:
  sdctl generate \"a red heart\"
  sdctl generate \"a red heart\" --seed 7 --steps 20 --cfg 5 --sampler \"DPM++ 2M Karras\"
  sdctl generate \"a cat\" -n 4 -o 'cats/{prompt}-{n:02}-{seed}.png'
  sdctl generate \"a dog\" --init-img cat.png --strength 0.6
  sdctl generate \"a hat\" --init-img cat.png --mask where.png
  sdctl generate \"a forest\" -W 1024 -H 1024 --offload-mode layer_streaming --vae-tiling
  sdctl generate \"a pizza\" -o - | display
  cat prompt.txt | sdctl generate - --json

The path of every picture is printed on stdout, one a line; progress and the summary go to stderr. With --json every \
event of the job is one line on stdout instead: {\"event\": \"queued\" | \"stage_started\" | \"progress\" | \"stage_finished\" | \
\"image\" | \"note\" | \"succeeded\" | \"failed\" | \"cancelled\" | \"error\", ...}; \"image\" carries the path, not the bytes.

Names for -o: {prompt} {seed} {model} {date} {time}, {index:03} from 0, {n:03} from 1, with zeros to three digits or, without \
:03, as they are; {{ is a brace. \
An existing file is never overwritten: the default name takes the next free -2, -3, ...; a name given with -o is an \
error before anything is computed, unless --force is given. The seed is drawn here where it is not given, and is part of the \
default name.";

#[derive(Debug, Args)]
#[command(after_help = GENERATE)]
pub(super) struct GenerateArgs {
    /// What to paint; - reads it from stdin. (word:1.2) and [word] weigh as in the web UIs
    #[arg(required_unless_present = "prompt_file")]
    pub(super) prompt: Option<String>,
    /// Read the prompt from a file; - is stdin
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(super) prompt_file: Option<PathBuf>,
    /// Model: a name from `sdctl models`, or the path of a diffusers folder (own daemon only)
    #[arg(short, long, help_heading = "What to make")]
    pub(super) model: Option<String>,
    /// How many pictures; picture i uses seed + i
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "What to make")]
    pub(super) count: u32,
    /// What to keep out of the picture
    #[arg(long, value_name = "PROMPT", allow_hyphen_values = true, help_heading = "What to make")]
    pub(super) negative: Option<String>,
    /// Pixels, a multiple of 8 [default: the model's]
    #[arg(short = 'W', long, value_name = "PIXELS", help_heading = "What to make")]
    pub(super) width: Option<u32>,
    /// Pixels, a multiple of 8 [default: the model's]
    #[arg(short = 'H', long, value_name = "PIXELS", help_heading = "What to make")]
    pub(super) height: Option<u32>,
    /// Seed of the first picture [default: random, and reported]
    #[arg(long, help_heading = "What to make")]
    pub(super) seed: Option<u64>,

    /// Denoising steps [default: the model's]
    #[arg(long, help_heading = "How to sample")]
    pub(super) steps: Option<u32>,
    /// Classifier-free guidance scale; 1 switches it off [default: the model's]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true, help_heading = "How to sample")]
    pub(super) cfg: Option<f64>,
    /// Sampler, in any common spelling; one with its schedule ("DPM++ 2M Karras") sets both
    #[arg(long, value_name = "NAME", value_parser = sampler, help = sampler_help(), help_heading = "How to sample")]
    pub(super) sampler: Option<SamplerChoice>,
    /// Spacing of the steps
    #[arg(long, value_name = "NAME", value_parser = schedule, help = schedule_help(), help_heading = "How to sample")]
    pub(super) schedule: Option<Schedule>,
    /// Rescale the noise schedule to zero terminal SNR [default: as the model says]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true, help_heading = "How to sample")]
    pub(super) zero_snr: Option<bool>,
    /// DDIM's eta: 0 deterministic, 1 as noisy as DDPM
    #[arg(long, allow_negative_numbers = true, help_heading = "How to sample")]
    pub(super) eta: Option<f64>,
    /// Guidance rescale, 0 to 1, against over-exposure with zero terminal SNR
    #[arg(long, value_name = "PHI", allow_negative_numbers = true, help_heading = "How to sample")]
    pub(super) cfg_rescale: Option<f64>,
    /// Text encoder layer from the end, as web UIs count: 1 last, 2 penultimate [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=24), help_heading = "How to sample")]
    pub(super) clip_skip: Option<u32>,
    /// Take brackets in the prompt literally
    #[arg(long, help_heading = "How to sample")]
    pub(super) no_emphasis: bool,

    /// Picture to start from: PNG, JPEG or WebP
    #[arg(long, value_name = "FILE", help_heading = "From a picture")]
    pub(super) init_img: Option<PathBuf>,
    /// Picture whose white part is painted anew (inpainting)
    #[arg(long, value_name = "FILE", requires = "init_img", help_heading = "From a picture")]
    pub(super) mask: Option<PathBuf>,
    /// How much of the picture is replaced, above 0 up to 1 [default: 0.8; with a mask 1]
    #[arg(long, requires = "init_img", allow_negative_numbers = true, help_heading = "From a picture")]
    pub(super) strength: Option<f64>,

    #[command(flatten)]
    pub(super) memory: MemoryArgs,

    /// File, pattern or folder for the pictures; - writes one to stdout [default: like a-red-heart-1234.png]
    #[arg(short, long, value_name = "PATTERN", help_heading = "Output")]
    pub(super) output: Option<String>,
    /// Overwrite files that exist
    #[arg(short, long, requires = "output", help_heading = "Output")]
    pub(super) force: bool,
    /// Show the pictures in the terminal
    #[arg(long, value_name = "WHEN", default_value = "auto", help_heading = "Output")]
    pub(super) show: Show,
    /// Leave the job running when this command ends early (needs a running daemon)
    #[arg(long, help_heading = "Output")]
    pub(super) keep: bool,
}

/// When to draw pictures in the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Show {
    /// On a terminal that can
    Auto,
    /// Whenever stdout is a terminal
    Always,
    /// Not at all
    Never,
}

/// A sampler, and the schedule that its name may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SamplerChoice {
    pub(super) sampler: Sampler,
    pub(super) schedule: Option<Schedule>,
}

fn sampler(text: &str) -> Result<SamplerChoice, names::UnknownName> {
    names::parse_sampler(text).map(|(sampler, schedule)| SamplerChoice { sampler, schedule })
}

fn sampler_help() -> String {
    let list: Vec<&str> = names::samplers().map(|(name, _)| name).collect();
    format!(
        "Sampler: {}, in any common spelling; one with its schedule (\"DPM++ 2M Karras\") sets both [default: the model's]",
        list.join(", ")
    )
}

fn schedule(text: &str) -> Result<Schedule, names::UnknownName> {
    names::parse_schedule(text)
}

fn schedule_help() -> String {
    let list: Vec<&str> = names::schedules().collect();
    format!("Spacing of the steps: {} [default: the model's]", list.join(", "))
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  sdctl watch 3f2a                  follow it and save what it makes\n  \
                        sdctl watch 3f2a --json           its events from the first, one a line\n\n\
                        Leaving with Ctrl-C does not cancel the job; `sdctl cancel JOB` does.")]
pub(super) struct WatchArgs {
    /// Id of the job, from `sdctl jobs`
    pub(super) job: String,
    /// File, pattern or folder for the pictures, as in `generate`
    #[arg(short, long, value_name = "PATTERN", conflicts_with = "no_save")]
    pub(super) output: Option<String>,
    /// Overwrite files that exist
    #[arg(short, long, requires = "output")]
    pub(super) force: bool,
    /// Save no pictures
    #[arg(long)]
    pub(super) no_save: bool,
    /// Show the pictures in the terminal
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(super) show: Show,
}

#[derive(Debug, Args)]
pub(super) struct InspectArgs {
    /// A name from `sdctl models`, or the path of a diffusers folder (own daemon only)
    pub(super) model: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  sdctl jobs                        what waits or runs\n  sdctl jobs --all -l 20            the last twenty\n  sdctl jobs --all --json | jq '.[] | select(.state == \"failed\")'"
)]
pub(super) struct JobsArgs {
    /// Also those that have ended
    #[arg(short, long)]
    pub(super) all: bool,
    /// At most this many, newest first
    #[arg(short, long, default_value_t = 100)]
    pub(super) limit: u32,
}

#[derive(Debug, Args)]
pub(super) struct JobArgs {
    /// Id of the job, from `sdctl jobs`
    pub(super) job: String,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  sdctl drain                       with the daemon's own grace\n  sdctl drain --timeout 5m          cancel what is not done in five minutes"
)]
pub(super) struct DrainArgs {
    /// How long accepted jobs may take, such as 30s, 5m or 1h; then they are cancelled
    #[arg(short, long, value_parser = super::human::parse_duration)]
    pub(super) timeout: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Every line is ok, warn or fail, with a remedy where one is needed. Exits 1 if any line is fail."
)]
pub(super) struct DoctorArgs {
    /// Remove what dead daemons left: segments, sockets, lock files
    #[arg(long)]
    pub(super) sweep: bool,
}

const COMPLETIONS: &str = "\
Examples:
  sdctl completions bash > ~/.local/share/bash-completion/completions/sdctl
  sdctl completions zsh > ~/.zfunc/_sdctl
  sdctl completions fish > ~/.config/fish/completions/sdctl.fish";

#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// Which shell
    pub(super) shell: Shell,
}

#[cfg(test)]
mod tests;

//! The `sdd` program: see [`sdd::cli`].

use std::process::ExitCode;

use clap::Parser as _;
use sd_proto::exit::ProgramExit;
use sdd::cli::Cli;
use sdd::daemon::{self, DaemonError, Inherited};
use sdd::workers::process::{adopt_descriptor, reserve_token_descriptor};
use sdd::{logging, memory};

fn main() -> ExitCode {
    let code = match start() {
        Ok(()) => ProgramExit::Success,
        Err((exit, problem)) => {
            eprintln!("sdd: {problem}");
            exit
        }
    };
    ExitCode::from(u8::try_from(code.code()).unwrap_or(1))
}

fn start() -> Result<(), (ProgramExit, String)> {
    memory::limit_heaps();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help and version were asked for.
            let _ = error.print();
            return Ok(());
        }
        Err(error) => return Err((ProgramExit::Usage, error.to_string().trim_start_matches("error: ").to_owned())),
    };
    let usage = |problem: String| (ProgramExit::Usage, problem);
    let adopt = |flag: &str, number: Option<i32>| {
        let adopted = number.map(adopt_descriptor).transpose();
        adopted.map_err(|error| usage(format!("{flag} {}: {error}", number.unwrap_or(-1))))
    };
    if cli.devices {
        let report = serde_json::to_string_pretty(&sdd::residency::device::report::Report::read());
        println!("{}", report.map_err(|error| (ProgramExit::Internal, error.to_string()))?);
        return Ok(());
    }
    // First of all, while their numbers mean what they meant to whoever started us.
    let owner = adopt("--private-owner-fd", cli.private_owner_fd)?;
    let ready = adopt("--ready-fd", cli.ready_fd)?;
    reserve_token_descriptor();
    let environment = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    let (config, unknown) = cli.configuration(environment).map_err(|error| usage(error.to_string()))?;
    if cli.print_config {
        print!("{}", config.print());
        return Ok(());
    }
    logging::start(&config.log_filter, config.log_format);
    if !unknown.is_empty() {
        tracing::debug!(variables = unknown.join(" "), "variables with SDD_ that mean nothing here");
    }
    // Files and sockets of ours are ours alone, unless a mode is set explicitly.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_stack_size(1 << 20)
        .thread_name("sdd")
        .enable_all()
        .build()
        .map_err(|error| (ProgramExit::Internal, format!("cannot start the runtime: {error}")))?;
    let outcome = runtime.block_on(daemon::run(config, Inherited { owner, ready }));
    // Nothing that is left may hold up the end.
    runtime.shutdown_timeout(std::time::Duration::from_millis(500));
    outcome.map_err(|error: DaemonError| (error.exit(), error.to_string()))
}

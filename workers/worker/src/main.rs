//! `sd-worker`: one process for one stage of one model on one device.
//!
//! The daemon starts it; it dials the daemon's private socket and does what it is told there until it is retired or the
//! link ends. It never talks to a client and never decides how much memory it may use.

mod arguments;
mod diffusion;
mod governor;
mod leases;
mod link;
mod memory;
mod outbox;
mod pulse;
mod runner;
mod segment;
mod text;
mod vae;
mod watch;

use std::process::ExitCode;

use clap::Parser as _;
use sd_proto::exit::WorkerExit;

use crate::arguments::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return exit(if error.use_stderr() { WorkerExit::BadArguments } else { WorkerExit::Clean });
        }
    };
    match arguments.command {
        Command::Inspect { folder } => inspect(&folder),
        Command::Serve(serve) => {
            memory::configure_allocator();
            tracing_subscriber::fmt()
                .with_env_filter(
                    tracing_subscriber::EnvFilter::try_from_env("SDD_WORKER_LOG")
                        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn")),
                )
                .with_writer(std::io::stderr)
                .with_ansi(false)
                .without_time()
                .init();
            exit(link::serve(serve))
        }
    }
}

fn exit(code: WorkerExit) -> ExitCode {
    ExitCode::from(u8::try_from(code.code()).unwrap_or(u8::MAX))
}

/// Prints what a model folder is, as JSON for the daemon.
fn inspect(folder: &std::path::Path) -> ExitCode {
    match sd_engine::inspect::inspect(folder) {
        Ok(report) => match serde_json::to_writer_pretty(std::io::stdout().lock(), &report) {
            Ok(()) => exit(WorkerExit::Clean),
            Err(error) => {
                eprintln!("cannot write the report: {error}");
                exit(WorkerExit::Internal)
            }
        },
        Err(error) => {
            eprintln!("{error}");
            exit(WorkerExit::BadWeights)
        }
    }
}

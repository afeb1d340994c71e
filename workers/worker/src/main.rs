//! `sd-worker`: one process for one stage of one model on one device.
//!
//! The daemon starts it; it dials the daemon's private socket and does what it is told there until it is retired or the
//! link ends. It never talks to a client and never decides how much memory it may use.

mod allocator;
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

use crate::arguments::{Arguments, Command, Estimate, EstimatedTask};

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
        Command::Estimate(asked) => estimate(&asked),
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

/// Prints what stages take at one size, as JSON for the daemon.
fn estimate(asked: &Estimate) -> ExitCode {
    use sd_engine::inspect::{Shape, Task};
    let shape = Shape {
        width: asked.width,
        height: asked.height,
        rows: asked.rows,
        tokens: asked.tokens,
        tile: asked.tile,
        overlap: asked.overlap,
        tile_batch: asked.tile_batch,
    };
    let all = [EstimatedTask::Encode, EstimatedTask::VaeEncode, EstimatedTask::Denoise, EstimatedTask::Decode];
    let stages = if asked.stage.is_empty() { &all[..] } else { &asked.stage };
    let found = stages.iter().map(|stage| {
        let task = match stage {
            EstimatedTask::Encode => Task::Encode,
            EstimatedTask::VaeEncode => Task::VaeEncode,
            EstimatedTask::Denoise => Task::Denoise,
            EstimatedTask::Decode => Task::Decode,
        };
        sd_engine::inspect::estimate(&asked.folder, task, &shape)
    });
    let stages = match found.collect::<Result<Vec<_>, _>>() {
        Ok(stages) => stages,
        Err(error) => {
            eprintln!("{error}");
            return exit(WorkerExit::BadWeights);
        }
    };
    let answer = std::collections::BTreeMap::from([("stages", stages)]);
    match serde_json::to_writer_pretty(std::io::stdout().lock(), &answer) {
        Ok(()) => exit(WorkerExit::Clean),
        Err(error) => {
            eprintln!("cannot write the estimate: {error}");
            exit(WorkerExit::Internal)
        }
    }
}

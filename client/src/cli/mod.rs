//! The command line: one module a subcommand, and what they share.

mod args;
mod completions;
mod control;
mod doctor;
mod events;
mod fit;
mod follow;
mod generate;
mod human;
mod input;
mod interrupts;
mod json;
mod leases;
mod lists;
mod machine;
mod naming;
mod operate;
mod progress;
mod report;
mod screen;
mod show;
mod table;
mod watch;
mod why;

use clap::Parser as _;
use sd_proto::exit::ProgramExit;

use args::{Arguments, Command};
use report::Trouble;

/// Parses the command line, runs it, prints what went wrong, and gives the exit code.
pub(crate) fn main() -> ProgramExit {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ProgramExit::Usage } else { ProgramExit::Success };
        }
    };
    let json = arguments.global.json;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Trouble::internal(format!("cannot start the runtime: {error}")).print(json),
    };
    let result = runtime.block_on(dispatch(arguments));
    // A blocked read of stdin must not hold the program.
    runtime.shutdown_background();
    match result {
        Ok(exit) => exit,
        Err(trouble) => trouble.print(json),
    }
}

async fn dispatch(arguments: Arguments) -> Result<ProgramExit, Trouble> {
    let global = &arguments.global;
    match arguments.command {
        Command::Generate(args) => generate::run(global, *args).await,
        Command::Watch(args) => watch::run(global, args).await,
        Command::Models => lists::models(global).await,
        Command::Inspect(args) => lists::inspect(global, &args.model).await,
        Command::Jobs(args) => lists::jobs(global, args).await,
        Command::Ps => lists::workers(global).await,
        Command::Leases(args) => leases::run(global, args).await,
        Command::Status => control::status(global).await,
        Command::Cancel(args) => control::cancel(global, &args.job).await,
        Command::Drain(args) => control::drain(global, args).await,
        Command::Why(args) => why::run(global, args).await,
        Command::Events(args) => events::run(global, args).await,
        Command::Fit(args) => fit::run(global, *args).await,
        Command::Load(args) => operate::load(global, args).await,
        Command::Unload(args) => operate::unload(global, args).await,
        Command::Pin(args) => operate::pin(global, args, true).await,
        Command::Unpin(args) => operate::pin(global, args, false).await,
        Command::Release(args) => operate::release(global, args).await,
        Command::Quarantine(args) => operate::quarantine(global, args).await,
        Command::Config(args) => fit::config(global, args).await,
        Command::Doctor(args) => doctor::run(global, args).await,
        Command::Completions(args) => completions::run(args),
    }
}

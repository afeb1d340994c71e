//! `sdctl completions`.

use clap::CommandFactory as _;
use sd_proto::exit::ProgramExit;

use super::args::{Arguments, CompletionsArgs};
use super::report::Trouble;
use super::screen;

/// Prints the completion script of a shell.
pub(super) fn run(args: CompletionsArgs) -> Result<ProgramExit, Trouble> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Arguments::command(), "sdctl", &mut script);
    screen::out_bytes(&script)?;
    Ok(ProgramExit::Success)
}

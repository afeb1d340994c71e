//! `sdctl`: makes pictures with `sdd`, and shows what it does.
#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    let exit = cli::main();
    std::process::ExitCode::from(u8::try_from(exit.code()).unwrap_or(1))
}

//! Writing to stdout and stderr where either may be closed.

use std::io::{self, Write as _};

use super::report::Trouble;

/// One line of results on stdout.
pub(super) fn out(text: impl std::fmt::Display) -> Result<(), Trouble> {
    writeln!(io::stdout().lock(), "{text}").map_err(failed)
}

/// Bytes on stdout.
pub(super) fn out_bytes(bytes: &[u8]) -> Result<(), Trouble> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(failed)
}

/// One line for people on stderr; if nobody reads it, then nobody does.
pub(super) fn say(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

fn failed(error: io::Error) -> Trouble {
    Trouble::output(format!("cannot write to stdout: {error}"))
}

//! The daemon's log, on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// Starts the log of this process. A second call changes nothing.
pub fn start(filter: &str, format: LogFormat) {
    let filter = filter.parse::<EnvFilter>().unwrap_or_else(|_| EnvFilter::new("info"));
    let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let started = match format {
        LogFormat::Text => base.with_ansi(io::stderr().is_terminal()).compact().try_init(),
        LogFormat::Json => base.json().try_init(),
    };
    if let Err(error) = started {
        tracing::debug!(%error, "the log runs already");
    }
}

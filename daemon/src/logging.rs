//! The daemon's log, on standard error.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// A level alone means this program's own lines; those of the libraries below it are shown from warnings on, unless they
/// are named.
fn directives(filter: &str) -> String {
    match filter {
        "error" | "off" => filter.into(),
        "warn" | "info" | "debug" | "trace" => format!("warn,sdd={filter},sd_worker={filter}"),
        other => other.into(),
    }
}

/// Starts the log of this process. A second call changes nothing.
pub fn start(filter: &str, format: LogFormat) {
    let filter = directives(filter).parse::<EnvFilter>().unwrap_or_else(|_| EnvFilter::new("info"));
    let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let started = match format {
        LogFormat::Text => base.with_ansi(io::stderr().is_terminal()).compact().try_init(),
        LogFormat::Json => base.json().try_init(),
    };
    if let Err(error) = started {
        tracing::debug!(%error, "the log runs already");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_alone_is_about_our_own_lines() {
        assert_eq!(directives("debug"), "warn,sdd=debug,sd_worker=debug");
        assert_eq!(directives("h2=trace,info"), "h2=trace,info");
        assert_eq!(directives("off"), "off");
    }
}

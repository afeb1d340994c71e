//! Ctrl-C and its like.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::report::Trouble;

/// The signals that ask us to stop.
pub(super) struct Interrupts {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hang_up: Option<Signal>,
}

impl Interrupts {
    /// Takes the signals over from their default action, for the life of the program. One that is ignored already stays
    /// so: `nohup` and shells that start jobs in the background mean it.
    pub(super) fn listen() -> Result<Self, Trouble> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let take = |kind: SignalKind| match ignored(&status, kind.as_raw_value()) {
            true => Ok(None),
            false => {
                signal(kind).map(Some).map_err(|error| Trouble::internal(format!("cannot handle signals: {error}")))
            }
        };
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hang_up: take(SignalKind::hangup())?,
        })
    }

    /// Waits for the next of them. Cancel-safe.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            () = received(&mut self.interrupt) => {}
            () = received(&mut self.terminate) => {}
            () = received(&mut self.hang_up) => {}
        }
    }
}

async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// Reads from `/proc/self/status` whether a signal is ignored.
fn ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        // Signals 1 (hang up) and 13 (broken pipe).
        let status = "Name:\tsdctl\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(ignored(status, 1) && ignored(status, 13));
        assert!(!ignored(status, 2) && !ignored(status, 15) && !ignored("", 1));
    }
}

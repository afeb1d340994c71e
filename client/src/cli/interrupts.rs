//! Ctrl-C and its like.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::report::Trouble;

/// The signals that ask us to stop.
pub(super) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Interrupts {
    /// Takes the signals over from their default action, for the life of the program.
    pub(super) fn listen() -> Result<Self, Trouble> {
        let take = |kind| signal(kind).map_err(|error| Trouble::internal(format!("cannot handle signals: {error}")));
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hang_up: take(SignalKind::hangup())?,
        })
    }

    /// Waits for the next of them. Cancel-safe.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}

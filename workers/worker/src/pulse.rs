//! The pulse: a thread of its own that shows that this process is not frozen, however long a computation takes.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use sd_proto::worker::v1::{Pulse, from_worker::Message};

use crate::memory;
use crate::outbox::Outbox;

/// Ends the pulse when dropped.
#[derive(Debug)]
pub(crate) struct PulseThread {
    _stop: Sender<()>,
}

/// Starts pulsing at the interval that the daemon asked for.
///
/// # Errors
/// The system cannot start a thread.
pub(crate) fn start(interval: Duration, outbox: Outbox) -> std::io::Result<PulseThread> {
    let (stop, stopped) = channel::<()>();
    std::thread::Builder::new().name("pulse".into()).stack_size(256 << 10).spawn(move || {
        let mut sequence = 0;
        let mut peak = 0;
        loop {
            match memory::resident() {
                Ok(resident) => {
                    peak = resident.charged().max(peak);
                    outbox.offer(Message::Pulse(Pulse {
                        sequence,
                        device_bytes: resident.charged(),
                        peak_bytes: std::mem::take(&mut peak),
                    }));
                    sequence += 1;
                }
                // Without a reading no pulse: the daemon must not take silence about bytes for zero bytes.
                Err(error) => tracing::error!(%error, "cannot read this process's memory"),
            }
            match stopped.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    })?;
    Ok(PulseThread { _stop: stop })
}

//! What this worker says: one queue that the link's stream drains.

use std::sync::{Arc, Mutex};

use sd_proto::worker::v1::FromWorker;
use sd_proto::worker::v1::from_worker::Message;
use tokio::sync::mpsc;

/// Messages that may wait for the link; beyond that progress is dropped and results wait.
const QUEUE: usize = 256;

/// The sending side, shared by the link, the model thread and the pulse.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    incarnation: u64,
    sender: Arc<Mutex<Option<mpsc::Sender<FromWorker>>>>,
}

impl Outbox {
    /// An outbox and the queue that the link drains.
    pub(crate) fn new(incarnation: u64) -> (Self, mpsc::Receiver<FromWorker>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { incarnation, sender: Arc::new(Mutex::new(Some(sender))) }, receiver)
    }

    fn sender(&self) -> Option<mpsc::Sender<FromWorker>> {
        self.sender.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    fn wrap(&self, message: Message) -> FromWorker {
        FromWorker { incarnation: self.incarnation, message: Some(message) }
    }

    /// Sends what may be lost when the link is slow: progress and pulses, which the next one replaces.
    pub(crate) fn offer(&self, message: Message) {
        if let Some(sender) = self.sender() {
            let _ = sender.try_send(self.wrap(message));
        }
    }

    /// Sends what must arrive, from a thread that may block. After [`Outbox::close`] it is dropped.
    pub(crate) fn deliver(&self, message: Message) {
        if let Some(sender) = self.sender() {
            let _ = sender.blocking_send(self.wrap(message));
        }
    }

    /// Sends what must arrive, from async code.
    pub(crate) async fn send(&self, message: Message) {
        if let Some(sender) = self.sender() {
            let _ = sender.send(self.wrap(message)).await;
        }
    }

    /// Ends the stream once everything sent so far has gone out.
    pub(crate) fn close(&self) {
        self.sender.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

//! The ring: segments that are bound for one pass, ahead of the one that runs where there is room, by a thread of its own.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::bindings::{Bindings, ParameterSource};
use super::declare::Declarations;
use super::executor::ExecutorError;
use super::plan::Storage;

/// Where all segments of a model are bound from.
#[derive(Clone)]
pub(super) struct Shelf {
    /// What each segment declares.
    pub(super) segments: Arc<[Declarations]>,
    /// Their numbers.
    pub(super) source: Arc<dyn ParameterSource>,
}

impl Shelf {
    /// Binds a segment, and lets its pages of the files go where weights are not to stay in memory.
    pub(super) fn bind(&self, index: usize, storage: Storage) -> Result<Bindings, ExecutorError> {
        let declarations = &self.segments[index];
        let bindings = Bindings::bind(declarations, &*self.source);
        match storage {
            Storage::Ram => {}
            Storage::Disk => declarations.parameters().for_each(|parameter| self.source.let_go(&parameter)),
        }
        bindings
    }
}

/// A segment to be bound; one of an earlier generation is not wanted any more.
struct Request {
    index: usize,
    storage: Storage,
    generation: u64,
}

/// The thread that binds ahead: it answers every request, in order, with `None` where it is not wanted any more.
struct Reader {
    requests: Sender<Request>,
    answers: Receiver<Option<Result<Bindings, ExecutorError>>>,
    thread: JoinHandle<()>,
}

impl Reader {
    fn start(shelf: Shelf, generation: Arc<AtomicU64>) -> std::io::Result<Self> {
        let (requests, inbox) = channel::<Request>();
        let (outbox, answers) = channel();
        let thread = std::thread::Builder::new().name("reader".into()).spawn(move || {
            for request in inbox {
                let wanted = request.generation == generation.load(Ordering::Acquire);
                let answer = wanted.then(|| shelf.bind(request.index, request.storage));
                if outbox.send(answer).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { requests, answers, thread })
    }

    /// Ends the thread, which has answered everything.
    fn end(self) {
        drop(self.requests);
        let _ = self.thread.join();
    }
}

/// Bytes that pass through: the running segment's, and those asked for ahead of it.
#[derive(Default)]
pub(super) struct Ring {
    /// Reserved from the moment that a segment is asked for until it has run.
    used: u64,
    /// Asked for and not taken, in the order in which they will run.
    pending: VecDeque<(usize, u64)>,
    generation: Arc<AtomicU64>,
    reader: Option<Reader>,
}

impl Ring {
    /// Bytes reserved now.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// How many segments were asked for and not taken.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Reserves room for a segment that the caller binds itself.
    pub(super) fn reserve(&mut self, bytes: u64) {
        self.used += bytes;
    }

    /// Gives back what a segment had reserved: it has run, or stays.
    pub(super) fn release(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Has a segment bound behind those that were asked for before. A system that cannot start a thread only costs the
    /// looking ahead.
    pub(super) fn ask(&mut self, shelf: &Shelf, index: usize, bytes: u64, storage: Storage) {
        if self.reader.is_none() {
            self.reader = Reader::start(shelf.clone(), self.generation.clone()).ok();
        }
        let generation = self.generation.load(Ordering::Relaxed);
        if let Some(reader) = &self.reader
            && reader.requests.send(Request { index, storage, generation }).is_ok()
        {
            self.pending.push_back((index, bytes));
            self.used += bytes;
        }
    }

    /// The segment `index`, if it is the next of those asked for; waits until it is bound. Its bytes stay reserved.
    pub(super) fn take(&mut self, index: usize) -> Option<Result<Bindings, ExecutorError>> {
        let (_, bytes) = self.pending.pop_front_if(|(next, _)| *next == index)?;
        let answer = self.reader.as_ref().and_then(|reader| reader.answers.recv().ok()).flatten();
        if !matches!(answer, Some(Ok(_))) {
            self.release(bytes);
        }
        answer
    }

    /// Drops what was asked for and not taken, and gives the bytes that were brought in for nothing. Waits for the segment
    /// that is being bound.
    pub(super) fn clear(&mut self) -> u64 {
        self.generation.fetch_add(1, Ordering::AcqRel);
        let mut wasted = 0;
        while let Some((_, bytes)) = self.pending.pop_front() {
            let answer = self.reader.as_ref().and_then(|reader| reader.answers.recv().ok()).flatten();
            if let Some(Ok(bindings)) = answer {
                wasted += bindings.bytes();
            }
            self.release(bytes);
        }
        wasted
    }

    /// As [`Self::clear`], and ends the thread.
    pub(super) fn end(&mut self) -> u64 {
        let wasted = self.clear();
        if let Some(reader) = self.reader.take() {
            reader.end();
        }
        wasted
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.end();
    }
}

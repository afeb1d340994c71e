//! The events of one job, in order and without gaps, kept for those who watch late.
//!
//! The owner of the jobs is the only writer. Watchers read from the log itself, each at its own place, and are only
//! told that something is new; so a slow one holds up nobody and misses nothing.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use sd_proto::v1::{Decision, ImageReady, JobEvent, job_event};
use tokio::sync::watch;

/// What an event costs beside its picture and texts, roughly.
const EVENT_BYTES: usize = 256;

/// A job's events.
#[derive(Debug)]
pub struct EventLog {
    job: String,
    entries: Mutex<Entries>,
    newest: watch::Sender<Newest>,
}

/// What watchers are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Newest {
    sequence: u64,
    ended: bool,
}

#[derive(Debug, Default)]
struct Entries {
    events: Vec<Arc<JobEvent>>,
    bytes: usize,
    ended: bool,
}

impl EventLog {
    /// An empty log.
    pub fn new(job: &str) -> Arc<Self> {
        let (newest, _) = watch::channel(Newest::default());
        Arc::new(Self { job: job.into(), entries: Mutex::default(), newest })
    }

    /// Appends an event under the next sequence number, which is returned; nothing follows a terminal event.
    pub fn append(&self, event: job_event::Event, now: SystemTime) -> Option<u64> {
        let ended = is_terminal(&event);
        let sequence = {
            let mut entries = self.lock();
            if entries.ended {
                return None;
            }
            let sequence = entries.events.len() as u64 + 1;
            let event = JobEvent { job_id: self.job.clone(), sequence, time: Some(now.into()), event: Some(event) };
            entries.bytes += cost(&event);
            entries.events.push(Arc::new(event));
            entries.ended = ended;
            sequence
        };
        self.newest.send_replace(Newest { sequence, ended });
        Some(sequence)
    }

    /// The event after `sequence`, if it has happened.
    pub fn after(&self, sequence: u64) -> Option<Arc<JobEvent>> {
        let index = usize::try_from(sequence).ok()?;
        self.lock().events.get(index).cloned()
    }

    /// The decisions among the events so far, in their order.
    pub fn decisions(&self) -> Vec<Decision> {
        let decision = |event: &Arc<JobEvent>| match &event.event {
            Some(job_event::Event::Decision(decision)) => Some(decision.clone()),
            Some(_) | None => None,
        };
        self.lock().events.iter().filter_map(decision).collect()
    }

    /// The pictures among the events so far, in their order.
    pub fn pictures(&self) -> Vec<ImageReady> {
        let picture = |event: &Arc<JobEvent>| match &event.event {
            Some(job_event::Event::Image(image)) => Some(image.clone()),
            Some(_) | None => None,
        };
        self.lock().events.iter().filter_map(picture).collect()
    }

    /// The number of events.
    pub fn len(&self) -> u64 {
        self.lock().events.len() as u64
    }

    /// Whether nothing has happened yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory that the events take, roughly, pictures included.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Drops the pictures' bytes; their events stay, so that sequence numbers have no gaps. Returns the bytes freed.
    pub fn drop_pictures(&self) -> usize {
        let mut entries = self.lock();
        let before = entries.bytes;
        for slot in &mut entries.events {
            if let Some(job_event::Event::Image(image)) = &slot.event
                && !image.png.is_empty()
            {
                let mut event = JobEvent::clone(slot);
                if let Some(job_event::Event::Image(image)) = &mut event.event {
                    image.png = Vec::new();
                }
                *slot = Arc::new(event);
            }
        }
        entries.bytes = entries.events.iter().map(|event| cost(event)).sum();
        before - entries.bytes
    }

    /// Waits for the terminal event.
    pub async fn ended(&self) {
        // The sender lives in self, so this cannot fail.
        let _ = self.newest.subscribe().wait_for(|newest| newest.ended).await;
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // The events are valid after every statement above, so a panicking holder leaves nothing half done.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_terminal(event: &job_event::Event) -> bool {
    use job_event::Event as E;
    match event {
        E::Succeeded(_) | E::Failed(_) | E::Cancelled(_) => true,
        E::Queued(_) | E::StageStarted(_) | E::Progress(_) | E::StageFinished(_) | E::Image(_) | E::Note(_) => false,
        E::Decision(_) => false,
    }
}

fn cost(event: &JobEvent) -> usize {
    use job_event::Event as E;
    EVENT_BYTES
        + match &event.event {
            Some(E::Image(image)) => image.png.capacity() + image.parameters.len(),
            Some(E::Queued(queued)) => {
                queued.effective.as_ref().map_or(0, |r| r.prompt.len() + r.negative_prompt.len())
            }
            Some(E::Failed(failure)) => failure.message.len() + failure.stderr.iter().map(String::len).sum::<usize>(),
            Some(E::Note(note)) => note.text.len(),
            Some(E::Decision(decision)) => decision.text.len(),
            Some(E::StageStarted(_) | E::Progress(_) | E::StageFinished(_) | E::Succeeded(_) | E::Cancelled(_))
            | None => 0,
        }
}

/// One reader of a log.
#[derive(Debug)]
pub struct Watcher {
    log: Arc<EventLog>,
    seen: u64,
    newest: watch::Receiver<Newest>,
}

impl Watcher {
    /// Reads from the event after `after` on.
    pub fn new(log: Arc<EventLog>, after: u64) -> Self {
        let newest = log.newest.subscribe();
        Self { log, seen: after, newest }
    }

    /// The next event, waited for; `None` after the terminal one. Cancel-safe.
    pub async fn next(&mut self) -> Option<Arc<JobEvent>> {
        loop {
            if let Some(event) = self.log.after(self.seen) {
                self.seen += 1;
                return Some(event);
            }
            let newest = *self.newest.borrow_and_update();
            if newest.sequence > self.seen {
                continue;
            }
            if newest.ended || self.newest.changed().await.is_err() {
                return None;
            }
        }
    }
}

/// Bounds what ended jobs keep: the oldest lose their pictures first.
#[derive(Debug, Default)]
pub struct Retention {
    ended: VecDeque<Arc<EventLog>>,
}

impl Retention {
    /// Takes a job that has just ended, and drops pictures of the oldest while all together exceed `limit` bytes. The
    /// newest is left whole: its client may not have come for it yet.
    pub fn ended(&mut self, log: Arc<EventLog>, limit: usize) {
        self.ended.push_back(log);
        let mut total: usize = self.ended.iter().map(|log| log.bytes()).sum();
        let older = self.ended.len() - 1;
        for log in self.ended.iter().take(older) {
            if total <= limit {
                break;
            }
            total -= log.drop_pictures();
        }
    }

    /// Forgets the oldest.
    pub fn forget_oldest(&mut self) {
        self.ended.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_proto::v1::{Cancelled, Note};

    fn note(text: &str) -> job_event::Event {
        job_event::Event::Note(Note { text: text.into() })
    }

    fn picture(bytes: usize) -> job_event::Event {
        job_event::Event::Image(ImageReady { png: vec![1; bytes], parameters: "p".into(), ..ImageReady::default() })
    }

    fn end() -> job_event::Event {
        job_event::Event::Cancelled(Cancelled::default())
    }

    #[tokio::test]
    async fn late_and_early_watchers_read_the_same_gapless_events() {
        let log = EventLog::new("j");
        let mut early = Watcher::new(log.clone(), 0);
        let reading = tokio::spawn(async move {
            let mut seen = Vec::new();
            while let Some(event) = early.next().await {
                seen.push(event.sequence);
            }
            seen
        });
        for text in ["a", "b", "c"] {
            log.append(note(text), SystemTime::now());
            tokio::task::yield_now().await;
        }
        assert_eq!(log.append(end(), SystemTime::now()), Some(4));
        assert_eq!(log.append(note("after the end"), SystemTime::now()), None);
        assert_eq!(reading.await.unwrap(), [1, 2, 3, 4]);

        let mut late = Watcher::new(log.clone(), 2);
        assert_eq!(late.next().await.unwrap().sequence, 3);
        assert_eq!(late.next().await.unwrap().sequence, 4);
        assert!(late.next().await.is_none());
        assert!(Watcher::new(log.clone(), 99).next().await.is_none(), "beyond the end there is nothing to wait for");
        log.ended().await;
    }

    #[test]
    fn old_pictures_go_and_their_events_stay() {
        let mut retention = Retention::default();
        let logs: Vec<_> = (0..4).map(|i| EventLog::new(&i.to_string())).collect();
        for log in &logs {
            log.append(picture(10_000), SystemTime::now());
            log.append(end(), SystemTime::now());
            retention.ended(log.clone(), 25_000);
        }
        let kept: Vec<bool> = logs.iter().map(|log| log.bytes() > 10_000).collect();
        assert_eq!(kept, [false, false, true, true]);
        let Some(job_event::Event::Image(image)) = &logs[0].after(0).unwrap().event else { panic!("an image event") };
        assert!(image.png.is_empty() && image.parameters == "p");

        let big = EventLog::new("big");
        big.append(picture(1_000_000), SystemTime::now());
        retention.ended(big.clone(), 25_000);
        assert!(big.bytes() > 1_000_000, "the newest is kept whole");
        assert!(logs.iter().all(|log| log.bytes() < 10_000));
    }
}

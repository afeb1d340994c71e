//! What was decided about memory, for people: the last decisions of this daemon, and those to come.
//!
//! Ledger and stages write here; `sdctl why`, `sdctl events` and the jobs' own events read. A decision is a message of
//! the public contract, so that nothing is translated twice.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use sd_proto::v1::Decision;
use tokio::sync::broadcast;

/// Decisions that are remembered; older ones are forgotten.
const REMEMBERED: usize = 4096;
/// Decisions that a slow reader may lag behind before it is told that it missed some.
const AHEAD: usize = 1024;

/// The journal. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    remembered: Mutex<Remembered>,
    news: broadcast::Sender<Arc<Decision>>,
}

#[derive(Debug, Default)]
struct Remembered {
    last: u64,
    decisions: VecDeque<Arc<Decision>>,
}

impl Default for Journal {
    fn default() -> Self {
        let (news, _) = broadcast::channel(AHEAD);
        Self { inner: Arc::new(Inner { remembered: Mutex::default(), news }) }
    }
}

impl Journal {
    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        // One push and one count: whole after every statement.
        self.inner.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a decision down; sequence and time are filled in here. Returns its sequence.
    pub fn record(&self, decision: Decision) -> u64 {
        let mut remembered = self.remembered();
        remembered.last += 1;
        let sequence = remembered.last;
        let decision = Arc::new(Decision { sequence, time: Some(SystemTime::now().into()), ..decision });
        if remembered.decisions.len() == REMEMBERED {
            remembered.decisions.pop_front();
        }
        remembered.decisions.push_back(decision.clone());
        // Sent under the lock, so that readers get them in order and without gaps. Nobody has to listen.
        let _ = self.inner.news.send(decision);
        sequence
    }

    /// What is remembered, oldest first, and everything that follows it.
    pub fn follow(&self) -> (Vec<Arc<Decision>>, broadcast::Receiver<Arc<Decision>>) {
        let remembered = self.remembered();
        (remembered.decisions.iter().cloned().collect(), self.inner.news.subscribe())
    }

    /// What is remembered about one job, oldest first.
    pub fn of_job(&self, job: &str) -> Vec<Arc<Decision>> {
        self.remembered().decisions.iter().filter(|decision| decision.job_id == job).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn decisions_are_numbered_remembered_and_followed_without_a_gap() {
        let journal = Journal::default();
        for n in 0..REMEMBERED + 2 {
            let job_id = if n % 2 == 0 { "even" } else { "odd" };
            journal.record(Decision { job_id: job_id.into(), ..Decision::default() });
        }
        let (past, mut news) = journal.follow();
        assert_eq!((past.len(), past[0].sequence), (REMEMBERED, 3), "the oldest are forgotten");
        let next = journal.record(Decision::default());
        assert_eq!(next, past[past.len() - 1].sequence + 1);
        assert_eq!(news.recv().await.unwrap().sequence, next);
        assert_eq!(journal.of_job("odd").len(), REMEMBERED / 2);
        assert!(journal.of_job("none").is_empty());
    }
}

//! Time as the scheduler sees it: the span since the daemon began, from a clock that tests can hold.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

/// A point in time: the span since the clock's origin. Plain data, so that pure state machines take it as an argument.
pub type Moment = Duration;

/// A monotonic clock with timers.
pub trait Clock: Send + Sync + 'static {
    /// The time now. Never goes back.
    fn now(&self) -> Moment;

    /// Completes at `moment`, at once where that has passed.
    fn sleep_until(&self, moment: Moment) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// The runtime's clock. Under `tokio::time::pause` it stands still and jumps to the next timer when nothing else can
/// run, so tests of the services take no time.
#[derive(Debug, Clone)]
pub struct RuntimeClock {
    origin: Instant,
}

impl RuntimeClock {
    /// A clock whose origin is now.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for RuntimeClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for RuntimeClock {
    fn now(&self) -> Moment {
        self.origin.elapsed()
    }

    fn sleep_until(&self, moment: Moment) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(tokio::time::sleep_until(self.origin + moment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_clock_follows_the_runtime() {
        let clock = RuntimeClock::new();
        assert_eq!(clock.now(), Duration::ZERO);
        clock.sleep_until(Duration::from_secs(3600)).await;
        assert_eq!(clock.now(), Duration::from_secs(3600));
        clock.sleep_until(Duration::from_secs(1)).await;
        assert_eq!(clock.now(), Duration::from_secs(3600), "a moment that has passed does not wait");
    }
}

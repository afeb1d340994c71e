//! Idle processes go after a while: down to no byte and no process.

use std::collections::HashMap;
use std::time::Duration;

use crate::residency::{HolderView, LifeView, Residency};
use crate::workers::Workers;

/// How long processes are kept without work.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeepAlive {
    /// Of models that are not named.
    pub time: Duration,
    /// Of these.
    pub models: HashMap<String, Duration>,
}

impl KeepAlive {
    fn of(&self, model: Option<&str>) -> Duration {
        model.and_then(|model| self.models.get(model)).copied().unwrap_or(self.time)
    }

    fn shortest(&self) -> Duration {
        self.models.values().copied().fold(self.time, Duration::min)
    }

    /// Retires what has been idle for its time, until the residency is gone. Pinned processes stay.
    pub async fn keep(self, residency: Residency, workers: Workers) {
        loop {
            let models: HashMap<u64, String> =
                workers.list().into_iter().map(|view| (view.spec.incarnation, view.spec.model)).collect();
            let devices = residency.snapshot().await;
            let turn = self.turn(devices.iter().flat_map(|device| &device.holders), &models);
            for incarnation in turn.due {
                tracing::info!(incarnation, "nothing was to do for so long that its process goes");
                drop(residency.retire(incarnation));
            }
            tokio::time::sleep(turn.again_in).await;
        }
    }

    /// Who is to go now, and when to look again: what becomes idle later is due after that.
    fn turn<'a>(&self, holders: impl Iterator<Item = &'a HolderView>, models: &HashMap<u64, String>) -> Turn {
        let mut turn = Turn { due: Vec::new(), again_in: self.shortest() };
        let kept = |holder: &&HolderView| holder.life == LifeView::Alive && !holder.pinned;
        for holder in holders.filter(kept) {
            let Some(idle) = holder.idle else { continue };
            let time = self.of(models.get(&holder.incarnation).map(String::as_str));
            match time.checked_sub(idle) {
                Some(rest) if !rest.is_zero() => turn.again_in = turn.again_in.min(rest),
                Some(_) | None => turn.due.push(holder.incarnation),
            }
        }
        turn
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Turn {
    due: Vec<u64>,
    again_in: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn holder(incarnation: u64, idle: Option<Duration>) -> HolderView {
        HolderView {
            incarnation,
            title: String::new(),
            life: LifeView::Alive,
            leased: 1,
            measured: 1,
            pinned: false,
            job: None,
            idle,
        }
    }

    #[test]
    fn what_was_idle_for_its_time_goes_unless_it_is_busy_pinned_or_going_already() {
        let keep = KeepAlive { time: 10 * SECOND, models: HashMap::from([("long".into(), 60 * SECOND)]) };
        let models = HashMap::from([(2, "long".to_owned()), (3, "other".to_owned())]);
        let holders = [
            holder(1, Some(10 * SECOND)),
            holder(2, Some(59 * SECOND)),
            holder(3, Some(7 * SECOND)),
            holder(4, None),
            HolderView { pinned: true, ..holder(5, Some(99 * SECOND)) },
            HolderView { life: LifeView::Retiring, ..holder(6, Some(99 * SECOND)) },
        ];
        assert_eq!(keep.turn(holders.iter(), &models), Turn { due: vec![1], again_in: SECOND });
        let none = keep.turn([].iter(), &models);
        assert_eq!(none, Turn { due: Vec::new(), again_in: 10 * SECOND }, "nothing that comes can be due before");
    }
}

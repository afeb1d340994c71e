//! The compute token: one stage task computes on a device at a time.
//!
//! It goes to the tenant that has computed least by its parts, and among one tenant's tasks to the one that asked first; nobody is
//! passed over more than a bounded number of times. Who computes may offer it at a step boundary.

use std::collections::VecDeque;

use super::super::lease::RequestId;
use super::Effect;
use super::share::Shares;
use crate::clock::Moment;
use crate::ids::{JobId, Tenant};

/// Somebody who computes or wants to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Contender {
    id: RequestId,
    job: JobId,
    tenant: Tenant,
    /// Later ones that were let past it.
    overtaken: u32,
}

/// Who computes, and who comes next.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(in crate::residency) struct Token {
    held: Option<(Contender, Moment)>,
    queue: VecDeque<Contender>,
}

impl Token {
    /// The job that computes.
    pub(in crate::residency) fn job(&self) -> Option<&JobId> {
        self.held.as_ref().map(|(holder, _)| &holder.job)
    }

    /// Whether somebody waits although nobody computes; never true between turns.
    pub(in crate::residency) fn stuck(&self) -> bool {
        self.held.is_none() && !self.queue.is_empty()
    }

    /// The most often that somebody who waits was passed over.
    pub(in crate::residency) fn most_overtaken(&self) -> u32 {
        self.queue.iter().map(|waiting| waiting.overtaken).max().unwrap_or(0)
    }

    /// Moves the time since which it is held.
    pub(super) fn shift(&mut self, moved: impl Fn(Moment) -> Moment) {
        if let Some((_, since)) = &mut self.held {
            *since = moved(*since);
        }
    }

    pub(super) fn request(&mut self, id: RequestId, job: JobId, tenant: Tenant) {
        self.queue.push_back(Contender { id, job, tenant, overtaken: 0 });
    }

    /// Whoever held or wanted it under this number does not any more.
    pub(super) fn ended(&mut self, id: RequestId, now: Moment, shares: &mut Shares) {
        self.queue.retain(|waiting| waiting.id != id);
        if let Some((holder, since)) = self.held.take_if(|(holder, _)| holder.id == id) {
            shares.charge(&holder.tenant, now.saturating_sub(since));
        }
    }

    /// Who computes offers it: it goes to another tenant that has had less, and comes back in its turn.
    pub(super) fn offered(&mut self, id: RequestId, now: Moment, shares: &mut Shares, effects: &mut Vec<Effect>) {
        let Some((holder, since)) = self.held.take_if(|(holder, _)| holder.id == id) else { return };
        shares.charge(&holder.tenant, now.saturating_sub(since));
        let due = |waiting: &Contender| {
            waiting.tenant != holder.tenant && shares.used(&waiting.tenant) < shares.used(&holder.tenant)
        };
        if self.queue.iter().any(due) {
            self.queue.push_back(holder);
        } else {
            effects.push(Effect::TokenGranted { id });
            self.held = Some((holder, now));
        }
    }

    /// Gives it to whoever is next, if nobody has it.
    pub(super) fn pass(&mut self, now: Moment, shares: &Shares, limit: u32, effects: &mut Vec<Effect>) {
        if self.held.is_some() {
            return;
        }
        let overdue = self.queue.iter().position(|waiting| waiting.overtaken >= limit);
        let fairest = || (0..self.queue.len()).min_by_key(|&at| shares.used(&self.queue[at].tenant));
        let Some(chosen) = overdue.or_else(fairest) else { return };
        for passed in self.queue.iter_mut().take(chosen) {
            passed.overtaken += 1;
        }
        let Some(next) = self.queue.remove(chosen) else { return };
        effects.push(Effect::TokenGranted { id: next.id });
        self.held = Some((next, now));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A token with its accounts, and a clock that each computation moves.
    #[derive(Default)]
    struct Bench {
        token: Token,
        shares: Shares,
        now: Moment,
    }

    impl Bench {
        fn pass(&mut self) -> Option<u64> {
            let mut effects = Vec::new();
            self.token.pass(self.now, &self.shares, 8, &mut effects);
            effects.first().map(|effect| match effect {
                Effect::TokenGranted { id } => id.0,
                other => panic!("{other:?}"),
            })
        }

        fn request(&mut self, id: u64, tenant: &str) -> Option<u64> {
            self.token.request(RequestId(id), JobId::from(format!("job{id}")), tenant.into());
            self.pass()
        }

        fn ended(&mut self, id: u64, after: Duration) -> Option<u64> {
            self.now += after;
            self.token.ended(RequestId(id), self.now, &mut self.shares);
            self.pass()
        }

        fn offered(&mut self, id: u64, after: Duration) -> Option<u64> {
            self.now += after;
            let mut effects = Vec::new();
            self.token.offered(RequestId(id), self.now, &mut self.shares, &mut effects);
            if effects.is_empty() { self.pass() } else { Some(id) }
        }
    }

    #[test]
    fn one_computes_at_a_time_in_order_and_who_leaves_the_queue_is_skipped() {
        let mut bench = Bench::default();
        assert_eq!(bench.request(1, "a"), Some(1));
        assert_eq!([2, 3, 4].map(|id| bench.request(id, "a")), [None; 3]);
        assert_eq!(bench.ended(2, SECOND), None);
        assert_eq!(bench.ended(1, SECOND), Some(3));
        assert_eq!(bench.token.job(), Some(&JobId::from("job3")));
        assert_eq!(bench.ended(1, SECOND), None, "what has ended cannot end again");
        assert_eq!(bench.ended(3, SECOND), Some(4));
        assert_eq!(bench.ended(4, SECOND), None);
        assert_eq!(bench.token, Token::default());
    }

    #[test]
    fn a_tenant_with_many_tasks_does_not_keep_another_waiting() {
        let mut bench = Bench::default();
        bench.request(1, "many");
        (2..6).for_each(|id| assert_eq!(bench.request(id, "many"), None));
        bench.request(10, "few");
        assert_eq!(bench.ended(1, SECOND), Some(10), "the one has computed, the other has not");
        assert_eq!(bench.ended(10, SECOND * 3), Some(2));
        bench.request(11, "few");
        assert_eq!(bench.ended(2, SECOND), Some(3), "two seconds of the one, three of the other");
    }

    #[test]
    fn nobody_is_passed_over_without_end() {
        let mut bench = Bench::default();
        bench.shares.charge(&"slow".into(), SECOND * 1000);
        bench.request(1, "quick");
        bench.request(2, "slow");
        let mut running = 1;
        for id in 3.. {
            bench.request(id, "quick");
            running = bench.ended(running, SECOND).unwrap();
            if running == 2 {
                assert_eq!(bench.token.most_overtaken(), 0);
                assert_eq!(id, 3 + 8, "eight were let past it");
                return;
            }
            assert!(bench.token.most_overtaken() <= 8);
            assert!(id < 20, "the slow tenant starves");
        }
    }

    #[test]
    fn at_a_step_boundary_it_goes_to_who_has_had_less_and_comes_back() {
        let mut bench = Bench::default();
        bench.request(1, "a");
        assert_eq!(bench.offered(1, SECOND), Some(1), "nobody else wants it");
        bench.request(2, "a");
        assert_eq!(bench.offered(1, SECOND), Some(1), "a task is not interrupted for one of the same tenant");
        bench.request(3, "b");
        assert_eq!(bench.offered(1, SECOND), Some(3));
        assert_eq!(bench.offered(3, SECOND), Some(3), "one second against three");
        assert_eq!(bench.ended(3, SECOND * 5), Some(2), "the first of the tenant that waits");
        assert_eq!(bench.ended(2, SECOND), Some(1));
    }
}

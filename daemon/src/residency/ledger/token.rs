//! The compute token: one stage task computes on a device at a time.

use std::collections::VecDeque;

use super::super::lease::RequestId;
use super::Effect;
use crate::ids::JobId;

/// Who computes, and who comes next.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::residency) struct Token {
    held: Option<(RequestId, JobId)>,
    queue: VecDeque<(RequestId, JobId)>,
}

impl Token {
    /// The job that computes.
    pub(in crate::residency) fn job(&self) -> Option<&JobId> {
        self.held.as_ref().map(|(_, job)| job)
    }

    /// Whether somebody waits although nobody computes; never true between turns.
    pub(in crate::residency) fn stuck(&self) -> bool {
        self.held.is_none() && !self.queue.is_empty()
    }

    pub(super) fn request(&mut self, id: RequestId, job: JobId, effects: &mut Vec<Effect>) {
        self.queue.push_back((id, job));
        self.pass(effects);
    }

    pub(super) fn ended(&mut self, id: RequestId, effects: &mut Vec<Effect>) {
        self.queue.retain(|(waiting, _)| *waiting != id);
        if self.held.as_ref().is_some_and(|(held, _)| *held == id) {
            self.held = None;
        }
        self.pass(effects);
    }

    fn pass(&mut self, effects: &mut Vec<Effect>) {
        if self.held.is_none()
            && let Some((id, job)) = self.queue.pop_front()
        {
            self.held = Some((id, job));
            effects.push(Effect::TokenGranted { id });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_computes_at_a_time_in_order_and_who_leaves_the_queue_is_skipped() {
        let mut token = Token::default();
        let mut effects = Vec::new();
        for n in 1..=4 {
            token.request(RequestId(n), JobId::from(format!("job{n}")), &mut effects);
        }
        assert_eq!(effects, [Effect::TokenGranted { id: RequestId(1) }]);
        effects.clear();
        token.ended(RequestId(2), &mut effects);
        assert_eq!(effects, []);
        token.ended(RequestId(1), &mut effects);
        assert_eq!(effects, [Effect::TokenGranted { id: RequestId(3) }]);
        assert_eq!(token.job(), Some(&JobId::from("job3")));
        effects.clear();
        token.ended(RequestId(1), &mut effects);
        assert_eq!(effects, [], "what has ended cannot end again");
        token.ended(RequestId(3), &mut effects);
        token.ended(RequestId(4), &mut effects);
        assert_eq!(token, Token::default());
    }
}

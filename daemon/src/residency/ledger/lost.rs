//! A device that is gone: nothing is granted there any more, and nobody is left waiting for it. What was leased stays charged.

use super::super::lease::{LeaseVector, Refusal};
use super::state::Waiter;
use super::{DecisionKind, Ledger, Turn};

impl Ledger {
    /// The device is gone, for this reason.
    pub(super) fn device_lost(&mut self, why: String, turn: &mut Turn<'_>) {
        if self.lost.is_none() {
            self.decide(turn, None, None, DecisionKind::DeviceLost { why: why.clone() });
        }
        self.lost = Some(why);
    }

    /// The device answers again.
    pub(super) fn device_found(&mut self, turn: &mut Turn<'_>) {
        if self.lost.take().is_some() {
            self.decide(turn, None, None, DecisionKind::Recovered);
        }
    }

    /// Why nothing can be granted on this device, if it is gone.
    pub(super) fn refusal_of_the_lost(&self, vector: &LeaseVector) -> Option<Refusal> {
        let why = format!("it is lost ({}); restart its driver or the host", self.lost.as_ref()?);
        Some(Refusal::Unusable { device: self.device.clone(), holder: vector.holder.clone(), why })
    }

    /// Refuses all that wait for a device that is gone.
    pub(super) fn refuse_for_the_lost(&mut self, turn: &mut Turn<'_>) {
        if self.lost.is_none() {
            return;
        }
        while let Some(Waiter { id, vector, .. }) = self.waiters.pop_front() {
            if let Some(refusal) = self.refusal_of_the_lost(&vector) {
                self.refuse(id, &vector, refusal, turn);
            }
        }
    }
}

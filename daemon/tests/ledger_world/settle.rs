//! How the world ends: everybody behaves again, everybody is served, and every byte comes back.

use std::time::Duration;

use sdd::residency::{Afterwards, Event};

use super::{Machine, WORLD, World};

impl<M: Machine> World<M> {
    /// Everybody behaves: tasks end, orders are followed, the dead are reaped. Then every request must be answered, and when
    /// all processes have gone, every byte is free.
    pub(crate) fn settle(&mut self) -> Result<(), String> {
        self.event(Event::Unhold)?;
        for round in 0..400 {
            // Capacity is read often, and grows to the least that was read while it lasted.
            self.event(Event::Capacity { bytes: WORLD })?;
            for id in self.claims.keys().copied().collect::<Vec<_>>() {
                self.release(id, Afterwards::Keep)?;
            }
            while let Some(bytes) = self.outputs.pop() {
                self.pool.give_back(bytes);
            }
            self.behave()?;
            self.pass(Duration::from_millis(500))?;
            if self.waiting.is_empty() && self.claims.is_empty() && round > 6 {
                return self.finish();
            }
        }
        Err(format!("requests are never answered: {:?}\n{}", self.waiting, self.machine.describe(self.now)))
    }

    fn behave(&mut self) -> Result<(), String> {
        for incarnation in self.processes.keys().copied().collect::<Vec<_>>() {
            let condemned = self.condemned.contains(&incarnation);
            let Some(process) = self.processes.get_mut(&incarnation) else { continue };
            process.hung = false;
            if process.dead || condemned {
                self.reap(incarnation)?;
                continue;
            }
            if !process.attached {
                self.attach(incarnation)?;
            }
            while self.processes.get(&incarnation).is_some_and(|p| !p.orders.is_empty() && !p.dead) {
                self.obey(incarnation, true)?;
            }
        }
        // Those who lied have lost what they hid by now.
        for (incarnation, lease, bytes) in self.machine.remains() {
            if let Some(held) = self.processes.get_mut(&incarnation).and_then(|p| p.held.get_mut(&lease)) {
                held.1 = bytes.min(held.1);
            }
        }
        self.ghosts.clear();
        while let Some(incarnation) = self.measures.pop() {
            self.measure(incarnation)?;
        }
        while let Some(id) = self.computing.take() {
            self.event(Event::TokenEnded { id })?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        for _ in 0..40 {
            for incarnation in self.processes.keys().copied().collect::<Vec<_>>() {
                self.event(Event::Retire { incarnation })?;
            }
            self.behave()?;
            self.pass(Duration::from_millis(500))?;
            if self.processes.is_empty() && self.tokens.is_empty() && self.machine.is_clean(self.now).is_ok() {
                break;
            }
        }
        if !self.tokens.is_empty() {
            return Err(format!("requests for the token are never answered: {:?}", self.tokens));
        }
        if self.machine.charged() != 0 || self.pool.used() != 0 || !self.processes.is_empty() {
            let (charged, shared) = (self.machine.charged(), self.pool.used());
            let state = self.machine.describe(self.now);
            return Err(format!("{charged} bytes and {shared} of shared memory are left when all is over\n{state}"));
        }
        self.machine.is_clean(self.now)
    }
}

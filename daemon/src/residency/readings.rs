//! When devices are read, and what a reading means to their ledgers.

use std::time::Duration;

use tracing::{info, warn};

use super::device::{DeviceReading, ProbeError, Processes};
use super::lease::Incarnation;
use super::ledger::Event;
use super::service::{Device, Owner};
use crate::clock::Moment;
use crate::ids::DeviceId;

/// A reading that is not older is good for another turn: a turn comes with every message.
const FRESH: Duration = Duration::from_millis(20);
/// Between two readings while somebody waits for bytes.
const READ_WAITING: Duration = Duration::from_millis(250);
/// Between two readings while somebody holds bytes.
const READ_HOLDING: Duration = Duration::from_secs(1);
/// Foreign use is counted in parts of the device, this-many-th of it, so that its trembling does not become one change after
/// the other.
const PARTS: u64 = 1024;

impl Device {
    /// When to read it next; `None` while nobody holds bytes and nobody waits, or where it has told that nobody shares it.
    pub(super) fn next_reading(&self) -> Option<Moment> {
        if self.alone {
            return None;
        }
        let interval = match (self.ledger.waits(), self.ledger.is_empty() && !self.ledger.is_short()) {
            (true, _) => READ_WAITING,
            (false, false) => READ_HOLDING,
            (false, true) => return None,
        };
        Some(self.read.as_ref().map_or(Moment::ZERO, |(at, _)| *at + interval))
    }
}

impl Owner {
    /// Reads a device where that is due: what others use of it is not ours to lease.
    pub(super) fn read(&mut self, id: &DeviceId, event: &Event) -> Vec<Event> {
        let Some(reading) = self.reading(id, event) else { return Vec::new() };
        let Some(device) = self.devices.get_mut(id) else { return Vec::new() };
        let reading = match reading {
            Ok(reading) => reading,
            Err(ProbeError::Lost(why)) => return vec![Event::DeviceLost { why }],
            // Says nothing about what is free: the last capacity counts.
            Err(ProbeError::Failed(_)) => return Vec::new(),
        };
        let budget = device.config.budget;
        let capacity = reading.capacity(budget, device.ledger.said());
        let part = (device.config.total / PARTS).max(1);
        let bytes = if capacity < budget { capacity - capacity % part } else { budget };
        let hidden = matches!(reading.processes, Processes::Hidden { .. });
        let free = hidden.then_some(Event::Free { bytes: reading.free });
        [Event::DeviceFound].into_iter().chain(free).chain([Event::Capacity { bytes }]).collect()
    }

    fn reading(&mut self, id: &DeviceId, event: &Event) -> Option<Result<DeviceReading, ProbeError>> {
        let now = self.clock.now();
        let here = |incarnation: &&Incarnation| self.places.get(incarnation) == Some(id);
        let pids: Vec<u32> =
            self.pids.iter().filter(|(incarnation, _)| here(incarnation)).map(|(_, pid)| *pid).collect();
        let device = self.devices.get_mut(id)?;
        let asked = matches!(event, Event::Request { .. }) || device.ledger.waits();
        let due = device.next_reading().is_some_and(|at| now >= at);
        let fresh = device.read.as_ref().is_some_and(|(at, _)| now < *at + FRESH);
        if device.alone || !(due || asked && !fresh) {
            return None;
        }
        let reading = device.config.probe.reading(&pids);
        let was = device.read.replace((now, reading.as_ref().map(|_| ()).map_err(ProbeError::clone)));
        match reading {
            Ok(reading) => {
                if let Some((_, Err(error))) = was {
                    info!(device = %id, %error, "the device answers again");
                }
                device.alone = reading.is_none();
                reading.map(Ok)
            }
            Err(error) => {
                // Told once.
                if was.is_none_or(|(_, was)| was.as_ref() != Err(&error)) {
                    warn!(device = %id, %error, "cannot read a device");
                }
                Some(Err(error))
            }
        }
    }
}

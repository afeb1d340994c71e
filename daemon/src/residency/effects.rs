//! What becomes of a ledger's effects: callers are answered, processes told, bytes measured, decisions made known. Apart from the
//! owner task, which decides when a ledger takes a step.

use sd_proto::v1;
use tracing::{debug, info, warn};

use super::device::Shown;
use super::handle::{Afterwards, ComputeToken, Granted, OnRelease};
use super::lease::{Incarnation, Refusal};
use super::ledger::{Decision, DecisionKind, Effect, Event};
use super::service::Owner;
use crate::ids::{DeviceId, JobId};

impl Owner {
    /// Carries an effect out; a measurement leads to another event.
    pub(super) fn carry_out(&mut self, device: &DeviceId, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Granted { id, incarnation, leases, waited, shared_memory } => {
                let commands = self.commands.clone();
                let release = OnRelease { commands, device: device.clone(), id, afterwards: Afterwards::Keep };
                let shared_memory = self.arena.promise(shared_memory);
                let granted = Granted::new(incarnation, leases, waited, shared_memory, release);
                match self.granting.remove(&id) {
                    // Who no longer waits drops it, and so releases it.
                    Some(reply) => drop(reply.send(Ok(granted))),
                    None => drop(granted),
                }
            }
            Effect::Refused { id, refusal } => {
                if let Some(reply) = self.granting.remove(&id) {
                    let _ = reply.send(Err(refusal));
                }
            }
            Effect::TokenGranted { id } => {
                if let Some(offer) = self.offers.remove(&id) {
                    let _ = offer.send(());
                    return None;
                }
                let token = ComputeToken { commands: self.commands.clone(), device: device.clone(), id };
                match self.computing.remove(&id) {
                    Some(reply) => drop(reply.send(Ok(token))),
                    None => drop(token),
                }
            }
            Effect::Measure { incarnation } => return self.measure(device, incarnation),
            Effect::Decided(decision) => self.tell(decision),
            Effect::Grant { incarnation, lease, request_id } => {
                let term = self.devices.get(device)?.config.rules.term;
                self.holders.as_ref()?.grant(incarnation, lease, request_id, term);
            }
            Effect::Revise { incarnation, lease, to, deadline } => {
                self.holders.as_ref()?.revise(incarnation, lease, to, deadline);
            }
            Effect::Retire { incarnation } => self.holders.as_ref()?.retire(incarnation),
            Effect::Kill { incarnation, cause } => self.holders.as_ref()?.kill(incarnation, cause),
            Effect::Proven { incarnation, lease, bytes, proof } => {
                for watch in self.watches.iter_mut().filter(|watch| watch.processes.contains(&incarnation)) {
                    watch.bytes += bytes;
                }
                self.holders.as_ref()?.proof(incarnation, lease, bytes, proof);
            }
        }
        None
    }

    fn measure(&self, device: &DeviceId, incarnation: Incarnation) -> Option<Event> {
        let pid = *self.pids.get(&incarnation)?;
        match self.devices.get(device)?.config.probe.process(pid) {
            Ok(Shown::Bytes(bytes)) => Some(Event::Measured { incarnation, bytes: Some(bytes) }),
            Ok(Shown::Nothing) => Some(Event::Measured { incarnation, bytes: None }),
            Ok(Shown::Hidden { free }) => Some(Event::Seen { incarnation, free }),
            Err(error) => {
                // Proves nothing: the ledger asks again, and the bytes stay charged.
                warn!(incarnation, pid, %device, %error, "cannot measure a process");
                None
            }
        }
    }

    fn tell(&self, decision: Decision) {
        let (device, incarnation) = (&decision.device, decision.incarnation);
        let job = decision.job.as_ref().map(JobId::as_str);
        let sent = v1::Decision::from(&decision);
        let lease = decision.lease.map(|lease| lease.0);
        let bytes = (sent.bytes > 0).then_some(sent.bytes);
        match decision.kind {
            DecisionKind::Degraded { .. }
            | DecisionKind::DeviceLost { .. }
            | DecisionKind::Killed(_)
            | DecisionKind::Overdraft { .. } => {
                warn!(%device, incarnation, lease, bytes, job, "{decision}");
            }
            // Its asker looks for another process: nothing is refused to a job.
            DecisionKind::Refused(Refusal::HolderGone { .. }) => {
                debug!(%device, incarnation, lease, bytes, job, "{decision}")
            }
            DecisionKind::Refused(_)
            | DecisionKind::TakesBack { .. }
            | DecisionKind::Capacity { .. }
            | DecisionKind::Held { .. }
            | DecisionKind::Unheld
            | DecisionKind::Recovered => info!(%device, incarnation, lease, bytes, job, "{decision}"),
            DecisionKind::WaitsForBytes { .. }
            | DecisionKind::WaitsForSharedMemory { .. }
            | DecisionKind::WaitsForProcess
            | DecisionKind::WaitsForDevice { .. }
            | DecisionKind::Granted { .. }
            | DecisionKind::Proven { .. } => debug!(%device, incarnation, lease, bytes, job, "{decision}"),
        }
        // That a process has gone is no decision about the request: its asker chooses another one.
        if !matches!(decision.kind, DecisionKind::Refused(Refusal::HolderGone { .. })) {
            self.journal.record(sent);
        }
        // Nobody has to listen.
        let _ = self.decisions.send(decision);
    }
}

//! Where leases and workers meet: the ledger's decisions go to workers as messages and signals, what workers say about
//! their memory goes to the ledger.

use std::time::Duration;

use sd_proto::worker::v1::{LeaseGrant, LeaseProof, LeaseRequest, LeaseRevise, ToWorker, to_worker};

use super::{BoxFuture, KillCause, Observer, Workers};
use crate::residency::{GrantedLease, Holders, LeaseId, LeaseKill, Proof, Purpose, Residency};

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

impl Workers {
    fn tell(&self, incarnation: u64, message: to_worker::Message) {
        if let Some(worker) = self.get(incarnation) {
            worker.send(ToWorker { message: Some(message) });
        }
    }
}

impl Holders for Workers {
    fn grant(&self, incarnation: u64, lease: GrantedLease, request_id: u64, term: Duration) {
        let grant = LeaseGrant {
            lease_id: lease.id.0,
            purpose: lease.purpose.to_link() as i32,
            bytes: lease.bytes,
            request_id,
            term_ms: millis(term),
        };
        self.tell(incarnation, to_worker::Message::Grant(grant));
    }

    fn revise(&self, incarnation: u64, lease: LeaseId, to: u64, deadline: Duration) {
        let revise = LeaseRevise { lease_id: lease.0, bytes: to, deadline_ms: millis(deadline) };
        self.tell(incarnation, to_worker::Message::Revise(revise));
    }

    fn proof(&self, incarnation: u64, lease: LeaseId, bytes: u64, proof: Proof) {
        let proof = LeaseProof { lease_id: lease.0, bytes, method: proof.to_link() as i32 };
        self.tell(incarnation, to_worker::Message::Proof(proof));
    }

    fn retire(&self, incarnation: u64) {
        if let Some(worker) = self.get(incarnation) {
            worker.retire();
        }
    }

    fn kill(&self, incarnation: u64, cause: LeaseKill) {
        if let Some(worker) = self.get(incarnation) {
            worker.kill(KillCause::Lease(cause));
        }
    }
}

impl Observer for Residency {
    fn spawned(&self, incarnation: u64, pid: u32) {
        self.holder_spawned(incarnation, pid);
    }

    fn attached(&self, incarnation: u64) -> BoxFuture {
        let residency = self.clone();
        Box::pin(async move { residency.holder_attached(incarnation).await })
    }

    fn lost(&self, incarnation: u64) {
        self.holder_lost(incarnation);
    }

    fn pulse(&self, incarnation: u64, device_bytes: u64, peak_bytes: u64) {
        Residency::pulse(self, incarnation, device_bytes, peak_bytes);
    }

    fn block_time(&self, incarnation: u64, time: Duration) {
        Residency::block_time(self, incarnation, time);
    }

    fn lease_requested(&self, incarnation: u64, request: LeaseRequest) {
        if let Some(purpose) = Purpose::from_link(request.purpose()) {
            self.extend(incarnation, request.request_id, purpose, request.min_bytes, request.want_bytes);
        }
    }

    fn lease_returned(&self, incarnation: u64, lease: u64, bytes: u64) {
        self.returned(incarnation, LeaseId(lease), bytes);
    }

    fn reaped(&self, incarnation: u64) {
        self.holder_reaped(incarnation);
    }
}

//! Who looks at jobs, and the names that jobs and tenants are given.

use crate::ids::{JobId, Tenant};

/// A new job's id: 12 hexadecimal digits, random, so that ids of two daemons do not meet.
pub fn new_job_id() -> JobId {
    let mut bytes = [0u8; 6];
    // The system's generator fails only before it is seeded at boot; ids need be unique then, not hard to guess.
    if getrandom::fill(&mut bytes).is_err() {
        let nanos = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        bytes.copy_from_slice(&nanos.to_le_bytes()[..6]);
    }
    JobId::from(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// The tenant of a Unix user.
pub fn tenant_of_uid(uid: u32) -> Tenant {
    Tenant::from(format!("uid:{uid}"))
}

/// The tenant of all peers that came over TCP.
pub fn tcp_tenant() -> Tenant {
    Tenant::from("tcp")
}

/// Decides which jobs exist for a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Viewer {
    /// A tenant sees its own jobs.
    Tenant(Tenant),
    /// The daemon's own user and root see all; the jobs that they submit are this tenant's.
    Operator(Tenant),
}

impl Viewer {
    /// Whether a job of `owner` exists for this viewer.
    pub fn sees(&self, owner: &Tenant) -> bool {
        match self {
            Self::Tenant(tenant) => tenant == owner,
            Self::Operator(_) => true,
        }
    }

    /// Whose jobs this viewer submits.
    pub fn tenant(&self) -> &Tenant {
        match self {
            Self::Tenant(tenant) | Self::Operator(tenant) => tenant,
        }
    }
}

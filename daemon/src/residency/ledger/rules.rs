//! Deadlines and bounds.

use std::time::Duration;

/// Deadlines and bounds of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    /// A process that has not pulsed for so long is taken for dead and killed. The supervisor's own clock is shorter
    /// and knows more; this one holds even if that fails.
    pub term: Duration,
    /// The same until a started process has done its handshake.
    pub start_term: Duration,
    /// Least time to give bytes back, before the time that moving them takes. A busy process whose blocks were learned to be
    /// slow has four blocks' time where that is longer: it gives back between two of them.
    pub revise_time: Duration,
    /// Bytes a second at which they move or are freed.
    pub bytes_per_second: u64,
    /// Time to exit after being asked to.
    pub retire_time: Duration,
    /// A release that is not proven for so long makes the device degraded.
    pub proof_time: Duration,
    /// A living process whose release is not proven for so long is not waited for: while it is idle and somebody needs the
    /// bytes, it is retired, for its end is sure to be proven.
    pub patience: Duration,
    /// How much more than its leases a process may hold, by the device's measure.
    pub tolerance: u64,
    /// Whether a reaped process proves that its bytes are free. True where the kernel frees them (CPU device); false where a
    /// driver does, and the device must be asked.
    pub reaping_proves: bool,
    /// How often a request that lacks bytes may be overtaken.
    pub overtake_limit: u32,
    /// How long a request that lacks bytes may be overtaken.
    pub overtake_time: Duration,
    /// Capacity grows only when more has been there for so long.
    pub growth_time: Duration,
    /// Whether a process that holds more than its leases and the tolerance is asked to give it back and then killed. The
    /// overdraft is charged and reported in any case.
    pub enforce: bool,
    /// Whether processes can give weights back and stay: the rung park, and shrinking what a busy one has beyond its floor.
    pub weights_move: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            term: Duration::from_secs(6),
            start_term: Duration::from_secs(60),
            revise_time: Duration::from_secs(2),
            bytes_per_second: 1 << 30,
            retire_time: Duration::from_secs(3),
            proof_time: Duration::from_secs(10),
            patience: Duration::from_millis(100),
            tolerance: 32 << 20,
            reaping_proves: true,
            overtake_limit: 8,
            overtake_time: Duration::from_secs(30),
            growth_time: Duration::from_secs(2),
            enforce: true,
            weights_move: true,
        }
    }
}

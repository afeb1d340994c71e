//! The `sdd` daemon as a library: supervisor of worker processes, ledger of device memory, job scheduler, public API.
//!
//! * [`config`]: file, environment and flags, checked into one value; [`cli`]: the command line; [`logging`].
//! * [`daemon`]: assembly of everything below, and the bounded shutdown.
//! * [`workers`]: worker processes, their link and their ends.
//!
//! It never opens a device, parses a weight file or runs a model.

pub mod arena;
pub mod clock;
pub mod ids;
pub mod residency;
pub mod workers;

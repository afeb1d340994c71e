//! The `sdd` daemon as a library: supervisor of worker processes, ledger of device memory, job scheduler, public API.
//!
//! * [`config`]: file, environment and flags, checked into one value; [`cli`]: the command line; [`logging`].
//! * [`daemon`]: assembly of everything below, and the bounded shutdown.
//! * [`serve`]: the public server; [`sockets`]; [`notify`]; [`memory`].
//! * [`workers`]: worker processes, their link and their ends.
//! * [`api`]: the public services; [`jobs`]: admission, queue, state and events; [`stages`]: what a job runs, and how a stage
//!   is brought to a worker; [`models`]: names, folders, descriptions; [`picture`]: the PNG file.
//!
//! It never opens a device, parses a weight file or runs a model.
#![deny(unsafe_code)]

pub mod api;
pub mod arena;
mod assembly;
pub mod cli;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod devices;
pub mod ids;
pub mod jobs;
pub mod journal;
pub mod logging;
pub mod memory;
pub mod models;
pub mod notify;
pub mod picture;
pub mod residency;
pub mod serve;
pub mod sockets;
pub mod stages;
pub mod workers;

//! What the tests of the real programs share: building them, running them in a folder of their own, looking at their
//! processes from outside.
//!
//! Nothing in here is shared between two tests but the built programs and the cache with the default model: every
//! [`Sandbox`] has its own lock folder, so its daemons know nothing of each other or of a daemon of the host.

pub mod calls;
pub mod daemon;
pub mod faults;
pub mod linked;
pub mod png_text;
pub mod process;
pub mod programs;
pub mod random;
pub mod readings;
pub mod sandbox;

pub use daemon::Daemon;
pub use programs::Programs;
pub use sandbox::Sandbox;

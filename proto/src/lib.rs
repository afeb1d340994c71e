//! The contract between `sdd`, its workers and its clients.
//!
//! * [`v1`]: the public interface (`sd.v1`): generation jobs and operator control.
//! * [`worker::v1`]: the private link between the daemon and one worker process.
//! * [`segment`]: the layout of a tensor in shared memory, checked on both sides.
//! * [`checkpoint`]: the layout of a denoiser's checkpoint in such a segment.
//! * [`exit`]: exit codes of every program.
//! * [`endpoint`]: how an address of a daemon is written, and where a daemon is looked for.
//! * [`instance`]: what a daemon leaves on a host, and how a dead one's leftovers are told from a living one's.

pub mod checkpoint;
pub mod endpoint;
pub mod exit;
pub mod instance;
pub mod segment;

/// The public interface.
#[allow(missing_docs, clippy::all, unreachable_pub, rust_2018_idioms)]
pub mod v1 {
    tonic::include_proto!("sd.v1");
}

/// The private interface between the daemon and its workers.
pub mod worker {
    /// Version 1 of the link.
    #[allow(missing_docs, clippy::all, unreachable_pub, rust_2018_idioms)]
    pub mod v1 {
        tonic::include_proto!("sd.worker.v1");
    }
}

/// Encoded `FileDescriptorSet` of every interface, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Version of [`worker::v1`]'s meaning; a worker that speaks another one is refused at its handshake.
pub const LINK_PROTOCOL: u32 = 2;

/// Largest gRPC message either side accepts, in bytes: an image file in a request, a PNG in an event.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// File descriptor number on which a worker finds its token (32 bytes, then end of file).
pub const TOKEN_FD: i32 = 3;

/// Bytes of a worker's token.
pub const TOKEN_BYTES: usize = 32;

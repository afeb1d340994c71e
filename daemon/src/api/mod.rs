//! The public gRPC interface: `sd.v1.Generation` and `sd.v1.Control`.
//!
//! * [`caller`]: who calls, and what that allows.
//! * [`status`]: the one table from errors to gRPC codes.
//! * [`generation`], [`control`]: the services.
//! * [`overview`]: what the daemon shows of itself.

pub mod caller;
pub mod control;
mod decisions;
mod fit;
pub mod generation;
mod operate;
pub mod overview;
mod quarantine;
pub mod status;

pub use caller::Caller;
pub use control::{Backing, ControlService, Identity};
pub use generation::GenerationService;
pub use overview::{Live, Overview};

use sd_proto::MAX_MESSAGE_BYTES;
use sd_proto::v1::control_server::ControlServer;
use sd_proto::v1::generation_server::GenerationServer;

/// The generation service with its message limits.
pub fn generation(service: GenerationService) -> GenerationServer<GenerationService> {
    GenerationServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// The control service with its message limits.
pub fn control(service: ControlService) -> ControlServer<ControlService> {
    ControlServer::new(service)
}

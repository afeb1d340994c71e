//! The Rust client of `sdd`, and what the command line `sdctl` is made of.
//!
//! * [`Client`]: one connection to a daemon; generation jobs and operator control, with typed errors.
//! * [`Session`]: finds a daemon ([`Places`]), joins the one that holds the device, or starts a private one that ends with
//!   the session and leaves nothing behind ([`PrivateDaemon`]).
//! * [`names`]: samplers, schedules, stages and states as people write them.
//!
//! ```no_run
//! use sd_client::{Client, proto::ImageRequest, proto::job_event::Event};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect(&"unix:/run/sdd/sdd.sock".parse()?).await?;
//! let image = ImageRequest { prompt: "a red heart".into(), seed: Some(7), ..Default::default() };
//! let mut events = client.generate(image, false).await?;
//! while let Some(event) = events.next().await {
//!     if let Some(Event::Image(image)) = event?.event {
//!         std::fs::write(format!("{}.png", image.seed), image.png)?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod client;
mod connect;
mod error;
mod events;
pub mod names;
mod operate;
mod places;
mod private;
mod program;
mod runtime_dir;
mod session;

pub use client::Client;
pub use connect::{ConnectError, Trust};
pub use error::{CallError, Refusal, Violation};
pub use events::Events;
pub use operate::Decisions;
pub use places::{Candidate, Places, PlacesError, Source};
pub use private::{Closed, PrivateDaemon, StartError};
pub use program::find_program;
pub use session::{Notice, OpenError, Session, StartPolicy};

/// The messages of the interface, as generated from `proto/sd/v1`.
pub use sd_proto::v1 as proto;

/// Where a daemon listens.
pub use sd_proto::endpoint::Endpoint;

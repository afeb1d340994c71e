//! Models as lists of segments, and the one executor that runs them.
//!
//! A model is a prelude, blocks and an epilogue. Each [`Segment`] *declares* its layers ([`Declarations`]) and runs on the
//! state that flows through, looking its parameters up in the [`Bindings`] that it is handed: it owns none. So a block can
//! be bound, dropped and bound again between two runs without the model noticing, and what binds it decides where the
//! numbers come from (a mapped file now; quantised data or an adapter's product by the same way).
//!
//! [`Residency`] is a model's memory: within its limit some segments stay bound, the others pass through a ring, each for one
//! pass. What stays is a pure function of sizes and limit, and no result depends on it.

mod bindings;
mod declare;
mod executor;
mod flow;
mod memory;
mod plan;
mod ring;
mod segment;

pub use bindings::{Bindings, Numbers, ParameterSource};
pub use declare::{ConvId, ConvShape, Declarations, LayerSpec, LinearId, NormId, Parameter, Role, TableId, UpsampleId};
pub use executor::{Executor, ExecutorError};
pub use flow::Flow;
pub use memory::{LoadEvent, Residency, RunStats, share};
pub use plan::{Policy, Storage};
pub use segment::{Observer, Segment, SegmentEvent, Uninterrupted};

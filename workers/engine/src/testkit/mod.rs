//! For tests: recorded pipelines, and model folders whose weights follow from the names of their tensors.
//!
//! Fixtures are in `tests/fixtures` of the repository; the README there says how they were made.

mod compare;
mod counting;
mod default_model;
mod fixture;
mod layouts;
mod seeded;
mod write;

pub use compare::{compare, compare_sliced};
pub use counting::CountingAllocator;
pub use default_model::DefaultModel;
pub use fixture::{Fixture, FixtureError, fixtures};
pub use layouts::{Case, Layouts, Network, SlicedTensor, TextRun, UnetRunShape, VaeRunShape};
pub use seeded::{canonical, noise, seeded, uniform};
pub use write::{Layout, NewTensor, scale_weights, write_safetensors, write_weights};

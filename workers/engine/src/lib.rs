//! The engine: weight files, networks as lists of segments, samplers, and the operations under them.
//!
//! It knows tensors and files, no protocol and no process. A worker loads one stage of one model through [`models`],
//! describes a folder through [`inspect`], and samples through [`sampling`].
#![deny(unsafe_code)]

pub mod formats;
pub mod inspect;
pub mod models;
// Kernels: every use of unsafe there has its reason beside it.
#[allow(unsafe_code)]
pub mod ops;
pub mod pipeline;
pub mod residency;
pub mod sampling;
pub mod tensor;
#[cfg(feature = "testkit")]
pub mod testkit;
pub mod text;

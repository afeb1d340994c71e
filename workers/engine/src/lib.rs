//! Placeholder.
pub mod ops;
pub mod sampling;

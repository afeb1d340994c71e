//! Hot operations of every model, with one signature for every device.
//!
//! All tensors are `f32`. Images are channels-last, `[N, H, W, C]`, contiguous; token sequences are `[B, S, C]`.
//! Weights come in the shapes of the weight files and are repacked once, when an operation is built from them.
//!
//! **Determinism.** Every output element is one sum in one order that depends on the operation's shape alone, so a
//! result has the same bytes with any number of threads, on every run, and for an image alone or in a batch.
//!
//! **Memory.** Beside its output an operation takes only what its documentation calls *working set*. What is said to be per
//! thread stays with the pool's threads for the next call.

mod attention;
mod chunks;
mod conv;
mod embedding;
mod kernel;
mod layout;
mod linear;
mod moments;
mod norm;
mod packed;
mod pointwise;
mod product;
mod rounding;
mod simd;
mod tensor;
mod thin;
mod threads;
mod transforms;
mod winograd;

pub use attention::{AttentionMask, attention};
pub use chunks::{Chunks, RowsBuilder, by_chunks};
pub use conv::{Conv2d, Padding, UpsampleConv2d, conv2d, conv2d_add, conv2d_upsampled};
pub use embedding::timestep_embedding;
pub use layout::{concat_channels, nchw_to_nhwc, nhwc_to_nchw, upsample_nearest2x};
pub use linear::{Linear, linear, linear_add, linear_geglu};
pub use moments::{ChannelMoments, GroupScale};
pub use norm::{group_norm, layer_norm, rms_norm};
pub use packed::WeightRows;
pub use pointwise::{Activation, activate, add, geglu, silu};
pub use rounding::{ComputeType, round};
pub use simd::backend;
pub use tensor::with_values;
pub use threads::{install, set_threads, threads};

#[cfg(test)]
mod tests;

//! Layers that several networks share. Each declares its parameters in its segment and keeps only handles.

mod attention;
mod resnet;
mod transformer;
mod upsample;

pub(crate) use attention::SpatialAttention;
pub(crate) use resnet::{ResnetBlock, ResnetShape, TimeNorm};
pub(crate) use transformer::{CrossCache, SpatialTransformer, TransformerShape};
pub(crate) use upsample::conv2d_upsampled_to;

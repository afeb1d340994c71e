//! Layers that several networks share. Each declares its parameters in its segment and keeps only handles.

mod resnet;
mod transformer;
mod upsample;

pub(crate) use resnet::{ResnetBlock, ResnetShape, TimeNorm};
pub(crate) use transformer::{CrossCache, SpatialTransformer, TransformerShape};
pub(crate) use upsample::conv2d_upsampled_to;

//! Convolutions over channels-last images.

use candle_core::{Result, Tensor, bail};

use super::layout::{nchw_to_nhwc, nhwc_to_nchw, upsample_nearest2x};

/// Rows and columns of zeros around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Padding {
    /// Rows above.
    pub top: usize,
    /// Rows below.
    pub bottom: usize,
    /// Columns on the left.
    pub left: usize,
    /// Columns on the right.
    pub right: usize,
}

impl Padding {
    /// No padding.
    pub const NONE: Self = Self::uniform(0);
    /// One row below and one column on the right, `(0, 1, 0, 1)`: downsamplers of VAEs.
    pub const BOTTOM_RIGHT: Self = Self { top: 0, bottom: 1, left: 0, right: 1 };

    /// `p` on every side.
    pub const fn uniform(p: usize) -> Self {
        Self { top: p, bottom: p, left: p, right: p }
    }
}

/// The parameters of a 2-D convolution.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    stride: usize,
    padding: Padding,
}

impl Conv2d {
    /// From `weight` `[Cout, Cin, kh, kw]` as in weight files and `bias` `[Cout]`.
    ///
    /// # Errors
    /// If the shapes do not fit each other or `stride` is zero.
    pub fn new(weight: Tensor, bias: Option<Tensor>, stride: usize, padding: Padding) -> Result<Self> {
        let (n, _, _, _) = weight.dims4()?;
        if let Some(b) = &bias
            && b.dims() != [n]
        {
            bail!("conv2d: bias {:?} does not fit weight {:?}", b.shape(), weight.shape());
        }
        if stride == 0 {
            bail!("conv2d: stride must be at least 1, got 0");
        }
        Ok(Self { weight, bias, stride, padding })
    }

    /// Channels of the input.
    pub fn in_channels(&self) -> usize {
        self.weight.dims()[1]
    }

    /// Channels of the output.
    pub fn out_channels(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Bytes that the parameters hold.
    pub fn bytes(&self) -> usize {
        4 * (self.weight.elem_count() + self.bias.as_ref().map_or(0, |b| b.elem_count()))
    }
}

/// The convolution of `x` `[N, H, W, Cin]`, giving `[N, H', W', Cout]`, `H' = (H + top + bottom − kh) / stride + 1`.
///
/// # Errors
/// If shapes do not fit or the image is smaller than the kernel.
pub fn conv2d(x: &Tensor, conv: &Conv2d) -> Result<Tensor> {
    let p = conv.padding;
    let x = nhwc_to_nchw(x)?.pad_with_zeros(2, p.top, p.bottom)?.pad_with_zeros(3, p.left, p.right)?;
    let mut y = nchw_to_nhwc(&x.conv2d(&conv.weight, 0, conv.stride, 1, 1)?)?;
    if let Some(b) = &conv.bias {
        y = y.broadcast_add(b)?;
    }
    Ok(y)
}

/// `conv2d(x, conv) + residual`; `residual` has the shape of the result.
///
/// # Errors
/// As [`conv2d`], and if the residual's shape differs.
pub fn conv2d_add(x: &Tensor, conv: &Conv2d, residual: &Tensor) -> Result<Tensor> {
    conv2d(x, conv)? + residual
}

/// The parameters of a 3×3 convolution with padding 1 that follows a nearest-neighbour upsampling by two.
#[derive(Clone, Debug)]
pub struct UpsampleConv2d(Conv2d);

impl UpsampleConv2d {
    /// From `weight` `[Cout, Cin, 3, 3]` as in weight files and `bias` `[Cout]`.
    ///
    /// # Errors
    /// If the shapes do not fit each other.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        if weight.dims4()?.2 != 3 || weight.dims4()?.3 != 3 {
            bail!("upsampling conv2d: the kernel must be 3×3, got weight {:?}", weight.shape());
        }
        Conv2d::new(weight, bias, 1, Padding::uniform(1)).map(Self)
    }

    /// Bytes that the parameters hold.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// Doubles height and width of `x` `[N, H, W, Cin]` (nearest), then convolves: `[N, 2H, 2W, Cout]`.
///
/// # Errors
/// If shapes do not fit.
pub fn conv2d_upsampled(x: &Tensor, conv: &UpsampleConv2d) -> Result<Tensor> {
    conv2d(&upsample_nearest2x(x)?, &conv.0)
}

//! Convolutions over channels-last images.
//!
//! A convolution is a product of rows with the packed weight, where a row is the `kh · kw` pixels under the kernel, read
//! where they lie. Nothing is unfolded in memory. Kernels of 3×3 with stride one go by way of [`winograd`].

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::kernel::MR;
use super::packed::{Packed, WeightRows, with_rows};
use super::pointwise::Activation;
use super::product::{Epilogue, Rows, product, product_tensor, slot};
use super::tensor::{Output, with_slice};
use super::transforms::WIDE;
use super::winograd::{self, Winograd};

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

/// The parameters of a 2-D convolution, packed for the CPU: as many bytes as in the file, rounded up to 16 outputs, and
/// 16/9 of that where Winograd's transform is used. [`Conv2d::bytes_of`] says how many in advance.
#[derive(Clone, Debug)]
pub struct Conv2d {
    packed: Packed,
    method: Method,
    kernel: (usize, usize),
    in_channels: usize,
    stride: usize,
    padding: Padding,
}

/// How a convolution is computed: a pure function of its parameters' shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Direct,
    Winograd,
}

impl Method {
    fn of(cout: usize, cin: usize, kernel: (usize, usize), stride: usize) -> Self {
        // Beyond 640 × 960 channels weights are most of a model, and 7/9 more of them is too much to pay. Of few channels
        // the transforms cost more than they save.
        let pays = cin >= 32 && cin.is_multiple_of(WIDE) && cout >= 32 && cin * cout <= 640 * 960;
        if kernel == (3, 3) && stride == 1 && pays { Method::Winograd } else { Method::Direct }
    }
}

impl Conv2d {
    /// From `weight` `[Cout, Cin, kh, kw]` as in weight files and `bias` `[Cout]`. The weight is read once and not kept.
    ///
    /// # Errors
    /// If the shapes do not fit each other or `stride` is zero.
    pub fn new(weight: Tensor, bias: Option<Tensor>, stride: usize, padding: Padding) -> Result<Self> {
        let (n, c, kh, kw) = weight.dims4()?;
        with_rows(&weight, n, |rows| Self::of_rows(rows, bias.as_ref(), [n, c, kh, kw], stride, padding))
    }

    /// From the rows of a weight `[Cout, Cin, kh, kw]`, wherever they come from, and `bias` `[Cout]`.
    ///
    /// # Errors
    /// If the shapes do not fit each other or `stride` is zero.
    pub fn of_rows(
        weight: &WeightRows<'_>,
        bias: Option<&Tensor>,
        [n, in_channels, kh, kw]: [usize; 4],
        stride: usize,
        padding: Padding,
    ) -> Result<Self> {
        if stride == 0 {
            bail!("conv2d: stride must be at least 1, got 0");
        }
        let method = Method::of(n, in_channels, (kh, kw), stride);
        let packed = match method {
            Method::Direct => Packed::new(weight, bias, n, kh * kw, in_channels),
            Method::Winograd => winograd::pack(weight, bias, n, in_channels),
        }?;
        Ok(Self { packed, method, kernel: (kh, kw), in_channels, stride, padding })
    }

    /// The same convolution with `shift`, `[Cout]` elements in any shape, added to its bias: what is added to every pixel
    /// of a result costs nothing that way. The weight is shared.
    ///
    /// # Errors
    /// If `shift` has another number of elements.
    pub fn shifted(&self, shift: &Tensor) -> Result<Self> {
        let packed = with_slice(shift, |shift| self.packed.shifted(shift))?;
        Ok(Self { packed, ..self.clone() })
    }

    /// Channels of the input.
    pub fn in_channels(&self) -> usize {
        self.in_channels
    }

    /// Channels of the output.
    pub fn out_channels(&self) -> usize {
        self.packed.n()
    }

    /// Bytes that the parameters hold.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    /// Bytes that a convolution with a bias will hold, before it is loaded.
    pub fn bytes_of(cout: usize, cin: usize, kernel: (usize, usize), stride: usize) -> usize {
        match Method::of(cout, cin, kernel, stride) {
            Method::Direct => Packed::bytes_of(cout, kernel.0 * kernel.1, cin),
            Method::Winograd => Packed::bytes_of(cout, 16, cin),
        }
    }
}

/// The convolution of `x` `[N, H, W, Cin]`, giving `[N, H', W', Cout]`, `H' = (H + top + bottom − kh) / stride + 1`.
///
/// Working set: per thread at most 64 KiB, and for 3×3 kernels of stride one `16 · 36 · (Cin + 16)` floats
/// (2.2 MB for 960 channels), kept for the next call; a copy of `x` if it is not contiguous.
///
/// # Errors
/// If shapes do not fit or the image is smaller than the kernel.
pub fn conv2d(x: &Tensor, conv: &Conv2d) -> Result<Tensor> {
    run(x, conv, Epilogue::default())
}

/// `conv2d(x, conv) + residual`; `residual` has the shape of the result.
///
/// Working set: as [`conv2d`].
///
/// # Errors
/// As [`conv2d`], and if the residual's shape differs.
pub fn conv2d_add(x: &Tensor, conv: &Conv2d, residual: &Tensor) -> Result<Tensor> {
    with_slice(residual, |r| run(x, conv, Epilogue { act: Activation::None, residual: Some(r) }))
}

fn run(x: &Tensor, conv: &Conv2d, epilogue: Epilogue<'_>) -> Result<Tensor> {
    let (n, h, w, c) = x.dims4()?;
    let (p, (kh, kw)) = (conv.padding, conv.kernel);
    if c != conv.in_channels {
        bail!("conv2d: image {:?} has {c} channels, the weight {}", x.shape(), conv.in_channels);
    }
    if h + p.top + p.bottom < kh || w + p.left + p.right < kw {
        bail!("conv2d: image {:?} with {p:?} is smaller than the kernel {kh}×{kw}", x.shape());
    }
    let (oh, ow) = ((h + p.top + p.bottom - kh) / conv.stride + 1, (w + p.left + p.right - kw) / conv.stride + 1);
    with_slice(x, |data| {
        let zeros = vec![0f32; c];
        if conv.method == Method::Winograd {
            let size = (n, h, w, c);
            return Winograd { image: data, size, padding: p, packed: &conv.packed, zeros: &zeros, epilogue }.run();
        }
        let window = Window {
            image: data,
            size: (h, w, c),
            out: (oh, ow),
            kernel: conv.kernel,
            stride: conv.stride,
            shift: (p.top, p.left),
            zeros: &zeros,
        };
        product_tensor(&window, n * oh * ow, &conv.packed, epilogue, vec![n, oh, ow, conv.out_channels()])
    })
}

/// The pixels under the kernel, for each pixel of the result.
struct Window<'a> {
    image: &'a [f32],
    size: (usize, usize, usize),
    out: (usize, usize),
    kernel: (usize, usize),
    stride: usize,
    /// Rows and columns of padding before the image.
    shift: (usize, usize),
    /// One pixel of padding.
    zeros: &'a [f32],
}

// SAFETY: addresses are those of whole pixels of `image` (rows and columns are compared with its size, and its length
// with the size of as many images as the output has), or of `zeros`, which has as many elements as a pixel.
unsafe impl Rows for Window<'_> {
    fn taps(&self) -> usize {
        self.kernel.0 * self.kernel.1
    }

    fn depth(&self) -> usize {
        self.size.2
    }

    fn locate(&self, range: Range<usize>, table: &mut [*const f32]) {
        let ((h, w, c), (oh, ow), (kh, kw)) = (self.size, self.out, self.kernel);
        assert!(
            range.end.div_ceil(oh * ow) * h * w * c <= self.image.len(),
            "rows {range:?} are beyond the last image"
        );
        let (mut n, mut y, mut x) = (range.start / ow / oh, range.start / ow % oh, range.start % ow);
        for i in 0..range.len() {
            let mut at = slot(i, 0, kh * kw);
            for ky in 0..kh {
                // Underflow wraps to a large number, which is as far outside as it should be.
                let iy = (y * self.stride + ky).wrapping_sub(self.shift.0);
                let line = self.image.as_ptr().wrapping_add((n * h).wrapping_add(iy).wrapping_mul(w * c));
                for kx in 0..kw {
                    let ix = (x * self.stride + kx).wrapping_sub(self.shift.1);
                    let inside = (iy < h) & (ix < w);
                    let pixel = line.wrapping_add(ix.wrapping_mul(c));
                    table[at] = if inside { pixel } else { self.zeros.as_ptr() };
                    at += MR;
                }
            }
            x += 1;
            if x == ow {
                (x, y) = (0, y + 1);
                if y == oh {
                    (y, n) = (0, n + 1);
                }
            }
        }
    }
}

/// The parameters of a 3×3 convolution with padding 1 that follows a nearest-neighbour upsampling by two.
///
/// Each of the four parities of an output pixel sees 2×2 pixels of the small image, some of them through several taps.
/// Those taps are added up once, here: 16/9 of the file's bytes, but 4/9 of the multiplications.
#[derive(Clone, Debug)]
pub struct UpsampleConv2d {
    /// For even and odd rows, of those even and odd columns.
    phases: [Packed; 4],
    in_channels: usize,
}

impl UpsampleConv2d {
    /// From `weight` `[Cout, Cin, 3, 3]` as in weight files and `bias` `[Cout]`. The weight is read once and not kept.
    ///
    /// # Errors
    /// If the shapes do not fit each other.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (n, in_channels, kh, kw) = weight.dims4()?;
        if (kh, kw) != (3, 3) {
            bail!("upsampling conv2d: the kernel must be 3×3, got weight {:?}", weight.shape());
        }
        with_rows(&weight, n, |rows| Self::of_rows(rows, bias.as_ref(), n, in_channels))
    }

    /// From the rows of a weight `[Cout, Cin, 3, 3]`, wherever they come from, and `bias` `[Cout]`.
    ///
    /// # Errors
    /// If the bias does not fit.
    pub fn of_rows(weight: &WeightRows<'_>, bias: Option<&Tensor>, n: usize, in_channels: usize) -> Result<Self> {
        let phase = |py: usize, px: usize| {
            // Even lines see taps {0} and {1, 2}, odd ones {0, 1} and {2}.
            let side = |parity: usize, tap: usize| usize::from(tap > parity);
            let sums = |row: usize, sums: &mut [f32]| {
                let mut taps = vec![0f32; in_channels * 9];
                weight(row, &mut taps);
                sums.fill(0.0);
                for (sums, taps) in sums.chunks_exact_mut(4).zip(taps.chunks_exact(9)) {
                    for (tap, &v) in taps.iter().enumerate() {
                        sums[side(py, tap / 3) * 2 + side(px, tap % 3)] += v;
                    }
                }
            };
            Packed::new(&sums, bias, n, 4, in_channels)
        };
        Ok(Self { phases: [phase(0, 0)?, phase(0, 1)?, phase(1, 0)?, phase(1, 1)?], in_channels })
    }

    /// Channels of the input.
    pub fn in_channels(&self) -> usize {
        self.in_channels
    }

    /// Channels of the output.
    pub fn out_channels(&self) -> usize {
        self.phases[0].n()
    }

    /// Bytes that the parameters hold.
    pub fn bytes(&self) -> usize {
        self.phases.iter().map(Packed::bytes).sum()
    }

    /// Bytes that a convolution with a bias will hold, before it is loaded.
    pub fn bytes_of(cout: usize, cin: usize) -> usize {
        4 * Packed::bytes_of(cout, 4, cin)
    }
}

/// Doubles height and width of `x` `[N, H, W, Cin]` (nearest), then convolves: `[N, 2H, 2W, Cout]`. Within rounding it
/// equals [`super::upsample_nearest2x`] and [`conv2d`] with padding 1, at less than half the work.
///
/// Working set: as [`conv2d`].
///
/// # Errors
/// If shapes do not fit.
pub fn conv2d_upsampled(x: &Tensor, conv: &UpsampleConv2d) -> Result<Tensor> {
    let (n, h, w, c) = x.dims4()?;
    if c != conv.in_channels {
        bail!("upsampling conv2d: image {:?} has {c} channels, the weight {}", x.shape(), conv.in_channels);
    }
    let cout = conv.out_channels();
    with_slice(x, |data| {
        let zeros = vec![0f32; c];
        let mut out = Output::new(n * h * w * 4 * cout);
        let shared = out.shared();
        for (phase, packed) in conv.phases.iter().enumerate() {
            let (py, px) = (phase / 2, phase % 2);
            let window = Window {
                image: data,
                size: (h, w, c),
                out: (h, w),
                kernel: (2, 2),
                stride: 1,
                shift: (1 - py, 1 - px),
                zeros: &zeros,
            };
            let place = |row: usize| {
                let (line, x) = (row / w, row % w);
                ((2 * line + py) * 2 * w + 2 * x + px) * cout
            };
            // SAFETY: the four phases and their rows are disjoint pixels of the output: `line` counts the lines of all
            // images, `2 · line + py < n · 2h` and `2x + px < 2w`.
            unsafe { product(&window, n * h * w, packed, Epilogue::default(), shared, &place)? };
        }
        // SAFETY: together the phases are all pixels.
        unsafe { out.finish((n, 2 * h, 2 * w, cout)) }
    })
}

//! Vector arithmetic without intrinsics: plain loops over lanes, compiled once per instruction set.
//!
//! Bodies are `#[inline(always)]` and generic over `FMA`; [`simd!`] instantiates them for AVX2 + FMA, chosen when the
//! program runs, and for the build's baseline. Sums run over fixed lanes, so their order depends on the length alone.

/// Lanes of a sum: four vectors of eight hide the latency of an addition.
pub(super) const LANES: usize = 32;

/// Whether AVX2 and FMA are there; the answer is cached by the standard library.
#[inline]
pub(super) fn has_avx2_fma() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Which kernels this machine runs: results of one differ from another's in the last bits, so it belongs to the numeric plan.
pub fn backend() -> &'static str {
    match (has_avx2_fma(), BASE_FMA) {
        (true, _) => "avx2-fma",
        (false, true) => "portable-fma",
        (false, false) => "portable",
    }
}

/// Whether the build's baseline multiplies and adds in one instruction.
pub(super) const BASE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// Defines a function whose `#[inline(always)]` body, generic over `const FMA: bool`, is compiled for each
/// instruction set and chosen at run time.
macro_rules! simd {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                if $crate::ops::simd::has_avx2_fma() {
                    // SAFETY: the processor has both features.
                    return unsafe { wide($($arg),*) };
                }
            }
            $body::<{ $crate::ops::simd::BASE_FMA }>($($arg),*)
        }
    };
}
pub(super) use simd;

/// `a · b + c`, rounded once where the instruction exists.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

const EXP_MIN: f32 = -87.33;
const EXP_MAX: f32 = 88.37;

/// `eˣ`: relative error below 1.5 · 2⁻²³ with FMA. Below −87.33 it stays at 1.2e-38, above 88.37 at 2.4e38; NaN stays NaN.
///
/// `x = n ln 2 + r`, `eʳ` by a polynomial of degree 6 fitted on `|r| ≤ ln 2 / 2`, `2ⁿ` by the exponent's bits.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    // 1.5 · 2²³: adding it rounds to an integer that stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has trailing zeros, so that n times it is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Comparisons are written so that NaN passes.
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let z = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = z - ROUND;
    let r = fma::<FMA>(n, -LN2_HI, x);
    let r = fma::<FMA>(n, -LN2_LO, r);
    let mut p = 1.381_446_7e-3;
    p = fma::<FMA>(p, r, 8.368_78e-3);
    p = fma::<FMA>(p, r, 4.166_839_4e-2);
    p = fma::<FMA>(p, r, 0.166_665_2);
    p = fma::<FMA>(p, r, 0.499_999_93);
    p = fma::<FMA>(p, r * r, r) + 1.0;
    p * f32::from_bits((z.to_bits() << 23).wrapping_add(0x3f80_0000))
}

/// `1 / (1 + e⁻ˣ)`.
#[inline(always)]
pub(super) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// `x · Φ(x)`: error below 4e-7 of the result, growing with `x²` ulp in the tail left of −3.
///
/// `Φ(−|x|) = t · exp(P(t) − x²/2)`, `t = 1 / (1 + |x|/4)`, `P` of degree 9 fitted over `|x| ≤ 13` with relative
/// error 2.8e-8.
#[inline(always)]
pub(super) fn gelu<const FMA: bool>(x: f32) -> f32 {
    const P: [f32; 9] = [
        0.714_341_6,
        -0.959_467_77,
        0.319_705_8,
        0.144_014_44,
        -0.174_814_29,
        0.331_667_93,
        0.405_440_12,
        1.004_355_2,
        -2.305_477_2,
    ];
    let t = 1.0 / fma::<FMA>(x.abs(), 0.25, 1.0);
    let mut p = -0.172_913;
    for c in P {
        p = fma::<FMA>(p, t, c);
    }
    let tail = t * exp::<FMA>(fma::<FMA>(x * -0.5, x, p));
    let y = x * tail;
    if x > 0.0 { x - y } else { y }
}

/// `0.5 x (1 + tanh u) = x · σ(2u)`, `u = √(2/π) (x + 0.044715 x³)`.
#[inline(always)]
pub(super) fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769;
    x * sigmoid::<FMA>(TWICE_ROOT * x * fma::<FMA>(0.044_715 * x, x, 1.0))
}

/// The sum of `f(v)` over `xs`, in [`LANES`] fixed lanes that are added pairwise at the end.
#[inline(always)]
pub(super) fn sum_by(xs: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [0f32; LANES];
    let chunks = xs.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for l in 0..LANES {
            acc[l] = f(acc[l], c[l]);
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        *a = f(*a, v);
    }
    fold(acc, |a, b| a + b)
}

/// Folds lanes pairwise.
#[inline(always)]
pub(super) fn fold(mut acc: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] = f(acc[l], acc[l + width]);
        }
        width /= 2;
    }
    acc[0]
}

//! The random generator: torch's CPU `torch.Generator`, bit for bit.
//!
//! A seed must mean here what it means in diffusers on the CPU, so this follows torch's own path exactly: a 32-bit
//! Mersenne Twister (Matsumoto & Nishimura 1998), a scalar Box–Muller in double precision for fewer than 16 values, and
//! for 16 or more torch's vectorised single-precision Box–Muller over blocks of 16 (the build for processors with AVX2 and
//! FMA, whose logarithm, sine and cosine are the Cephes polynomials). Where torch runs without AVX2 its own values
//! differ from these in the last bits.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::checkpoint::{In, Out};
use super::{NoiseSource, SamplingError};

/// Words of Mersenne Twister state.
const WORDS: usize = 624;
/// The recurrence's middle offset.
const MIDDLE: usize = 397;
/// From this many values on, torch fills uniformly and transforms in blocks of 16.
const BLOCK: usize = 16;

/// A generator equal to `torch.Generator("cpu").manual_seed(seed)`; its state can be stored and restored exactly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "GeneratorState", into = "GeneratorState")]
pub struct Generator {
    words: Box<[u32; WORDS]>,
    /// Next word to hand out; `WORDS` means the state must be advanced first.
    next: usize,
    /// The second value of the last scalar Box–Muller pair, in double precision as torch keeps it.
    spare: Option<f64>,
}

/// What is stored of a [`Generator`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct GeneratorState {
    words: Vec<u32>,
    next: usize,
    /// Bits of the spare value: text formats must not round it.
    spare: Option<u64>,
}

impl From<Generator> for GeneratorState {
    fn from(generator: Generator) -> Self {
        Self { words: generator.words.to_vec(), next: generator.next, spare: generator.spare.map(f64::to_bits) }
    }
}

impl TryFrom<GeneratorState> for Generator {
    type Error = SamplingError;

    fn try_from(state: GeneratorState) -> Result<Self, Self::Error> {
        let found = state.words.len();
        let words: Box<[u32; WORDS]> = state.words.into_boxed_slice().try_into().map_err(|_| {
            SamplingError::State(format!("a generator's state has {WORDS} words, found {found}: it is damaged"))
        })?;
        if state.next > WORDS {
            return Err(SamplingError::State(format!(
                "a generator's position is at most {WORDS}, found {}",
                state.next
            )));
        }
        Ok(Self { words, next: state.next, spare: state.spare.map(f64::from_bits) })
    }
}

impl Generator {
    /// The generator for a seed. As in torch only the low 32 bits count.
    pub fn new(seed: u64) -> Self {
        let mut words = Box::new([0u32; WORDS]);
        words[0] = seed as u32;
        for i in 1..WORDS {
            let previous = words[i - 1];
            words[i] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { words, next: WORDS, spare: None }
    }

    /// Writes the state into a checkpoint.
    pub(super) fn write(&self, out: &mut Out) {
        out.number(self.next);
        out.0.push(u8::from(self.spare.is_some()));
        out.0.extend(self.spare.map_or(0, f64::to_bits).to_le_bytes());
        self.words.iter().for_each(|word| out.word(*word));
    }

    /// Reads the state that [`Generator::write`] wrote.
    pub(super) fn read(from: &mut In<'_>) -> Result<Self, SamplingError> {
        let next = from.number()?;
        let (has_spare, bits) = (from.byte()? != 0, from.long()?);
        let words = (0..WORDS).map(|_| from.word()).collect::<Result<_, _>>()?;
        GeneratorState { words, next, spare: has_spare.then_some(bits) }.try_into()
    }

    /// The next 32 random bits.
    pub fn random(&mut self) -> u32 {
        if self.next == WORDS {
            self.advance();
        }
        let mut y = self.words[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// The next 64 random bits: two draws, the first one high.
    pub fn random64(&mut self) -> u64 {
        let high = u64::from(self.random());
        (high << 32) | u64::from(self.random())
    }

    /// `torch.rand(n)`: uniform in [0, 1) with 24 bits.
    pub fn rand(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform()).collect()
    }

    /// `torch.randn(n)`: standard normal values.
    pub fn randn(&mut self, n: usize) -> Vec<f32> {
        if n < BLOCK {
            return (0..n).map(|_| self.normal() as f32).collect();
        }
        let mut values = self.rand(n);
        for block in values.chunks_exact_mut(BLOCK) {
            box_muller_block(block);
        }
        if !n.is_multiple_of(BLOCK) {
            // torch draws the last sixteen again, overwriting part of the last whole block.
            let tail = &mut values[n - BLOCK..];
            for value in tail.iter_mut() {
                *value = self.uniform();
            }
            box_muller_block(tail);
        }
        values
    }

    fn uniform(&mut self) -> f32 {
        (self.random() & 0x00ff_ffff) as f32 * (1.0 / 16_777_216.0)
    }

    /// One value of the scalar path; pairs share one transform, the second is kept for the next call of any size.
    fn normal(&mut self) -> f64 {
        if let Some(value) = self.spare.take() {
            return value;
        }
        let u1 = self.uniform53();
        let u2 = self.uniform53();
        let radius = (-2.0 * (-u2).ln_1p()).sqrt();
        let (sin, cos) = (2.0 * std::f64::consts::PI * u1).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos
    }

    fn uniform53(&mut self) -> f64 {
        (self.random64() & ((1 << 53) - 1)) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    fn advance(&mut self) {
        for i in 0..WORDS {
            let y = (self.words[i] & 0x8000_0000) | (self.words[(i + 1) % WORDS] & 0x7fff_ffff);
            let twist = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[i] = self.words[(i + MIDDLE) % WORDS] ^ (y >> 1) ^ twist;
        }
        self.next = 0;
    }
}

impl NoiseSource for Generator {
    /// Drawn on the CPU in row-major order whatever the device, so that a seed means the same picture everywhere.
    fn noise_like(&mut self, sample: &Tensor) -> Result<Tensor, SamplingError> {
        let values = self.randn(sample.elem_count());
        Ok(Tensor::from_vec(values, sample.shape(), sample.device())?)
    }
}

/// Eight pairs of uniforms (first eight the radii, last eight the angles) to sixteen normal values, in place.
fn box_muller_block(block: &mut [f32]) {
    let (radii, angles) = block.split_at_mut(BLOCK / 2);
    for (u1, u2) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * cephes_ln(1.0 - *u1)).sqrt();
        let (sin, cos) = cephes_sin_cos(std::f32::consts::TAU * *u2);
        *u1 = radius * cos;
        *u2 = radius * sin;
    }
}

/// Natural logarithm of a positive normal number: Cephes `logf`, with the fused multiply-adds of torch's build.
fn cephes_ln(x: f32) -> f32 {
    const P: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as f32 - 126.0;
    let mut m = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000);
    if m < std::f32::consts::FRAC_1_SQRT_2 {
        exponent -= 1.0;
        m += m - 1.0;
    } else {
        m -= 1.0;
    }
    let z = m * m;
    let y = P[1..].iter().fold(P[0], |y, &c| y.mul_add(m, c)) * m;
    let y = y.mul_add(z, exponent * -2.121_944_4e-4);
    let y = (-z).mul_add(0.5, y);
    exponent.mul_add(0.693_359_4, m + y)
}

/// Sine and cosine of an angle in [0, 2π): Cephes `sinf` and `cosf` with their three-part reduction by π/4.
fn cephes_sin_cos(angle: f32) -> (f32, f32) {
    let octant = ((angle * (4.0 / std::f32::consts::PI)) as i32 + 1) & !1;
    let y = octant as f32;
    let x = y.mul_add(-0.785_156_25, angle);
    let x = y.mul_add(-2.418_756_5e-4, x);
    let x = y.mul_add(-3.774_895e-8, x);
    let z = x * x;
    let c = 2.443_315_7e-5_f32.mul_add(z, -1.388_731_6e-3).mul_add(z, 4.166_664_6e-2) * z;
    let c = c.mul_add(z, -(z * 0.5)) + 1.0;
    let s = (-1.951_529_6e-4_f32).mul_add(z, 8.332_161e-3).mul_add(z, -1.666_665_5e-1) * z;
    let s = s.mul_add(x, x);
    let (sin, cos) = if octant & 2 == 0 { (s, c) } else { (c, s) };
    let sin = if octant & 4 == 0 { sin } else { -sin };
    let cos = if (octant + 2) & 4 == 0 { cos } else { -cos };
    (sin, cos)
}

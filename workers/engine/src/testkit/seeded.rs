//! Numbers that follow from names.

use candle_core::{Device, Result, Tensor};

/// The name by which a tensor is seeded: without the prefixes that some repositories have and others lack.
pub fn canonical(name: &str) -> &str {
    ["text_model.", "model."].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// `count` numbers in −1..1: FNV-1a of `name`, then splitmix64 of each index from 1, of which the upper 24 bits count.
pub fn uniform(name: &str, count: usize) -> Vec<f32> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let number = |i: u64| {
        let mut x = hash.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        (x >> 40) as f32 * 2f32.powi(-24) * 2.0 - 1.0
    };
    (1..=count as u64).map(number).collect()
}

/// The values of the weight called `name` (prefixes do not count) of `shape`, row-major: biases within ±0.05, other
/// vectors 1 ± 0.1, matrices and kernels of variance 1 over their inputs.
pub fn seeded(name: &str, shape: &[usize]) -> Vec<f32> {
    let name = canonical(name);
    let mut values = uniform(name, shape.iter().product());
    match shape {
        [] | [_] if name.ends_with("bias") => values.iter_mut().for_each(|w| *w *= 0.05),
        [] | [_] => values.iter_mut().for_each(|w| *w = 1.0 + 0.1 * *w),
        [_, inputs @ ..] => {
            let scale = (3.0 / inputs.iter().product::<usize>() as f64).sqrt() as f32;
            values.iter_mut().for_each(|w| *w *= scale);
        }
    }
    values
}

/// An input of about unit variance, from a name.
///
/// # Errors
/// If the shape is too large.
pub fn noise(name: &str, shape: &[usize]) -> Result<Tensor> {
    let values = uniform(name, shape.iter().product()).into_iter().map(|v| v * 1.7).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

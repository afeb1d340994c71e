//! How many bytes a stage task will need on its device.
//!
//! Three sources, the best one counts:
//! * the **formula** that the model's inspection gives for a stage: `fixed + per_pixel × width × height + per_token × (tokens
//!   beyond those that the fixed part covers)`, an upper bound from the architecture;
//! * what was **learned**: the highest bytes that a process of the same (model, stage, shape, numeric plan) was
//!   measured to hold, of tasks that succeeded. A failed run teaches nothing.
//!
//! A margin is added to either. What was learned may raise the estimate without bound, but lowers it to no less than half of
//! the formula: a peak is sampled, and what lived shorter than the sampling interval was not seen.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::lease::{LeasePart, Purpose};

/// Bytes that a worker process on the CPU device is charged before it holds a weight: its runtime, its link's buffers,
/// thread stacks and, in a text worker, the tokenizer. Measured as `RssAnon + RssShmem` at the first pulse, of a debug build
/// with two threads: diffusion 1.1 MiB, VAE 1.9 MiB, text with the default model's vocabulary of 2,436 tokens 3.7 MiB. Twice
/// the largest, because more threads bring more stacks. CLIP's own vocabulary of 49,408 tokens takes more and is not
/// measured yet; the learned peak of the stage corrects it after the first run.
pub const CPU_CONTEXT_BYTES: u64 = 8 << 20;

/// Part of an estimate that is added to it: one eighth.
const MARGIN_SHARE: u64 = 8;
/// Added to each estimate whatever its size: what the allocator keeps between its arenas.
const MARGIN_BYTES: u64 = 4 << 20;

/// A stage's working set as its inspection describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Formula {
    /// Whatever the size.
    pub fixed_bytes: u64,
    /// For each pixel of the image.
    pub bytes_per_pixel: u64,
    /// Tokens of conditioning that `fixed_bytes` covers.
    pub fixed_tokens: u64,
    /// For each token beyond those.
    pub bytes_per_token: u64,
}

impl Formula {
    /// Its value; saturates, so that an absurd size is refused as too large and not wrapped into a small one.
    pub fn bytes(&self, shape: Shape) -> u64 {
        let pixels = u64::from(shape.width).saturating_mul(u64::from(shape.height));
        let more_tokens = shape.tokens.saturating_sub(self.fixed_tokens);
        self.fixed_bytes
            .saturating_add(pixels.saturating_mul(self.bytes_per_pixel))
            .saturating_add(more_tokens.saturating_mul(self.bytes_per_token))
    }
}

/// The shape of a task, as far as its memory depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Shape {
    /// Pixels of the image; 0 for a stage that does not depend on them.
    pub width: u32,
    /// Pixels of the image; 0 for a stage that does not depend on them.
    pub height: u32,
    /// Tokens of conditioning, over prompt and negative prompt.
    pub tokens: u64,
}

/// What a learned peak belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TaskKey {
    /// The model's fingerprint, so that changed weights are another model.
    pub model: String,
    /// The stage: "encode", "vae encode", "denoise", "decode".
    pub stage: &'static str,
    /// Its shape.
    pub shape: Shape,
    /// What of the numeric plan decides memory, as text.
    pub plan: String,
}

/// A task whose bytes are to be estimated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskSize {
    /// What it is.
    pub key: TaskKey,
    /// Bytes of the weights as the device is charged for them.
    pub weights_bytes: u64,
    /// Its working set.
    pub formula: Formula,
    /// Bytes of shared memory that the process maps and touches: charged to it on the CPU device, 0 elsewhere.
    pub mapped_bytes: u64,
}

/// Where an estimate comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The architecture's formula.
    Formula,
    /// A measured peak.
    Learned,
}

/// What a task is estimated to need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// Bytes of the process before it holds a weight.
    pub context: u64,
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of everything else, margin included.
    pub working_set: u64,
    /// Where `working_set` comes from.
    pub source: Source,
}

impl Estimate {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.context.saturating_add(self.weights).saturating_add(self.working_set)
    }

    /// As parts of a request.
    pub fn parts(&self) -> Vec<LeasePart> {
        vec![
            LeasePart::exactly(Purpose::Context, self.context),
            LeasePart::exactly(Purpose::Weights, self.weights),
            LeasePart::exactly(Purpose::WorkingSet, self.working_set),
        ]
    }
}

/// Estimates tasks, and learns from what they took.
#[derive(Debug)]
pub struct Estimator {
    context_bytes: u64,
    /// Learned working sets, without margin. The mutex guards look-ups and inserts only.
    learned: Mutex<HashMap<TaskKey, u64>>,
}

impl Estimator {
    /// An estimator of a device whose processes take `context_bytes` before they hold a weight.
    pub fn new(context_bytes: u64) -> Self {
        Self { context_bytes, learned: Mutex::default() }
    }

    /// An estimator of the CPU device.
    pub fn cpu() -> Self {
        Self::new(CPU_CONTEXT_BYTES)
    }

    fn learned(&self) -> std::sync::MutexGuard<'_, HashMap<TaskKey, u64>> {
        // A map of numbers: an insert that panicked leaves it whole.
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a task will need.
    pub fn estimate(&self, task: &TaskSize) -> Estimate {
        let formula = task.formula.bytes(task.key.shape).saturating_add(task.mapped_bytes);
        let learned = self.learned().get(&task.key).copied();
        let (bytes, source) = match learned {
            Some(peak) => (peak.max(formula / 2), Source::Learned),
            None => (formula, Source::Formula),
        };
        Estimate {
            context: self.context_bytes,
            weights: task.weights_bytes,
            working_set: bytes.saturating_add(bytes / MARGIN_SHARE).saturating_add(MARGIN_BYTES),
            source,
        }
    }

    /// Learns from a task that succeeded while its process held at most `peak_bytes` on the device. To be called for
    /// successes only: what a failed run held says nothing about what a whole one needs.
    pub fn learn(&self, task: &TaskSize, peak_bytes: u64) {
        let fixed = self.context_bytes.saturating_add(task.weights_bytes);
        let working_set = peak_bytes.saturating_sub(fixed);
        let mut learned = self.learned();
        let highest = learned.entry(task.key.clone()).or_insert(working_set);
        *highest = working_set.max(*highest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn task(width: u32, height: u32) -> TaskSize {
        TaskSize {
            key: TaskKey {
                model: "m".into(),
                stage: "decode",
                shape: Shape { width, height, tokens: 0 },
                plan: String::new(),
            },
            weights_bytes: 100 * MIB,
            formula: Formula { fixed_bytes: 8 * MIB, bytes_per_pixel: 1024, fixed_tokens: 0, bytes_per_token: 0 },
            mapped_bytes: MIB,
        }
    }

    #[test]
    fn the_formula_counts_pixels_tokens_and_a_margin() {
        let estimate = Estimator::new(20 * MIB).estimate(&task(256, 256));
        // 8 + 64 MiB of the formula and 1 mapped, one eighth more, and 4.
        assert_eq!(estimate.working_set, 73 * MIB + 73 * MIB / 8 + 4 * MIB);
        assert_eq!(estimate.total(), 120 * MIB + estimate.working_set);
        assert_eq!(estimate.source, Source::Formula);
        let parts = estimate.parts();
        assert_eq!(parts.iter().map(|part| part.min).sum::<u64>(), estimate.total());

        let formula = Formula { fixed_bytes: 10, bytes_per_pixel: 0, fixed_tokens: 77, bytes_per_token: 3 };
        let bytes = |tokens| formula.bytes(Shape { tokens, ..Shape::default() });
        assert_eq!((bytes(1), bytes(77), bytes(79)), (10, 10, 16));
    }

    #[test]
    fn an_absurd_size_saturates() {
        let estimate = Estimator::cpu().estimate(&TaskSize {
            formula: Formula { bytes_per_pixel: u64::MAX, ..Formula::default() },
            ..task(u32::MAX, u32::MAX)
        });
        assert_eq!(estimate.total(), u64::MAX);
    }

    #[test]
    fn a_learned_peak_belongs_to_its_shape_and_never_falls() {
        let estimator = Estimator::new(20 * MIB);
        let (small, large) = (task(256, 256), task(512, 512));
        estimator.learn(&small, (20 + 100 + 50) * MIB);
        let estimate = estimator.estimate(&small);
        assert_eq!((estimate.working_set, estimate.source), (50 * MIB + 50 * MIB / 8 + 4 * MIB, Source::Learned));
        assert_eq!(estimator.estimate(&large).source, Source::Formula);

        estimator.learn(&small, (20 + 100 + 45) * MIB);
        assert_eq!(estimator.estimate(&small), estimate, "a lower peak changes nothing");
        estimator.learn(&small, (20 + 100 + 200) * MIB);
        assert_eq!(estimator.estimate(&small).working_set, 225 * MIB + 4 * MIB, "the formula was too low");
    }

    #[test]
    fn a_peak_that_was_not_seen_lowers_the_estimate_by_half_at_most() {
        let estimator = Estimator::new(20 * MIB);
        let task = task(256, 256);
        estimator.learn(&task, 0);
        let half = 73 * MIB / 2;
        assert_eq!(estimator.estimate(&task).working_set, half + half / 8 + 4 * MIB);
    }
}

//! How many bytes a stage task will need on its device.
//!
//! Three sources, the best one counts:
//! * the **dry run**: the worker program walks the model at the very shape and options, and adds up what is alive at once;
//! * the **formula** that the model's inspection gives for a stage: `fixed + per_pixel × width × height + per_token × (tokens
//!   beyond those that the fixed part covers)`, an upper bound from the architecture;
//! * what was **learned**: the highest bytes that a process of the same (model, stage, shape, numeric plan) was
//!   measured to hold, of tasks that succeeded. A failed run teaches nothing.
//!
//! A margin is added to each. What was learned may raise the estimate without bound, but lowers it to no less than half of
//! the dry run's or formula's: a peak is sampled, and what lived shorter than the sampling interval was not seen.

use super::peaks::Peaks;

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
    /// What a dry run of it found, where there was one.
    pub dry_run: Option<u64>,
    /// Bytes of shared memory that the process maps and touches: charged to it on the CPU device, 0 elsewhere.
    pub mapped_bytes: u64,
}

/// Where an estimate comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The architecture's formula.
    Formula,
    /// A walk through the model at this very shape.
    DryRun,
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
}

impl Source {
    /// The word for it in the public interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Formula => "formula",
            Self::DryRun => "dryrun",
            Self::Learned => "learned",
        }
    }
}

/// Estimates tasks, and learns from what they took.
#[derive(Debug)]
pub struct Estimator {
    context_bytes: u64,
    /// Learned working sets, without margin.
    learned: Peaks,
}

impl Estimator {
    /// An estimator of a device whose processes take `context_bytes` before they hold a weight.
    pub fn new(context_bytes: u64) -> Self {
        Self { context_bytes, learned: Peaks::default() }
    }

    /// An estimator of the CPU device.
    pub fn cpu() -> Self {
        Self::new(CPU_CONTEXT_BYTES)
    }

    /// The same with what was learned before, which it adds to.
    #[must_use]
    pub fn remembering(self, learned: Peaks) -> Self {
        Self { learned, ..self }
    }

    /// What a task will need.
    pub fn estimate(&self, task: &TaskSize) -> Estimate {
        let (unmeasured, source) = match task.dry_run {
            Some(bytes) => (bytes, Source::DryRun),
            None => (task.formula.bytes(task.key.shape), Source::Formula),
        };
        let bytes = unmeasured.saturating_add(task.mapped_bytes);
        match self.learned.peak(&task.key) {
            Some(peak) => self.with_margin(task, peak.max(bytes / 2), Source::Learned),
            None => self.with_margin(task, bytes, source),
        }
    }

    /// What the architecture's formula says alone: the same whatever has run before.
    pub fn by_formula(&self, task: &TaskSize) -> Estimate {
        let bytes = task.formula.bytes(task.key.shape).saturating_add(task.mapped_bytes);
        self.with_margin(task, bytes, Source::Formula)
    }

    fn with_margin(&self, task: &TaskSize, bytes: u64, source: Source) -> Estimate {
        Estimate {
            context: self.context_bytes,
            weights: task.weights_bytes,
            working_set: bytes.saturating_add(bytes / MARGIN_SHARE).saturating_add(MARGIN_BYTES),
            source,
        }
    }

    /// Learns from a task that succeeded while its process held at most `peak_bytes` on the device, `weights_held` of them
    /// weights. To be called for successes only: what a failed run held says nothing about what a whole one needs.
    pub fn learn(&self, task: &TaskSize, weights_held: u64, peak_bytes: u64) {
        let fixed = self.context_bytes.saturating_add(weights_held);
        self.learned.raise(&task.key, peak_bytes.saturating_sub(fixed));
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
            dry_run: None,
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

        let formula = Formula { fixed_bytes: 10, bytes_per_pixel: 0, fixed_tokens: 77, bytes_per_token: 3 };
        let bytes = |tokens| formula.bytes(Shape { tokens, ..Shape::default() });
        assert_eq!((bytes(1), bytes(77), bytes(79)), (10, 10, 16));
    }

    #[test]
    fn a_dry_run_counts_over_the_formula_and_what_was_learned_over_both() {
        let estimator = Estimator::new(20 * MIB);
        let dry = TaskSize { dry_run: Some(31 * MIB), ..task(256, 256) };
        let estimate = estimator.estimate(&dry);
        assert_eq!((estimate.working_set, estimate.source), (32 * MIB + 4 * MIB + 4 * MIB, Source::DryRun));
        assert_eq!(estimator.by_formula(&dry), Estimator::new(20 * MIB).estimate(&task(256, 256)));
        estimator.learn(&dry, 100 * MIB, (20 + 100 + 64) * MIB);
        assert_eq!(estimator.estimate(&dry).working_set, 72 * MIB + 4 * MIB);
        assert_eq!(estimator.by_formula(&dry).source, Source::Formula, "a numeric plan follows from this alone");
        // A process that streams holds fewer weights.
        let streamed = task(512, 256);
        estimator.learn(&streamed, 10 * MIB, (20 + 10 + 160) * MIB);
        assert_eq!(estimator.estimate(&streamed).working_set, 180 * MIB + 4 * MIB);
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
        estimator.learn(&small, 100 * MIB, (20 + 100 + 50) * MIB);
        let estimate = estimator.estimate(&small);
        assert_eq!((estimate.working_set, estimate.source), (50 * MIB + 50 * MIB / 8 + 4 * MIB, Source::Learned));
        assert_eq!(estimator.estimate(&large).source, Source::Formula);

        estimator.learn(&small, 100 * MIB, (20 + 100 + 45) * MIB);
        assert_eq!(estimator.estimate(&small), estimate, "a lower peak changes nothing");
        estimator.learn(&small, 100 * MIB, (20 + 100 + 200) * MIB);
        assert_eq!(estimator.estimate(&small).working_set, 225 * MIB + 4 * MIB, "the formula was too low");
    }

    #[test]
    fn a_peak_that_was_not_seen_lowers_the_estimate_by_half_at_most() {
        let estimator = Estimator::new(20 * MIB);
        let task = task(256, 256);
        estimator.learn(&task, 100 * MIB, 0);
        let half = 73 * MIB / 2;
        assert_eq!(estimator.estimate(&task).working_set, half + half / 8 + 4 * MIB);
    }
}

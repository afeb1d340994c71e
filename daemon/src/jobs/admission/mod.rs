//! Admission: a request is checked in full, with every fault named, and completed, before it becomes a job.
//!
//! * [`complete`]: defaults filled in, fields checked.
//! * [`fits`]: what knows needs and limits.
//! * [`refusal`]: why not, in words.

pub mod complete;
pub mod fits;
pub mod refusal;

use std::sync::Arc;

use sd_proto::v1::{ImageRequest, Stage};

pub use self::complete::complete;
pub use self::fits::{Fits, StageNeed};
use self::refusal::stage_title;
pub use self::refusal::{AdmissionError, DoesNotFit, Violation};
use super::limits::Limits;
use super::request::Admitted;
use crate::config::memory::Mode;
use crate::models::{Model, ModelRef, Registry};
use crate::residency::Bytes;
use crate::stages::plan::Grouping;

/// What a request would need, and whether it fits.
#[derive(Debug, Clone)]
pub struct Verdict {
    /// The request, completed.
    pub request: Admitted,
    /// One entry a process.
    pub needs: Vec<StageNeed>,
    /// Bytes that may be used.
    pub limit: u64,
    /// Where.
    pub device: String,
    /// The mode that moves least of those in which it fits.
    pub fitting: Option<Mode>,
    /// The order of its images, or why it does not fit.
    pub outcome: Result<Grouping, Box<DoesNotFit>>,
}

/// Who asks, as far as admission cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asker {
    /// The daemon's own user over its Unix socket.
    pub may_name_paths: bool,
}

/// Admits requests. Cheap to clone.
#[derive(Clone)]
pub struct Admission {
    registry: Registry,
    limits: Arc<Limits>,
    fits: Arc<dyn Fits>,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Admission {
    /// Admission by these limits, to these models, within this budget.
    pub fn new(registry: Registry, limits: Limits, fits: Arc<dyn Fits>) -> Self {
        Self { registry, limits: Arc::new(limits), fits }
    }

    /// Which models there are.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The model that a request names, if this asker may name it.
    ///
    /// # Errors
    /// [`AdmissionError::PathNotAllowed`], [`AdmissionError::Model`].
    pub async fn model(&self, name: &str, asker: Asker) -> Result<Arc<Model>, AdmissionError> {
        let reference = ModelRef::parse(name);
        if matches!(reference, ModelRef::Path(_)) && !asker.may_name_paths {
            return Err(AdmissionError::PathNotAllowed(name.into()));
        }
        Ok(self.registry.resolve(&reference).await?)
    }

    /// Checks and completes a request, and says in which order its images are to be made.
    ///
    /// # Errors
    /// See [`AdmissionError`].
    pub async fn admit(&self, request: ImageRequest, asker: Asker) -> Result<(Admitted, Grouping), AdmissionError> {
        let verdict = self.judge(request, asker).await?;
        let grouping = verdict.outcome.map_err(AdmissionError::DoesNotFit)?;
        Ok((verdict.request, grouping))
    }

    /// Checks and completes a request, and says what it would need, without admitting it.
    ///
    /// # Errors
    /// Everything that admission refuses but for want of memory.
    pub async fn judge(&self, request: ImageRequest, asker: Asker) -> Result<Verdict, AdmissionError> {
        let model = self.model(&request.model, asker).await?;
        let plans = self.fits.plans(&model, request.memory.as_ref());
        let seed = request.seed.unwrap_or_else(draw_seed);
        let limits = self.limits.clone();
        let completed = if request.init_image.is_empty() {
            complete(request, model, plans, seed, &limits)
        } else {
            // Hashing and copying megabytes is not for a thread that serves others.
            tokio::task::spawn_blocking(move || complete(request, model, plans, seed, &limits))
                .await
                .map_err(|error| AdmissionError::Broken(error.to_string()))?
        };
        let mut request = completed.map_err(AdmissionError::Invalid)?;
        self.fits.choose_tiles(&mut request);
        self.fits.prepare(&request).await;
        let needs = self.fits.needs(&request);
        let (limit, device) = (self.fits.limit(&request), self.fits.device());
        let fitting = self.fitting(&request);
        let outcome = self.check_fit(&request, &needs, limit, fitting).map_err(Box::new);
        Ok(Verdict { request, needs, limit, device, fitting, outcome })
    }

    fn check_fit(
        &self,
        request: &Admitted,
        needs: &[StageNeed],
        limit: u64,
        fitting: Option<Mode>,
    ) -> Result<Grouping, DoesNotFit> {
        let Some(worst) = needs.iter().max_by_key(|need| need.least()).copied() else { return Ok(Grouping::ByImage) };
        let all = needs.iter().fold(0, |sum: u64, need| sum.saturating_add(need.total()));
        if fits(request, needs, limit) {
            // Every process stays with what it holds: image by image only where nothing need be moved for it.
            let by_image = all <= limit && !request.memory.moves();
            return Ok(if by_image { Grouping::ByImage } else { Grouping::ByStage });
        }
        let together = request.memory.stays();
        let breakdown = if together {
            let each = needs.iter().map(|need| format!("{} {}", stage_title(need.stage), Bytes(need.total())));
            each.collect::<Vec<_>>().join(", ")
        } else {
            let fixed = Bytes(worst.context.saturating_add(worst.floor));
            let streamed = if worst.floor < worst.weights { "least weights" } else { "weights" };
            format!("context and {streamed} {fixed}, working set {}", Bytes(worst.working_set))
        };
        Err(DoesNotFit {
            width: request.width,
            height: request.height,
            stage: worst.stage,
            together,
            need: if together { all } else { worst.least() },
            limit,
            breakdown,
            device: self.fits.device(),
            mode: request.memory.mode,
            fitting,
            largest: self.largest(request),
        })
    }

    /// The mode that moves least of those in which a request fits.
    fn fitting(&self, request: &Admitted) -> Option<Mode> {
        let order = [Mode::None, Mode::CondOnly, Mode::CondDiffusion, Mode::Aggressive, Mode::LayerStreaming];
        order.into_iter().find(|mode| {
            let mut other = request.clone();
            other.memory.mode = *mode;
            let (needs, limit) = (self.fits.needs(&other), self.fits.limit(&other));
            let sum = |text: bool| {
                let counted = needs.iter().filter(|need| text || need.stage != Stage::Encode);
                counted.fold(0, |sum: u64, need| sum.saturating_add(need.total()))
            };
            let each = needs.iter().all(|need| need.least() <= limit);
            match mode {
                Mode::None => sum(true) <= limit,
                Mode::CondOnly => each && sum(false) <= limit,
                Mode::CondDiffusion | Mode::Aggressive | Mode::LayerStreaming | Mode::Auto => each,
            }
        })
    }

    /// The largest size of a request's shape that fits.
    fn largest(&self, request: &Admitted) -> Option<(u32, u32)> {
        let step = request.model.report.scale_factor();
        let size = |steps: u32| {
            let ratio = f64::from(request.height) / f64::from(request.width);
            let height = (f64::from(steps) * ratio).round().max(1.0) as u32;
            (steps * step, height * step)
        };
        let fitting = |steps: u32| {
            let (width, height) = size(steps);
            let mut smaller = Admitted { width, height, ..request.clone() };
            self.fits.choose_tiles(&mut smaller);
            fits(&smaller, &self.fits.needs(&smaller), self.fits.limit(&smaller))
        };
        let (mut good, mut bad) = (0, request.width / step);
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fitting(middle) {
                good = middle;
            } else {
                bad = middle;
            }
        }
        (good > 0).then(|| size(good))
    }
}

/// Whether a request fits in its mode: where none is ever moved, all stages together, else each alone with the least that it runs
/// with.
fn fits(request: &Admitted, needs: &[StageNeed], limit: u64) -> bool {
    if request.memory.stays() {
        return needs.iter().fold(0, |sum: u64, need| sum.saturating_add(need.total())) <= limit;
    }
    needs.iter().all(|need| need.least() <= limit)
}

/// A seed of 32 bits, as the web UIs draw them.
fn draw_seed() -> u64 {
    let mut bytes = [0u8; 4];
    match getrandom::fill(&mut bytes) {
        Ok(()) => u64::from(u32::from_le_bytes(bytes)),
        Err(_) => std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos())),
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use sd_proto::v1::{MemoryRequest, NumericPlan};

    use super::*;
    use crate::jobs::fixtures;
    use crate::residency::estimate::Source;
    use crate::stages::memory::MemoryPlan;

    /// Stages of fixed needs: text 10, diffusion 40, of which 5 with streaming, VAE 20, and a limit.
    struct Numbers(u64);

    impl Fits for Numbers {
        fn needs(&self, request: &Admitted) -> Vec<StageNeed> {
            let need = |stage, weights, least| StageNeed {
                stage,
                context: 1,
                weights,
                floor: if request.memory.streams(stage) { least } else { weights },
                working_set: 0,
                source: Source::Formula,
            };
            vec![need(Stage::Encode, 9, 3), need(Stage::Denoise, 39, 4), need(Stage::Decode, 19, 4)]
        }

        fn limit(&self, _: &Admitted) -> u64 {
            self.0
        }

        fn device(&self) -> String {
            "cpu".into()
        }

        fn plans(&self, _: &Model, _: Option<&MemoryRequest>) -> (MemoryPlan, NumericPlan) {
            (MemoryPlan::default(), fixtures::numeric_plan())
        }
    }

    fn judged(limit: u64, mode: Mode) -> (Option<Mode>, Result<Grouping, DoesNotFit>) {
        let registry = Registry::new(crate::models::RegistryConfig::default(), Arc::new(NoInspector));
        let admission = Admission::new(registry, Limits::default(), Arc::new(Numbers(limit)));
        let asked = MemoryRequest { mode: mode.to_proto() as i32, ..MemoryRequest::default() };
        let memory = MemoryPlan::resolve(&crate::config::memory::Settings::default(), Some(&asked));
        let request = Admitted { memory, ..fixtures::admitted() };
        let needs = admission.fits.needs(&request);
        let fitting = admission.fitting(&request);
        (fitting, admission.check_fit(&request, &needs, limit, fitting))
    }

    struct NoInspector;

    impl crate::models::Inspector for NoInspector {
        fn inspect<'a>(
            &'a self,
            _: &'a std::path::Path,
        ) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, crate::workers::InspectError>> + Send + 'a>> {
            Box::pin(std::future::ready(Ok(Vec::new())))
        }
    }

    #[test]
    fn each_mode_refuses_what_it_cannot_hold_and_names_the_one_that_can() {
        for (limit, fitting) in [
            (70, Some(Mode::None)),
            (69, Some(Mode::CondOnly)),
            (60, Some(Mode::CondOnly)),
            (59, Some(Mode::CondDiffusion)),
            (40, Some(Mode::CondDiffusion)),
            (39, Some(Mode::LayerStreaming)),
            (5, Some(Mode::LayerStreaming)),
            (4, None),
        ] {
            assert_eq!(judged(limit, Mode::Auto).0, fitting, "{limit}");
        }
        assert_eq!(judged(70, Mode::None).1, Ok(Grouping::ByImage));
        let error = judged(69, Mode::None).1.unwrap_err();
        let text = error.to_string();
        assert!(error.together && error.need == 70, "{text}");
        assert!(text.contains("offload mode none") && text.contains("cond_only would fit"), "{text}");
        let error = judged(39, Mode::CondDiffusion).1.unwrap_err();
        assert_eq!((error.stage, error.need, error.fitting), (Stage::Denoise, 40, Some(Mode::LayerStreaming)));
        assert_eq!(judged(39, Mode::Auto).1, Ok(Grouping::ByStage));
        assert_eq!(
            judged(70, Mode::Aggressive).1,
            Ok(Grouping::ByStage),
            "a stage that leaves runs for all images first"
        );
        assert!(judged(4, Mode::Auto).1.unwrap_err().to_string().contains("no size fits"));
    }
}

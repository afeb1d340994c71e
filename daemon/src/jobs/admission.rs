//! Admission: a request is checked in full, with every fault named, and completed, before it becomes a job.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use sd_proto::v1::{Emphasis, ImageRequest, MemoryRequest, NumericPlan, OffloadMode, Sampler, Schedule, Stage};

use super::limits::Limits;
use super::request::{Admitted, ImageFile, InitialImage, sampler_of_name};
use crate::config::memory::Mode;
use crate::config::tiles;
use crate::models::{Model, ModelError, ModelRef, Registry};
use crate::residency::Bytes;
use crate::residency::estimate::Source;
use crate::stages::memory::MemoryPlan;
use crate::stages::plan::Grouping;

/// Highest guidance scale; more is a slip of the finger.
const MAX_GUIDANCE: f64 = 100.0;
const DEFAULT_STRENGTH: f64 = 0.8;
const DEFAULT_STRENGTH_WITH_MASK: f64 = 1.0;

/// A field of the request that cannot be accepted, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The field, as the contract names it.
    pub field: &'static str,
    /// Value, limit and remedy.
    pub description: String,
}

/// Why a request is not admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// Fields are wrong; all that are, at once.
    #[error("{}", .0.iter().map(|v| format!("{}: {}", v.field, v.description)).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<Violation>),
    /// No such model, or one that cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Paths are taken only from the daemon's own user over its Unix socket.
    #[error(
        "model {0:?} is a path: paths are taken only from the daemon's own user over its unix socket, others name a \
         registered model"
    )]
    PathNotAllowed(String),
    /// A stage would need more than the device's whole budget.
    #[error("{0}")]
    DoesNotFit(Box<DoesNotFit>),
    /// The check itself broke.
    #[error("the request could not be checked: {0}: this is a bug of sdd")]
    Broken(String),
}

/// A request that is too large for the budget, with the numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{width} × {height} does not fit: {} {} ({breakdown}), but {} may be used on device {device}: {}",
    self.subject(), Bytes(*need), Bytes(*limit), self.remedy()
)]
pub struct DoesNotFit {
    /// Pixels asked for.
    pub width: u32,
    /// Pixels asked for.
    pub height: u32,
    /// The stage with the largest need.
    pub stage: Stage,
    /// Whether all stages are counted together, because the mode moves none.
    pub together: bool,
    /// Bytes that it needs.
    pub need: u64,
    /// Bytes that may be used.
    pub limit: u64,
    /// What the need is made of.
    pub breakdown: String,
    /// Where.
    pub device: String,
    /// The mode that was to be used.
    pub mode: Mode,
    /// The mode that moves least of those in which it fits, if any does.
    pub fitting: Option<Mode>,
    /// The largest size of this shape that fits, if any does.
    pub largest: Option<(u32, u32)>,
}

impl DoesNotFit {
    fn subject(&self) -> String {
        match self.together {
            true => format!("with offload mode {} all stages stay, and together they need", self.mode),
            false => format!("stage {} needs", stage_title(self.stage)),
        }
    }

    /// What would fit.
    pub fn remedy(&self) -> String {
        let mode = self.fitting.map(|mode| format!("offload mode {mode} would fit it"));
        let size = self
            .largest
            .map(|(width, height)| format!("the largest size of this shape that fits is {width} × {height}"));
        match (mode, size) {
            (Some(mode), Some(size)) => format!("{mode}; {size}; or raise the device's budget"),
            (Some(mode), None) => format!("{mode}; or raise the device's budget"),
            (None, Some(size)) => format!("{size}; or raise the device's budget"),
            (None, None) => "no size fits, raise the device's budget".into(),
        }
    }
}

fn stage_title(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "?",
        Stage::Encode => "encode",
        Stage::VaeEncode => "vae encode",
        Stage::Denoise => "denoise",
        Stage::Decode => "decode",
    }
}

/// What one stage of a request needs on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageNeed {
    /// The stage.
    pub stage: Stage,
    /// The process before it holds a weight.
    pub context: u64,
    /// All its weights.
    pub weights: u64,
    /// The least of them with which it runs.
    pub floor: u64,
    /// Activations and workspaces.
    pub working_set: u64,
    /// Where that comes from.
    pub source: Source,
}

impl StageNeed {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.context.saturating_add(self.weights).saturating_add(self.working_set)
    }

    /// The least with which it runs.
    pub fn least(&self) -> u64 {
        self.context.saturating_add(self.floor).saturating_add(self.working_set)
    }
}

/// Says what requests need and what there is. Depends on configuration alone, never on what is free at the moment.
pub trait Fits: Send + Sync + 'static {
    /// What each stage of a request needs; one entry a process.
    fn needs(&self, request: &Admitted) -> Vec<StageNeed>;
    /// Bytes that leases of the device may hold together for this request.
    fn limit(&self, request: &Admitted) -> u64;
    /// The device's id.
    fn device(&self) -> String;
    /// How a model's request uses memory, and the numeric choices for it; tiles are not chosen yet.
    fn plans(&self, model: &Model, asked: Option<&MemoryRequest>) -> (MemoryPlan, NumericPlan);
    /// Chooses whether the VAE works in tiles, and of what size: from request, configuration and budget alone.
    fn choose_tiles(&self, _request: &mut Admitted) {}
    /// Finds out what is not known yet of a request's needs. To be awaited before [`Fits::needs`].
    fn prepare<'a>(&'a self, _request: &'a Admitted) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(std::future::ready(()))
    }
}

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

/// Notes what is wrong with a request.
#[derive(Default)]
struct Faults(Vec<Violation>);

impl Faults {
    fn note(&mut self, field: &'static str, description: impl Into<String>) {
        self.0.push(Violation { field, description: description.into() });
    }

    fn unless(&mut self, holds: bool, field: &'static str, description: impl FnOnce() -> String) {
        if !holds {
            self.note(field, description());
        }
    }
}

/// Fills in what a request leaves open and checks everything. Pure.
///
/// # Errors
/// Every fault, not just the first.
pub fn complete(
    request: ImageRequest,
    model: Arc<Model>,
    (memory, plan): (MemoryPlan, NumericPlan),
    seed: u64,
    limits: &Limits,
) -> Result<Admitted, Vec<Violation>> {
    let report = &model.report;
    let mut faults = Faults::default();

    prompt(&mut faults, "prompt", &request.prompt, limits);
    faults.unless(!request.prompt.trim().is_empty(), "prompt", || "it is empty: say what to paint".into());
    prompt(&mut faults, "negative_prompt", &request.negative_prompt, limits);
    let step = report.scale_factor();
    let width = size(&mut faults, "width", request.width, report.defaults.width, step, limits);
    let height = size(&mut faults, "height", request.height, report.defaults.height, step, limits);

    let steps = request.steps.unwrap_or(report.defaults.steps);
    faults.unless((1..=limits.steps).contains(&steps), "steps", || {
        format!("{steps} is out of range: ask for 1 to {}", limits.steps)
    });
    let count = request.count.max(1);
    faults.unless(count <= limits.count, "count", || {
        format!(
            "{count} images are too many for one request: ask for at most {}, more by several requests",
            limits.count
        )
    });
    faults.unless(seed.checked_add(u64::from(count - 1)).is_some(), "seed", || {
        format!("{seed} leaves no room for {count} images, whose seeds count up from it: choose a lower one")
    });

    let guidance_scale = request.guidance_scale.unwrap_or(report.defaults.guidance_scale);
    number(&mut faults, "guidance_scale", guidance_scale, 0.0, MAX_GUIDANCE);
    let eta = request.eta.unwrap_or(0.0);
    number(&mut faults, "eta", eta, 0.0, 1.0);
    let guidance_rescale = request.guidance_rescale.unwrap_or(0.0);
    number(&mut faults, "guidance_rescale", guidance_rescale, 0.0, 1.0);

    let mut sampler = named(&mut faults, "sampler", request.sampler, Sampler::try_from, "1 (DDIM) to 8 (UNIPC)");
    if sampler == Sampler::Unspecified {
        sampler = sampler_of_name(&report.defaults.sampler).unwrap_or_default();
    }
    let schedule =
        named(&mut faults, "schedule", request.schedule, Schedule::try_from, "1 (LEADING) to 6 (SGM_UNIFORM)");
    let emphasis = match named(&mut faults, "emphasis", request.emphasis, Emphasis::try_from, "1 (WEB_UI) or 2 (OFF)") {
        Emphasis::Unspecified | Emphasis::WebUi => true,
        Emphasis::Off => false,
    };
    faults.unless(request.clip_skip <= report.text.layers, "clip_skip", || {
        format!("{} is more than the text encoder's {} layers", request.clip_skip, report.text.layers)
    });

    let initial = initial_image(&mut faults, &request, &model, steps, limits);
    if let Some(memory) = &request.memory {
        asked_memory(&mut faults, memory);
    }
    if !faults.0.is_empty() {
        return Err(faults.0);
    }
    Ok(Admitted {
        prompt: request.prompt,
        negative_prompt: request.negative_prompt,
        width,
        height,
        steps,
        guidance_scale,
        seed,
        count,
        sampler,
        schedule,
        zero_terminal_snr: request.zero_terminal_snr,
        eta,
        guidance_rescale,
        emphasis,
        clip_skip: request.clip_skip,
        initial,
        plan,
        memory,
        asked_memory: request.memory,
        model,
    })
}

fn prompt(faults: &mut Faults, field: &'static str, text: &str, limits: &Limits) {
    faults.unless(text.len() <= limits.prompt_bytes, field, || {
        format!("it has {} bytes, at most {} are accepted: shorten it", text.len(), limits.prompt_bytes)
    });
    faults.unless(!text.contains('\0'), field, || "it contains a zero character: remove it".into());
}

fn size(faults: &mut Faults, field: &'static str, asked: u32, default: u32, step: u32, limits: &Limits) -> u32 {
    let size = if asked == 0 { default } else { asked };
    if !size.is_multiple_of(step) {
        let (lower, higher) = (size / step * step, size.checked_next_multiple_of(step).unwrap_or(limits.edge));
        faults.note(
            field,
            if lower == 0 {
                format!("{size} is not a multiple of {step}: use {higher}")
            } else {
                format!("{size} is not a multiple of {step}: use {lower} or {higher}")
            },
        );
    }
    faults.unless(size <= limits.edge, field, || format!("{size} is too large: at most {} pixels", limits.edge));
    size
}

fn number(faults: &mut Faults, field: &'static str, value: f64, low: f64, high: f64) {
    // Written so that NaN is refused too.
    faults.unless(value >= low && value <= high, field, || {
        format!("{value} is out of range: use a number from {low} to {high}")
    });
}

fn named<T: Default, E>(
    faults: &mut Faults,
    field: &'static str,
    number: i32,
    parse: impl FnOnce(i32) -> Result<T, E>,
    known: &str,
) -> T {
    parse(number).unwrap_or_else(|_| {
        faults.note(field, format!("{number} is unknown here: use {known}, or 0 for the default"));
        T::default()
    })
}

fn asked_memory(faults: &mut Faults, memory: &MemoryRequest) {
    named(faults, "memory.mode", memory.mode, OffloadMode::try_from, "1 (AUTO) to 6 (LAYER_STREAMING)");
    if let Err((key, problem)) = tiles(memory.vae_tile_size, memory.vae_tile_overlap) {
        let field = if key == "vae_tile_size" { "memory.vae_tile_size" } else { "memory.vae_tile_overlap" };
        faults.note(field, problem);
    }
}

fn initial_image(
    faults: &mut Faults,
    request: &ImageRequest,
    model: &Model,
    steps: u32,
    limits: &Limits,
) -> Option<InitialImage> {
    let inpainting = model.report.is_inpainting();
    if request.init_image.is_empty() {
        faults.unless(request.mask.is_empty(), "mask", || "a mask needs an init_image: send both or neither".into());
        faults.unless(request.strength.is_none(), "strength", || {
            "it says how much of an init_image is replaced, but there is none: leave it out".into()
        });
        faults.unless(!inpainting, "init_image", || {
            format!("model {} paints into pictures: send an init_image and a mask", model.name)
        });
        return None;
    }
    image_file(faults, "init_image", &request.init_image, limits);
    let masked = !request.mask.is_empty();
    if masked {
        image_file(faults, "mask", &request.mask, limits);
    }
    faults.unless(masked || !inpainting, "mask", || {
        format!("model {} paints into pictures: send a mask, white where it is to paint", model.name)
    });
    let strength = request.strength.unwrap_or(if masked { DEFAULT_STRENGTH_WITH_MASK } else { DEFAULT_STRENGTH });
    if strength > 0.0 && strength <= 1.0 {
        // As the field does it: the share of the steps that is run, rounded down.
        faults.unless((f64::from(steps) * strength).floor() >= 1.0, "strength", || {
            format!("{strength} of {steps} steps is less than one step: use more of either")
        });
    } else {
        faults.note("strength", format!("{strength} is out of range: use a number above 0 up to 1"));
    }
    Some(InitialImage {
        image: ImageFile::new(&request.init_image),
        mask: masked.then(|| ImageFile::new(&request.mask)),
        strength,
    })
}

fn image_file(faults: &mut Faults, field: &'static str, bytes: &[u8], limits: &Limits) {
    faults.unless(bytes.len() <= limits.image_file_bytes, field, || {
        let (found, most) = (Bytes(bytes.len() as u64), Bytes(limits.image_file_bytes as u64));
        format!("the file has {found}, at most {most} are accepted: make it smaller")
    });
    // The first bytes only; whether the rest is whole shows when the worker reads it.
    let known = bytes.starts_with(b"\x89PNG\r\n\x1a\n")
        || bytes.starts_with(&[0xff, 0xd8, 0xff])
        || (bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP"));
    faults.unless(known, field, || "this is no image file that is understood: send PNG, JPEG or WebP".into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use proptest::prelude::*;

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\n rest";

    fn plans() -> (MemoryPlan, NumericPlan) {
        (MemoryPlan::default(), fixtures::numeric_plan())
    }

    fn check(request: ImageRequest) -> Result<Admitted, Vec<Violation>> {
        complete(request, fixtures::model(), plans(), 7, &Limits::default())
    }

    fn base() -> ImageRequest {
        ImageRequest { prompt: "a red heart".into(), ..ImageRequest::default() }
    }

    /// The one violation of a request, which must be of this field.
    fn violation(field: &str, request: ImageRequest) -> String {
        let violations = check(request).expect_err(field);
        assert_eq!(violations.iter().map(|v| v.field).collect::<Vec<_>>(), [field], "{violations:?}");
        violations[0].description.clone()
    }

    #[test]
    fn what_is_left_open_comes_from_the_model() {
        let admitted = check(base()).unwrap();
        assert_eq!((admitted.width, admitted.height, admitted.steps), (256, 256, 20));
        assert_eq!((admitted.guidance_scale, admitted.sampler, admitted.count), (4.0, Sampler::Ddim, 1));
        assert_eq!((admitted.seed, admitted.emphasis, &admitted.initial), (7, true, &None));
        let shown = admitted.to_proto();
        assert_eq!((shown.width, shown.steps, shown.seed, shown.count), (256, Some(20), Some(7), 1));
        assert_eq!((shown.model.as_str(), shown.sampler), ("default", Sampler::Ddim as i32));
    }

    #[test]
    fn every_single_fault_is_named_with_its_field() {
        let text = violation("width", ImageRequest { width: 257, ..base() });
        assert!(text.contains("256") && text.contains("264"), "{text}");
        assert!(violation("height", ImageRequest { height: 4, ..base() }).contains("use 8"));
        assert!(violation("width", ImageRequest { width: u32::MAX - 7, ..base() }).contains("8192"));
        assert!(violation("steps", ImageRequest { steps: Some(0), ..base() }).contains("1 to 1000"));
        violation("steps", ImageRequest { steps: Some(1001), ..base() });
        assert!(violation("count", ImageRequest { count: 65, ..base() }).contains("64"));
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 101.0] {
            violation("guidance_scale", ImageRequest { guidance_scale: Some(bad), ..base() });
        }
        violation("eta", ImageRequest { eta: Some(f64::NAN), ..base() });
        violation("guidance_rescale", ImageRequest { guidance_rescale: Some(1.5), ..base() });
        assert!(violation("sampler", ImageRequest { sampler: 99, ..base() }).contains("99"));
        violation("schedule", ImageRequest { schedule: -1, ..base() });
        violation("emphasis", ImageRequest { emphasis: 3, ..base() });
        assert!(violation("clip_skip", ImageRequest { clip_skip: 4, ..base() }).contains("3 layers"));
        violation("prompt", ImageRequest { prompt: " \n".into(), ..base() });
        violation("prompt", ImageRequest { prompt: "a\0b".into(), ..base() });
        let text = violation("prompt", ImageRequest { prompt: "x".repeat(20_000), ..base() });
        assert!(text.contains("20000") && text.contains("16384"), "{text}");
        violation("negative_prompt", ImageRequest { negative_prompt: "x".repeat(20_000), ..base() });
    }

    #[test]
    fn what_a_request_says_of_memory_is_checked_too() {
        let asked = |memory| ImageRequest { memory: Some(memory), ..base() };
        violation("memory.mode", asked(MemoryRequest { mode: 7, ..MemoryRequest::default() }));
        let text =
            violation("memory.vae_tile_size", asked(MemoryRequest { vae_tile_size: 100, ..MemoryRequest::default() }));
        assert!(text.contains("multiple of 8"), "{text}");
        let memory = MemoryRequest { vae_tile_size: 256, vae_tile_overlap: 200, ..MemoryRequest::default() };
        assert!(violation("memory.vae_tile_overlap", asked(memory)).contains("128"));
        let memory = MemoryRequest { mode: 3, vae_tile_size: 256, vae_tile_overlap: 64, ..MemoryRequest::default() };
        assert_eq!(check(asked(memory)).unwrap().to_proto().memory, Some(memory));
    }

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
            plans()
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

    #[test]
    fn seeds_that_would_overflow_are_refused() {
        let last = |count, seed| {
            let request = ImageRequest { count, ..base() };
            complete(request, fixtures::model(), plans(), seed, &Limits::default())
        };
        assert_eq!(last(2, u64::MAX).unwrap_err()[0].field, "seed");
        assert_eq!(last(2, u64::MAX - 1).unwrap().image_seed(1), u64::MAX);
    }

    #[test]
    fn image_files_are_checked_where_they_are_used() {
        let with_image = ImageRequest { init_image: PNG.into(), ..base() };
        let admitted = check(with_image.clone()).unwrap();
        assert_eq!(admitted.initial.as_ref().unwrap().strength, 0.8);
        assert!(admitted.to_proto().init_image.is_empty(), "files are not shown");
        let masked = check(ImageRequest { mask: PNG.into(), ..with_image.clone() }).unwrap();
        assert_eq!(masked.initial.as_ref().map(|initial| initial.strength), Some(1.0));

        assert!(violation("mask", ImageRequest { mask: PNG.into(), ..base() }).contains("init_image"));
        violation("strength", ImageRequest { strength: Some(0.5), ..base() });
        for bad in [0.0, -0.5, 1.01, f64::NAN] {
            violation("strength", ImageRequest { strength: Some(bad), ..with_image.clone() });
        }
        let text = violation("strength", ImageRequest { strength: Some(0.04), ..with_image.clone() });
        assert!(text.contains("less than one step"), "{text}");
        violation("init_image", ImageRequest { init_image: b"GIF89a".to_vec(), ..base() });
        violation("mask", ImageRequest { mask: b"text".to_vec(), ..with_image });
    }

    #[test]
    fn all_faults_are_named_at_once() {
        let request = ImageRequest { width: 3, steps: Some(0), sampler: 77, prompt: String::new(), ..base() };
        let fields: Vec<_> = check(request).unwrap_err().iter().map(|v| v.field).collect();
        assert_eq!(fields, ["prompt", "width", "steps", "sampler"]);
    }

    proptest! {
        /// Whatever the numbers: either named faults, or a request whose every value is usable.
        #[test]
        fn admitted_requests_are_sound(
            width in any::<u32>(), height in 0u32..10_000, steps in proptest::option::of(any::<u32>()),
            guidance in proptest::option::of(any::<f64>()), count in any::<u32>(), sampler in any::<i32>(),
            seed in any::<u64>(), strength in proptest::option::of(any::<f64>()), image in any::<bool>(),
        ) {
            let request = ImageRequest {
                width, height, steps, guidance_scale: guidance, count, sampler, seed: Some(seed), strength,
                init_image: if image { PNG.into() } else { Vec::new() },
                ..base()
            };
            match complete(request, fixtures::model(), plans(), seed, &Limits::default()) {
                Err(violations) => prop_assert!(!violations.is_empty()),
                Ok(admitted) => {
                    prop_assert!(admitted.width > 0 && admitted.width % 8 == 0 && admitted.width <= 8192);
                    prop_assert!(admitted.height > 0 && admitted.height % 8 == 0);
                    prop_assert!((1..=1000).contains(&admitted.steps) && (1..=64).contains(&admitted.count));
                    prop_assert!(admitted.guidance_scale.is_finite());
                    prop_assert!(admitted.seed.checked_add(u64::from(admitted.count - 1)).is_some());
                    prop_assert_eq!(admitted.initial.is_some(), image);
                }
            }
        }
    }
}

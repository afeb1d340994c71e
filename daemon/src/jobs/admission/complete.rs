//! Filling in what a request leaves open, and checking every field of it. Pure.

use std::sync::Arc;

use sd_proto::v1::{Emphasis, ImageRequest, MemoryRequest, NumericPlan, OffloadMode, Sampler, Schedule};

use super::refusal::Violation;
use crate::config::tiles;
use crate::jobs::limits::Limits;
use crate::jobs::request::{Admitted, ImageFile, InitialImage, sampler_of_name};
use crate::models::Model;
use crate::residency::Bytes;
use crate::stages::memory::MemoryPlan;

/// Highest guidance scale; more is a slip of the finger.
const MAX_GUIDANCE: f64 = 100.0;
const DEFAULT_STRENGTH: f64 = 0.8;
const DEFAULT_STRENGTH_WITH_MASK: f64 = 1.0;

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

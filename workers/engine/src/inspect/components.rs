//! The parts of a pipeline's folder, read as far as they can be, with everything that is wrong.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::Path;

use super::fingerprint::Fingerprint;
use crate::formats::WeightSet;
use crate::models::{
    AutoencoderKl, AutoencoderKlConfig, ClipTextConfig, ClipTextModel, ModelError, Unet, UnetConfig, VaeHalf,
};
use crate::residency::Declarations;
use crate::sampling::{PredictionType, SamplerKind, SchedulerConfig};

/// A component's configuration, files, and what of its weights each task binds.
pub(super) struct Part<C> {
    pub(super) config: C,
    pub(super) weights: WeightSet,
    pub(super) fingerprint: Fingerprint,
}

/// The scheduler as far as a report needs it.
pub(super) struct Scheduler {
    pub(super) class: Option<String>,
    pub(super) prediction: PredictionType,
    pub(super) sampler: Option<SamplerKind>,
}

/// Everything that could be read, and all problems.
pub(super) struct Collected {
    pub(super) text: Option<Part<ClipTextConfig>>,
    pub(super) unet: Option<Part<UnetConfig>>,
    pub(super) vae: Option<Part<AutoencoderKlConfig>>,
    pub(super) scheduler: Option<Scheduler>,
    pub(super) defaults: Option<super::assemble::Overrides>,
    pub(super) problems: Vec<String>,
}

impl Collected {
    /// Reads what is in `folder`.
    pub(super) fn read(folder: &Path) -> Self {
        let mut problems = Vec::new();
        let text = part(
            &mut problems,
            &folder.join("text_encoder"),
            ClipTextConfig::read,
            ClipTextModel::weights,
            ClipTextModel::declarations,
        );
        let unet = part(&mut problems, &folder.join("unet"), UnetConfig::read, Unet::weights, Unet::declarations);
        let both = |config: &AutoencoderKlConfig| {
            let halves = [VaeHalf::Encoder, VaeHalf::Decoder];
            halves.iter().flat_map(|&half| AutoencoderKl::declarations(config, half)).collect()
        };
        let vae = part(&mut problems, &folder.join("vae"), AutoencoderKlConfig::read, AutoencoderKl::weights, both);
        let scheduler = scheduler(&mut problems, folder);
        tokenizer(&mut problems, folder);
        let defaults = note(&mut problems, super::assemble::Overrides::read(&folder.join("sdd.json"))).flatten();
        let mut collected = Self { text, unet, vae, scheduler, defaults, problems };
        collected.check_together();
        collected
    }

    /// Checks that the parts belong to one another. What is wrong between them comes first: it explains the rest.
    fn check_together(&mut self) {
        let (Some(text), Some(unet), Some(vae)) = (&self.text, &self.unet, &self.vae) else { return };
        let mut found = Vec::new();
        let (wide, hidden) = (unet.config.conditioning_width, text.config.hidden_size);
        if wide != hidden {
            found.push(format!("unet takes conditioning of width {wide}, but text_encoder gives {hidden}"));
        }
        let (out, latent, input) = (unet.config.out_channels, vae.config.latent_channels, unet.config.in_channels);
        if out != latent {
            found.push(format!("unet gives {out} channels, but vae has latents of {latent}"));
        }
        // Latents alone, or with a mask and the masked latents.
        let inpaint = 2 * latent + 1;
        if input != latent && input != inpaint {
            let kinds = format!("{latent} (text and image to image) and {inpaint} (inpainting)");
            found.push(format!("unet takes {input} channels; supported are {kinds}"));
        }
        let (i, o) = (vae.config.in_channels, vae.config.out_channels);
        if (i, o) != (3, 3) {
            found.push(format!("vae has images of {i} and {o} channels; supported is 3"));
        }
        self.problems.splice(0..0, found);
    }
}

/// The value, or its error among the problems.
fn note<T, E: Display>(problems: &mut Vec<String>, result: Result<T, E>) -> Option<T> {
    result.map_err(|e| problems.push(e.to_string())).ok()
}

/// One component: its configuration, its weights, and what is wrong between the two.
fn part<C>(
    problems: &mut Vec<String>,
    folder: &Path,
    config: impl Fn(&Path) -> Result<C, crate::models::ConfigError>,
    weights: impl Fn(&Path) -> Result<WeightSet, ModelError>,
    declarations: impl Fn(&C) -> Vec<Declarations>,
) -> Option<Part<C>> {
    if !folder.is_dir() {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        problems.push(format!("{name} is missing: there is no folder {}", folder.display()));
        return None;
    }
    let config_path = folder.join("config.json");
    let config = note(problems, config(&config_path));
    let weights = note(problems, weights(folder));
    let (config, weights) = (config?, weights?);
    check_tensors(problems, &declarations(&config), &weights);
    let mut fingerprint = Fingerprint::new();
    fingerprint.add(&std::fs::read(&config_path).unwrap_or_default());
    for file in weights.files() {
        fingerprint.add_file(file);
    }
    Some(Part { config, weights, fingerprint })
}

/// Missing tensors, wrong shapes and types, and tensors without a place.
fn check_tensors(problems: &mut Vec<String>, declarations: &[Declarations], weights: &WeightSet) {
    let mut declared = BTreeSet::new();
    for parameter in declarations.iter().flat_map(Declarations::parameters) {
        let shapes: Vec<&[usize]> = parameter.shapes.iter().map(Vec::as_slice).collect();
        if let Err(e) = weights.check(&parameter.name, &shapes) {
            problems.push(e.to_string());
        }
        declared.insert(parameter.name);
    }
    for name in weights.names().filter(|&name| !declared.contains(name) && !weights.is_ignorable(name)) {
        problems.extend(weights.unexpected(name).map(|e| e.to_string()));
    }
}

fn scheduler(problems: &mut Vec<String>, folder: &Path) -> Option<Scheduler> {
    let path = folder.join("scheduler/scheduler_config.json");
    if !path.is_file() {
        problems.push(format!("scheduler is missing: there is no file {}", path.display()));
        return None;
    }
    let config = note(problems, SchedulerConfig::load(&path))?;
    let prediction = config.prediction_type.unwrap_or(PredictionType::Epsilon);
    // A class that is not known leaves the choice to the family's default.
    let sampler = config.default_sampler().ok();
    Some(Scheduler { class: config.class_name, prediction, sampler })
}

fn tokenizer(problems: &mut Vec<String>, folder: &Path) {
    let tokenizer = folder.join("tokenizer");
    let has = |name: &str| tokenizer.join(name).is_file();
    if !tokenizer.is_dir() {
        problems.push(format!("tokenizer is missing: there is no folder {}", tokenizer.display()));
    } else if !(has("tokenizer.json") || has("vocab.json") && has("merges.txt")) {
        let path = tokenizer.display();
        problems.push(format!("{path} has neither tokenizer.json nor vocab.json with merges.txt"));
    }
}

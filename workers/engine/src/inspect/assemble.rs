//! From what was read to the description.

use std::path::Path;

use serde::Deserialize;

use super::InspectError;
use super::components::{Collected, Part};
use super::family::Pipeline;
use super::fingerprint::Fingerprint;
use super::report::{
    ComponentReport, Defaults, DiffusionReport, Family, FileReport, ModelReport, NUMERICS_VERSION, Stage, Task,
    TaskReport, TextReport, VaeReport, WorkingSet,
};
use crate::formats::{Precision, WeightSet};
use crate::models::{AutoencoderKl, AutoencoderKlConfig, ClipTextConfig, ClipTextModel, Unet, UnetConfig, VaeHalf};
use crate::ops::Activation;
use crate::residency::{Declarations, Flow, LayerSpec, Role};
use crate::sampling::{PredictionType, SamplerKind};

/// Bytes that every task may take whatever its size: small tensors, tables, the allocator's slack.
pub(super) const FIXED_BYTES: u64 = 4 << 20;
/// Bytes that each thread keeps for products of rows.
const THREAD_BYTES: u64 = 128 << 10;
/// Most input channels of a convolution that each thread transforms in memory of its own.
const TRANSFORMED_CHANNELS: usize = 960;
/// Tokens that [`WorkingSet::fixed_bytes`] covers: a prompt and a negative prompt of four chunks each.
const FIXED_TOKENS: u64 = 2 * 4 * 77;
/// Images that one pass of denoising takes: guided and unguided.
const PASS_ROWS: u64 = 2;

/// `sdd.json` of a folder.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Overrides {
    #[serde(default)]
    defaults: OverrideDefaults,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct OverrideDefaults {
    width: Option<u32>,
    height: Option<u32>,
    steps: Option<u32>,
    guidance_scale: Option<f64>,
    sampler: Option<String>,
}

impl Overrides {
    /// The file's overrides; none if it does not exist.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, String> {
        match std::fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| format!("{}: {e}", path.display())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("cannot read {}: {e}", path.display())),
        }
    }
}

/// The report, or all problems.
pub(super) fn assemble(folder: &Path, pipeline: &Pipeline, collected: Collected) -> Result<ModelReport, InspectError> {
    let Collected {
        text: Some(text),
        unet: Some(unet),
        vae: Some(vae),
        scheduler: Some(scheduler),
        defaults,
        problems,
    } = collected
    else {
        return Err(InspectError::Problems { path: folder.to_path_buf(), problems: collected.problems });
    };
    if !problems.is_empty() {
        return Err(InspectError::Problems { path: folder.to_path_buf(), problems });
    }
    let factor = vae.config.factor();
    let text_class = if text.config.projection.is_some() { "CLIPTextModelWithProjection" } else { "CLIPTextModel" };
    let components = vec![
        component(folder, Stage::Text, text_class, &text, text_tasks(&text.config)),
        component(folder, Stage::Diffusion, "UNet2DConditionModel", &unet, vec![denoise_task(&unet.config, factor)]),
        component(folder, Stage::Vae, "AutoencoderKL", &vae, vae_tasks(&vae.config)),
    ];
    let mut fingerprint = Fingerprint::new();
    for part in components.iter().map(|c| &c.fingerprint) {
        fingerprint.add(part.as_bytes());
    }
    for file in ["model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json", "tokenizer/merges.txt"]
    {
        fingerprint.add(&std::fs::read(folder.join(file)).unwrap_or_default());
    }
    let sampler = scheduler.sampler.unwrap_or(SamplerKind::Dpmpp2m);
    Ok(ModelReport {
        family: family(&text.config, &unet.config),
        pipeline: pipeline.class.clone(),
        fingerprint: fingerprint.hex(),
        numerics_version: NUMERICS_VERSION,
        backend: crate::ops::backend().into(),
        components,
        text: TextReport {
            hidden_size: text.config.hidden_size,
            layers: text.config.layers,
            max_tokens: text.config.max_position_embeddings,
        },
        diffusion: DiffusionReport {
            in_channels: unet.config.in_channels,
            out_channels: unet.config.out_channels,
            conditioning_width: unet.config.conditioning_width,
            prediction_type: prediction(scheduler.prediction).into(),
            guidance_embedding: unet.config.time_cond_proj_dim.is_some(),
        },
        vae: VaeReport {
            latent_channels: vae.config.latent_channels,
            scale_factor: factor,
            scaling_factor: vae.config.scaling_factor,
            force_upcast: vae.config.force_upcast,
        },
        sampler: sampler.name().into(),
        defaults: resolve_defaults(&unet.config, factor, sampler, defaults.unwrap_or_default()),
        scheduler: scheduler.class,
    })
}

/// Generations differ in their text encoder: CLIP's own with the quick activation, or OpenCLIP's.
fn family(text: &ClipTextConfig, unet: &UnetConfig) -> Family {
    let inpaint = unet.in_channels != unet.out_channels;
    match (text.act, inpaint) {
        (Activation::QuickGelu, false) => Family::Sd1,
        (Activation::QuickGelu, true) => Family::Sd1Inpaint,
        (_, false) => Family::Sd2,
        (_, true) => Family::Sd2Inpaint,
    }
}

fn prediction(kind: PredictionType) -> &'static str {
    match kind {
        PredictionType::Epsilon => "epsilon",
        PredictionType::Velocity => "v_prediction",
        PredictionType::Sample => "sample",
        PredictionType::Flow => "flow_prediction",
    }
}

fn resolve_defaults(unet: &UnetConfig, factor: usize, sampler: SamplerKind, over: Overrides) -> Defaults {
    let over = over.defaults;
    let [height, width] = unet.sample_size.unwrap_or([64, 64]).map(|side| (side * factor) as u32);
    // Few-step models say so by their scheduler or by taking guidance as an input.
    let few = sampler == SamplerKind::Lcm || unet.time_cond_proj_dim.is_some();
    let (steps, guidance) = match (few, unet.time_cond_proj_dim) {
        (true, Some(_)) => (4, 8.5),
        (true, None) => (4, 1.0),
        (false, _) => (25, 7.5),
    };
    Defaults {
        width: over.width.unwrap_or(width),
        height: over.height.unwrap_or(height),
        steps: over.steps.unwrap_or(steps),
        guidance_scale: over.guidance_scale.unwrap_or(guidance),
        sampler: over.sampler.unwrap_or_else(|| sampler.name().to_owned()),
    }
}

fn component<C>(folder: &Path, stage: Stage, class: &str, part: &Part<C>, tasks: Vec<TaskReport>) -> ComponentReport {
    let weights: &WeightSet = &part.weights;
    let name = |path: &Path| path.strip_prefix(folder).unwrap_or(path).to_string_lossy().into_owned();
    let numbers = |name: &str| weights.tensor(name).map_or(0, |(_, t)| t.shape.iter().product::<usize>() as u64);
    ComponentReport {
        stage,
        folder: name(weights.root()),
        class_name: class.into(),
        files: weights.files().iter().map(|f| FileReport { name: name(f.path()), bytes: f.len() }).collect(),
        tensors: weights.len(),
        parameters: weights.names().map(numbers).sum(),
        file_bytes: weights.file_bytes(),
        precision: weights.precision().unwrap_or(Precision::F32),
        weights_bytes: tasks.iter().map(|t| t.weights_bytes).sum(),
        fingerprint: part.fingerprint.hex(),
        tasks,
    }
}

/// Bytes that the threads of this machine keep between the operations of a task; see [`crate::ops::conv2d`].
pub(super) fn threads_bytes(declarations: &[Declarations]) -> u64 {
    let channels = |layer: &LayerSpec| match layer {
        LayerSpec::Conv { shape, .. } => shape.input.min(TRANSFORMED_CHANNELS),
        LayerSpec::Linear { .. } | LayerSpec::Upsample { .. } | LayerSpec::Norm { .. } | LayerSpec::Table { .. } => 0,
    };
    let widest = declarations.iter().flat_map(|d| d.layers()).map(channels).max().unwrap_or(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    threads * (THREAD_BYTES + 16 * 24 * 4 * (widest as u64 + 16))
}

fn task(task: Task, declarations: &[Declarations], mut working_set: WorkingSet) -> TaskReport {
    working_set.fixed_bytes += threads_bytes(declarations);
    let bytes = || declarations.iter().map(Declarations::bound_bytes);
    TaskReport {
        task,
        weights_bytes: bytes().sum(),
        largest_segment_bytes: bytes().max().unwrap_or(0),
        segments: declarations.len(),
        block_bytes: declarations.iter().filter(|d| d.role() == Role::Block).map(Declarations::bound_bytes).collect(),
        working_set,
    }
}

fn text_tasks(config: &ClipTextConfig) -> Vec<TaskReport> {
    let per_token = ClipTextModel::flow(config).bytes_per_pixel();
    let working_set = WorkingSet {
        fixed_bytes: FIXED_BYTES + FIXED_TOKENS * per_token,
        bytes_per_pixel: 0,
        fixed_tokens: FIXED_TOKENS,
        bytes_per_token: per_token,
        tiled: None,
    };
    vec![task(Task::Encode, &ClipTextModel::declarations(config), working_set)]
}

fn denoise_task(config: &UnetConfig, factor: usize) -> TaskReport {
    let flow = Unet::flow(config);
    let per_token = flow.bytes_per_token();
    let working_set = WorkingSet {
        fixed_bytes: FIXED_BYTES + FIXED_TOKENS * per_token,
        bytes_per_pixel: PASS_ROWS * per_image_pixel(&flow, factor),
        fixed_tokens: FIXED_TOKENS,
        bytes_per_token: per_token,
        tiled: None,
    };
    task(Task::Denoise, &Unet::declarations(config), working_set)
}

fn vae_tasks(config: &AutoencoderKlConfig) -> Vec<TaskReport> {
    let half = |kind, half, factor| {
        let flow = AutoencoderKl::flow(config, half);
        let working_set = WorkingSet {
            fixed_bytes: FIXED_BYTES,
            bytes_per_pixel: per_image_pixel(&flow, factor),
            fixed_tokens: 0,
            bytes_per_token: 0,
            tiled: Some(AutoencoderKl::tile_cost(config, half)),
        };
        task(kind, &AutoencoderKl::declarations(config, half), working_set)
    };
    vec![half(Task::Decode, VaeHalf::Decoder, config.factor()), half(Task::VaeEncode, VaeHalf::Encoder, 1)]
}

/// A flow whose unit is a latent pixel, for each pixel of the image.
fn per_image_pixel(flow: &Flow, factor: usize) -> u64 {
    flow.bytes_per_pixel().div_ceil((factor * factor) as u64)
}

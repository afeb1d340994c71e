//! Which architecture a pipeline's class stands for.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::InspectError;

/// Pipelines of the architectures that are supported. The other parts decide which family it is.
const SUPPORTED: [&str; 7] = [
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionInpaintPipelineLegacy",
    "LatentConsistencyModelPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
    "DiffusionPipeline",
];

/// Beginnings of other classes' names, longest match first among equals.
const OTHERS: [(&str, &str); 26] = [
    ("StableDiffusionXL", "Stable Diffusion XL"),
    ("StableDiffusion3", "Stable Diffusion 3"),
    ("StableDiffusionLatentUpscale", "a latent upscaler"),
    ("StableDiffusionUpscale", "an upscaler"),
    ("StableDiffusionDepth2Img", "Stable Diffusion 2 with depth"),
    ("StableDiffusionInstructPix2Pix", "InstructPix2Pix"),
    ("StableDiffusionControlNet", "a ControlNet"),
    ("StableVideoDiffusion", "Stable Video Diffusion"),
    ("StableCascade", "Stable Cascade"),
    ("Flux2", "FLUX.2"),
    ("Flux", "FLUX.1"),
    ("Chroma", "Chroma"),
    ("ZImage", "Z-Image"),
    ("QwenImage", "Qwen-Image"),
    ("Wan", "Wan"),
    ("Sana", "Sana"),
    ("HiDream", "HiDream"),
    ("HunyuanVideo", "HunyuanVideo"),
    ("Hunyuan", "HunyuanDiT"),
    ("PixArt", "PixArt"),
    ("AuraFlow", "AuraFlow"),
    ("Kandinsky", "Kandinsky"),
    ("Kolors", "Kolors"),
    ("LTX", "LTX-Video"),
    ("Cosmos", "Cosmos"),
    ("Lumina", "Lumina"),
];

/// What is said to be supported.
const SUPPORTED_WORDS: &str = "Stable Diffusion 1.x and 2.x (StableDiffusionPipeline and its image to image, inpainting and \
                               latent consistency relatives)";

/// `model_index.json`.
#[derive(Clone, Debug)]
pub(super) struct Pipeline {
    pub(super) class: String,
}

impl Pipeline {
    /// Reads the index in `folder` and refuses what is not supported.
    pub(super) fn read(folder: &Path) -> Result<Self, InspectError> {
        let path = folder.to_path_buf();
        match std::fs::metadata(folder) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(InspectError::NotFound { path }),
            Err(e) => return Err(InspectError::BadIndex { path, reason: e.to_string() }),
            Ok(m) if !m.is_dir() => return Err(InspectError::SingleFile { path }),
            Ok(_) => {}
        }
        let index = folder.join("model_index.json");
        if !index.exists() {
            return Err(InspectError::NotAPipeline { hint: hint(folder), path });
        }
        let bad = |reason: String| InspectError::BadIndex { path: index.clone(), reason };
        let text = std::fs::read(&index).map_err(|e| bad(e.to_string()))?;
        let fields: BTreeMap<String, Value> = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        let class = match fields.get("_class_name") {
            Some(Value::String(class)) => class.clone(),
            // Custom pipelines name a file and a class.
            Some(Value::Array(parts)) => parts.last().and_then(Value::as_str).unwrap_or_default().to_owned(),
            _ => return Err(bad("it has no _class_name".into())),
        };
        // A generic pipeline, or one of another name that has just the parts that are supported, is judged by its parts.
        if SUPPORTED.contains(&class.as_str()) && !fields.contains_key("transformer") {
            return Ok(Self { class });
        }
        let name = OTHERS.iter().find(|(start, _)| class.starts_with(start)).map(|(_, name)| *name);
        Err(InspectError::Architecture { path, class, name, supported: SUPPORTED_WORDS.into() })
    }
}

/// What a folder without an index seems to be.
fn hint(folder: &Path) -> String {
    let names: Vec<String> = std::fs::read_dir(folder)
        .map(|entries| entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    let ends = |end: &str| names.iter().find(|n| n.ends_with(end));
    if names.is_empty() {
        return "; it is empty".into();
    }
    if let Some(file) = ends(".safetensors").or(ends(".ckpt")).or(ends(".gguf")) {
        return format!("; it holds {file}: single files and single components are not supported yet");
    }
    if let Some(inner) = names.iter().find(|n| folder.join(n).join("model_index.json").exists()) {
        return format!("; its folder {inner} is one");
    }
    String::new()
}

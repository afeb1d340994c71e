//! A finished picture as a PNG file that says how it was made.
//!
//! Two text chunks: `parameters`, in the form that the web UIs read back (prompt, `Negative prompt: …`, then one line
//! `Steps: 20, Sampler: DDIM, …`), and `sd`, a JSON object of the whole request, the seed and the numeric plan. Both
//! describe the one image as a request of its own (its seed, count 1), so that image 2 of a call and the image of a call
//! with that seed are the same file.

use std::borrow::Cow;
use std::fmt::Write as _;

use sd_proto::v1::{NumericPlan, Sampler, Schedule};
use serde_json::{Value, json};

use crate::jobs::request::{Admitted, ImageFile, sampler_name, schedule_name};

/// Pixels of a picture: interleaved 8-bit RGB, row by row, `3 × width × height` bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pixels {
    /// Pixels a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// The bytes.
    pub rgb: Vec<u8>,
}

/// A PNG file and its parameters text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    /// The file.
    pub png: Vec<u8>,
    /// What its `parameters` chunk says.
    pub parameters: String,
}

/// Why no file could be made.
#[derive(Debug, thiserror::Error)]
pub enum PictureError {
    /// The pixels do not have the promised size.
    #[error("a picture of {width} × {height} needs {expected} bytes of pixels, but there are {found}")]
    Size {
        /// Pixels a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Bytes needed.
        expected: u64,
        /// Bytes there.
        found: u64,
    },
    /// The encoder refused.
    #[error("cannot encode the picture as png: {0}")]
    Encode(#[from] png::EncodingError),
}

/// Encodes image `index` of a request. Equal inputs give equal bytes. Takes milliseconds of computing: not for an
/// async thread.
///
/// # Errors
/// Pixels of another size than they say.
pub fn encode(pixels: &Pixels, request: &Admitted, index: u32) -> Result<Picture, PictureError> {
    let expected = 3 * u64::from(pixels.width) * u64::from(pixels.height);
    if pixels.rgb.len() as u64 != expected {
        let Pixels { width, height, ref rgb } = *pixels;
        return Err(PictureError::Size { width, height, expected, found: rgb.len() as u64 });
    }
    let parameters = parameters(request, index);
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, pixels.width, pixels.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    // A tEXt chunk is Latin-1; readers take the same keyword from an iTXt chunk where the text needs Unicode.
    if parameters.chars().all(|c| u32::from(c) < 256) {
        encoder.add_text_chunk("parameters".into(), parameters.clone())?;
    } else {
        encoder.add_itxt_chunk("parameters".into(), parameters.clone())?;
    }
    encoder.add_itxt_chunk("sd".into(), record(request, index).to_string())?;
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels.rgb)?;
    writer.finish()?;
    Ok(Picture { png, parameters })
}

/// The text that the web UIs write into their pictures and read back from them.
pub fn parameters(request: &Admitted, index: u32) -> String {
    let mut text = request.prompt.clone();
    if !request.negative_prompt.is_empty() {
        let _ = write!(text, "\nNegative prompt: {}", request.negative_prompt);
    }
    let mut fields: Vec<(&str, String)> = vec![("Steps", request.steps.to_string())];
    let sampler = match request.sampler {
        Sampler::Unspecified => request.model.report.scheduler_sampler().map(sampler_title),
        named => Some(sampler_title(named)),
    };
    if let Some(sampler) = sampler {
        fields.push(("Sampler", sampler.into()));
    }
    if let Some(schedule) = schedule_title(request.schedule) {
        fields.push(("Schedule type", schedule.into()));
    }
    fields.push(("CFG scale", request.guidance_scale.to_string()));
    fields.push(("Seed", request.image_seed(index).to_string()));
    fields.push(("Size", format!("{}x{}", request.width, request.height)));
    fields.push(("Model", request.model.name.clone()));
    if let Some(initial) = &request.initial {
        fields.push(("Denoising strength", initial.strength.to_string()));
    }
    if request.clip_skip > 0 {
        fields.push(("Clip skip", request.clip_skip.to_string()));
    }
    if request.eta != 0.0 {
        fields.push(("Eta", request.eta.to_string()));
    }
    if request.guidance_rescale != 0.0 {
        fields.push(("Guidance rescale", request.guidance_rescale.to_string()));
    }
    if let Some(zero) = request.zero_terminal_snr {
        fields.push(("Zero terminal SNR", (if zero { "True" } else { "False" }).into()));
    }
    if !request.emphasis {
        fields.push(("Emphasis", "None".into()));
    }
    fields.push(("Version", concat!("sdd ", env!("CARGO_PKG_VERSION")).into()));
    let line: Vec<String> = fields.iter().map(|(name, value)| format!("{name}: {}", quote(value))).collect();
    let _ = write!(text, "\n{}", line.join(", "));
    text
}

/// Quotes a value the way the web UIs do: as JSON where it has a character that ends or splits a value.
fn quote(value: &str) -> Cow<'_, str> {
    if value.contains([',', '\n', ':']) { Value::from(value).to_string().into() } else { value.into() }
}

/// The sampler as the web UIs spell it.
fn sampler_title(sampler: Sampler) -> &'static str {
    match sampler {
        Sampler::Unspecified => "",
        Sampler::Ddim => "DDIM",
        Sampler::Euler => "Euler",
        Sampler::EulerAncestral => "Euler a",
        Sampler::Heun => "Heun",
        Sampler::Dpmpp2m => "DPM++ 2M",
        Sampler::Dpmpp2mSde => "DPM++ 2M SDE",
        Sampler::Lcm => "LCM",
        Sampler::Unipc => "UniPC",
    }
}

/// The schedule as the web UIs spell it, where they have it; absent: the model's own.
fn schedule_title(schedule: Schedule) -> Option<&'static str> {
    Some(match schedule {
        Schedule::Unspecified => return None,
        Schedule::Leading => "Leading",
        Schedule::Trailing => "Trailing",
        Schedule::Linspace => "Linspace",
        Schedule::Karras => "Karras",
        Schedule::Exponential => "Exponential",
        Schedule::SgmUniform => "SGM Uniform",
    })
}

/// Everything that decides the picture, as JSON. Image files are named by length and SHA-256.
fn record(request: &Admitted, index: u32) -> Value {
    let file = |file: &ImageFile| json!({"bytes": file.bytes().len(), "sha256": file.sha256()});
    let initial = request.initial.as_ref();
    let NumericPlan { version, device, dtype, backend, batch, vae_tile } = &request.plan;
    json!({
        "program": concat!("sdd ", env!("CARGO_PKG_VERSION")),
        "request": {
            "model": request.model.name,
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "width": request.width,
            "height": request.height,
            "steps": request.steps,
            "guidance_scale": request.guidance_scale,
            "seed": request.image_seed(index),
            "count": 1,
            "sampler": sampler_name(request.sampler),
            "schedule": schedule_name(request.schedule),
            "zero_terminal_snr": request.zero_terminal_snr,
            "eta": request.eta,
            "guidance_rescale": request.guidance_rescale,
            "emphasis": if request.emphasis { "web_ui" } else { "off" },
            "clip_skip": request.clip_skip,
            "init_image": initial.map(|initial| file(&initial.image)),
            "mask": initial.and_then(|initial| initial.mask.as_ref()).map(file),
            "strength": initial.map(|initial| initial.strength),
        },
        "seed": request.image_seed(index),
        "model": {"name": request.model.name, "fingerprint": request.model.report.fingerprint},
        "plan": {
            "version": version,
            "device": device,
            "dtype": dtype,
            "backend": backend,
            "batch": batch,
            "vae_tile": vae_tile,
        },
    })
}

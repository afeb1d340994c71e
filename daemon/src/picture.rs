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

/// Encodes image `index` of a request; `degraded` says why it is not what the plan promised at admission, where it is not.
/// Equal inputs give equal bytes. Takes milliseconds of computing: not for an
/// async thread.
///
/// # Errors
/// Pixels of another size than they say.
pub fn encode(pixels: &Pixels, request: &Admitted, index: u32, degraded: &str) -> Result<Picture, PictureError> {
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
    let mut record = record(request, index);
    if !degraded.is_empty() {
        record["degraded"] = degraded.into();
    }
    encoder.add_itxt_chunk("sd".into(), record.to_string())?;
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
    let NumericPlan { version, device, dtype, backend, batch, vae_tile, vae_tile_overlap, vae_dtype } = &request.plan;
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
            "vae_tile": vae_tile, "vae_tile_overlap": vae_tile_overlap, "vae_dtype": vae_dtype,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::fixtures;
    use crate::jobs::request::InitialImage;
    use std::collections::BTreeMap;

    fn pixels(width: u32, height: u32) -> Pixels {
        let rgb = (0..3 * width * height).map(|i| (i * 7 % 251) as u8).collect();
        Pixels { width, height, rgb }
    }

    /// Text chunks as a reader finds them: keyword, kind, text.
    fn chunks(png: &[u8]) -> Vec<(String, &'static str, String)> {
        let reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let info = reader.info();
        let latin = info.uncompressed_latin1_text.iter().map(|c| (c.keyword.clone(), "tEXt", c.text.clone()));
        let unicode = info.utf8_text.iter().map(|c| (c.keyword.clone(), "iTXt", c.get_text().unwrap()));
        latin.chain(unicode).collect()
    }

    /// Reads a parameters text the way the web UIs do: the last line holds `name: value` pairs, a value being a JSON string
    /// or everything up to the next comma; of the lines before, what follows "Negative prompt:" is the negative prompt.
    fn read_back(text: &str) -> (String, String, BTreeMap<String, String>) {
        let mut lines: Vec<&str> = text.trim().split('\n').collect();
        let mut rest = lines.pop().unwrap();
        let mut fields = BTreeMap::new();
        while !rest.is_empty() {
            let (name, value) = rest.split_once(':').unwrap();
            let value = value.trim_start();
            let (value, after) = if value.starts_with('"') {
                let mut stream = serde_json::Deserializer::from_str(value).into_iter::<String>();
                let text = stream.next().unwrap().unwrap();
                (text, &value[stream.byte_offset()..])
            } else {
                let end = value.find(',').unwrap_or(value.len());
                (value[..end].to_owned(), &value[end..])
            };
            fields.insert(name.trim().to_owned(), value);
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        let (mut prompt, mut negative, mut in_negative) = (Vec::new(), Vec::new(), false);
        for line in lines {
            match line.trim().strip_prefix("Negative prompt:") {
                Some(first) => {
                    in_negative = true;
                    negative.push(first.trim());
                }
                None if in_negative => negative.push(line.trim()),
                None => prompt.push(line.trim()),
            }
        }
        (prompt.join("\n"), negative.join("\n"), fields)
    }

    #[test]
    fn the_web_uis_read_the_parameters_back() {
        let mut request = fixtures::admitted();
        request.prompt = "a red heart, (shiny:1.2)\nsecond line".into();
        request.negative_prompt = "blurry, bad: very".into();
        request.sampler = Sampler::Dpmpp2m;
        request.schedule = Schedule::Karras;
        request.clip_skip = 2;
        let picture = encode(&pixels(16, 8), &request, 2, "").unwrap();
        let (prompt, negative, fields) = read_back(&picture.parameters);
        assert_eq!(prompt, request.prompt);
        assert_eq!(negative, request.negative_prompt);
        let expected = [
            ("Steps", "20"),
            ("Sampler", "DPM++ 2M"),
            ("Schedule type", "Karras"),
            ("CFG scale", "4"),
            ("Seed", "3"),
            ("Size", "256x192"),
            ("Model", "default"),
            ("Clip skip", "2"),
        ];
        for (name, value) in expected {
            assert_eq!(fields.get(name).map(String::as_str), Some(value), "{name} in {}", picture.parameters);
        }
        let first = "a red heart, (shiny:1.2)\nsecond line\nNegative prompt: blurry, bad: very\nSteps: 20, Sampler: DPM++ 2M, \
                     Schedule type: Karras, CFG scale: 4, Seed: 3, Size: 256x192, Model: default, Clip skip: 2, Version: sdd ";
        assert!(picture.parameters.starts_with(first), "{}", picture.parameters);
    }

    #[test]
    fn a_picture_that_is_not_what_was_promised_says_why() {
        let degraded = |why: &str| {
            let picture = encode(&pixels(8, 8), &fixtures::admitted(), 0, why).unwrap();
            String::from_utf8_lossy(&picture.png).contains("\"degraded\":\"made in tiles\"")
        };
        assert!(degraded("made in tiles") && !degraded(""));
    }

    #[test]
    fn a_value_with_a_comma_is_quoted_and_read_back_whole() {
        let mut request = fixtures::admitted();
        request.model = std::sync::Arc::new(crate::models::Model {
            name: "mine, \"the best\": v2".into(),
            ..crate::models::Model::clone(&request.model)
        });
        let (_, _, fields) = read_back(&parameters(&request, 0));
        assert_eq!(fields["Model"], "mine, \"the best\": v2");
        assert_eq!(fields["Steps"], "20");
    }

    #[test]
    fn latin_text_goes_into_a_text_chunk_and_all_else_into_an_international_one() {
        let mut request = fixtures::admitted();
        for (prompt, kind) in [("café à la crème", "tEXt"), ("a 🍕 and 猫", "iTXt")] {
            request.prompt = prompt.into();
            let picture = encode(&pixels(8, 8), &request, 0, "").unwrap();
            let chunks = chunks(&picture.png);
            let (_, found, text) = chunks.iter().find(|(keyword, _, _)| keyword == "parameters").unwrap();
            assert_eq!((*found, text), (kind, &picture.parameters));
            assert!(text.starts_with(prompt));
        }
    }

    #[test]
    fn the_record_holds_the_whole_request_and_no_image_bytes() {
        let mut request = fixtures::admitted();
        request.count = 4;
        let (image, mask) = (ImageFile::new(&[7; 1000]), ImageFile::new(b"mask"));
        request.initial = Some(InitialImage { image: image.clone(), mask: Some(mask), strength: 0.75 });
        let picture = encode(&pixels(8, 8), &request, 1, "").unwrap();
        let chunks = chunks(&picture.png);
        let (_, kind, text) = chunks.iter().find(|(keyword, _, _)| keyword == "sd").unwrap();
        assert_eq!(*kind, "iTXt");
        let record: Value = serde_json::from_str(text).unwrap();
        assert_eq!(record["request"]["prompt"], "a red heart");
        assert_eq!(record["request"]["seed"], 2);
        assert_eq!(record["request"]["count"], 1);
        assert_eq!(record["request"]["strength"], 0.75);
        assert_eq!(record["request"]["init_image"], json!({"bytes": 1000, "sha256": image.sha256()}));
        assert_eq!(record["request"]["mask"]["bytes"], 4);
        assert_eq!(record["seed"], 2);
        assert_eq!(record["model"]["fingerprint"], request.model.report.fingerprint);
        assert_eq!(record["plan"]["dtype"], "f32");
        assert!(picture.parameters.contains("Denoising strength: 0.75"));
    }

    #[test]
    fn image_two_of_a_call_is_the_file_of_a_call_with_its_seed() {
        let (mut two, mut one) = (fixtures::admitted(), fixtures::admitted());
        (two.count, two.seed) = (2, 41);
        (one.count, one.seed) = (1, 42);
        let (of_two, of_one) =
            (encode(&pixels(24, 16), &two, 1, "").unwrap(), encode(&pixels(24, 16), &one, 0, "").unwrap());
        assert!(of_two == of_one);
    }

    #[test]
    fn the_pixels_survive() {
        let pixels = pixels(40, 24);
        let picture = encode(&pixels, &fixtures::admitted(), 0, "").unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&picture.png)).read_info().unwrap();
        let mut read = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut read).unwrap();
        assert_eq!((info.width, info.height, info.color_type), (40, 24, png::ColorType::Rgb));
        assert!(read == pixels.rgb);

        let short = Pixels { width: 41, ..pixels };
        let error = encode(&short, &fixtures::admitted(), 0, "").unwrap_err();
        assert!(matches!(error, PictureError::Size { expected: 2952, found: 2880, .. }), "{error}");
    }
}

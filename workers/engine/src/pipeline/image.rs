//! Image files as a request brings them: read with limits, brought to size, turned into what the networks take.

use std::io::Cursor;

use candle_core::{Device, Tensor};
use image::imageops::FilterType;
use image::{DynamicImage, GrayImage, ImageDecoder as _, ImageReader, Limits, RgbImage};

use super::PipelineError;

/// Longest edge of an image file, in pixels.
const MAX_EDGE: u32 = 16_384;
/// Bytes that decoding one file may take.
const MAX_DECODED: u64 = 1 << 30;

fn read(bytes: &[u8], what: &str) -> Result<DynamicImage, PipelineError> {
    let bad = |reason: String| {
        PipelineError::Request(format!("the {what} cannot be read: {reason}; PNG, JPEG and WebP files are supported"))
    };
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|e| bad(e.to_string()))?;
    let mut limits = Limits::default();
    (limits.max_image_width, limits.max_image_height) = (Some(MAX_EDGE), Some(MAX_EDGE));
    limits.max_alloc = Some(MAX_DECODED);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|e| bad(e.to_string()))?;
    // Cameras store how the picture is to be turned; diffusers' loader applies it as well.
    let orientation = decoder.orientation().map_err(|e| bad(e.to_string()))?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(|e| bad(e.to_string()))?;
    image.apply_orientation(orientation);
    if image.width() == 0 || image.height() == 0 {
        return Err(bad("it has no pixels".into()));
    }
    Ok(image)
}

/// A picture at the size that is generated.
#[derive(Debug, Clone)]
pub struct SourceImage {
    pixels: RgbImage,
}

impl SourceImage {
    /// Reads an image file and brings it to `width` × `height` (Lanczos), transparency ignored, as diffusers does.
    ///
    /// # Errors
    /// The file cannot be read as an image.
    pub fn read(bytes: &[u8], width: usize, height: usize) -> Result<Self, PipelineError> {
        let mut pixels = read(bytes, "initial image")?.into_rgb8();
        let (width, height) = (width as u32, height as u32);
        if pixels.dimensions() != (width, height) {
            pixels = image::imageops::resize(&pixels, width, height, FilterType::Lanczos3);
        }
        Ok(Self { pixels })
    }

    /// The picture as the autoencoder takes it: `[1, 3, height, width]` in -1 to 1, f32.
    ///
    /// # Errors
    /// Only where memory fails.
    pub fn tensor(&self) -> Result<Tensor, PipelineError> {
        let (width, height) = (self.pixels.width() as usize, self.pixels.height() as usize);
        let raw = self.pixels.as_raw();
        let mut values = Vec::with_capacity(raw.len());
        for channel in 0..3 {
            values.extend(raw[channel..].iter().step_by(3).map(|byte| f32::from(*byte) / 255.0 * 2.0 - 1.0));
        }
        Ok(Tensor::from_vec(values, (1, 3, height, width), &Device::Cpu)?)
    }
}

/// Where a picture is painted anew, at the size that is generated.
#[derive(Debug, Clone)]
pub struct SourceMask {
    /// 1 where it is painted anew, else 0; row-major.
    values: Vec<f32>,
    width: usize,
    height: usize,
}

impl SourceMask {
    /// Reads an image file as a mask: brought to size, grey, white (at least half) is painted anew.
    ///
    /// # Errors
    /// The file cannot be read as an image.
    pub fn read(bytes: &[u8], width: usize, height: usize) -> Result<Self, PipelineError> {
        let rgb = read(bytes, "mask")?.into_rgb8();
        // ITU-R 601 luma in 16-bit fixed point, as Pillow converts to grey.
        let mut grey = GrayImage::from_fn(rgb.width(), rgb.height(), |x, y| {
            let [r, g, b] = rgb.get_pixel(x, y).0.map(u32::from);
            image::Luma([((r * 19_595 + g * 38_470 + b * 7_471 + 0x8000) >> 16) as u8])
        });
        if grey.dimensions() != (width as u32, height as u32) {
            grey = image::imageops::resize(&grey, width as u32, height as u32, FilterType::Lanczos3);
        }
        let values = grey.as_raw().iter().map(|byte| if f32::from(*byte) / 255.0 < 0.5 { 0.0 } else { 1.0 }).collect();
        Ok(Self { values, width, height })
    }

    /// The mask for latents: `[1, 1, height / scale, width / scale]`, the nearest pixel of each cell as torch's
    /// `interpolate` picks it.
    ///
    /// # Errors
    /// Only where memory fails.
    pub fn latent_mask(&self, scale: usize) -> Result<Tensor, PipelineError> {
        let (rows, columns) = (self.height / scale, self.width / scale);
        let values: Vec<f32> = (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row * scale, column * scale)))
            .map(|(y, x)| self.values[y * self.width + x])
            .collect();
        Ok(Tensor::from_vec(values, (1, 1, rows, columns), &Device::Cpu)?)
    }

    /// The picture with the masked part grey (zero in -1 to 1), `[1, 3, height, width]`.
    ///
    /// # Errors
    /// The picture has another size.
    pub fn masked(&self, image: &SourceImage) -> Result<Tensor, PipelineError> {
        let kept: Vec<f32> = self.values.iter().map(|value| if *value < 0.5 { 1.0 } else { 0.0 }).collect();
        let kept = Tensor::from_vec(kept, (1, 1, self.height, self.width), &Device::Cpu)?;
        Ok(image.tensor()?.broadcast_mul(&kept)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn png(width: u32, height: u32, pixel: impl Fn(u32, u32) -> [u8; 3]) -> Vec<u8> {
        let image = RgbImage::from_fn(width, height, |x, y| image::Rgb(pixel(x, y)));
        let mut bytes = Vec::new();
        image.write_to(&mut Cursor::new(&mut bytes), image::ImageFormat::Png).unwrap();
        bytes
    }

    #[test]
    fn a_picture_becomes_planes_from_minus_one_to_one() {
        let bytes = png(16, 8, |x, y| [(x * 17) as u8, (y * 36) as u8, 255]);
        let tensor = SourceImage::read(&bytes, 16, 8).unwrap().tensor().unwrap();
        assert_eq!(tensor.dims(), [1, 3, 8, 16]);
        let planes = tensor.squeeze(0).unwrap().to_vec3::<f32>().unwrap();
        assert_eq!(planes[0][3][0], -1.0);
        assert_eq!(planes[0][3][15], 1.0);
        assert_eq!(planes[1][2][5], 72.0 / 255.0 * 2.0 - 1.0);
        assert_eq!(planes[2][7][9], 1.0);
    }

    #[test]
    fn a_mask_is_binary_and_the_nearest_pixel_counts_in_latents() {
        let bytes = png(16, 16, |x, _| if x < 8 { [0, 0, 0] } else { [130, 130, 130] });
        let mask = SourceMask::read(&bytes, 16, 16).unwrap();
        let latent = mask.latent_mask(8).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(latent, [0.0, 1.0, 0.0, 1.0]);
        let image = SourceImage::read(&png(16, 16, |_, _| [255, 255, 255]), 16, 16).unwrap();
        let masked = mask.masked(&image).unwrap().squeeze(0).unwrap().to_vec3::<f32>().unwrap();
        assert_eq!((masked[0][0][0], masked[0][0][15]), (1.0, 0.0));
    }

    #[test]
    fn other_sizes_are_brought_to_size_and_other_files_are_refused() {
        let bytes = png(10, 30, |_, _| [200, 100, 50]);
        let tensor = SourceImage::read(&bytes, 16, 8).unwrap().tensor().unwrap();
        assert_eq!(tensor.dims(), [1, 3, 8, 16]);
        for (bad, what) in [(&b"GIF89a not supported"[..], "gif"), (&bytes[..40], "truncated"), (&b""[..], "empty")] {
            let error = SourceImage::read(bad, 8, 8).unwrap_err();
            assert!(error.to_string().contains("initial image"), "{what}: {error}");
        }
        // A header that promises more pixels than anybody should decode.
        let mut huge = png(8, 8, |_, _| [0, 0, 0]);
        huge[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        assert!(SourceMask::read(&huge, 8, 8).is_err());
    }
}

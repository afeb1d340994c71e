//! What a PNG says of itself.

use std::collections::BTreeMap;

/// A decoded picture and its text chunks.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// RGB, row-major.
    pub pixels: Vec<u8>,
    /// tEXt and iTXt chunks by keyword.
    pub text: BTreeMap<String, String>,
}

/// Decodes a PNG of 8-bit RGB.
///
/// # Errors
/// It is not one.
pub fn read(bytes: &[u8]) -> anyhow::Result<Picture> {
    let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info()?;
    let size = reader.output_buffer_size().ok_or_else(|| anyhow::anyhow!("too large"))?;
    let mut pixels = vec![0; size];
    let frame = reader.next_frame(&mut pixels)?;
    reader.finish()?;
    anyhow::ensure!(frame.color_type == png::ColorType::Rgb, "color type {:?}", frame.color_type);
    let info = reader.info();
    let mut text = BTreeMap::new();
    for chunk in &info.uncompressed_latin1_text {
        text.insert(chunk.keyword.clone(), chunk.text.clone());
    }
    for chunk in &info.utf8_text {
        text.insert(chunk.keyword.clone(), chunk.get_text()?);
    }
    Ok(Picture { width: info.width, height: info.height, pixels, text })
}

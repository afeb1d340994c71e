//! What is read before a job is submitted: prompts and picture files, with limits.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::report::Trouble;

/// Most bytes of a prompt; the daemon's own limit is lower.
const PROMPT_LIMIT: u64 = 1 << 20;
/// Most bytes of a picture file; a request holds two and must stay below the message limit.
const IMAGE_LIMIT: u64 = 30 << 20;

/// Reads a prompt from a file, or from stdin for `-`, less the line end that editors and echo add.
pub(super) fn prompt(path: &Path) -> Result<String, Trouble> {
    let (name, bytes) = if path == Path::new("-") {
        ("stdin".to_owned(), limited(io::stdin().lock(), PROMPT_LIMIT))
    } else {
        (path.display().to_string(), File::open(path).and_then(|file| limited(file, PROMPT_LIMIT)))
    };
    let bytes = bytes.map_err(|error| Trouble::data(format!("cannot read the prompt from {name}: {error}")))?;
    let bytes = bytes
        .ok_or_else(|| Trouble::data(format!("the prompt in {name} has more than {PROMPT_LIMIT} bytes: shorten it")))?;
    let text = String::from_utf8(bytes)
        .map_err(|_| Trouble::data(format!("the prompt in {name} is not UTF-8 text: convert it with iconv")))?;
    Ok(text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t)).to_owned())
}

/// Reads a picture file as it is, once it is known to be one that the daemon can read.
pub(super) fn image(path: &Path, what: &str) -> Result<Vec<u8>, Trouble> {
    let name = path.display();
    let bytes = File::open(path)
        .and_then(|file| limited(file, IMAGE_LIMIT))
        .map_err(|error| Trouble::data(format!("cannot read {what} {name}: {error}")))?
        .ok_or_else(|| {
            let limit = super::human::bytes(IMAGE_LIMIT);
            Trouble::data(format!("{what} {name} has more than {limit}: scale it down first"))
        })?;
    match image::guess_format(&bytes) {
        Ok(image::ImageFormat::Png | image::ImageFormat::Jpeg | image::ImageFormat::WebP) => {}
        Ok(format) => {
            return Err(Trouble::data(format!("{what} {name} is {format:?}: convert it to PNG, JPEG or WebP")));
        }
        Err(_) => return Err(Trouble::data(format!("{what} {name} is no picture file: give a PNG, JPEG or WebP"))),
    }
    let reader = image::ImageReader::new(io::Cursor::new(&bytes)).with_guessed_format();
    let size = reader.map_err(|error| error.to_string()).and_then(|r| r.into_dimensions().map_err(|e| e.to_string()));
    match size {
        Ok(_) => Ok(bytes),
        Err(error) => Err(Trouble::data(format!("{what} {name} is damaged: {error}"))),
    }
}

/// All bytes, or `None` where there are more than `limit`.
fn limited(reader: impl Read, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    reader.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_file_loses_its_last_line_end_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.txt");
        std::fs::write(&file, " a cat,\nsitting\r\n").unwrap();
        assert_eq!(prompt(&file).unwrap(), " a cat,\nsitting");
        std::fs::write(&file, [0xff]).unwrap();
        assert!(format!("{:?}", prompt(&file).unwrap_err()).contains("UTF-8"));
        std::fs::write(&file, vec![b'x'; PROMPT_LIMIT as usize + 1]).unwrap();
        assert!(format!("{:?}", prompt(&file).unwrap_err()).contains("more than"));
        assert!(format!("{:?}", prompt(&dir.path().join("absent")).unwrap_err()).contains("absent"));
    }

    #[test]
    fn only_pictures_that_the_daemon_reads_are_sent() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("i");
        let mut png = io::Cursor::new(Vec::new());
        image::DynamicImage::new_rgb8(8, 8).write_to(&mut png, image::ImageFormat::Png).unwrap();
        let png = png.into_inner();
        std::fs::write(&file, &png).unwrap();
        assert_eq!(image(&file, "initial picture").unwrap(), png);
        for (bytes, part) in
            [(&png[..20], "damaged"), (&b"hello"[..], "no picture"), (&b"GIF89a\x01\0\x01\0\0\0\0"[..], "Gif")]
        {
            std::fs::write(&file, bytes).unwrap();
            let error = image(&file, "mask").unwrap_err();
            assert_eq!(error.exit, sd_proto::exit::ProgramExit::Data);
            assert!(format!("{error:?}").contains(part), "{error:?}");
        }
    }
}

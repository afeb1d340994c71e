//! What picture files are called, and how they are written without overwriting anything unasked.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::report::Trouble;

/// Longest part of a name that comes from a prompt or a model, in characters and in bytes.
const SLUG_CHARS: usize = 40;
const SLUG_BYTES: usize = 120;
/// How many taken names are passed over before something else must be wrong.
const MOST_TAKEN: u32 = 100_000;

/// What stands in a name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Facts {
    pub(super) prompt: String,
    pub(super) model: String,
    /// `2026-01-31`, local.
    pub(super) date: String,
    /// `153059`, local.
    pub(super) time: String,
}

impl Facts {
    /// With the present local time.
    pub(super) fn now(prompt: &str, model: &str) -> Self {
        let now = chrono::Local::now();
        Self {
            prompt: prompt.into(),
            model: model.into(),
            date: now.format("%Y-%m-%d").to_string(),
            time: now.format("%H%M%S").to_string(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Literal(String),
    Field { field: Field, width: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Prompt,
    Seed,
    Model,
    Date,
    Time,
    Index,
    Number,
}

const FIELDS: [(&str, Field); 7] = [
    ("prompt", Field::Prompt),
    ("seed", Field::Seed),
    ("model", Field::Model),
    ("date", Field::Date),
    ("time", Field::Time),
    ("index", Field::Index),
    ("n", Field::Number),
];

/// What to do about a file that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Existing {
    /// Take the next free name: nobody asked for this very name.
    NextFree,
    /// Refuse before anything is computed.
    Refuse,
    /// Replace it, as asked.
    Replace,
}

/// How picture files are named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Naming {
    pieces: Vec<Piece>,
    existing: Existing,
}

/// A picture that was written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) path: PathBuf,
    /// The name asked for was taken meanwhile.
    pub(super) moved: bool,
}

impl Naming {
    /// Reads `-o`: a file, a pattern or a folder; absent: a sensible name in this folder.
    pub(super) fn parse(output: Option<&str>, force: bool, count: u32) -> Result<Self, Trouble> {
        let free = if force { Existing::Replace } else { Existing::NextFree };
        let default = "{prompt}-{seed}.png";
        let (pattern, existing) = match output {
            None => (default.to_owned(), free),
            Some("") => return Err(Trouble::usage("the output name is empty: leave -o out for the default name")),
            Some(text) if text.ends_with('/') || Path::new(text).is_dir() => {
                // A folder's own braces are no fields.
                let folder = text.trim_end_matches('/').replace('{', "{{").replace('}', "}}");
                (format!("{folder}/{default}"), free)
            }
            Some(text) => (text.to_owned(), if force { Existing::Replace } else { Existing::Refuse }),
        };
        let mut pieces = parse_pattern(&with_extension(&pattern)?)?;
        let distinct = |piece: &Piece| match piece {
            Piece::Field { field: Field::Seed | Field::Index | Field::Number, .. } => true,
            Piece::Field { field: Field::Prompt | Field::Model | Field::Date | Field::Time, .. }
            | Piece::Literal(_) => false,
        };
        if count > 1 && !pieces.iter().any(distinct) {
            number_before_extension(&mut pieces);
        }
        Ok(Self { pieces, existing })
    }

    /// Whether the model's name is part of the file's.
    pub(super) fn needs_model(&self) -> bool {
        self.pieces.iter().any(|piece| matches!(piece, Piece::Field { field: Field::Model, .. }))
    }

    fn path(&self, facts: &Facts, index: u32, seed: u64) -> PathBuf {
        let mut text = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Literal(literal) => text.push_str(literal),
                Piece::Field { field, width } => text.push_str(&match field {
                    Field::Prompt => slug(&facts.prompt),
                    Field::Model => slug(facts.model.rsplit('/').find(|part| !part.is_empty()).unwrap_or("model")),
                    Field::Seed => format!("{seed:0width$}"),
                    Field::Date => facts.date.clone(),
                    Field::Time => facts.time.clone(),
                    Field::Index => format!("{index:0width$}"),
                    Field::Number => format!("{:0width$}", u64::from(index) + 1),
                }),
            }
        }
        text.into()
    }

    /// Checks before anything is computed that the files can be written: folders exist and are writable, and no file
    /// would be overwritten unasked.
    pub(super) fn check(&self, facts: &Facts, first_seed: u64, count: u32) -> Result<(), Trouble> {
        let mut checked = None;
        for index in 0..count {
            let path = self.path(facts, index, first_seed.wrapping_add(u64::from(index)));
            let folder = match path.parent() {
                Some(folder) if folder != Path::new("") => folder.to_owned(),
                _ => PathBuf::from("."),
            };
            if checked.as_ref() != Some(&folder) {
                check_folder(&folder)?;
                checked = Some(folder);
            }
            let found = fs::symlink_metadata(&path);
            if found.as_ref().is_ok_and(|m| m.is_dir()) {
                return Err(Trouble::output(format!("{} is a folder", path.display())));
            }
            if self.existing == Existing::Refuse && found.is_ok() {
                let name = path.display();
                return Err(Trouble::output(format!(
                    "{name} exists: choose another name, or overwrite it with --force"
                )));
            }
        }
        Ok(())
    }

    /// Writes a picture.
    pub(super) fn write(&self, facts: &Facts, index: u32, seed: u64, png: &[u8]) -> Result<Written, Trouble> {
        let path = self.path(facts, index, seed);
        let failed =
            |path: &Path, error: io::Error| Trouble::output(format!("cannot write {}: {error}", path.display()));
        if self.existing == Existing::Replace {
            // Beside it and then renamed, so that a full disk does not cost the old picture.
            let mut part = path.clone().into_os_string();
            part.push(format!(".part-{}", std::process::id()));
            let part = PathBuf::from(part);
            write_new(&part, png).map_err(|error| failed(&path, error))?;
            if let Err(error) = fs::rename(&part, &path) {
                let _ = fs::remove_file(&part);
                return Err(failed(&path, error));
            }
            return Ok(Written { path, moved: false });
        }
        for attempt in 1..MOST_TAKEN {
            let candidate = if attempt == 1 { path.clone() } else { numbered(&path, attempt) };
            match write_new(&candidate, png) {
                // A picture that was computed is kept, even if its name was taken meanwhile.
                Ok(()) => {
                    return Ok(Written { path: candidate, moved: attempt > 1 && self.existing == Existing::Refuse });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failed(&candidate, error)),
            }
        }
        Err(Trouble::output(format!("{} and {MOST_TAKEN} names after it are taken", path.display())))
    }
}

fn check_folder(folder: &Path) -> Result<(), Trouble> {
    let shown = folder.display();
    if !folder.is_dir() {
        return Err(Trouble::output(format!("folder {shown} does not exist: make it with mkdir -p")));
    }
    nix::unistd::access(folder, nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK)
        .map_err(|errno| Trouble::output(format!("cannot write into folder {shown}: {}", errno.desc())))
}

/// Creates a file that must not exist; a half-written one is removed.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let written = file.write_all(bytes);
    if written.is_err() {
        let _ = fs::remove_file(path);
    }
    written
}

/// `a.png` → `a-2.png`.
fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{number}"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

fn with_extension(pattern: &str) -> Result<String, Trouble> {
    let name = pattern.rsplit('/').next().unwrap_or(pattern);
    match name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()) {
        Some(extension) if extension == "png" => Ok(pattern.into()),
        Some(extension)
            if ["jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "avif", "jxl"].contains(&&*extension) =>
        {
            Err(Trouble::usage(format!("pictures are written as PNG, not {extension}: end the name in .png")))
        }
        // A dot in the name itself: "v1.5".
        Some(_) | None => Ok(format!("{pattern}.png")),
    }
}

fn parse_pattern(pattern: &str) -> Result<Vec<Piece>, Trouble> {
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("{{").or_else(|| rest.strip_prefix("}}")) {
            literal.push(c);
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            let (inside, after) = after.split_once('}').ok_or_else(|| {
                Trouble::usage(format!("{{ without }} in output name {pattern:?}: write {{{{ for a brace itself"))
            })?;
            if !literal.is_empty() {
                pieces.push(Piece::Literal(std::mem::take(&mut literal)));
            }
            pieces.push(parse_field(inside)?);
            rest = after;
        } else {
            literal.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    if !literal.is_empty() {
        pieces.push(Piece::Literal(literal));
    }
    Ok(pieces)
}

fn parse_field(inside: &str) -> Result<Piece, Trouble> {
    let (name, width) = inside.split_once(':').map_or((inside, None), |(name, width)| (name, Some(width)));
    let Some((_, field)) = FIELDS.into_iter().find(|(known, _)| *known == name) else {
        let known: Vec<String> = FIELDS.iter().map(|(name, _)| format!("{{{name}}}")).collect();
        return Err(Trouble::usage(format!("unknown {{{name}}} in the output name: use {}", known.join(", "))));
    };
    let width = match width {
        None => 0,
        Some(text) => text.parse().ok().filter(|width| *width <= 20).ok_or_else(|| {
            Trouble::usage(format!("{{{inside}}} in the output name: after the colon stands a width such as 03"))
        })?,
    };
    Ok(Piece::Field { field, width })
}

fn number_before_extension(pieces: &mut Vec<Piece>) {
    let number = Piece::Field { field: Field::Number, width: 0 };
    // `with_extension` has seen to it that the last piece ends in the extension.
    let Some(Piece::Literal(last)) = pieces.pop() else { return };
    let stem = &last[..last.len() - ".png".len()];
    pieces.push(Piece::Literal(format!("{stem}-")));
    pieces.push(number);
    pieces.push(Piece::Literal(last[stem.len()..].to_owned()));
}

/// A prompt as part of a file name: lower case words joined by "-", emphasis weights left out.
fn slug(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_alphanumeric() {
            word.extend(c.to_lowercase());
            continue;
        }
        if !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
        if c == ':' {
            while chars.next_if(|c| c.is_ascii_digit() || *c == '.').is_some() {}
        }
    }
    words.extend((!word.is_empty()).then_some(word));
    let mut slug = String::new();
    for word in words {
        let longer =
            slug.chars().count() + 1 + word.chars().count() > SLUG_CHARS || slug.len() + 1 + word.len() > SLUG_BYTES;
        if longer && !slug.is_empty() {
            break;
        }
        if !slug.is_empty() {
            slug.push('-');
        }
        // One word may be longer than the room (a text without spaces).
        for c in word.chars().take(SLUG_CHARS) {
            if slug.len() + c.len_utf8() <= SLUG_BYTES {
                slug.push(c);
            }
        }
    }
    if slug.is_empty() { "picture".into() } else { slug }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            prompt: "A (red:1.2) heart, [best]".into(),
            model: "/models/sd-turbo".into(),
            date: "2026-01-31".into(),
            time: "153059".into(),
        }
    }

    fn path(output: Option<&str>, count: u32, index: u32) -> String {
        Naming::parse(output, false, count).unwrap().path(&facts(), index, 1234).display().to_string()
    }

    #[test]
    fn names_follow_the_pattern() {
        assert_eq!(path(None, 1, 0), "a-red-heart-best-1234.png");
        assert_eq!(path(Some("x"), 1, 0), "x.png");
        assert_eq!(path(Some("v1.5"), 1, 0), "v1.5.png");
        assert_eq!(path(Some("X.PNG"), 1, 0), "X.PNG");
        assert_eq!(path(Some("{model}/{date}-{time}-{n:03}.png"), 2, 1), "sd-turbo/2026-01-31-153059-002.png");
        assert_eq!(path(Some("{index}_{seed}"), 2, 1), "1_1234.png");
        assert_eq!(path(Some("{{x}}"), 1, 0), "{x}.png");
        assert_eq!(path(Some("same.png"), 3, 2), "same-3.png");
        assert_eq!(path(Some("{prompt}"), 3, 2), "a-red-heart-best-3.png");
        assert_eq!(path(Some("new folder/"), 1, 0), "new folder/a-red-heart-best-1234.png");
    }

    #[test]
    fn bad_patterns_are_refused_and_say_what_is_known() {
        for (pattern, part) in
            [("{sed}", "{seed}"), ("{n:x}", "width"), ("{n", "without }"), ("a.jpg", "PNG"), ("", "empty")]
        {
            let error = Naming::parse(Some(pattern), false, 1).unwrap_err();
            assert_eq!(error.exit, sd_proto::exit::ProgramExit::Usage);
            assert!(format!("{error:?}").contains(part), "{pattern}: {error:?}");
        }
    }

    #[test]
    fn prompts_become_short_words() {
        assert_eq!(slug("猫 face"), "猫-face");
        assert_eq!(slug("../../etc/passwd\0"), "etc-passwd");
        assert_eq!(slug("!!!"), "picture");
        assert_eq!(slug(&"word ".repeat(100)), ["word"; 8].join("-"));
        assert_eq!(slug(&"x".repeat(500)).len(), 40);
        assert!(slug(&"🎂猫".repeat(500)).len() <= SLUG_BYTES);
    }

    #[test]
    fn nothing_is_overwritten_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().to_str().unwrap();
        let naming = Naming::parse(Some(folder), false, 1).unwrap();
        for name in ["a-red-heart-best-1.png", "a-red-heart-best-1-2.png", "a-red-heart-best-1-3.png"] {
            naming.check(&facts(), 1, 1).unwrap();
            let written = naming.write(&facts(), 0, 1, b"png").unwrap();
            assert_eq!(written, Written { path: dir.path().join(name), moved: false });
        }
        let file = format!("{folder}/x.png");
        let naming = Naming::parse(Some(&file), false, 1).unwrap();
        naming.check(&facts(), 1, 1).unwrap();
        naming.write(&facts(), 0, 1, b"first").unwrap();
        let error = naming.check(&facts(), 1, 1).unwrap_err();
        assert_eq!(error.exit, sd_proto::exit::ProgramExit::Output);
        // The name was taken while the picture was computed: kept under another.
        let written = naming.write(&facts(), 0, 1, b"second").unwrap();
        assert_eq!(written, Written { path: dir.path().join("x-2.png"), moved: true });
        assert_eq!(fs::read(&file).unwrap(), b"first");
        let naming = Naming::parse(Some(&file), true, 1).unwrap();
        naming.check(&facts(), 1, 1).unwrap();
        naming.write(&facts(), 0, 1, b"third").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"third");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5, "no parts are left");
    }

    #[test]
    fn folders_are_checked_before_anything_is_computed() {
        let dir = tempfile::tempdir().unwrap();
        let naming = Naming::parse(Some(&format!("{}/absent/x.png", dir.path().display())), false, 1).unwrap();
        let error = format!("{:?}", naming.check(&facts(), 1, 1).unwrap_err());
        assert!(error.contains("does not exist") && error.contains("mkdir"), "{error}");
        fs::create_dir(dir.path().join("x.png")).unwrap();
        let naming = Naming::parse(Some(&format!("{}/{{n}}/../x.png", dir.path().display())), true, 1).unwrap();
        assert!(naming.check(&facts(), 1, 1).is_err());
    }
}

//! When a model folder counts as changed: by names, lengths and times of its files, without reading them.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Deepest level of a model folder that is looked at: component folders and one below.
const MAX_DEPTH: usize = 3;
/// Most files that are looked at; a folder with more is no model.
const MAX_FILES: usize = 4096;

/// The state of a folder's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    files: Vec<(PathBuf, u64, i64, i64)>,
}

impl Stamp {
    /// Looks at a folder. Blocking.
    ///
    /// # Errors
    /// The folder or one below cannot be read, or holds too many files to be a model.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        collect(folder, Path::new(""), 0, &mut files)?;
        files.sort();
        Ok(Self { files })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, length, _, _)| length).sum()
    }
}

fn collect(root: &Path, below: &Path, depth: usize, files: &mut Vec<(PathBuf, u64, i64, i64)>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        // Follows links: hubs keep their files as links into a store.
        let Ok(metadata) = fs::metadata(root.join(&path)) else { continue };
        if metadata.is_dir() {
            if depth + 1 < MAX_DEPTH {
                collect(root, &path, depth + 1, files)?;
            }
        } else if files.len() < MAX_FILES {
            files.push((path, metadata.len(), metadata.mtime(), metadata.mtime_nsec()));
        } else {
            return Err(io::Error::other(format!("more than {MAX_FILES} files: this is no model folder")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_changes_the_stamp_and_a_second_look_does_not() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("unet")).unwrap();
        let file = dir.path().join("unet/config.json");
        fs::write(&file, "{}").unwrap();
        let first = Stamp::of(dir.path()).unwrap();
        assert_eq!(first, Stamp::of(dir.path()).unwrap());
        assert_eq!(first.bytes(), 2);

        let later = fs::metadata(&file).unwrap().modified().unwrap() + std::time::Duration::from_secs(2);
        fs::File::options().write(true).open(&file).unwrap().set_modified(later).unwrap();
        let touched = Stamp::of(dir.path()).unwrap();
        assert_ne!(first, touched);
        fs::write(dir.path().join("unet/more"), "x").unwrap();
        assert_ne!(touched, Stamp::of(dir.path()).unwrap());
        assert!(Stamp::of(&dir.path().join("absent")).is_err());
    }
}

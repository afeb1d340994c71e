//! The model folder on disk: written once for each content hash, whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why the default model could not be written to the cache.
#[derive(Debug, thiserror::Error)]
pub enum MaterializeError {
    /// A folder of the cache could not be made.
    #[error("cannot create {}: {source}; name a cache folder that this user may write", path.display())]
    CreateFolder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The lock that serialises writers could not be taken.
    #[error("cannot lock {}: {source}; name a cache folder on a file system with file locks", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file of the model could not be written in full.
    #[error(
        "cannot write {}: {source}; the default model needs {needed} bytes there, free some space or name another cache folder",
        path.display()
    )]
    WriteFile {
        /// The file.
        path: PathBuf,
        /// Bytes of the whole model.
        needed: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A damaged or unfinished folder could not be taken away.
    #[error("cannot remove the damaged {}: {source}; remove it by hand", path.display())]
    RemoveDamaged {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The finished folder could not be moved to its place.
    #[error("cannot move {} to {}: {source}; remove the latter by hand", from.display(), to.display())]
    Publish {
        /// The finished folder under its temporary name.
        from: PathBuf,
        /// Its final name.
        to: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Writes the default model to `<cache_dir>/models/default-<id>/` unless it is already there, and returns that folder.
///
/// A folder whose files all exist in their lengths is reused; anything else under that name is replaced. The folder
/// appears by a rename, so no reader ever sees half of it, and a crash leaves at most an unfinished folder that the next
/// call removes. Callers in several processes wait for each other on a lock file beside it.
///
/// # Errors
/// [`MaterializeError`] names the path that failed and what to do about it.
pub fn materialize(cache_dir: &Path) -> Result<PathBuf, MaterializeError> {
    place(&cache_dir.join("models"), &format!("default-{}", crate::id()), crate::files())
}

/// [`materialize`] for any set of files.
fn place(models: &Path, name: &str, files: &[(&str, &[u8])]) -> Result<PathBuf, MaterializeError> {
    let folder = models.join(name);
    if is_complete(&folder, files) {
        return Ok(folder);
    }
    create_folder(models)?;

    let lock_path = models.join(format!(".{name}.lock"));
    // Held until the end of this function; the file stays, because removing it would let two callers lock two files.
    let _lock = File::create(&lock_path)
        .and_then(|file| file.lock().map(|()| file))
        .map_err(|source| MaterializeError::Lock { path: lock_path.clone(), source })?;
    if is_complete(&folder, files) {
        return Ok(folder);
    }

    // Only the holder of the lock writes here, so whatever lies under this name was left by a crash.
    let unfinished = models.join(format!(".{name}.partial"));
    remove(&unfinished)?;
    for (relative, bytes) in files {
        let path = unfinished.join(relative);
        create_folder(path.parent().expect("a joined path has a parent"))?;
        write_durably(&path, bytes).map_err(|source| MaterializeError::WriteFile {
            path: path.clone(),
            needed: files.iter().map(|(_, bytes)| bytes.len() as u64).sum(),
            source,
        })?;
    }
    // A worker that still maps the damaged files keeps its mapping: removing names does not touch the pages.
    remove(&folder)?;
    fs::rename(&unfinished, &folder).map_err(|source| MaterializeError::Publish {
        from: unfinished.clone(),
        to: folder.clone(),
        source,
    })?;
    Ok(folder)
}

/// Whether every file exists in its length. Lengths only: the check runs at each start and must cost microseconds.
fn is_complete(folder: &Path, files: &[(&str, &[u8])]) -> bool {
    files.iter().all(|(relative, bytes)| {
        fs::metadata(folder.join(relative))
            .is_ok_and(|metadata| metadata.is_file() && metadata.len() == bytes.len() as u64)
    })
}

fn create_folder(path: &Path) -> Result<(), MaterializeError> {
    fs::create_dir_all(path).map_err(|source| MaterializeError::CreateFolder { path: path.to_path_buf(), source })
}

/// Removes a folder, or a file in its place; nothing there is fine.
fn remove(path: &Path) -> Result<(), MaterializeError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    removed.map_err(|source| MaterializeError::RemoveDamaged { path: path.to_path_buf(), source })
}

/// Writes and synchronises: after a power failure a renamed folder must not hold empty files of the right length.
fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use super::{MaterializeError, is_complete, materialize, place};
    use std::fs;
    use std::sync::Barrier;

    const SMALL: &[(&str, &[u8])] = &[("index.json", b"{}"), ("unet/weights", &[7; 1000])];

    #[test]
    fn the_embedded_model_arrives_byte_for_byte() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let folder = materialize(cache.path()).expect("the model is written");
        assert_eq!(folder, cache.path().join("models").join(format!("default-{}", crate::id())));
        for (relative, bytes) in crate::files() {
            assert!(fs::read(folder.join(relative)).expect("the file exists") == *bytes, "{relative} differs");
        }
    }

    #[test]
    fn a_complete_folder_is_reused_untouched() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let folder = place(cache.path(), "m", SMALL).expect("written");
        // Same length, other bytes: only a rewrite would bring the old ones back.
        fs::write(folder.join("index.json"), b"[]").expect("written");
        assert_eq!(place(cache.path(), "m", SMALL).expect("reused"), folder);
        assert_eq!(fs::read(folder.join("index.json")).expect("read"), b"[]");
    }

    #[test]
    fn a_damaged_folder_is_replaced() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let folder = place(cache.path(), "m", SMALL).expect("written");
        let weights = folder.join("unet/weights");

        fs::write(&weights, [7; 999]).expect("truncated");
        place(cache.path(), "m", SMALL).expect("replaced");
        assert_eq!(fs::read(&weights).expect("read"), [7; 1000]);

        fs::remove_file(&weights).expect("removed");
        place(cache.path(), "m", SMALL).expect("replaced");
        assert_eq!(fs::read(&weights).expect("read"), [7; 1000]);

        fs::remove_dir_all(&folder).expect("removed");
        fs::write(&folder, b"a file in its place").expect("written");
        place(cache.path(), "m", SMALL).expect("replaced");
        assert!(is_complete(&folder, SMALL));
    }

    #[test]
    fn what_a_crash_left_is_cleared() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let left = cache.path().join(".m.partial");
        fs::create_dir_all(left.join("unet")).expect("made");
        fs::write(left.join("unet/stray"), b"half").expect("written");
        let folder = place(cache.path(), "m", SMALL).expect("written");
        assert!(!left.exists());
        assert!(!folder.join("unet/stray").exists());
    }

    #[test]
    fn callers_at_the_same_time_all_succeed() {
        const CALLERS: usize = 8;
        let cache = tempfile::tempdir().expect("a temporary folder");
        let start = Barrier::new(CALLERS);
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..CALLERS)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        let folder = place(cache.path(), "m", SMALL)?;
                        assert!(is_complete(&folder, SMALL));
                        Ok::<_, MaterializeError>(folder)
                    })
                })
                .collect();
            for caller in callers {
                assert_eq!(caller.join().expect("no panic").expect("written"), cache.path().join("m"));
            }
        });
    }

    #[test]
    fn an_unusable_cache_is_named_with_a_remedy() {
        let cache = tempfile::tempdir().expect("a temporary folder");
        let file = cache.path().join("file");
        fs::write(&file, b"").expect("written");
        let error = place(&file.join("models"), "m", SMALL).expect_err("a file is no folder");
        assert!(matches!(error, MaterializeError::CreateFolder { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&file.display().to_string()) && text.contains("name a cache folder"), "{text}");
    }
}

//! What stage tasks were measured to need, by model, stage, shape and numeric plan; kept in a file over restarts.
//!
//! One JSON object a line, appended when a peak is raised; the last line about a task counts. The file is written anew when it is
//! opened and has more lines than tasks. A line that cannot be read is passed over with a warning: at worst a
//! peak is learned again. A peak never falls, and only tasks that succeeded raise one.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::estimate::{Shape, TaskKey};

/// Tasks that are remembered; those that were learned first are forgotten first.
const REMEMBERED: usize = 4096;
/// Most bytes of a file that are read: a file beyond that is not one of ours.
const MOST_BYTES: u64 = 16 << 20;

/// The stages, by the names that they have in estimates.
const STAGES: [&str; 4] = ["encode", "vae encode", "denoise", "decode"];

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    model: String,
    stage: String,
    width: u32,
    height: u32,
    tokens: u64,
    plan: String,
    bytes: u64,
}

impl Line {
    fn of(key: &TaskKey, bytes: u64) -> Self {
        let Shape { width, height, tokens } = key.shape;
        let (model, stage, plan) = (key.model.clone(), key.stage.into(), key.plan.clone());
        Self { model, stage, width, height, tokens, plan, bytes }
    }

    fn task(self) -> Option<(TaskKey, u64)> {
        let stage = STAGES.into_iter().find(|stage| *stage == self.stage)?;
        let shape = Shape { width: self.width, height: self.height, tokens: self.tokens };
        Some((TaskKey { model: self.model, stage, shape, plan: self.plan }, self.bytes))
    }
}

#[derive(Debug, Default)]
struct Known {
    /// Bytes, and when it was learned, as a count.
    peaks: HashMap<TaskKey, (u64, u64)>,
    learned: u64,
    file: Option<File>,
}

/// Learned peaks, in memory alone or with a file.
#[derive(Debug, Default)]
pub struct Peaks {
    /// Guards look-ups, inserts and the writing of single lines.
    known: Mutex<Known>,
}

impl Peaks {
    /// Those of a file, which is made where it does not exist. A file that cannot be read or written is told in the log and then not
    /// used.
    pub fn open(path: &Path) -> Self {
        let mut known = Known::default();
        match read(path) {
            Ok(read) => {
                if read.bad > 0 {
                    tracing::warn!(path = %path.display(), lines = read.bad, "learned peaks that cannot be read are dropped");
                }
                for (key, bytes) in read.peaks {
                    known.raise(key, bytes);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "learned peaks cannot be read: learning anew");
            }
        }
        match rewrite(path, &known) {
            Ok(file) => known.file = Some(file),
            Err(error) => tracing::warn!(path = %path.display(), %error, "learned peaks cannot be kept over a restart"),
        }
        Self { known: Mutex::new(known) }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A map of numbers: an insert that panicked leaves it whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The highest bytes that were learned for a task.
    pub fn peak(&self, key: &TaskKey) -> Option<u64> {
        self.known().peaks.get(key).map(|(bytes, _)| *bytes)
    }

    /// Raises a task's peak; a lower one changes nothing.
    pub fn raise(&self, key: &TaskKey, bytes: u64) {
        let mut known = self.known();
        if !known.raise(key.clone(), bytes) {
            return;
        }
        let line = line(key, bytes);
        if let Some(file) = &mut known.file
            && let Err(error) = file.write_all(line.as_bytes())
        {
            tracing::warn!(%error, "learned peaks cannot be written any more: kept in memory");
            known.file = None;
        }
    }
}

impl Known {
    /// Whether that was news.
    fn raise(&mut self, key: TaskKey, bytes: u64) -> bool {
        self.learned += 1;
        let at = self.learned;
        if let Some((highest, _)) = self.peaks.get_mut(&key) {
            let raised = bytes > *highest;
            *highest = bytes.max(*highest);
            return raised;
        }
        if self.peaks.len() >= REMEMBERED
            && let Some(oldest) = self.peaks.iter().min_by_key(|(_, (_, at))| *at).map(|(key, _)| key.clone())
        {
            self.peaks.remove(&oldest);
        }
        self.peaks.insert(key, (bytes, at));
        true
    }
}

fn line(key: &TaskKey, bytes: u64) -> String {
    // Strings and numbers always become JSON.
    let mut line = serde_json::to_string(&Line::of(key, bytes)).unwrap_or_default();
    line.push('\n');
    line
}

struct Read {
    peaks: Vec<(TaskKey, u64)>,
    bad: usize,
}

fn read(path: &Path) -> io::Result<Read> {
    let file = File::open(path)?;
    if file.metadata()?.len() > MOST_BYTES {
        return Err(io::Error::other("it is larger than any that is written"));
    }
    let mut read = Read { peaks: Vec::new(), bad: 0 };
    for bytes in BufReader::new(file).split(b'\n') {
        let bytes = bytes?;
        match serde_json::from_slice::<Line>(&bytes).ok().and_then(Line::task) {
            Some(task) => read.peaks.push(task),
            None if bytes.is_empty() => {}
            None => read.bad += 1,
        }
    }
    Ok(read)
}

/// Writes a file with one line a task, in the place of what is there, and opens it for more.
fn rewrite(path: &Path, known: &Known) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut tasks: Vec<_> = known.peaks.iter().collect();
    tasks.sort_by_key(|(_, (_, at))| *at);
    let text: String = tasks.into_iter().map(|(key, (bytes, _))| line(key, *bytes)).collect();
    // By a rename, so that a daemon which is killed meanwhile leaves one whole file.
    let temporary = PathBuf::from(format!("{}.{}", path.display(), std::process::id()));
    fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })?;
    OpenOptions::new().append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(width: u32) -> TaskKey {
        TaskKey {
            model: "m".into(),
            stage: "decode",
            shape: Shape { width, height: 8, tokens: 0 },
            plan: "1 f32 \"quoted\"".into(),
        }
    }

    #[test]
    fn peaks_survive_a_restart_and_never_fall() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/peaks.jsonl");
        let peaks = Peaks::open(&path);
        peaks.raise(&key(8), 100);
        peaks.raise(&key(8), 90);
        peaks.raise(&key(8), 110);
        peaks.raise(&key(16), 7);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 3, "what was no news is not written");
        drop(peaks);
        let again = Peaks::open(&path);
        assert_eq!((again.peak(&key(8)), again.peak(&key(16)), again.peak(&key(24))), (Some(110), Some(7), None));
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2, "one line a task");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing temporary is left");
    }

    #[test]
    fn what_cannot_be_read_is_dropped_and_the_rest_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("peaks.jsonl");
        let good = line(&key(8), 5);
        let unknown = good.replace("decode", "dream");
        fs::write(
            &path,
            [b"\xff\xfe not text\n{\"model\":\n".as_slice(), unknown.as_bytes(), good.as_bytes(), b"{\"mod"].concat(),
        )
        .unwrap();
        let peaks = Peaks::open(&path);
        assert_eq!(peaks.peak(&key(8)), Some(5));
        peaks.raise(&key(16), 6);
        drop(peaks);
        assert_eq!(read(&path).unwrap().bad, 0, "the file is whole again");
        assert_eq!(Peaks::open(&path).peak(&key(16)), Some(6));
        // A folder in its place: nothing is kept, and everything works.
        let blocked = folder.path().join("blocked");
        fs::create_dir(&blocked).unwrap();
        let peaks = Peaks::open(&blocked);
        peaks.raise(&key(8), 1);
        assert_eq!(peaks.peak(&key(8)), Some(1));
    }

    #[test]
    fn the_store_is_bounded_and_forgets_what_was_learned_first() {
        let peaks = Peaks::default();
        for width in 0..REMEMBERED as u32 + 2 {
            peaks.raise(&key(width), 1);
        }
        let there_are = peaks.known().peaks.len();
        assert_eq!((there_are, peaks.peak(&key(0)), peaks.peak(&key(1))), (REMEMBERED, None, None));
        assert!(peaks.peak(&key(2)).is_some());
    }
}

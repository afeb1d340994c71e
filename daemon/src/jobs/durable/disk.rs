//! The store on disk: a folder that only the daemon's user enters, in it a file a job.
//!
//! | file | what it is |
//! |---|---|
//! | `lock` | held by the daemon that uses the folder |
//! | `jobs/ID.job` | the record, written last: without it, the other files of a job are leftovers |
//! | `jobs/ID.NAME` | a file that the record names |
//! | `jobs/ID.runs` | a byte for each time that the job began to run |
//! | `jobs/*.new` | being written |
//! | `damaged/` | what could not be read |
//!
//! A file is written under another name, forced to the medium and renamed, and then the folder is: after a power cut it is the
//! old one or the new one.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::record::{FileMark, is_plain};
use super::{Damaged, DurableJob, Loaded, RecordError, Store, StoreError};
use crate::ids::JobId;

/// Files that `damaged/` keeps for people to look at; the oldest go first.
const DAMAGED_KEPT: usize = 64;
const RECORD: &str = "job";
const RUNS: &str = "runs";

/// The store.
#[derive(Debug)]
pub struct DiskStore {
    folder: PathBuf,
    jobs: PathBuf,
    damaged: PathBuf,
    _lock: Flock<File>,
}

/// Makes a folder, and those above it, for this user alone.
fn make_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let metadata = fs::metadata(folder)?;
    if metadata.permissions().mode() & 0o077 != 0 {
        // Prompts are nobody else's business, whoever made the folder.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

impl DiskStore {
    /// Opens the store in a folder, which is made where it is not there. Blocking.
    ///
    /// # Errors
    /// [`StoreError::Folder`], or [`StoreError::Held`] while another daemon uses it.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        let wrong = |source| StoreError::Folder { folder: folder.display().to_string(), source };
        let (jobs, damaged) = (folder.join("jobs"), folder.join("damaged"));
        for folder in [folder, &jobs, &damaged] {
            make_private(folder).map_err(wrong)?;
        }
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(wrong)?;
        let lock = create(&folder.join("lock")).map_err(wrong)?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => StoreError::Held(folder.display().to_string()),
            errno => wrong(errno.into()),
        })?;
        Ok(Self { folder: folder.to_owned(), jobs, damaged, _lock: lock })
    }

    fn path(&self, job: &JobId, name: &str) -> PathBuf {
        self.jobs.join(format!("{job}.{name}"))
    }

    fn write(&self, job: &JobId, name: &str, bytes: &[u8]) -> io::Result<()> {
        let (path, new) = (self.path(job, name), self.path(job, &format!("{name}.new")));
        let written = (|| {
            let mut file = create(&new)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        })();
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.jobs)?.sync_all()
    }

    /// Names of the files of one job, without its id.
    fn files_of(&self, job: &JobId) -> io::Result<Vec<String>> {
        let prefix = format!("{job}.");
        let names = fs::read_dir(&self.jobs)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter_map(|name| name.strip_prefix(&prefix).map(str::to_owned)).collect())
    }

    fn put_files(&self, job: &DurableJob) -> io::Result<()> {
        let (record, beside) = job.encode();
        for file in beside {
            // An older record of this job has written it already: a name stands for the same bytes for ever.
            let length = fs::metadata(self.path(&job.id, &file.mark.name)).map(|metadata| metadata.len());
            if length.ok() != Some(file.mark.bytes) {
                self.write(&job.id, &file.mark.name, &file.bytes)?;
            }
        }
        self.write(&job.id, RECORD, &record)?;
        match fs::remove_file(self.path(&job.id, RUNS)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        self.sync()
    }

    fn read(&self, id: &JobId) -> Result<DurableJob, RecordError> {
        let unreadable = |name: &str, error: io::Error| RecordError::File {
            name: name.into(),
            problem: format!("cannot be read: {error}"),
        };
        let record = fs::read(self.path(id, RECORD)).map_err(|error| unreadable(RECORD, error))?;
        let file = |mark: &FileMark| fs::read(self.path(id, &mark.name)).map_err(|error| unreadable(&mark.name, error));
        let mut job = DurableJob::decode(&record, file)?;
        if job.id != *id {
            return Err(RecordError::Content("id"));
        }
        let runs = fs::metadata(self.path(id, RUNS)).map_or(0, |metadata| metadata.len());
        job.broken_runs = u32::try_from(runs).unwrap_or(u32::MAX);
        Ok(job)
    }

    /// Moves all files of a job out of the way; where that fails, they stay and are found again at the next start.
    fn set_aside(&self, names: &[String]) {
        let mut kept: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(&self.damaged)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        kept.sort();
        let superfluous = (kept.len() + names.len()).saturating_sub(DAMAGED_KEPT);
        for (_, path) in kept.into_iter().take(superfluous) {
            let _ = fs::remove_file(path);
        }
        for name in names {
            if let Err(error) = fs::rename(self.jobs.join(name), self.damaged.join(name)) {
                tracing::warn!(%error, file = name, "a damaged record cannot be moved aside");
            }
        }
    }
}

impl Store for DiskStore {
    fn put(&self, job: &DurableJob) -> Result<(), StoreError> {
        let is_new = !self.path(&job.id, RECORD).is_file();
        self.put_files(job).map_err(|source| {
            // What is there of a new job is not to be taken up: nobody hears that it was accepted.
            if is_new && let Err(error) = self.remove(&job.id) {
                tracing::warn!(%error, "half a record is left");
            }
            StoreError::Write { job: job.id.clone(), folder: self.folder.display().to_string(), source }
        })
    }

    fn remove(&self, job: &JobId) -> Result<(), StoreError> {
        let wrong = |source| StoreError::Remove { job: job.clone(), folder: self.folder.display().to_string(), source };
        match fs::remove_file(self.path(job, RECORD)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(wrong(error)),
            Ok(()) | Err(_) => {}
        }
        self.sync().map_err(wrong)?;
        for name in self.files_of(job).map_err(wrong)? {
            // Without the record it means nothing any more, and the next start removes it.
            let _ = fs::remove_file(self.path(job, &name));
        }
        Ok(())
    }

    fn note_start(&self, job: &JobId) {
        let appended = OpenOptions::new().append(true).create(true).mode(0o600).open(self.path(job, RUNS));
        if let Err(error) = appended.and_then(|mut file| file.write_all(b"1")) {
            tracing::debug!(%error, %job, "the start of a job is not noted");
        }
    }

    fn load(&self) -> Result<Loaded, StoreError> {
        let wrong = |source| StoreError::Folder { folder: self.folder.display().to_string(), source };
        let mut by_job: HashMap<String, Vec<String>> = HashMap::new();
        let mut leftovers = Vec::new();
        for entry in fs::read_dir(&self.jobs).map_err(wrong)? {
            let Ok(name) = entry.map_err(wrong)?.file_name().into_string() else { continue };
            match name.split_once('.') {
                Some((id, rest)) if is_plain(id) && !rest.ends_with(".new") => {
                    by_job.entry(id.to_owned()).or_default().push(name);
                }
                Some(_) | None => leftovers.push(name),
            }
        }
        let mut loaded = Loaded::default();
        for (id, names) in by_job {
            let record = format!("{id}.{RECORD}");
            if !names.contains(&record) {
                leftovers.extend(names);
                continue;
            }
            match self.read(&JobId::from(id)) {
                Ok(job) => {
                    let (_, beside) = job.encode();
                    let own = [RECORD, RUNS].into_iter().map(str::to_owned);
                    let named: HashSet<String> = beside.into_iter().map(|file| file.mark.name).chain(own).collect();
                    let id = format!("{}.", job.id);
                    leftovers.extend(
                        names.into_iter().filter(|name| name.strip_prefix(&id).is_none_or(|n| !named.contains(n))),
                    );
                    loaded.jobs.push(job);
                }
                Err(error) => {
                    self.set_aside(&names);
                    loaded.damaged.push(Damaged { name: record, problem: error.to_string() });
                }
            }
        }
        for name in leftovers {
            let _ = fs::remove_file(self.jobs.join(name));
        }
        loaded.jobs.sort_by(|a, b| (a.order, &a.id).cmp(&(b.order, &b.id)));
        loaded.damaged.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::durable::Progress;
    use crate::jobs::fixtures;
    use crate::jobs::request::{Admitted, ImageFile, InitialImage};
    use sd_proto::v1::ImageReady;
    use std::time::SystemTime;

    fn job(id: &str, order: u64, picture: Option<&[u8]>) -> DurableJob {
        let initial = picture.map(|bytes| InitialImage { image: ImageFile::new(bytes), mask: None, strength: 0.5 });
        let request = Admitted { initial, ..fixtures::admitted() };
        DurableJob::of(id.into(), "uid:1".into(), order, SystemTime::now(), &request)
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_put_is_there_after_the_next_opening_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/state");
        let (first, second, gone) = (job("bb", 1, None), job("aa", 2, Some(b"picture")), job("cc", 0, Some(b"x")));
        {
            let store = DiskStore::open(&folder).unwrap();
            assert!(matches!(DiskStore::open(&folder), Err(StoreError::Held(_))), "one daemon a folder");
            for job in [&second, &first, &gone] {
                store.put(job).unwrap();
            }
            store.remove(&gone.id).unwrap();
            store.remove(&gone.id).unwrap();
            store.note_start(&first.id);
            store.note_start(&first.id);
        }
        for path in [folder.clone(), folder.join("jobs")] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o700);
        }
        assert_eq!(fs::metadata(folder.join("jobs/aa.image")).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(&folder.join("jobs")), ["aa.image", "aa.job", "bb.job", "bb.runs"]);
        let store = DiskStore::open(&folder).unwrap();
        let loaded = store.load().unwrap();
        assert_eq!(loaded.damaged, []);
        let broken = DurableJob { broken_runs: 2, ..first.clone() };
        assert_eq!(loaded.jobs, [broken, second]);
        store.put(&first).unwrap();
        assert_eq!(store.load().unwrap().jobs[0].broken_runs, 0, "a new record begins to count anew");
    }

    #[test]
    fn a_write_that_was_torn_leaves_the_old_record_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let store = DiskStore::open(dir.path()).unwrap();
        let whole = job("aa", 1, Some(b"picture"));
        store.put(&whole).unwrap();
        let jobs = dir.path().join("jobs");
        // What a daemon leaves that is killed while it writes: new files half written, and files without their record.
        fs::write(jobs.join("aa.job.new"), "sdd-job 1 ").unwrap();
        fs::write(jobs.join("bb.image"), "picture").unwrap();
        fs::write(jobs.join("aa.other"), "of an older record").unwrap();
        let loaded = store.load().unwrap();
        assert_eq!((loaded.jobs, loaded.damaged), (vec![whole], vec![]));
        assert_eq!(names(&jobs), ["aa.image", "aa.job"]);
    }

    #[test]
    fn progress_is_kept_and_where_it_is_damaged_the_job_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let store = DiskStore::open(dir.path()).unwrap();
        let picture = ImageReady { index: 1, png: vec![7; 100], ..ImageReady::default() };
        let progress = Progress { pictures: vec![picture], ..Progress::default() };
        let (bare, done) = (job("aa", 1, Some(b"picture")), job("aa", 1, Some(b"picture")));
        let done = DurableJob { progress, submitted: bare.submitted, ..done };
        store.put(&bare).unwrap();
        store.put(&done).unwrap();
        assert_eq!(store.load().unwrap().jobs, [done]);
        let jobs = dir.path().join("jobs");
        let file = names(&jobs).into_iter().find(|name| name.starts_with("aa.done-")).unwrap();
        fs::write(jobs.join(file), "half").unwrap();
        let loaded = store.load().unwrap();
        assert_eq!((loaded.jobs, loaded.damaged), (vec![bare], vec![]));
        assert_eq!(names(&jobs), ["aa.image", "aa.job"], "what is of no use is removed");
    }

    #[test]
    fn a_damaged_record_is_moved_aside_and_hurts_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let store = DiskStore::open(dir.path()).unwrap();
        for (id, order) in [("aa", 1), ("bb", 2), ("cc", 3), ("dd", 4), ("ee", 5)] {
            store.put(&job(id, order, Some(b"picture"))).unwrap();
        }
        let jobs = dir.path().join("jobs");
        let record = fs::read_to_string(jobs.join("aa.job")).unwrap();
        fs::write(jobs.join("aa.job"), &record[..record.len() / 2]).unwrap();
        fs::write(jobs.join("bb.job"), record.replacen("sdd-job 1", "sdd-job 9", 1)).unwrap();
        fs::write(jobs.join("cc.image"), "pictorial").unwrap();
        fs::copy(jobs.join("ee.job"), jobs.join("ff.job")).unwrap();
        fs::remove_file(jobs.join("ee.image")).unwrap();
        let loaded = store.load().unwrap();
        assert_eq!(loaded.jobs.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["dd"]);
        let problems: Vec<String> = loaded.damaged.iter().map(|d| format!("{}: {}", d.name, d.problem)).collect();
        assert_eq!(problems.len(), 5, "{problems:?}");
        for (problem, word) in problems.iter().zip(["checksum", "version 9", "bytes", "cannot be read", "file"]) {
            assert!(problem.contains(word), "{problem}");
        }
        assert_eq!(names(&jobs), ["dd.image", "dd.job"]);
        assert!(names(&dir.path().join("damaged")).contains(&"aa.job".to_owned()));
        assert_eq!(store.load().unwrap().damaged, [], "it is told once");
    }

    #[test]
    fn what_is_moved_aside_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let store = DiskStore::open(dir.path()).unwrap();
        for round in 0..4 {
            for n in 0..30 {
                fs::write(dir.path().join(format!("jobs/{round}-{n}.job")), "nonsense").unwrap();
            }
            assert_eq!(store.load().unwrap().damaged.len(), 30);
        }
        assert_eq!(names(&dir.path().join("damaged")).len(), DAMAGED_KEPT);
    }

    #[test]
    fn a_store_that_cannot_write_says_so_and_keeps_nothing_of_the_job() {
        let dir = tempfile::tempdir().unwrap();
        let store = DiskStore::open(dir.path()).unwrap();
        // In the record's way stands a folder: to rename onto it fails, as every system call does on a full disk.
        fs::create_dir(dir.path().join("jobs/aa.job")).unwrap();
        let error = store.put(&job("aa", 1, Some(b"picture"))).unwrap_err();
        assert!(matches!(&error, StoreError::Write { .. }), "{error}");
        assert!(error.to_string().contains("durable = false"), "{error}");
        fs::remove_dir(dir.path().join("jobs/aa.job")).unwrap();
        store.remove(&"aa".into()).unwrap();
        assert_eq!(names(&dir.path().join("jobs")), Vec::<String>::new());
        let blocked = dir.path().join("file");
        fs::write(&blocked, "").unwrap();
        assert!(matches!(DiskStore::open(&blocked.join("state")), Err(StoreError::Folder { .. })));
    }
}

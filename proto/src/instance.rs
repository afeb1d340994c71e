//! What a daemon leaves on a host, and how a dead one's leftovers are told from a living one's.
//!
//! Every daemon process is an *instance* with a random id. It holds an flock for life on `instance-ID.lock` in a
//! host-wide folder; its shared-memory segments are named `sdd-ID-N`. The kernel drops the lock with the process, however
//! that ends, so whoever can take the lock knows that the instance is dead and removes what it left ([`sweep`]). A
//! device is held the same way ([`DeviceLock`]), so that no two daemons hand out one budget twice.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

mod device;

pub use self::device::{DeviceLock, DeviceLockError, Sharer};

/// Folder where the operating system shows shared-memory objects.
pub const SHM_DIR: &str = "/dev/shm";

/// Who holds an instance or a device lock, as written into the lock file for others to read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holder {
    /// Process id of the daemon.
    pub pid: u32,
    /// User id of the daemon.
    pub uid: u32,
    /// Where it listens, as [`crate::endpoint::Endpoint`] prints it.
    pub endpoint: String,
    /// Folder with its sockets.
    pub runtime_dir: PathBuf,
    /// Whether the daemon was started for one client call and ends with it.
    pub private: bool,
}

impl Holder {
    fn write(&self, file: &mut File) -> io::Result<()> {
        let text = format!(
            "pid={}\nuid={}\nendpoint={}\nruntime_dir={}\nprivate={}\n",
            self.pid,
            self.uid,
            self.endpoint,
            self.runtime_dir.display(),
            self.private
        );
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())
    }

    fn read(file: &mut File) -> io::Result<Self> {
        let mut text = String::new();
        file.rewind()?;
        file.take(16 << 10).read_to_string(&mut text)?;
        let fields: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
        let get = |key: &str| fields.get(key).copied().unwrap_or_default();
        Ok(Self {
            pid: get("pid").parse().unwrap_or(0),
            uid: get("uid").parse().unwrap_or(u32::MAX),
            endpoint: get("endpoint").into(),
            runtime_dir: get("runtime_dir").into(),
            private: get("private") == "true",
        })
    }
}

/// The host-wide folder for locks: `SDD_LOCK_DIR` where set, else `sdd` below the first of `/run/lock`, `/var/lock` and the
/// folder for temporary files that everyone may write to, so that all users of a host agree on it. Created with
/// mode 1777 where absent.
///
/// # Errors
/// The folder cannot be created.
pub fn default_lock_dir() -> io::Result<PathBuf> {
    if let Some(dir) = std::env::var_os("SDD_LOCK_DIR").filter(|dir| !dir.is_empty()) {
        fs::create_dir_all(&dir)?;
        return Ok(dir.into());
    }
    let shared = |dir: &PathBuf| fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.mode() & 0o002 != 0);
    let base = [PathBuf::from("/run/lock"), PathBuf::from("/var/lock")]
        .into_iter()
        .find(shared)
        .unwrap_or_else(std::env::temp_dir);
    let dir = base.join("sdd");
    match fs::create_dir(&dir) {
        Ok(()) => fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    Ok(dir)
}

/// Name of segment `number` of an instance, as `shm_open` takes it without the slash.
pub fn segment_name(instance: &str, number: u64) -> String {
    format!("sdd-{instance}-{number}")
}

/// 16 hexadecimal digits that nobody else has drawn.
fn random_id() -> io::Result<String> {
    let mut random = [0u8; 8];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn open_lock_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o666)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    // The umask has cut the mode; another user's daemon must be able to lock this file. Not ours: already right.
    let _ = file.set_permissions(fs::Permissions::from_mode(0o666));
    Ok(file)
}

/// Locks the file at `path`, or returns it unlocked where another process holds it. A file that was unlinked while we
/// waited for nothing is opened anew, so that the lock is always on what the path names.
fn try_lock(path: &Path) -> io::Result<Result<Flock<File>, File>> {
    loop {
        let file = open_lock_file(path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                let held = lock.metadata()?;
                match fs::symlink_metadata(path) {
                    Ok(named) if named.ino() == held.ino() && named.dev() == held.dev() => return Ok(Ok(lock)),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            Err((file, nix::errno::Errno::EWOULDBLOCK)) => return Ok(Err(file)),
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

/// A living instance: its id, held by an flock until this value is dropped or the process ends.
#[derive(Debug)]
pub struct InstanceLock {
    id: String,
    path: PathBuf,
    lock: Flock<File>,
}

impl InstanceLock {
    /// A new instance with a random id.
    ///
    /// # Errors
    /// The lock file cannot be created or written.
    pub fn create(lock_dir: &Path, holder: &Holder) -> io::Result<Self> {
        loop {
            let id = random_id()?;
            let path = lock_dir.join(format!("instance-{id}.lock"));
            if let Ok(mut lock) = try_lock(&path)? {
                holder.write(&mut lock)?;
                return Ok(Self { id, path, lock });
            }
        }
    }

    /// The instance's id, 16 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Writes who holds this instance anew, once it is known where it listens.
    ///
    /// # Errors
    /// The lock file cannot be written.
    pub fn update(&mut self, holder: &Holder) -> io::Result<()> {
        holder.write(&mut self.lock)
    }
}

impl Drop for InstanceLock {
    fn drop(&mut self) {
        // Unlinked while still locked: nobody can mistake a later instance's file for ours.
        let _ = fs::remove_file(&self.path);
    }
}

/// What [`sweep`] removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Swept {
    /// Dead instances found.
    pub instances: usize,
    /// Shared-memory segments removed.
    pub segments: usize,
    /// Bytes of those segments.
    pub bytes: u64,
    /// Sockets removed.
    pub sockets: usize,
}

/// Removes what dead instances left: their segments, their sockets, their lock files. Those of living instances,
/// and of instances whose files this user may not touch, stay.
///
/// # Errors
/// The lock folder cannot be read.
pub fn sweep(lock_dir: &Path) -> io::Result<Swept> {
    let mut swept = Swept::default();
    for entry in fs::read_dir(lock_dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(id) = name.strip_prefix("instance-").and_then(|n| n.strip_suffix(".lock")) else { continue };
        // Another sweeper may be at it, or the file may be another user's under a sticky folder: not ours to judge.
        let Ok(Ok(mut lock)) = try_lock(&path) else { continue };
        let holder = Holder::read(&mut lock)?;
        swept.instances += 1;
        remove_segments(id, &mut swept);
        remove_sockets(&holder, &mut swept);
        let _ = fs::remove_file(&path);
    }
    Ok(swept)
}

fn remove_segments(id: &str, swept: &mut Swept) {
    let prefix = format!("sdd-{id}-");
    let Ok(entries) = fs::read_dir(SHM_DIR) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(&prefix) {
            continue;
        }
        let bytes = entry.metadata().map(|m| m.len()).unwrap_or(0);
        if fs::remove_file(entry.path()).is_ok() {
            swept.segments += 1;
            swept.bytes += bytes;
        }
    }
}

fn remove_sockets(holder: &Holder, swept: &mut Swept) {
    use std::os::unix::fs::FileTypeExt as _;
    let listening = holder.endpoint.strip_prefix("unix:").map(PathBuf::from);
    let in_dir = fs::read_dir(&holder.runtime_dir).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in in_dir.chain(listening) {
        // A socket that answers belongs to a later daemon on the same path.
        let is_socket = fs::symlink_metadata(&path).is_ok_and(|m| m.file_type().is_socket());
        if is_socket && std::os::unix::net::UnixStream::connect(&path).is_err() && fs::remove_file(&path).is_ok() {
            swept.sockets += 1;
        }
    }
    if holder.private {
        // Made for one call by a client that is gone as well; removed only if nothing else is in it.
        let _ = fs::remove_dir(&holder.runtime_dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(dir: &Path) -> Holder {
        Holder { pid: 42, uid: 7, endpoint: "unix:/x".into(), runtime_dir: dir.join("run"), private: true }
    }

    #[test]
    fn a_living_instance_is_never_swept_and_a_dead_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let instance = InstanceLock::create(dir.path(), &holder(dir.path())).unwrap();
        let segment = Path::new(SHM_DIR).join(segment_name(instance.id(), 1));
        fs::write(&segment, [1u8; 100]).unwrap();
        // Another process would find the flock held; inside one process a second open file description does too.
        assert_eq!(sweep(dir.path()).unwrap(), Swept::default());
        assert!(segment.exists());
        // Death without a drop: the lock goes with the descriptor, the file stays.
        let InstanceParts { id, path } = die(instance);
        assert!(path.exists());
        let swept = sweep(dir.path()).unwrap();
        assert_eq!((swept.instances, swept.segments, swept.bytes), (1, 1, 100));
        assert!(!segment.exists() && !path.exists(), "instance {id} left something");
    }

    struct InstanceParts {
        id: String,
        path: PathBuf,
    }

    fn die(instance: InstanceLock) -> InstanceParts {
        let mut instance = std::mem::ManuallyDrop::new(instance);
        let parts = InstanceParts { id: instance.id.clone(), path: instance.path.clone() };
        let null = File::open("/dev/null").unwrap();
        let null = Flock::lock(null, FlockArg::LockShared).unwrap();
        drop(std::mem::replace(&mut instance.lock, null));
        parts
    }

    #[test]
    fn a_clean_end_leaves_no_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        drop(InstanceLock::create(dir.path(), &holder(dir.path())).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

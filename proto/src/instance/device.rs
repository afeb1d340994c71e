//! Locks on devices: one daemon alone, or several that share it by budget.
//!
//! `device-ID.lock` is locked exclusively by a daemon that has the device to itself, and shared by those that share it. Each
//! sharer also has a seat, `share-ID.RANDOM.lock`, locked for life, which says who it is and its budget. Who wants a seat adds the
//! budgets up under `gate-ID.lock`, so that two that come at once cannot both take the last bytes.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::{Holder, open_lock_file, random_id, try_lock};

/// A device held by one daemon of the host, or shared by several. The device's file stays when the lock ends; only the flock
/// counts.
#[derive(Debug)]
pub struct DeviceLock {
    lock: Flock<File>,
    seat: Option<Seat>,
}

/// One daemon among those that share a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sharer {
    /// Who.
    pub holder: Holder,
    /// Bytes that it may lease.
    pub budget: u64,
}

/// A sharer's own file.
#[derive(Debug)]
struct Seat {
    path: PathBuf,
    lock: Flock<File>,
    budget: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Unlinked while still locked, as an instance's file is.
        let _ = fs::remove_file(&self.path);
    }
}

/// How often a lock whose holder is not a living daemon is tried again, and how long between.
const MOMENTS: u32 = 50;
const MOMENT: Duration = Duration::from_millis(2);

/// Whether a process of this id exists.
fn lives(pid: u32) -> bool {
    let Ok(pid) = i32::try_from(pid) else { return false };
    pid > 0 && nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None) != Err(Errno::ESRCH)
}

/// Why a device is not ours.
#[derive(Debug, thiserror::Error)]
pub enum DeviceLockError {
    /// Another daemon holds it.
    #[error("device {device} is held by sdd with pid {} of uid {} at {}", holder.pid, holder.uid, holder.endpoint)]
    Held {
        /// The device's id.
        device: String,
        /// Who holds it.
        holder: Holder,
    },
    /// Those that share it have been promised too much to leave room for this one.
    #[error(
        "device {device} has {total} bytes, of which {taken} are promised to {}: a budget of {budget} is {} too much; \
         set a smaller devices.{device}.budget here or there",
        names(sharers), budget.saturating_add(*taken).saturating_sub(*total)
    )]
    Overcommitted {
        /// The device's id.
        device: String,
        /// Bytes it has.
        total: u64,
        /// Bytes of the sharers' budgets.
        taken: u64,
        /// Bytes asked for.
        budget: u64,
        /// Who shares it.
        sharers: Vec<Sharer>,
    },
    /// The lock file cannot be opened or written.
    #[error("cannot lock device {device} by {}: {source}", path.display())]
    Io {
        /// The device's id.
        device: String,
        /// The lock file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

fn names(sharers: &[Sharer]) -> String {
    let name = |sharer: &Sharer| format!("pid {} of uid {} ({})", sharer.holder.pid, sharer.holder.uid, sharer.budget);
    sharers.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn device_file(lock_dir: &Path, device: &str) -> PathBuf {
    lock_dir.join(format!("device-{device}.lock"))
}

/// What the budget is written as, behind the holder's lines.
const BUDGET: &str = "budget=";

impl Seat {
    fn create(lock_dir: &Path, device: &str, budget: u64) -> io::Result<Self> {
        loop {
            let path = lock_dir.join(format!("share-{device}.{}.lock", random_id()?));
            if let Ok(lock) = try_lock(&path)? {
                return Ok(Self { path, lock, budget });
            }
        }
    }

    fn write(&mut self, holder: &Holder) -> io::Result<()> {
        use std::io::Write as _;
        holder.write(&mut self.lock)?;
        self.lock.write_all(format!("{BUDGET}{}\n", self.budget).as_bytes())
    }
}

/// Who shares a device now; seats of dead daemons are removed on the way.
fn sharers(lock_dir: &Path, device: &str) -> io::Result<Vec<Sharer>> {
    let prefix = format!("share-{device}.");
    let mut living = Vec::new();
    for entry in fs::read_dir(lock_dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.starts_with(&prefix) || !name.ends_with(".lock") {
            continue;
        }
        let mut file = match File::options().read(true).write(true).open(&path) {
            Ok(file) => match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(_dead) => {
                    let _ = fs::remove_file(&path);
                    continue;
                }
                Err((file, Errno::EWOULDBLOCK)) => file,
                Err((_, errno)) => return Err(errno.into()),
            },
            // It has just ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let holder = Holder::read(&mut file)?;
        let mut text = String::new();
        file.rewind()?;
        file.take(16 << 10).read_to_string(&mut text)?;
        let budget = text.lines().find_map(|line| line.strip_prefix(BUDGET)?.parse().ok());
        // One that has not written its budget yet is still behind the gate and will be counted when it has.
        living.extend(budget.map(|budget| Sharer { holder, budget }));
    }
    living.sort_by_key(|sharer| sharer.holder.pid);
    Ok(living)
}

impl DeviceLock {
    /// Takes a device ("cpu", or a GPU's UUID) for this daemon alone, without waiting.
    ///
    /// # Errors
    /// [`DeviceLockError::Held`] names the daemon that holds it, or the first of those that share it.
    pub fn acquire(lock_dir: &Path, device: &str, holder: &Holder) -> Result<Self, DeviceLockError> {
        let lock = take(lock_dir, device, FlockArg::LockExclusiveNonblock)?;
        let mut lock = Self { lock, seat: None };
        let path = device_file(lock_dir, device);
        lock.update(holder).map_err(|source| DeviceLockError::Io { device: device.into(), path, source })?;
        Ok(lock)
    }

    /// Takes a share of a device: `budget` of its `total` bytes.
    ///
    /// # Errors
    /// [`DeviceLockError::Held`] where a daemon has it to itself, [`DeviceLockError::Overcommitted`] where the budgets of all that
    /// share it would exceed `total`.
    pub fn share(
        lock_dir: &Path,
        device: &str,
        holder: &Holder,
        budget: u64,
        total: u64,
    ) -> Result<Self, DeviceLockError> {
        let path = lock_dir.join(format!("gate-{device}.lock"));
        let io = |source| DeviceLockError::Io { device: device.into(), path: path.clone(), source };
        let gate = open_lock_file(&path).map_err(io)?;
        // Held by others for as long as this function takes.
        let _gate = Flock::lock(gate, FlockArg::LockExclusive).map_err(|(_, errno)| io(errno.into()))?;
        let lock = take(lock_dir, device, FlockArg::LockSharedNonblock)?;
        let sharers = sharers(lock_dir, device).map_err(io)?;
        let taken = sharers.iter().fold(0u64, |sum, sharer| sum.saturating_add(sharer.budget));
        if taken.saturating_add(budget) > total {
            return Err(DeviceLockError::Overcommitted { device: device.into(), total, taken, budget, sharers });
        }
        let seat = Seat::create(lock_dir, device, budget).map_err(io)?;
        let mut lock = Self { lock, seat: Some(seat) };
        lock.update(holder).map_err(io)?;
        Ok(lock)
    }

    /// Who holds a device now: nobody, one daemon, or all that share it.
    ///
    /// # Errors
    /// A lock file exists and cannot be opened or read.
    pub fn holders(lock_dir: &Path, device: &str) -> io::Result<Vec<Holder>> {
        let path = device_file(lock_dir, device);
        if !path.exists() {
            return Ok(Vec::new());
        }
        match try_lock(&path)? {
            Ok(_free) => Ok(Vec::new()),
            Err(mut file) => {
                let sharers = sharers(lock_dir, device)?;
                if sharers.is_empty() {
                    return Ok(vec![Holder::read(&mut file)?]);
                }
                Ok(sharers.into_iter().map(|sharer| sharer.holder).collect())
            }
        }
    }

    /// Who shares a device now, with budgets; empty where nobody does or one daemon has it to itself.
    ///
    /// # Errors
    /// A lock file exists and cannot be opened or read.
    pub fn sharers(lock_dir: &Path, device: &str) -> io::Result<Vec<Sharer>> {
        sharers(lock_dir, device)
    }

    /// Who holds a device now, the first of those that share it; `None` when nobody does.
    ///
    /// # Errors
    /// The lock file exists and cannot be opened or read.
    pub fn holder(lock_dir: &Path, device: &str) -> io::Result<Option<Holder>> {
        Ok(Self::holders(lock_dir, device)?.into_iter().next())
    }

    /// Writes who holds this device anew.
    ///
    /// # Errors
    /// The lock file cannot be written.
    pub fn update(&mut self, holder: &Holder) -> io::Result<()> {
        match &mut self.seat {
            Some(seat) => seat.write(holder),
            None => holder.write(&mut self.lock),
        }
    }
}

/// Locks a device's file without waiting.
fn take(lock_dir: &Path, device: &str, how: FlockArg) -> Result<Flock<File>, DeviceLockError> {
    let path = device_file(lock_dir, device);
    let io = |source| DeviceLockError::Io { device: device.into(), path: path.clone(), source };
    let mut looks = 0;
    loop {
        let file = open_lock_file(&path).map_err(io)?;
        match Flock::lock(file, how) {
            // The device's file is never removed, so the lock is on what the path names.
            Ok(lock) => return Ok(lock),
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let sharer = sharers(lock_dir, device).map_err(io)?.into_iter().next();
                let holder = match sharer {
                    Some(sharer) => sharer.holder,
                    None => Holder::read(&mut file).map_err(io)?,
                };
                // Somebody who only asks who holds it ([`DeviceLock::holder`]) has the lock for a moment: then the
                // last daemon's name still stands in the file.
                looks += 1;
                if looks == MOMENTS || lives(holder.pid) {
                    return Err(DeviceLockError::Held { device: device.into(), holder });
                }
                std::thread::sleep(MOMENT);
            }
            Err((_, errno)) => return Err(io(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(pid: u32) -> Holder {
        Holder { pid, uid: 7, endpoint: format!("unix:/{pid}"), runtime_dir: "/run".into(), private: false }
    }

    #[test]
    fn a_second_daemon_learns_who_holds_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let first = DeviceLock::acquire(dir.path(), "cpu", &holder(42)).unwrap();
        for second in [
            DeviceLock::acquire(dir.path(), "cpu", &Holder::default()),
            DeviceLock::share(dir.path(), "cpu", &Holder::default(), 1, 10),
        ] {
            match second {
                Err(DeviceLockError::Held { device, holder: found }) => {
                    assert_eq!((device.as_str(), found), ("cpu", holder(42)));
                }
                other => panic!("expected Held, got {other:?}"),
            }
        }
        assert_eq!(DeviceLock::holder(dir.path(), "cpu").unwrap(), Some(holder(42)));
        drop(first);
        assert_eq!(DeviceLock::holder(dir.path(), "cpu").unwrap(), None);
        DeviceLock::acquire(dir.path(), "cpu", &Holder::default()).unwrap();
    }

    #[test]
    fn budgets_of_those_that_share_a_device_never_exceed_it() {
        let dir = tempfile::tempdir().unwrap();
        let share = |pid, budget| DeviceLock::share(dir.path(), "cpu", &holder(pid), budget, 100);
        let mut first = share(1, 60).unwrap();
        let second = share(2, 40).unwrap();
        let refused = share(3, 1).unwrap_err();
        let DeviceLockError::Overcommitted { total: 100, taken: 100, budget: 1, ref sharers, .. } = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(sharers.iter().map(|sharer| sharer.budget).collect::<Vec<_>>(), [60, 40]);
        for word in ["100 bytes", "pid 1 of uid 7 (60)", "budget of 1 is 1 too much", "devices.cpu.budget"] {
            assert!(refused.to_string().contains(word), "{refused}");
        }
        let alone = DeviceLock::acquire(dir.path(), "cpu", &holder(4));
        assert!(matches!(alone, Err(DeviceLockError::Held { ref holder, .. }) if holder.pid == 1), "{alone:?}");
        first.update(&Holder { endpoint: "tcp".into(), ..holder(1) }).unwrap();
        let holders = DeviceLock::holders(dir.path(), "cpu").unwrap();
        assert_eq!(holders.iter().map(|holder| holder.endpoint.as_str()).collect::<Vec<_>>(), ["tcp", "unix:/2"]);

        // Death without a drop: the lock goes with the descriptor, the file stays and counts for nothing.
        let mut seat = std::mem::ManuallyDrop::new(first).seat.take().map(std::mem::ManuallyDrop::new).unwrap();
        let null = Flock::lock(File::open("/dev/null").unwrap(), FlockArg::LockShared).unwrap();
        drop(std::mem::replace(&mut seat.lock, null));
        assert!(seat.path.exists());
        let third = share(3, 60).unwrap();
        assert!(!seat.path.exists());
        drop((second, third));
        assert_eq!(DeviceLock::sharers(dir.path(), "cpu").unwrap(), []);
    }
}

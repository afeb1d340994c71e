//! What the doctor says of the folder of locks: who holds which device, and what dead daemons left.

use std::path::{Path, PathBuf};

use sd_proto::instance::{DeviceLock, Holder, SHM_DIR, sweep};

use super::super::{human, machine};
use super::Check;

pub(super) fn checks(lock_dir: std::io::Result<PathBuf>, sweeping: bool) -> Vec<Check> {
    let lock_dir = match lock_dir {
        Ok(lock_dir) => lock_dir,
        Err(error) => {
            return vec![Check::fail(
                "lock folder",
                error.to_string(),
                "set SDD_LOCK_DIR to a folder that all users may write",
            )];
        }
    };
    let shown = lock_dir.display().to_string();
    let folder = match machine::writable(&lock_dir) {
        Ok(()) => Check::ok("lock folder", shown.clone()),
        Err(error) => Check::fail("lock folder", error, "chmod 1777 on it, or set SDD_LOCK_DIR"),
    };
    let mut checks = vec![folder];
    if sweeping {
        checks.push(match sweep(&lock_dir) {
            Ok(swept) => Check::ok(
                "swept",
                format!(
                    "{}, {} of {}, {}",
                    human::count(swept.instances as u64, "dead daemon"),
                    human::count(swept.segments as u64, "segment"),
                    human::bytes(swept.bytes),
                    human::count(swept.sockets as u64, "socket"),
                ),
            ),
            Err(error) => {
                Check::fail("swept", format!("{shown}: {error}"), "run it as the user whose leftovers these are")
            }
        });
    }
    checks.push(match machine::leftovers(&lock_dir, Path::new(SHM_DIR)) {
        Ok(found) => leftovers(found),
        Err(error) => Check::warn("leftovers", format!("{shown}: {error}"), "make the folder readable"),
    });
    checks.extend(held(&lock_dir));
    checks
}

/// A line for every device that a daemon holds.
fn held(lock_dir: &Path) -> Vec<Check> {
    let name = "held device";
    let mut checks = Vec::new();
    for entry in std::fs::read_dir(lock_dir).into_iter().flatten().flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let Some(device) = file.strip_prefix("device-").and_then(|rest| rest.strip_suffix(".lock")) else { continue };
        let who = DeviceLock::sharers(lock_dir, device).and_then(|sharers| {
            let shares =
                sharers.iter().map(|sharer| format!("{} ({})", who(&sharer.holder), human::bytes(sharer.budget)));
            let shares: Vec<String> = shares.collect();
            if !shares.is_empty() {
                return Ok(Some(format!("{device} is shared by {}", shares.join(", "))));
            }
            Ok(DeviceLock::holder(lock_dir, device)?.map(|holder| format!("{device} is held by {}", who(&holder))))
        });
        checks.push(match who {
            Ok(Some(found)) => Check::ok(name, found),
            Ok(None) => continue,
            Err(error) => {
                Check::warn(name, format!("{device}: {error}"), "make the lock files readable and writable for all")
            }
        });
    }
    checks
}

fn who(holder: &Holder) -> String {
    let private = if holder.private { ", private" } else { "" };
    format!("sdd pid {} of uid {} at {}{private}", holder.pid, holder.uid, holder.endpoint)
}

fn leftovers(found: machine::Leftovers) -> Check {
    let name = "leftovers";
    if found == machine::Leftovers::default() {
        return Check::ok(name, "none");
    }
    let text = format!(
        "{}, {} of {} in {SHM_DIR}",
        human::count(found.instances as u64, "dead daemon"),
        human::count(found.segments as u64, "segment"),
        human::bytes(found.bytes),
    );
    let remedy = match found.orphans {
        0 => "sdctl doctor --sweep removes them (so does the next start of sdd)".to_owned(),
        n => format!(
            "sdctl doctor --sweep; {} without a lock file: rm {SHM_DIR}/sdd-* once no daemon runs",
            human::count(n as u64, "segment")
        ),
    };
    Check::warn(name, text, remedy)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;
    use machine::Leftovers;

    #[test]
    fn leftovers_come_with_their_remedy() {
        assert_eq!(leftovers(Leftovers::default()).level, Level::Ok);
        let check = leftovers(Leftovers { instances: 1, segments: 2, bytes: 20, orphans: 0 });
        assert_eq!(check.level, Level::Warn);
        assert!(check.remedy.unwrap().contains("--sweep"));
    }

    #[test]
    fn sweeping_removes_what_the_dead_left() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("instance-0123456789abcdef.lock"), "").unwrap();
        let before = checks(Ok(dir.path().to_owned()), false);
        assert!(before.last().unwrap().found.starts_with("1 dead daemon"), "{before:?}");
        let after = checks(Ok(dir.path().to_owned()), true);
        assert!(after[1].found.starts_with("1 dead daemon"), "{after:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn orphans_are_named_with_the_command_that_removes_them() {
        assert_eq!(leftovers(Leftovers::default()).level, Level::Ok);
        let check = leftovers(Leftovers { instances: 0, segments: 2, bytes: 10, orphans: 2 });
        assert!(check.level == Level::Warn && check.remedy.unwrap().contains("rm /dev/shm/sdd-*"));
    }

    #[test]
    fn who_holds_a_device_is_named_and_how_it_is_shared() {
        let dir = tempfile::tempdir().unwrap();
        let holder = |pid| Holder { pid, endpoint: "unix:/s".into(), ..Holder::default() };
        assert_eq!(held(dir.path()), []);
        let alone = DeviceLock::acquire(dir.path(), "cpu", &holder(1)).unwrap();
        assert!(held(dir.path())[0].found.contains("cpu is held by sdd pid 1 of uid 0 at unix:/s"));
        drop(alone);
        let _shares = [2, 3].map(|pid| DeviceLock::share(dir.path(), "cpu", &holder(pid), 1 << 30, 4 << 30).unwrap());
        let found = held(dir.path());
        assert!(found[0].found.starts_with("cpu is shared by sdd pid 2"), "{found:?}");
        assert!(found[0].found.ends_with("pid 3 of uid 0 at unix:/s (1.00 GiB)"), "{found:?}");
    }
}

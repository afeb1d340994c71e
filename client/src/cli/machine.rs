//! What `doctor` finds out about the machine; pure reading, no judgement but of the texts it parses.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use sd_proto::instance::SHM_DIR;

/// How long a program may take to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// Bytes of a file system: all, and what is free for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) total: u64,
    pub(super) free: u64,
}

/// The file system of shared memory.
pub(super) fn shared_memory() -> io::Result<Space> {
    let stat = nix::sys::statvfs::statvfs(SHM_DIR)?;
    let unit = stat.fragment_size() as u64;
    Ok(Space { total: stat.blocks() as u64 * unit, free: stat.blocks_available() as u64 * unit })
}

/// The host's memory, from `/proc/meminfo`.
pub(super) fn host_memory() -> Option<Space> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    Some(Space { total: meminfo(&text, "MemTotal")?, free: meminfo(&text, "MemAvailable")? })
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
}

/// This process's control group limit, where there is one: the tightest on the way to the root.
pub(super) fn group_memory() -> Option<Space> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    group_folders(&groups)
        .into_iter()
        .filter_map(|(folder, limit_name, usage_name)| {
            let limit: u64 = fs::read_to_string(folder.join(limit_name)).ok()?.trim().parse().ok()?;
            // Version 1 writes "none" as a number near 2^63.
            if limit >= 1 << 60 {
                return None;
            }
            let used: u64 = fs::read_to_string(folder.join(usage_name)).ok()?.trim().parse().ok()?;
            Some(Space { total: limit, free: limit.saturating_sub(used) })
        })
        .min_by_key(|space| space.free)
}

/// Every folder whose limit counts, with the names of its limit and its usage.
fn group_folders(groups: &str) -> Vec<(PathBuf, &'static str, &'static str)> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, limit, usage) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            list if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        for ancestor in Path::new(path.trim_start_matches('/')).ancestors() {
            folders.push((Path::new(root).join(ancestor), limit, usage));
        }
    }
    folders
}

/// Soft limit of a resource of this process; `None`: unlimited.
pub(super) fn limit(resource: nix::sys::resource::Resource) -> io::Result<Option<u64>> {
    let (soft, _) = nix::sys::resource::getrlimit(resource)?;
    Ok((soft != nix::libc::RLIM_INFINITY).then_some(soft))
}

/// The features of the CPU that the kernels look for: name, present.
pub(super) fn cpu_features() -> Vec<(&'static str, bool)> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
    ];
    #[cfg(target_arch = "aarch64")]
    return vec![("neon", true)];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    Vec::new()
}

/// What a program says to `--version`: the last word of its first line.
pub(super) async fn version(program: &Path) -> Result<String, String> {
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(VERSION_LIMIT, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err(format!("no answer to --version within {} s", VERSION_LIMIT.as_secs())),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = text.lines().next().and_then(|line| line.split_whitespace().next_back());
    match word {
        Some(word) if output.status.success() => Ok(word.to_owned()),
        Some(_) | None => Err(format!("--version ended with {}", output.status)),
    }
}

/// What dead daemons left on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Leftovers {
    /// Lock files that nobody holds; `sweep` removes these and their segments.
    pub(super) instances: usize,
    /// Segments of these, or of no instance at all.
    pub(super) segments: usize,
    /// Bytes of those segments.
    pub(super) bytes: u64,
    /// Segments without a lock file, which `sweep` cannot judge.
    pub(super) orphans: usize,
}

/// Looks for leftovers without touching them.
pub(super) fn leftovers(lock_dir: &Path, shm_dir: &Path) -> io::Result<Leftovers> {
    let mut found = Leftovers::default();
    let mut alive = Vec::new();
    let mut dead = Vec::new();
    for entry in fs::read_dir(lock_dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(id) = name.strip_prefix("instance-").and_then(|n| n.strip_suffix(".lock")) else { continue };
        // A shared lock is enough to see that nobody holds the exclusive one, and two doctors do not disturb each other.
        let free = OpenOptions::new()
            .read(true)
            .open(entry.path())
            .is_ok_and(|file| Flock::lock(file, FlockArg::LockSharedNonblock).is_ok());
        if free { dead.push(id.to_owned()) } else { alive.push(id.to_owned()) }
    }
    found.instances = dead.len();
    for entry in fs::read_dir(shm_dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((id, _)) = name.strip_prefix("sdd-").and_then(|rest| rest.rsplit_once('-')) else { continue };
        if id.len() != 16 || alive.iter().any(|living| living == id) {
            continue;
        }
        found.segments += 1;
        found.bytes += entry.metadata().map_or(0, |m| m.len());
        found.orphans += usize::from(!dead.iter().any(|dead| dead == id));
    }
    Ok(found)
}

/// Whether a folder can be written, or the nearest one above it where it does not exist yet.
pub(super) fn writable(folder: &Path) -> Result<(), String> {
    let existing = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    nix::unistd::access(existing, nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK)
        .map_err(|errno| format!("{}: {}", existing.display(), errno.desc()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_texts_are_read() {
        let text = "MemTotal:       16318480 kB\nMemFree:         1 kB\nMemAvailable:   8000 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(16_318_480 << 10));
        assert_eq!(meminfo(text, "MemAvailable"), Some(8000 << 10));
        assert_eq!(meminfo(text, "Mem"), None);
        let memory = host_memory().unwrap();
        assert!(memory.free <= memory.total && memory.total > 0);
    }

    #[test]
    fn limits_of_every_group_above_count() {
        let folders = group_folders("0::/user/session\n");
        let paths: Vec<_> = folders.iter().map(|(path, ..)| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/sys/fs/cgroup/user/session", "/sys/fs/cgroup/user", "/sys/fs/cgroup/"]);
        let folders = group_folders("5:cpu,memory:/a\n4:pids:/b\n");
        assert_eq!(
            folders[0],
            (PathBuf::from("/sys/fs/cgroup/memory/a"), "memory.limit_in_bytes", "memory.usage_in_bytes")
        );
        assert_eq!(folders.len(), 2);
    }

    #[test]
    fn leftovers_are_counted_and_the_living_are_not() {
        let [locks, segments] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let holder = sd_proto::instance::Holder::default();
        let living = sd_proto::instance::InstanceLock::create(locks.path(), &holder).unwrap();
        let dead = "0123456789abcdef";
        fs::write(locks.path().join(format!("instance-{dead}.lock")), "").unwrap();
        for name in
            [format!("sdd-{}-1", living.id()), format!("sdd-{dead}-1"), "sdd-ffffffffffffffff-3".into(), "other".into()]
        {
            fs::write(segments.path().join(name), [0; 10]).unwrap();
        }
        let found = leftovers(locks.path(), segments.path()).unwrap();
        assert_eq!(found, Leftovers { instances: 1, segments: 2, bytes: 20, orphans: 1 });
    }

    #[tokio::test]
    async fn a_version_is_the_last_word_of_the_first_line() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p");
        fs::write(&file, "#!/bin/sh\necho sdd 1.2.3\necho more\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(version(&file).await, Ok("1.2.3".into()));
        assert!(version(&dir.path().join("absent")).await.is_err());
    }
}

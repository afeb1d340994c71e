//! `sdctl doctor`: one line a check, with a remedy where one is needed.

mod devices;
mod locks;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::resource::Resource;
use sd_client::{Client, ConnectError, Places, find_program};
use sd_proto::exit::ProgramExit;
use sd_proto::instance::{SHM_DIR, default_lock_dir};
use serde_json::{Value, json};

use super::args::{DoctorArgs, Global};
use super::report::Trouble;
use super::{human, machine, screen};

/// Shared memory that jobs of the default model may need at once, with room for a second job.
const SHM_NEEDED: u64 = 32 << 20;
const SHM_COMFORTABLE: u64 = 60 << 20;
/// Memory that the default model needs, and what larger ones begin at.
const MEMORY_NEEDED: u64 = 512 << 20;
const MEMORY_COMFORTABLE: u64 = 2 << 30;
const FILES_NEEDED: u64 = 256;

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Ok,
    Warn,
    Fail,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One check's result.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    level: Level,
    name: &'static str,
    found: String,
    remedy: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { level: Level::Ok, name, found: found.into(), remedy: None }
    }

    fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Warn, name, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { level: Level::Fail, name, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn json(&self) -> Value {
        json!({ "check": self.name, "level": self.level.name(), "found": self.found, "remedy": self.remedy })
    }
}

/// Runs every check; exits 1 where one fails.
pub(super) async fn run(global: &Global, args: DoctorArgs) -> Result<ProgramExit, Trouble> {
    let places = Places::from_environment(global.endpoint.clone())?;
    let locked = machine::limit(Resource::RLIMIT_MEMLOCK);
    let mut checks = programs().await;
    checks.extend(devices::checks(find_program().ok().as_deref(), locked.as_ref().ok().copied().flatten()).await);
    checks.extend(daemons(&places).await);
    checks.push(shared_memory(machine::shared_memory()));
    checks.push(memory(machine::host_memory(), machine::group_memory()));
    checks.push(locked_memory(locked));
    checks.push(open_files(machine::limit(Resource::RLIMIT_NOFILE)));
    checks.push(cpu(&machine::cpu_features()));
    checks.push(cache());
    checks.extend(locks::checks(default_lock_dir(), args.sweep));
    if global.json {
        screen::out(format_args!("{:#}", Value::Array(checks.iter().map(Check::json).collect())))?;
    } else {
        let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        for check in checks.iter().filter(|check| !global.quiet || check.level != Level::Ok) {
            let found = human::line(&check.found);
            screen::out(format_args!("{:<4}  {:<width$}  {found}", check.level.name(), check.name))?;
            if let Some(remedy) = &check.remedy {
                screen::out(format_args!("{:<4}  {:<width$}  → {}", "", "", human::line(remedy)))?;
            }
        }
    }
    let failed = checks.iter().any(|check| check.level == Level::Fail);
    Ok(if failed { ProgramExit::Failure } else { ProgramExit::Success })
}

async fn programs() -> Vec<Check> {
    let own = env!("CARGO_PKG_VERSION");
    let judge = |name, program: &Path, version: Result<String, String>| match version {
        Ok(version) if version == own => Check::ok(name, format!("{} {version}", program.display())),
        Ok(version) => Check::warn(
            name,
            format!("{} is version {version}, sdctl is {own}", program.display()),
            "install all three programs from one build",
        ),
        Err(error) => Check::fail(
            name,
            format!("{}: {error}", program.display()),
            "install it anew, for this machine's architecture",
        ),
    };
    let sdd = match find_program() {
        Ok(sdd) => sdd,
        Err(error) => return vec![Check::fail("sdd", error.to_string(), "install sdd beside sdctl")],
    };
    let mut checks = vec![judge("sdd", &sdd, machine::version(&sdd).await)];
    let worker = sdd.canonicalize().unwrap_or(sdd).with_file_name("sd-worker");
    checks.push(match worker.exists() {
        true => judge("sd-worker", &worker, machine::version(&worker).await),
        false => Check::warn(
            "sd-worker",
            format!("not beside sdd ({})", worker.display()),
            "install it there, or tell sdd in its configuration where it is",
        ),
    });
    checks
}

async fn daemons(places: &Places) -> Vec<Check> {
    let mut checks = Vec::new();
    let named = places.named.is_some();
    let mut answers = false;
    for candidate in places.candidates() {
        let at = format!("{} ({})", candidate.endpoint, candidate.source);
        let client = match Client::connect_trusting(&candidate.endpoint, candidate.trust).await {
            Ok(client) => client,
            Err(ConnectError::Absent { .. }) if !named => continue,
            Err(error) => {
                let remedy = match error {
                    ConnectError::Absent { .. } => "start sdd there, or correct --endpoint or SDCTL_ENDPOINT",
                    ConnectError::Forbidden { .. } | ConnectError::Untrusted { .. } => {
                        "ask its owner, or name another one with --endpoint"
                    }
                    ConnectError::Silent { .. } | ConnectError::Foreign { .. } => "end what listens there",
                };
                checks.push(Check::fail("daemon", error.to_string(), remedy));
                continue;
            }
        };
        checks.push(match client.status_within(Duration::from_secs(5)).await {
            Ok(status) if status.version != env!("CARGO_PKG_VERSION") => Check::warn(
                "daemon",
                format!("{at} is sdd {}, sdctl is {}", status.version, env!("CARGO_PKG_VERSION")),
                "restart the daemon from the same build",
            ),
            Ok(status) if status.devices.iter().any(|device| device.degraded) => Check::warn(
                "daemon",
                format!("{at}: a device is degraded: memory of a dead worker is not proven free"),
                "see `sdctl leases`; restarting the daemon clears it",
            ),
            Ok(status) => Check::ok(
                "daemon",
                format!(
                    "{at}: sdd {}, pid {}, {} running, {} queued",
                    status.version, status.pid, status.running_jobs, status.queued_jobs
                ),
            ),
            Err(error) => {
                Check::fail("daemon", format!("{at}: {error}"), "end it (kill -9 if it is frozen) and start it anew")
            }
        });
        answers = true;
    }
    if checks.is_empty() && !answers {
        let found = "none runs: `sdctl generate` starts a private one for each call";
        checks.push(Check::ok("daemon", found));
    }
    checks
}

fn shared_memory(space: std::io::Result<machine::Space>) -> Check {
    let name = "shared memory";
    let remedy = "in a container: docker run --shm-size=256m (or ipc: host); else: mount -o remount,size=50% /dev/shm";
    let space = match space {
        Ok(space) => space,
        Err(error) => {
            return Check::fail(name, format!("{SHM_DIR}: {error}"), format!("mount a tmpfs there; {remedy}"));
        }
    };
    let found = format!("{SHM_DIR} has {} free of {}", human::bytes(space.free), human::bytes(space.total));
    match space.free {
        free if free < SHM_NEEDED => {
            Check::fail(name, format!("{found}; the default model needs {}", human::bytes(SHM_NEEDED)), remedy)
        }
        free if free < SHM_COMFORTABLE => Check::warn(name, format!("{found}; large pictures need more"), remedy),
        _ => Check::ok(name, found),
    }
}

fn memory(host: Option<machine::Space>, group: Option<machine::Space>) -> Check {
    let name = "memory";
    let Some(host) = host else {
        return Check::warn(name, "/proc/meminfo cannot be read", "mount /proc");
    };
    let mut found = format!("{} available of {}", human::bytes(host.free), human::bytes(host.total));
    let mut free = host.free;
    if let Some(group) = group {
        found.push_str(&format!("; control group: {} left of {}", human::bytes(group.free), human::bytes(group.total)));
        free = free.min(group.free);
    }
    match free {
        free if free < MEMORY_NEEDED => Check::fail(
            name,
            format!("{found}; the default model needs {}", human::bytes(MEMORY_NEEDED)),
            "end other programs, or raise the container's memory limit",
        ),
        free if free < MEMORY_COMFORTABLE => {
            Check::warn(name, format!("{found}; enough for the default model only"), "larger models need more memory")
        }
        _ => Check::ok(name, found),
    }
}

fn locked_memory(limit: std::io::Result<Option<u64>>) -> Check {
    let name = "locked memory";
    match limit {
        Ok(None) => Check::ok(name, "unlimited"),
        Ok(Some(limit)) => Check::ok(name, format!("at most {} (matters for GPUs only)", human::bytes(limit))),
        Err(error) => Check::warn(name, error.to_string(), "see ulimit -l"),
    }
}

fn open_files(limit: std::io::Result<Option<u64>>) -> Check {
    let name = "open files";
    match limit {
        Ok(Some(limit)) if limit < FILES_NEEDED => {
            Check::warn(name, format!("at most {limit}"), format!("raise it: ulimit -n {}", FILES_NEEDED * 4))
        }
        Ok(Some(limit)) => Check::ok(name, format!("at most {limit}")),
        Ok(None) => Check::ok(name, "unlimited"),
        Err(error) => Check::warn(name, error.to_string(), "see ulimit -n"),
    }
}

fn cpu(features: &[(&str, bool)]) -> Check {
    let name = "cpu";
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let has: Vec<&str> = features.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    let lacks = |wanted: &str| features.iter().any(|(name, has)| *name == wanted && !has);
    let found = format!(
        "{}, {}",
        human::count(threads as u64, "thread"),
        if has.is_empty() { "no vector features".into() } else { has.join(" ") }
    );
    if lacks("avx2") || lacks("fma") {
        return Check::warn(
            name,
            format!("{found}; without avx2 and fma pictures take several times as long"),
            "use a newer CPU",
        );
    }
    Check::ok(name, found)
}

fn cache() -> Check {
    let name = "cache folder";
    let folder = cache_folder();
    match machine::writable(&folder) {
        Ok(()) => Check::ok(name, folder.display().to_string()),
        Err(error) => Check::warn(
            name,
            format!("{} cannot be written ({error})", folder.display()),
            "set XDG_CACHE_HOME to a folder that can, for the default model's files",
        ),
    }
}

/// Where `sdd` keeps the default model's files unless its configuration says otherwise.
fn cache_folder() -> PathBuf {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache"))) {
        Some(cache) => cache.join("sdd"),
        None if nix::unistd::geteuid().is_root() => PathBuf::from("/var/cache/sdd"),
        None => std::env::temp_dir().join(format!("sdd-cache-{}", nix::unistd::getuid())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::Space;

    #[test]
    fn small_shared_memory_names_the_option_that_enlarges_it() {
        let check = |free| shared_memory(Ok(Space { total: 64 << 20, free }));
        assert_eq!(check(1 << 20).level, Level::Fail);
        assert!(check(1 << 20).remedy.unwrap().contains("--shm-size"));
        assert_eq!(check(50 << 20).level, Level::Warn);
        assert_eq!(check(64 << 20).level, Level::Ok);
        assert_eq!(shared_memory(Err(std::io::Error::other("gone"))).level, Level::Fail);
    }

    #[test]
    fn the_tighter_of_host_and_group_decides() {
        let space = |free| Space { total: 64 << 30, free };
        assert_eq!(memory(Some(space(32 << 30)), None).level, Level::Ok);
        assert_eq!(memory(Some(space(32 << 30)), Some(space(1 << 30))).level, Level::Warn);
        assert_eq!(memory(Some(space(32 << 30)), Some(space(100 << 20))).level, Level::Fail);
        assert_eq!(memory(None, None).level, Level::Warn);
    }

    #[test]
    fn an_old_cpu_is_warned_of() {
        assert_eq!(cpu(&[("avx2", false), ("fma", false)]).level, Level::Warn);
        assert_eq!(cpu(&[("avx2", true), ("fma", true)]).level, Level::Ok);
    }
}

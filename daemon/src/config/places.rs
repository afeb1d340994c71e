//! Where things are looked for when nobody says so.

use std::env;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use sd_proto::endpoint;

fn absolute(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The configuration file, if any: `$XDG_CONFIG_HOME/sdd/config.toml` (else below `~/.config`), then
/// `/etc/sdd/config.toml`. Only the first that exists counts.
pub fn default_file() -> Option<PathBuf> {
    let user = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
    let user = user.map(|folder| folder.join("sdd/config.toml"));
    user.into_iter().chain([PathBuf::from("/etc/sdd/config.toml")]).find(|path| path.exists())
}

/// `$XDG_CACHE_HOME/sdd`, else `~/.cache/sdd`, else `/var/cache/sdd` for root and a folder for temporary files for others.
pub(super) fn cache_dir() -> PathBuf {
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    match cache {
        Some(cache) => cache.join("sdd"),
        None if is_root() => PathBuf::from("/var/cache/sdd"),
        None => env::temp_dir().join(format!("sdd-cache-{}", nix::unistd::getuid())),
    }
}

/// `$XDG_STATE_HOME/sdd`, else `~/.local/state/sdd`, else `/var/lib/sdd` for root; others without a home have none.
pub(super) fn state_dir() -> Option<PathBuf> {
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    match state {
        Some(state) => Some(state.join("sdd")),
        None => is_root().then(|| PathBuf::from("/var/lib/sdd")),
    }
}

/// Root's daemon serves the system: its sockets for workers lie in a folder of their own, because clients of other users
/// must be able to enter the one above.
pub(super) fn runtime_dir() -> PathBuf {
    if is_root() { PathBuf::from("/run/sdd/private") } else { endpoint::user_runtime_dir() }
}

/// Where clients connect by default.
pub(super) fn socket(runtime_dir: Option<&Path>) -> PathBuf {
    match runtime_dir {
        Some(folder) => folder.join("sdd.sock"),
        None if is_root() => endpoint::system_socket(),
        None => endpoint::user_socket(),
    }
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Whether a file can be run.
pub(super) fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// The worker program: beside this one, then in `search` (the value of `PATH`). On failure, where it was looked for.
///
/// # Errors
/// It is nowhere.
pub fn find_worker(own: Option<&Path>, search: Option<OsString>) -> Result<PathBuf, String> {
    const NAME: &str = "sd-worker";
    let beside = own.and_then(Path::parent).map(|folder| folder.join(NAME));
    let in_path = search.iter().flat_map(env::split_paths).map(|folder| folder.join(NAME));
    let found = beside.clone().into_iter().chain(in_path).find(|path| is_program(path));
    found.ok_or_else(|| {
        let beside = beside.map_or_else(String::new, |path| format!("at {} or ", path.display()));
        format!("there is no worker program {beside}in PATH: install sd-worker beside sdd, or set worker_binary")
    })
}

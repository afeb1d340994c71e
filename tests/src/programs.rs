//! The programs under test, built once in the profile of the test itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Paths of the programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The daemon.
    pub sdd: PathBuf,
    /// The worker.
    pub sd_worker: PathBuf,
    /// The client.
    pub sdctl: PathBuf,
    /// A worker that misbehaves on purpose; see its source.
    pub faulty_worker: PathBuf,
}

impl Programs {
    /// Those of one folder.
    fn of(folder: &Path) -> Self {
        Self {
            sdd: folder.join("sdd"),
            sd_worker: folder.join("sd-worker"),
            sdctl: folder.join("sdctl"),
            faulty_worker: folder.join("faulty-worker"),
        }
    }
}

/// The programs, built if they are not up to date. Tests of one package do not build the binaries of others, so this asks
/// cargo, which holds no lock while tests run; up to date it costs a fraction of a second. What it asks for is what
/// `cargo test --workspace` builds, so that dependencies are built once; in the release profile, for benches, it is what
/// `cargo build --release` builds. `SD_TEST_PROGRAMS` names a folder whose programs are taken as they are: for long runs
/// beside which somebody goes on building.
pub fn programs() -> &'static Programs {
    static PROGRAMS: OnceLock<Programs> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        if let Some(folder) = std::env::var_os("SD_TEST_PROGRAMS") {
            return Programs::of(Path::new(&folder));
        }
        let exe = std::env::current_exe().expect("the test's own path");
        // target/PROFILE/deps/test-HASH, or target/PROFILE/soak
        let folder = exe.parent().filter(|folder| !folder.ends_with("deps")).or_else(|| exe.ancestors().nth(2));
        let folder = folder.expect("tests lie in the profile's folder or one below").to_path_buf();
        let profile = match folder.file_name().and_then(|name| name.to_str()) {
            Some("debug") => "dev",
            Some(other) => other,
            None => "dev",
        };
        let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "--profile", profile])
            .args(if profile == "dev" { &["--workspace", "--bins", "--tests"][..] } else { &[] })
            .current_dir(repository())
            .env("CARGO_TARGET_DIR", folder.parent().expect("the target folder"))
            .status()
            .expect("cargo runs");
        assert!(status.success(), "the programs do not build");
        Programs::of(&folder)
    })
}

/// The repository's root.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies one folder below the root")
}

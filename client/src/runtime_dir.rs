//! The folder of a private daemon.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

use sd_proto::endpoint::MAX_SOCKET_PATH;

/// A folder of mode 0700 for a daemon's sockets, removed with all that is in it.
#[derive(Debug)]
pub(crate) struct RuntimeDir {
    pub(crate) path: PathBuf,
    keep: bool,
}

impl RuntimeDir {
    /// Makes one with a random name in `$XDG_RUNTIME_DIR`, else in the folder for temporary files.
    pub(crate) fn create() -> io::Result<Self> {
        let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for base in own.into_iter().chain([std::env::temp_dir(), PathBuf::from("/tmp")]) {
            // Room for the longest name of a socket in it.
            if base.as_os_str().len() + "/sdd-private-0123456789abcdef/link-0123456789abcdef.sock".len()
                > MAX_SOCKET_PATH
            {
                continue;
            }
            let path = base.join(format!("sdd-private-{}", random_name()?));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self { path, keep: false }),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Leaves the folder to the daemon that uses it on.
    pub(crate) fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

fn random_name() -> io::Result<String> {
    let mut random = [0u8; 8];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

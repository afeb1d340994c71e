//! Sockets and the folder they lie in: private, short enough, and never taken from a daemon that lives.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use sd_proto::endpoint::Endpoint;
use tokio::net::{TcpListener, UnixListener};

/// Why a socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another daemon answers there.
    #[error("another daemon already listens on {0}: use it, or choose another --listen or --runtime-dir")]
    Held(Endpoint),
    /// The path is taken by something else.
    #[error("{} exists and is not a socket: remove it, or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// Others could enter the folder of the private sockets.
    #[error(
        "runtime folder {} has mode {mode:04o} and owner {owner}: it must be this user's alone \
         (chmod 0700; with systemd RuntimeDirectoryMode=0700), or choose another --runtime-dir", path.display()
    )]
    Open {
        /// The folder.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Its owner's uid.
        owner: u32,
    },
    /// The system refuses.
    #[error("cannot {action} {what}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// With what.
        what: String,
        /// What the system says.
        source: io::Error,
    },
}

fn system(action: &'static str, what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> SocketError {
    let what = what.to_string();
    move |source| SocketError::System { action, what, source }
}

/// Makes the folders above a path that do not exist, with mode 0755 whatever the process's umask is: other users reach the
/// system's socket through them, and the socket's own mode says who may use it. Existing folders stay as they are.
fn create_parents(path: &Path) -> Result<(), SocketError> {
    let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.exists()) else {
        return Ok(());
    };
    create_parents(parent)?;
    match DirBuilder::new().mode(0o755).create(parent) {
        Ok(()) => {
            fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).map_err(system("chmod", parent.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(system("create", parent.display())(error)),
    }
}

/// Makes the runtime folder with mode 0700, or checks that an existing one is ours alone. An existing folder's mode is
/// never changed: it may be `/run`.
///
/// # Errors
/// [`SocketError::Open`], [`SocketError::System`].
pub fn prepare_runtime_dir(path: &Path) -> Result<(), SocketError> {
    create_parents(path)?;
    match DirBuilder::new().mode(0o700).create(path) {
        // The umask can only have taken bits away.
        Ok(()) => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(system("chmod", path.display()))?
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(system("create", path.display())(error)),
    }
    let folder = fs::symlink_metadata(path).map_err(system("examine", path.display()))?;
    let (mode, owner) = (folder.mode() & 0o7777, folder.uid());
    if !folder.is_dir() || mode & 0o077 != 0 || owner != nix::unistd::geteuid().as_raw() {
        return Err(SocketError::Open { path: path.into(), mode, owner });
    }
    Ok(())
}

/// Binds a Unix socket with these permissions. What a dead daemon left at the path is removed; a living one is not
/// disturbed.
///
/// # Errors
/// [`SocketError::Held`], [`SocketError::NotASocket`], [`SocketError::System`].
pub fn bind_unix(path: &Path, mode: u32) -> Result<UnixListener, SocketError> {
    create_parents(path)?;
    remove_stale(path)?;
    let listener = std::os::unix::net::UnixListener::bind(path).map_err(|error| match error.kind() {
        // Somebody was faster.
        io::ErrorKind::AddrInUse => SocketError::Held(Endpoint::Unix(path.into())),
        _ => system("bind", path.display())(error),
    })?;
    // Bound under the process's umask, which `main` sets to 0077: never open wider than this.
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(system("chmod", path.display()))?;
    listener.set_nonblocking(true).map_err(system("prepare", path.display()))?;
    UnixListener::from_std(listener).map_err(system("watch", path.display()))
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system("examine", path.display())(error)),
        Ok(file) if !file.file_type().is_socket() => return Err(SocketError::NotASocket(path.into())),
        Ok(_) => {}
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(SocketError::Held(Endpoint::Unix(path.into()))),
        // Nobody listens: its daemon is dead.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing the socket of a dead daemon");
            fs::remove_file(path).map_err(system("remove", path.display()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Its queue is full: it lives.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(SocketError::Held(Endpoint::Unix(path.into()))),
        Err(error) => Err(system("examine", path.display())(error)),
    }
}

/// A socket on which clients connect.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket and its path.
    Unix(UnixListener, PathBuf),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl Listener {
    /// Binds an endpoint.
    ///
    /// # Errors
    /// See [`SocketError`].
    pub async fn bind(endpoint: &Endpoint, mode: u32) -> Result<Self, SocketError> {
        match endpoint {
            Endpoint::Unix(path) => Ok(Self::Unix(bind_unix(path, mode)?, path.clone())),
            Endpoint::Tcp { host, port } => match TcpListener::bind((host.as_str(), *port)).await {
                Ok(listener) => Ok(Self::Tcp(listener)),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(SocketError::Held(endpoint.clone())),
                Err(error) => Err(system("bind", endpoint)(error)),
            },
        }
    }

    /// Where it really listens: a port that was left to the system is known now.
    pub fn endpoint(&self) -> Endpoint {
        match self {
            Self::Unix(_, path) => Endpoint::Unix(path.clone()),
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => Endpoint::Tcp { host: address.ip().to_string(), port: address.port() },
                Err(_) => Endpoint::Tcp { host: "localhost".into(), port: 0 },
            },
        }
    }
}

/// Removes socket files when dropped.
#[derive(Debug, Default)]
pub struct SocketFiles(Vec<PathBuf>);

impl SocketFiles {
    /// Remembers one.
    pub fn add(&mut self, path: PathBuf) {
        self.0.push(path);
    }
}

impl Drop for SocketFiles {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_daemons_socket_is_replaced_and_a_living_ones_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sdd.sock");
        let living = bind_unix(&path, 0o600).unwrap();
        assert!(matches!(bind_unix(&path, 0o600), Err(SocketError::Held(_))));
        drop(living);
        assert!(path.exists(), "closing a listener leaves its file");
        let again = bind_unix(&path, 0o640).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        drop(again);
        let other = dir.path().join("precious");
        fs::write(&other, "text").unwrap();
        assert!(matches!(bind_unix(&other, 0o600), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&other).unwrap(), "text");
    }

    #[test]
    fn the_runtime_folder_is_ours_alone_or_refused_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = dir.path().join("a/b");
        prepare_runtime_dir(&fresh).unwrap();
        assert_eq!(fs::metadata(dir.path().join("a")).unwrap().mode() & 0o777, 0o755, "others pass the folder above");
        assert_eq!(fs::metadata(&fresh).unwrap().mode() & 0o777, 0o700);
        prepare_runtime_dir(&fresh).unwrap();
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(prepare_runtime_dir(&fresh), Err(SocketError::Open { mode: 0o755, .. })));
        assert_eq!(fs::metadata(&fresh).unwrap().mode() & 0o777, 0o755);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(matches!(prepare_runtime_dir(&link), Err(SocketError::Open { .. })), "a link can be moved under us");
    }

    #[tokio::test]
    async fn a_free_port_is_named_once_it_is_known() {
        let any = Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 };
        let listener = Listener::bind(&any, 0).await.unwrap();
        let Endpoint::Tcp { host, port } = listener.endpoint() else { panic!("not TCP") };
        assert!(host == "127.0.0.1" && port != 0);
        let taken = Listener::bind(&listener.endpoint(), 0).await;
        assert!(matches!(taken, Err(SocketError::Held(_))));
    }
}

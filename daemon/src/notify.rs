//! A word to whoever started us: the service manager, or the client that waits for its private daemon.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use sd_proto::endpoint::Endpoint;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

/// Tells systemd a state (`READY=1`, `STOPPING=1`) where it asked for it.
pub fn service_manager(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let send = || -> io::Result<()> {
        let address = match path.as_encoded_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(&path)?,
        };
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
    };
    if let Err(error) = send() {
        tracing::warn!(%error, "the service manager could not be told {state}");
    }
}

/// Writes where we serve, and closes the pipe. Whoever waited for it may have gone: no reason to fail.
pub fn ready(pipe: OwnedFd, endpoint: &Endpoint) {
    if let Err(error) = writeln!(File::from(pipe), "{endpoint}") {
        tracing::warn!(%error, "nobody reads that we are ready");
    }
}

/// Completes when the owner's end of the pipe is closed.
pub async fn owner_gone(pipe: OwnedFd) {
    let mut pipe = match pipe::Receiver::from_owned_fd(pipe) {
        Ok(pipe) => pipe,
        Err(error) => {
            tracing::error!(%error, "the owner's descriptor is not a pipe that can be read");
            return;
        }
    };
    let mut ignored = [0u8; 64];
    while pipe.read(&mut ignored).await.is_ok_and(|read| read > 0) {}
}

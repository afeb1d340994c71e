//! How a daemon's address is written, and where a daemon is looked for.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest path of a Unix socket, in bytes: `sun_path` less its terminating zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// An address on which a daemon listens: `unix:PATH` or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A Unix domain socket.
    Unix(PathBuf),
    /// A TCP address; port 0 lets the system choose.
    Tcp {
        /// Name or address, without the brackets of IPv6.
        host: String,
        /// Port.
        port: u16,
    },
}

/// Why a text is not an [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// Neither form.
    #[error("{0:?} is not an endpoint: write unix:PATH or HOST:PORT")]
    Form(String),
    /// Too long for the operating system.
    #[error("socket path {path:?} has {length} bytes, at most {MAX_SOCKET_PATH} are possible: choose a shorter one")]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        length: usize,
    },
    /// Not a port number.
    #[error("{port:?} in endpoint {endpoint:?} is not a port: write a number from 0 to 65535")]
    Port {
        /// What stands in its place.
        port: String,
        /// The whole text.
        endpoint: String,
    },
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let path = text.strip_prefix("unix:").or_else(|| text.starts_with('/').then_some(text));
        if let Some(path) = path {
            let path = path.strip_prefix("//").map_or(path, |_| &path[2..]);
            if path.is_empty() {
                return Err(EndpointError::Form(text.into()));
            }
            if path.len() > MAX_SOCKET_PATH {
                return Err(EndpointError::TooLong { path: path.into(), length: path.len() });
            }
            return Ok(Self::Unix(path.into()));
        }
        let plain = text.strip_prefix("http://").or_else(|| text.strip_prefix("tcp://")).unwrap_or(text);
        let (host, port) = plain.rsplit_once(':').ok_or_else(|| EndpointError::Form(text.into()))?;
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || host.contains('/') {
            return Err(EndpointError::Form(text.into()));
        }
        let port = port.parse().map_err(|_| EndpointError::Port { port: port.into(), endpoint: text.into() })?;
        Ok(Self::Tcp { host: host.into(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// Socket of a daemon that serves the whole system: `SDD_SYSTEM_SOCKET` where set (a container that mounts it elsewhere),
/// else `/run/sdd/sdd.sock`.
pub fn system_socket() -> PathBuf {
    match std::env::var_os("SDD_SYSTEM_SOCKET") {
        Some(path) if !path.is_empty() => path.into(),
        _ => PathBuf::from("/run/sdd/sdd.sock"),
    }
}

/// Folder of one user's daemon: `$XDG_RUNTIME_DIR/sdd`, else `sdd-UID` in the folder for temporary files.
pub fn user_runtime_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir).join("sdd"),
        _ => std::env::temp_dir().join(format!("sdd-{}", nix::unistd::getuid())),
    }
}

/// Socket of one user's daemon.
pub fn user_socket() -> PathBuf {
    user_runtime_dir().join("sdd.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_parse_and_print() {
        for (text, printed) in [
            ("unix:/run/x.sock", "unix:/run/x.sock"),
            ("unix:///run/x.sock", "unix:/run/x.sock"),
            ("/run/x.sock", "unix:/run/x.sock"),
            ("unix:relative.sock", "unix:relative.sock"),
            ("localhost:7860", "localhost:7860"),
            ("http://localhost:7860", "localhost:7860"),
            ("[::1]:0", "[::1]:0"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.to_string(), printed);
            assert_eq!(printed.parse::<Endpoint>().unwrap(), endpoint);
        }
    }

    #[test]
    fn what_is_neither_is_refused_with_the_form() {
        for text in ["", "localhost", "unix:", ":80", "http://a/b:80"] {
            assert!(matches!(text.parse::<Endpoint>(), Err(EndpointError::Form(_))), "{text}");
        }
        assert!(matches!("host:99999".parse::<Endpoint>(), Err(EndpointError::Port { .. })));
        let long = format!("unix:/{}", "x".repeat(MAX_SOCKET_PATH));
        assert!(matches!(long.parse::<Endpoint>(), Err(EndpointError::TooLong { .. })));
    }
}

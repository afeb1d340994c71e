//! One connection to a daemon: opened once, never silently again, so that a respawned daemon on the same path is not
//! mistaken for the one we talked to.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use sd_proto::endpoint::Endpoint;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::transport::Channel;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a silent connection is probed, and how long the answer may take: a frozen daemon is found within the sum.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Whose socket may be connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Whoever listens there: the user named the endpoint.
    Named,
    /// Only a daemon of this user or of root: the endpoint was found, and others could have put a socket there.
    OwnOrRoot,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody listens.
    #[error("no daemon listens at {endpoint} ({source})")]
    Absent {
        /// Where.
        endpoint: Endpoint,
        /// What the system says.
        source: io::Error,
    },
    /// The socket belongs to a user we do not trust, or cannot show whose it is.
    #[error("the socket at {endpoint} belongs to {owner}, not to you or root: name it with --endpoint if you trust it")]
    Untrusted {
        /// Where.
        endpoint: Endpoint,
        /// Whose it is.
        owner: String,
    },
    /// The system does not let us.
    #[error("not permitted to connect to {endpoint} ({source}): ask for access to its socket")]
    Forbidden {
        /// Where.
        endpoint: Endpoint,
        /// What the system says.
        source: io::Error,
    },
    /// Connected or connecting, and no answer.
    #[error("the daemon at {endpoint} does not answer within {} s: it may be frozen or overloaded", after.as_secs_f64())]
    Silent {
        /// Where.
        endpoint: Endpoint,
        /// How long we waited.
        after: Duration,
    },
    /// Something answers, and it is not a daemon.
    #[error("what listens at {endpoint} does not speak sd.v1: {detail}")]
    Foreign {
        /// Where.
        endpoint: Endpoint,
        /// What went wrong.
        detail: String,
    },
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Opens the connection; the channel fails for good once it is lost.
pub(crate) async fn connect(endpoint: &Endpoint, trust: Trust) -> Result<Channel, ConnectError> {
    let silent = || ConnectError::Silent { endpoint: endpoint.clone(), after: CONNECT_TIMEOUT };
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, open(endpoint, trust)).await.map_err(|_| silent())??;
    let once = Arc::new(Mutex::new(Some(stream)));
    let connector = tower::service_fn(move |_| {
        let stream = once.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        std::future::ready(match stream {
            Some(stream) => Ok(TokioIo::new(stream)),
            None => Err(io::Error::new(io::ErrorKind::ConnectionReset, "the daemon closed the connection")),
        })
    });
    tonic::transport::Endpoint::from_static("http://sdd")
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector(connector)
        .await
        .map_err(|error| ConnectError::Foreign { endpoint: endpoint.clone(), detail: error.to_string() })
}

async fn open(endpoint: &Endpoint, trust: Trust) -> Result<Box<dyn Stream>, ConnectError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::PermissionDenied => ConnectError::Forbidden { endpoint: endpoint.clone(), source },
        _ => ConnectError::Absent { endpoint: endpoint.clone(), source },
    };
    match endpoint {
        Endpoint::Unix(path) => {
            let stream = UnixStream::connect(path).await.map_err(failed)?;
            if trust == Trust::OwnOrRoot {
                let peer = stream.peer_cred().map_err(failed)?.uid();
                if peer != 0 && peer != nix::unistd::getuid().as_raw() {
                    let owner = format!("user {peer}");
                    return Err(ConnectError::Untrusted { endpoint: endpoint.clone(), owner });
                }
            }
            Ok(Box::new(stream))
        }
        Endpoint::Tcp { host, port } => {
            // What a daemon listens on may name every address of its host; this one is reached by loopback.
            let host = match host.as_str() {
                "0.0.0.0" => "127.0.0.1",
                "::" => "::1",
                host => host,
            };
            let stream = TcpStream::connect((host, *port)).await.map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            Ok(Box::new(stream))
        }
    }
}

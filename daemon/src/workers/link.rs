//! The private gRPC server to which workers attach, apart from the public one.
//!
//! It only moves messages: who may attach is decided by the supervisor of the incarnation that the caller claims to be
//! ([`check`]), because that one knows the process it spawned.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sd_proto::worker::v1::link_server::{Link, LinkServer};
use sd_proto::worker::v1::{FromWorker, Hello, ToWorker, from_worker};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use super::spec::{WorkerSpec, stage_name};

/// Messages that may wait in each direction. A worker that lets more pile up does not read.
pub const QUEUE: usize = 64;
/// Largest message of a worker: notes and errors; tensors never travel here.
const MAX_FROM_WORKER: usize = 1 << 20;

/// Who is at the other end of a connection, by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process id; 0 where the kernel does not say.
    pub pid: u32,
    /// User id.
    pub uid: u32,
}

/// What an attaching worker must prove.
#[derive(Debug, Clone)]
pub struct Expected {
    /// The token that was given to the process.
    pub token: [u8; sd_proto::TOKEN_BYTES],
    /// The process that was spawned, and the user it runs as.
    pub peer: Peer,
    /// What it was spawned as.
    pub spec: WorkerSpec,
}

/// Why a worker may not attach.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Another process than the one that was spawned.
    #[error("pid {} of uid {} claims to be incarnation {incarnation}, which is another process", peer.pid, peer.uid)]
    Stranger {
        /// Who it is.
        peer: Peer,
        /// Who it says it is.
        incarnation: u64,
    },
    /// The right process without the right token.
    #[error("the token is not the one this process was given")]
    Token,
    /// It speaks another version of the contract.
    #[error("it speaks link protocol {found} (version {version:?}), this daemon speaks {}", sd_proto::LINK_PROTOCOL)]
    Protocol {
        /// What it speaks.
        found: u32,
        /// The worker's own version.
        version: String,
    },
    /// It says it is something else than it was started as.
    #[error("it says {found}, but was started as {expected}")]
    Identity {
        /// By itself.
        found: String,
        /// By us.
        expected: String,
    },
    /// It attached before.
    #[error("it has attached before")]
    Twice,
    /// No such incarnation lives.
    #[error("no worker of incarnation {0} lives")]
    Unknown(u64),
}

impl Refused {
    /// Whether this proves that the spawned process itself misbehaves. A stranger's lie costs only the stranger.
    pub fn condemns(&self) -> bool {
        match self {
            Self::Stranger { .. } | Self::Unknown(_) => false,
            Self::Token | Self::Protocol { .. } | Self::Identity { .. } | Self::Twice => true,
        }
    }
}

/// Checks a worker's first message against what was spawned. The kernel's word on the peer comes first, so that nobody
/// else learns whether a token is right; the token is compared in constant time.
///
/// # Errors
/// The first thing that does not hold.
pub fn check(expected: &Expected, hello: &Hello, peer: Peer) -> Result<(), Refused> {
    if peer != expected.peer {
        return Err(Refused::Stranger { peer, incarnation: expected.spec.incarnation });
    }
    if !equal_in_constant_time(&hello.token, &expected.token) {
        return Err(Refused::Token);
    }
    if hello.protocol != sd_proto::LINK_PROTOCOL {
        return Err(Refused::Protocol { found: hello.protocol, version: hello.version.clone() });
    }
    let identity = |pid, stage, device: &str| format!("pid {pid}, stage {stage}, device {device}");
    let found = identity(hello.pid, stage_name(hello.stage()), &hello.device);
    let wanted = identity(expected.peer.pid, stage_name(expected.spec.stage), expected.spec.device.as_str());
    if found != wanted {
        return Err(Refused::Identity { found, expected: wanted });
    }
    Ok(())
}

fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && std::hint::black_box(a.iter().zip(b).fold(0u8, |differ, (x, y)| differ | (x ^ y))) == 0
}

/// A worker that wants to attach: what it said and who it is. The supervisor answers with where its messages go.
#[derive(Debug)]
pub struct AttachRequest {
    /// Its first message.
    pub hello: Hello,
    /// Who it is.
    pub peer: Peer,
    /// Messages to it.
    pub to_worker: mpsc::Sender<Result<ToWorker, Status>>,
    /// Where its further messages go.
    pub reply: oneshot::Sender<Result<mpsc::Sender<FromWorker>, Refused>>,
}

/// Which supervisor listens for which incarnation. Held only for the length of a look-up.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    table: Arc<Mutex<HashMap<u64, mpsc::Sender<AttachRequest>>>>,
}

impl Routes {
    /// Opens the way to an incarnation's supervisor, until the returned guard is dropped.
    pub fn open(&self, incarnation: u64) -> (RouteGuard, mpsc::Receiver<AttachRequest>) {
        let (sender, receiver) = mpsc::channel(4);
        self.table.lock().unwrap_or_else(PoisonError::into_inner).insert(incarnation, sender);
        (RouteGuard { routes: self.clone(), incarnation }, receiver)
    }

    fn find(&self, incarnation: u64) -> Option<mpsc::Sender<AttachRequest>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).get(&incarnation).cloned()
    }
}

/// Closes an incarnation's way when dropped: what a dead incarnation says finds nobody.
#[derive(Debug)]
pub struct RouteGuard {
    routes: Routes,
    incarnation: u64,
}

impl Drop for RouteGuard {
    fn drop(&mut self) {
        self.routes.table.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.incarnation);
    }
}

#[derive(Debug)]
struct Service {
    routes: Routes,
    hello_deadline: Duration,
    closing: CancellationToken,
}

#[tonic::async_trait]
impl Link for Service {
    type AttachStream = ReceiverStream<Result<ToWorker, Status>>;

    async fn attach(&self, request: Request<Streaming<FromWorker>>) -> Result<Response<Self::AttachStream>, Status> {
        let credentials = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        let credentials = credentials.ok_or_else(|| Status::permission_denied("the peer has no credentials"))?;
        let pid = credentials.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
        let peer = Peer { pid, uid: credentials.uid() };
        let (to_worker, messages) = mpsc::channel(QUEUE);
        let session = Session {
            routes: self.routes.clone(),
            peer,
            incoming: request.into_inner(),
            to_worker,
            hello_deadline: self.hello_deadline,
        };
        let closing = self.closing.clone();
        // The headers go out when this function returns; the caller waits for them before anything else happens.
        tokio::spawn(async move {
            tokio::select! {
                () = closing.cancelled() => {}
                () = session.run() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(messages)))
    }
}

struct Session {
    routes: Routes,
    peer: Peer,
    incoming: Streaming<FromWorker>,
    to_worker: mpsc::Sender<Result<ToWorker, Status>>,
    hello_deadline: Duration,
}

impl Session {
    async fn run(mut self) {
        let (incarnation, deliver) = match self.attach().await {
            Ok(attached) => attached,
            Err(why) => {
                tracing::warn!(peer = self.peer.pid, "a worker's handshake failed: {}", why.message());
                let _ = self.to_worker.send(Err(why)).await;
                return;
            }
        };
        // From here on the supervisor alone holds the way to the worker: when it lets go, the stream ends.
        drop(self.to_worker);
        // An error is a broken stream, whatever its code: the process's exit status tells why.
        while let Ok(Some(message)) = self.incoming.message().await {
            if message.incarnation != incarnation {
                tracing::warn!(
                    incarnation,
                    claimed = message.incarnation,
                    "a message of another incarnation was dropped"
                );
                continue;
            }
            if deliver.send(message).await.is_err() {
                return;
            }
        }
    }

    async fn attach(&mut self) -> Result<(u64, mpsc::Sender<FromWorker>), Status> {
        let first = tokio::time::timeout(self.hello_deadline, self.incoming.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no hello came in time"))??
            .ok_or_else(|| Status::invalid_argument("the stream ended before its hello"))?;
        let incarnation = first.incarnation;
        let Some(from_worker::Message::Hello(hello)) = first.message else {
            return Err(Status::invalid_argument("the first message is not a hello"));
        };
        let unknown = || Status::permission_denied(Refused::Unknown(incarnation).to_string());
        let supervisor = self.routes.find(incarnation).ok_or_else(unknown)?;
        let (reply, answer) = oneshot::channel();
        let request = AttachRequest { hello, peer: self.peer, to_worker: self.to_worker.clone(), reply };
        supervisor.send(request).await.map_err(|_| unknown())?;
        match answer.await.map_err(|_| unknown())? {
            Ok(deliver) => Ok((incarnation, deliver)),
            Err(refused) => Err(Status::permission_denied(refused.to_string())),
        }
    }
}

/// The running server. Dropping it does not stop it; [`close`](LinkServerHandle::close) does.
#[derive(Debug)]
pub struct LinkServerHandle {
    path: PathBuf,
    closing: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl LinkServerHandle {
    /// Serves on a socket that is already bound.
    pub fn serve(listener: UnixListener, path: &Path, routes: Routes, hello_deadline: Duration) -> Self {
        let closing = CancellationToken::new();
        let service = LinkServer::new(Service { routes, hello_deadline, closing: closing.clone() })
            .max_decoding_message_size(MAX_FROM_WORKER);
        let signal = closing.clone().cancelled_owned();
        let task = tokio::spawn(async move {
            let served = tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming_shutdown(UnixListenerStream::new(listener), signal)
                .await;
            if let Err(error) = served {
                tracing::error!(%error, "the workers' link server failed");
            }
        });
        Self { path: path.into(), closing, task }
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ends every stream and the server, and removes the socket. Bounded: a connection that does not end is dropped.
    pub async fn close(self) {
        self.closing.cancel();
        let mut task = self.task;
        if tokio::time::timeout(Duration::from_secs(1), &mut task).await.is_err() {
            task.abort();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_proto::worker::v1::WorkerStage;

    fn expected() -> Expected {
        Expected {
            token: [7; 32],
            peer: Peer { pid: 100, uid: 1000 },
            spec: WorkerSpec {
                incarnation: 5,
                stage: WorkerStage::Vae,
                model: "m".into(),
                model_dir: "/m".into(),
                device: "cpu".into(),
                threads: 1,
                weights_total: 0,
            },
        }
    }

    fn hello() -> Hello {
        Hello {
            token: vec![7; 32],
            protocol: sd_proto::LINK_PROTOCOL,
            pid: 100,
            stage: WorkerStage::Vae as i32,
            device: "cpu".into(),
            version: "1".into(),
        }
    }

    #[test]
    fn the_right_worker_attaches_and_every_other_does_not() {
        let expected = expected();
        let peer = expected.peer;
        assert_eq!(check(&expected, &hello(), peer), Ok(()));
        let stranger = Peer { pid: 101, ..peer };
        let refused = check(&expected, &hello(), stranger).unwrap_err();
        assert!(matches!(refused, Refused::Stranger { .. }) && !refused.condemns());
        assert!(matches!(check(&expected, &hello(), Peer { uid: 0, ..peer }), Err(Refused::Stranger { .. })));
        let lies = [
            Hello { token: vec![8; 32], ..hello() },
            Hello { token: vec![7; 31], ..hello() },
            Hello { token: Vec::new(), ..hello() },
            Hello { protocol: 99, ..hello() },
            Hello { stage: WorkerStage::Text as i32, ..hello() },
            Hello { device: "GPU-1".into(), ..hello() },
            Hello { pid: 101, ..hello() },
        ];
        for lie in lies {
            let refused = check(&expected, &lie, peer).unwrap_err();
            assert!(refused.condemns(), "{refused}");
        }
    }
}

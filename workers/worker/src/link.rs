//! The link to the daemon: hello, leases, tasks, retirement.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::FromRawFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use hyper_util::rt::TokioIo;
use sd_proto::exit::WorkerExit;
use sd_proto::worker::v1::link_client::LinkClient;
use sd_proto::worker::v1::{Hello, LeasePurpose, ToWorker, from_worker, to_worker};
use sd_proto::{LINK_PROTOCOL, MAX_MESSAGE_BYTES, TOKEN_BYTES, TOKEN_FD};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio_stream::wrappers::ReceiverStream;

use crate::arguments::Serve;
use crate::leases::{Leases, Revision};
use crate::memory;
use crate::outbox::Outbox;
use crate::pulse;
use crate::runner::{ModelThread, Order};

/// How long the daemon may take to accept the link.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// How long the daemon may take to read what was said before this process ends.
const FAREWELL_DEADLINE: Duration = Duration::from_secs(2);

/// Serves until retired, refused or alone, and says how to exit.
pub(crate) fn serve(arguments: Serve) -> WorkerExit {
    let token = match take_token() {
        Ok(token) => token,
        Err(error) => {
            eprintln!("{error:#}: sd-worker is started by sdd, not by hand");
            return WorkerExit::BadArguments;
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start the runtime: {error}");
            return WorkerExit::Internal;
        }
    };
    runtime.block_on(run(arguments, token))
}

/// Reads the token from the inherited pipe and closes it.
fn take_token() -> anyhow::Result<Vec<u8>> {
    // Whoever starts this by hand has nothing there, or something of his own that must be left alone.
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat fills the structure or fails, whatever the descriptor is.
    let is_open = unsafe { libc::fstat(TOKEN_FD, status.as_mut_ptr()) } == 0;
    // SAFETY: read only where fstat has filled it.
    let is_pipe = is_open && unsafe { status.assume_init() }.st_mode & libc::S_IFMT == libc::S_IFIFO;
    anyhow::ensure!(is_pipe, "no pipe with a token on descriptor {TOKEN_FD}");
    // SAFETY: the descriptor is open, this process's by contract with the daemon, and nothing else uses it.
    let mut file = unsafe { File::from_raw_fd(TOKEN_FD) };
    let mut token = vec![0u8; TOKEN_BYTES];
    file.read_exact(&mut token).with_context(|| format!("no token on descriptor {TOKEN_FD}"))?;
    Ok(token)
}

async fn connect(socket: &Path) -> anyhow::Result<LinkClient<tonic::transport::Channel>> {
    let path: PathBuf = socket.into();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = tonic::transport::Endpoint::from_static("http://sdd.invalid")
        .connect_timeout(CONNECT_DEADLINE)
        .connect_with_connector(connector)
        .await
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    Ok(LinkClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES))
}

async fn run(arguments: Serve, token: Vec<u8>) -> WorkerExit {
    let (outbox, queue) = Outbox::new(arguments.incarnation);
    let (finished, mut ended) = oneshot::channel();
    let leases = Leases::default();
    let model = match ModelThread::start(&arguments, outbox.clone(), leases.allowance(), finished) {
        Ok(model) => model,
        Err(error) => {
            eprintln!("cannot start the model thread: {error}");
            return WorkerExit::Internal;
        }
    };
    outbox
        .send(from_worker::Message::Hello(Hello {
            token,
            protocol: LINK_PROTOCOL,
            pid: std::process::id(),
            stage: arguments.stage.on_link() as i32,
            device: arguments.device.id().into(),
            version: env!("CARGO_PKG_VERSION").into(),
        }))
        .await;
    let attach = async {
        let mut client = connect(&arguments.socket).await?;
        let response = client.attach(ReceiverStream::new(queue)).await.context("the daemon refused the link")?;
        anyhow::Ok(response.into_inner())
    };
    let mut orders = match tokio::time::timeout(CONNECT_DEADLINE, attach).await {
        Ok(Ok(orders)) => orders,
        Ok(Err(error)) => {
            eprintln!("{error:#}");
            return WorkerExit::LostLink;
        }
        Err(_elapsed) => {
            eprintln!("the daemon did not accept the link within {CONNECT_DEADLINE:?}");
            return WorkerExit::LostLink;
        }
    };
    let mut worker = Attached { outbox, model, leases, pulse: None };
    loop {
        tokio::select! {
            order = orders.message() => match order {
                Ok(Some(order)) => {
                    if let Some(exit) = worker.obey(order).await {
                        return worker.farewell(exit, &mut orders).await;
                    }
                }
                Ok(None) => return WorkerExit::LostLink,
                Err(status) => {
                    tracing::info!(code = ?status.code(), "the link broke");
                    return WorkerExit::LostLink;
                }
            },
            Some(revision) = worker.model.given_back.recv() => worker.returned(revision).await,
            exit = &mut ended => {
                // The model thread ends by itself only where going on makes no sense: weights that cannot be used.
                return worker.farewell(exit.unwrap_or(WorkerExit::Internal), &mut orders).await;
            }
        }
    }
}

/// A worker whose link stands.
struct Attached {
    outbox: Outbox,
    model: ModelThread,
    leases: Leases,
    pulse: Option<pulse::PulseThread>,
}

impl Attached {
    /// Does what one message asks; `Some` ends the process.
    async fn obey(&mut self, order: ToWorker) -> Option<WorkerExit> {
        match order.message? {
            to_worker::Message::Welcome(welcome) => {
                let interval = Duration::from_millis(u64::from(welcome.pulse_interval_ms.max(10)));
                match pulse::start(interval, self.outbox.clone()) {
                    Ok(thread) => self.pulse = Some(thread),
                    Err(error) => {
                        eprintln!("cannot start the pulse: {error}");
                        return Some(WorkerExit::Internal);
                    }
                }
            }
            to_worker::Message::Grant(grant) => {
                self.leases.granted(&grant);
                tracing::debug!(lease = grant.lease_id, bytes = grant.bytes, total = self.leases.total(), "granted");
            }
            to_worker::Message::Revise(revise) => self.revise(revise.lease_id, revise.bytes),
            to_worker::Message::Proof(proof) => {
                tracing::debug!(lease = proof.lease_id, bytes = proof.bytes, "release proven");
            }
            to_worker::Message::Task(task) => self.model.order(Order::Run(Box::new(task))),
            to_worker::Message::Cancel(cancel) => self.model.cancel(cancel.task_id),
            to_worker::Message::Retire(_) => {
                self.model.cancel_all();
                let (freed, wait) = oneshot::channel();
                self.model.order(Order::Unload(freed));
                // A model thread that has ended has freed as well.
                let _ = wait.await;
                for returned in self.leases.give_back_all() {
                    self.outbox.send(from_worker::Message::LeaseReturned(returned)).await;
                }
                return Some(WorkerExit::Clean);
            }
        }
        None
    }

    /// Has a lease given back down to `bytes`. Weights go at the next block of the running task, or at once; scratch memory
    /// goes after the running task.
    fn revise(&mut self, lease_id: u64, bytes: u64) {
        match self.leases.purpose(lease_id) {
            Some(LeasePurpose::Weights) => {
                self.leases.revise_weights(lease_id, bytes);
                self.model.order(Order::Follow);
            }
            Some(LeasePurpose::WorkingSet) => self.model.order(Order::Trim(Revision { lease_id, bytes })),
            Some(LeasePurpose::Unspecified | LeasePurpose::Context) => {
                tracing::warn!(lease = lease_id, bytes, "this lease ends only with the process");
            }
            None => tracing::warn!(lease = lease_id, "revision of a lease that is not held"),
        }
    }

    /// Says that a lease was given back.
    async fn returned(&mut self, revision: Revision) {
        if let Some(returned) = self.leases.give_back(revision.lease_id, revision.bytes) {
            self.outbox.send(from_worker::Message::LeaseReturned(returned)).await;
        }
    }

    /// Lets the daemon read everything that was said, then ends.
    async fn farewell(self, exit: WorkerExit, orders: &mut tonic::Streaming<ToWorker>) -> WorkerExit {
        drop(self.pulse);
        self.outbox.close();
        let drained = async { while let Ok(Some(_)) = orders.message().await {} };
        if tokio::time::timeout(FAREWELL_DEADLINE, drained).await.is_err() {
            tracing::warn!("the daemon did not end the link");
        }
        memory::trim();
        exit
    }
}

//! A real worker whose daemon is the test: its leases, tasks and segments are the test's to give.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sd_proto::segment::{FIELDS_BYTES, HEADER_BYTES, Header};
use sd_proto::worker::v1::link_server::{Link, LinkServer};
use sd_proto::worker::v1::{
    ElementType, FromWorker, LeaseGrant, LeasePurpose, LeaseReturned, LeaseRevise, NamedSegment, Segment, Task,
    TaskDone, TaskPhase, ToWorker, Welcome, from_worker, to_worker,
};
use sd_proto::{TOKEN_BYTES, TOKEN_FD};
use shared_memory::{Shmem, ShmemConf};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

use crate::process::Process;
use crate::programs::programs;

/// Longer than anything here takes on a busy machine; it only bounds a failure.
const PATIENCE: Duration = Duration::from_secs(120);
/// Shorter than a segment of the default model's networks, so that pulses do not hide what is asked for.
const PULSE: u32 = 100;

/// The incarnation of every worker here.
pub const INCARNATION: u64 = 1;

type Orders = mpsc::Sender<Result<ToWorker, Status>>;

struct Endpoint {
    orders: std::sync::Mutex<Option<mpsc::Receiver<Result<ToWorker, Status>>>>,
    said: mpsc::UnboundedSender<from_worker::Message>,
}

#[tonic::async_trait]
impl Link for Endpoint {
    type AttachStream = Pin<Box<ReceiverStream<Result<ToWorker, Status>>>>;

    async fn attach(&self, request: Request<Streaming<FromWorker>>) -> Result<Response<Self::AttachStream>, Status> {
        let orders = self.orders.lock().expect("the lock").take().ok_or_else(|| Status::aborted("one worker only"))?;
        let (mut stream, said) = (request.into_inner(), self.said.clone());
        tokio::spawn(async move {
            while let Ok(Some(FromWorker { message: Some(message), .. })) = stream.message().await {
                let _ = said.send(message);
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(orders))))
    }
}

/// A worker that serves this test.
pub struct LinkedWorker {
    runtime: Runtime,
    orders: Orders,
    said: mpsc::UnboundedReceiver<from_worker::Message>,
    child: Child,
    _folder: tempfile::TempDir,
}

impl std::fmt::Debug for LinkedWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkedWorker").field("pid", &self.child.id()).finish_non_exhaustive()
    }
}

impl Drop for LinkedWorker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl LinkedWorker {
    /// Starts a worker for a stage ("text", "diffusion", "vae") of the model in `folder` and welcomes it.
    pub fn start(stage: &str, model: &Path) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("tokio");
        let folder = tempfile::Builder::new().prefix("sdd-linked-").tempdir().expect("a folder");
        let socket = folder.path().join("link");
        let (orders, queue) = mpsc::channel(64);
        let (said_to, said) = mpsc::unbounded_channel();
        let endpoint = Endpoint { orders: std::sync::Mutex::new(Some(queue)), said: said_to };
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(&socket).expect("a socket")
        };
        let serving = tonic::transport::Server::builder()
            .add_service(LinkServer::new(endpoint))
            .serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(serving);
        let child = spawn(stage, model, &socket);
        let mut worker = Self { runtime, orders, said, child, _folder: folder };
        let hello = worker.until(|message| match message {
            from_worker::Message::Hello(hello) => Some(hello),
            _ => None,
        });
        assert_eq!(hello.pid, worker.child.id());
        worker.order(to_worker::Message::Welcome(Welcome { pulse_interval_ms: PULSE }));
        worker
    }

    /// The process, as the kernel shows it.
    pub fn process(&self) -> Process {
        Process { pid: self.child.id() as i32, arguments: vec!["sd-worker".into()] }
    }

    /// Sends an order.
    pub fn order(&self, message: to_worker::Message) {
        let order = Ok(ToWorker { message: Some(message) });
        self.runtime.block_on(self.orders.send(order)).expect("the worker listens");
    }

    /// Grants a lease, or another amount of one.
    pub fn grant(&self, lease_id: u64, purpose: LeasePurpose, bytes: u64) {
        let grant = LeaseGrant { lease_id, purpose: purpose as i32, bytes, ..LeaseGrant::default() };
        self.order(to_worker::Message::Grant(grant));
    }

    /// Has a lease given back down to `bytes`.
    pub fn revise(&self, lease_id: u64, bytes: u64) {
        self.order(to_worker::Message::Revise(LeaseRevise { lease_id, bytes, deadline_ms: 10_000 }));
    }

    /// Sends a task.
    pub fn task(&self, task: &Task) {
        self.order(to_worker::Message::Task(task.clone()));
    }

    /// What the worker says next.
    pub fn next_message(&mut self) -> from_worker::Message {
        let next = async { tokio::time::timeout(PATIENCE, self.said.recv()).await };
        match self.runtime.block_on(next) {
            Ok(Some(message)) => message,
            Ok(None) => panic!("the worker ended"),
            Err(_) => panic!("the worker says nothing"),
        }
    }

    /// The first message that is wanted; what comes before it is passed over.
    pub fn until<T>(&mut self, mut wanted: impl FnMut(from_worker::Message) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(self.next_message()) {
                return found;
            }
        }
    }

    /// Waits until the running task has computed so many steps. Panics if it ends before.
    pub fn steps(&mut self, steps: u64) {
        self.until(|message| match message {
            from_worker::Message::Progress(progress) => {
                (progress.phase() == TaskPhase::Computing && progress.done >= steps).then_some(())
            }
            from_worker::Message::Done(_) => panic!("the task was done before its step {steps}"),
            from_worker::Message::Failed(failed) => panic!("{failed:?}"),
            _ => None,
        });
    }

    /// Waits until a lease was given back while a task runs; panics if that ends before.
    pub fn returned_while_running(&mut self) -> LeaseReturned {
        self.until(|message| match message {
            from_worker::Message::LeaseReturned(returned) => Some(returned),
            from_worker::Message::Done(_) => panic!("the task was done before the lease was given back"),
            from_worker::Message::Failed(failed) => panic!("{failed:?}"),
            _ => None,
        })
    }

    /// Waits until a lease was given back.
    pub fn returned(&mut self) -> LeaseReturned {
        self.until(|message| match message {
            from_worker::Message::LeaseReturned(returned) => Some(returned),
            _ => None,
        })
    }

    /// Waits for the end of a task that succeeds.
    pub fn done(&mut self) -> TaskDone {
        self.until(|message| match message {
            from_worker::Message::Done(done) => Some(done),
            from_worker::Message::Failed(failed) => panic!("{failed:?}"),
            _ => None,
        })
    }

    /// Waits for the process to end by itself; its exit code, and what it said on its standard error.
    pub fn end(mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
        }
        (self.child.wait().expect("a child").code(), said)
    }
}

fn spawn(stage: &str, model: &Path, socket: &Path) -> Child {
    let (token, mut says) = std::io::pipe().expect("a pipe");
    says.write_all(&[7; TOKEN_BYTES]).expect("a token fits a pipe");
    drop(says);
    let mut command = Command::new(&programs().sd_worker);
    command
        .args(["serve", "--stage", stage, "--device", "cpu", "--threads", "2"])
        .args(["--incarnation", &INCARNATION.to_string()])
        .arg("--socket")
        .arg(socket)
        .arg("--model")
        .arg(model)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let descriptor = token.as_raw_fd();
    // SAFETY: dup2 and fcntl are async-signal-safe, and the descriptor is open until after the fork.
    unsafe {
        command.pre_exec(move || {
            let moved = match descriptor {
                TOKEN_FD => libc::fcntl(TOKEN_FD, libc::F_SETFD, 0),
                other => libc::dup2(other, TOKEN_FD),
            };
            if moved < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    command.spawn().expect("sd-worker starts")
}

/// A tensor in shared memory.
pub struct Shared {
    memory: Shmem,
    /// As a task names it.
    pub named: NamedSegment,
}

impl Shared {
    fn new(role: &str, shape: &[u64], capacity: u64, writer: u64) -> Self {
        let memory = ShmemConf::new().size(HEADER_BYTES + capacity as usize).create().expect("shared memory");
        let segment = Segment {
            name: memory.get_os_id().trim_start_matches('/').to_owned(),
            element_type: ElementType::F32 as i32,
            shape: shape.to_vec(),
            capacity,
            writer,
            sequence: 1,
        };
        Self { memory, named: NamedSegment { role: role.into(), segment: Some(segment) } }
    }

    /// An input of these values.
    pub fn input(role: &str, shape: &[u64], values: &[f32]) -> Self {
        let capacity = 4 * values.len() as u64;
        let shared = Self::new(role, shape, capacity, 0);
        let header = Header { element_type: ElementType::F32, shape: shape.to_vec(), capacity, writer: 0, sequence: 1 };
        let fields = header.encode().expect("a header");
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        // SAFETY: the mapping has a header page and as many bytes as the values; no worker has heard of it yet.
        unsafe {
            let base = shared.memory.as_ptr();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.add(HEADER_BYTES), bytes.len());
            std::ptr::copy_nonoverlapping(fields.as_ptr(), base, FIELDS_BYTES);
        }
        shared
    }

    /// An output of this shape.
    pub fn output(role: &str, shape: &[u64]) -> Self {
        Self::new(role, shape, 4 * shape.iter().product::<u64>(), INCARNATION)
    }

    /// The payload, after the task is done.
    pub fn bytes(&self) -> Vec<u8> {
        let capacity = self.named.segment.as_ref().map_or(0, |segment| segment.capacity) as usize;
        // SAFETY: the mapping has a header page and `capacity` bytes, which nobody writes after the task.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(HEADER_BYTES), capacity).to_vec() }
    }
}

//! A worker that misbehaves on purpose. `SDD_TEST_FAULT=STAGE:FAULT` says which stage and how; other stages, and `inspect`,
//! become the real worker (`SDD_TEST_WORKER`). `SDD_TEST_FAULT=@FILE`: the file says so, for each worker anew; while it is
//! empty or missing, every worker is a real one. `@FILE` may also say `STAGE:FAULT:N`: the next N workers of that stage
//! misbehave, those after them are real ones.

use std::io::Read as _;
use std::os::fd::FromRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use sd_proto::checkpoint;
use sd_proto::segment::{HEADER_BYTES, Header};
use sd_proto::worker::v1::link_client::LinkClient;
use sd_proto::worker::v1::{
    FromWorker, Hello, NamedSegment, Pulse, Task, TaskDone, TaskError, TaskFailed, WorkerStage, from_worker,
    task::Work, to_worker,
};
use sd_proto::{LINK_PROTOCOL, TOKEN_BYTES, TOKEN_FD};
use shared_memory::ShmemConf;
use tokio::sync::mpsc;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Never says hello.
    Silent,
    /// Says hello with a token of its own.
    WrongToken,
    /// Ends with code 0 in the middle of a task.
    ExitZero,
    /// Aborts in the middle of a task.
    Abort,
    /// Never answers a task, and does not pulse.
    Frozen,
    /// Seals a header with another shape than the one it was told.
    LyingShape,
    /// Seals a header under another incarnation's name.
    LyingWriter,
    /// Writes noise where the header should be.
    Garbage,
    /// Says that it is done and has sealed nothing.
    Unsealed,
    /// Says that it is done with a task that it was never given.
    OtherTask,
    /// Says that a task needs more memory than there is.
    OutOfMemory,
    /// Ends in the middle of a task as a worker does that cannot allocate.
    ExitMemory,
    /// Never ends a task, and does not hear that it is cancelled.
    Deaf,
    /// Leaves checkpoints that are none, and aborts.
    LyingCheckpoint,
    /// Takes hundreds of megabytes beyond its leases, says so truthfully, and goes on.
    Greedy,
}

/// What a greedy worker takes beyond all that it is granted.
const GREED: u64 = 384 << 20;

fn fault(name: &str) -> anyhow::Result<Fault> {
    Ok(match name {
        "silent" => Fault::Silent,
        "wrong-token" => Fault::WrongToken,
        "exit-zero" => Fault::ExitZero,
        "abort" => Fault::Abort,
        "frozen" => Fault::Frozen,
        "lying-shape" => Fault::LyingShape,
        "lying-writer" => Fault::LyingWriter,
        "garbage" => Fault::Garbage,
        "unsealed" => Fault::Unsealed,
        "other-task" => Fault::OtherTask,
        "out-of-memory" => Fault::OutOfMemory,
        "exit-memory" => Fault::ExitMemory,
        "deaf" => Fault::Deaf,
        "lying-checkpoint" => Fault::LyingCheckpoint,
        "greedy" => Fault::Greedy,
        other => anyhow::bail!("unknown fault {other}"),
    })
}

struct Arguments {
    all: Vec<String>,
}

impl Arguments {
    fn value(&self, name: &str) -> anyhow::Result<&str> {
        let at = self.all.iter().position(|argument| argument == name).with_context(|| format!("no {name}"))?;
        self.all.get(at + 1).map(String::as_str).with_context(|| format!("no value for {name}"))
    }
}

/// Takes one from the number of faults that a plan in a file still has; `false` where none is left.
fn take_one(file: &str, stage: &str, name: &str, left: u64) -> anyhow::Result<bool> {
    let Some(left) = left.checked_sub(1) else { return Ok(false) };
    let new = format!("{file}.{}", std::process::id());
    std::fs::write(&new, format!("{stage}:{name}:{left}"))?;
    std::fs::rename(new, file)?;
    Ok(true)
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments { all: std::env::args().skip(1).collect() };
    let mut plan = std::env::var("SDD_TEST_FAULT").context("SDD_TEST_FAULT")?;
    let file = plan.strip_prefix('@').map(str::to_owned);
    if let Some(file) = &file {
        plan = std::fs::read_to_string(file).ok().filter(|plan| !plan.is_empty()).unwrap_or_else(|| "none:none".into());
    }
    let (stage, name) = plan.split_once(':').context("SDD_TEST_FAULT is STAGE:FAULT")?;
    let meant = arguments.all.first().is_some_and(|verb| verb == "serve") && arguments.value("--stage")? == stage;
    let (name, meant) = match (name.split_once(':'), &file) {
        (Some((name, left)), Some(file)) => (name, meant && take_one(file, stage, name, left.parse()?)?),
        (Some(_), None) => anyhow::bail!("a number of faults needs a file"),
        (None, _) => (name, meant),
    };
    if meant {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(misbehave(&arguments, fault(name)?));
    }
    let real = std::env::var_os("SDD_TEST_WORKER").context("SDD_TEST_WORKER")?;
    Err(Command::new(real).args(&arguments.all).exec().into())
}

async fn misbehave(arguments: &Arguments, fault: Fault) -> anyhow::Result<()> {
    if fault == Fault::Silent {
        std::future::pending::<()>().await;
    }
    let mut token = vec![0u8; TOKEN_BYTES];
    // SAFETY: the descriptor is this process's by contract with the daemon, and nothing else uses it.
    unsafe { std::fs::File::from_raw_fd(TOKEN_FD) }.read_exact(&mut token)?;
    if fault == Fault::WrongToken {
        token.reverse();
        token[0] ^= 1;
    }
    let incarnation: u64 = arguments.value("--incarnation")?.parse()?;
    let (say, queue) = mpsc::channel(16);
    let wrap = move |message| FromWorker { incarnation, message: Some(message) };
    let stage = match arguments.value("--stage")? {
        "text" => WorkerStage::Text,
        "diffusion" => WorkerStage::Diffusion,
        _ => WorkerStage::Vae,
    };
    let hello = Hello {
        token,
        protocol: LINK_PROTOCOL,
        pid: std::process::id(),
        stage: stage as i32,
        device: arguments.value("--device")?.into(),
        version: env!("CARGO_PKG_VERSION").into(),
    };
    say.send(wrap(from_worker::Message::Hello(hello))).await?;
    let socket = PathBuf::from(arguments.value("--socket")?);
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
    });
    let channel =
        tonic::transport::Endpoint::from_static("http://sdd.invalid").connect_with_connector(connector).await?;
    let mut orders =
        LinkClient::new(channel).attach(tokio_stream::wrappers::ReceiverStream::new(queue)).await?.into_inner();
    let mut pulse = tokio::time::interval(Duration::from_millis(200));
    let mut sequence = 0;
    let mut frozen = false;
    let (mut leased, mut greedy) = (0, false);
    let mut hoard: Vec<Vec<u8>> = Vec::new();
    loop {
        tokio::select! {
            order = orders.message() => match order?.and_then(|order| order.message) {
                Some(to_worker::Message::Task(task)) if matches!(task.work, Some(Work::Load(_))) => {
                    say.send(wrap(from_worker::Message::Done(done(&task, Vec::new())))).await?;
                }
                Some(to_worker::Message::Task(task)) => match fault {
                    Fault::ExitZero => std::process::exit(0),
                    Fault::Abort => {
                        eprintln!("this worker aborts on purpose");
                        std::process::abort();
                    }
                    Fault::ExitMemory => std::process::exit(sd_proto::exit::WorkerExit::OutOfMemory.code()),
                    Fault::Frozen => frozen = true,
                    Fault::Silent | Fault::WrongToken | Fault::Deaf => {}
                    Fault::OutOfMemory => {
                        let error = TaskError::OutOfMemory as i32;
                        let message = "this task needs more memory than its lease".into();
                        let failed = TaskFailed { task_id: task.task_id, error, message };
                        say.send(wrap(from_worker::Message::Failed(failed))).await?;
                    }
                    Fault::LyingCheckpoint => {
                        lie_about_checkpoints(&task)?;
                        std::process::abort();
                    }
                    Fault::Greedy => greedy = true,
                    Fault::LyingShape | Fault::LyingWriter | Fault::Garbage | Fault::Unsealed => {
                        let outputs = lie(&task, fault)?;
                        say.send(wrap(from_worker::Message::Done(done(&task, outputs)))).await?;
                    }
                    Fault::OtherTask => {
                        let other = Task { task_id: task.task_id + 1000, ..task };
                        say.send(wrap(from_worker::Message::Done(done(&other, Vec::new())))).await?;
                    }
                },
                Some(to_worker::Message::Grant(grant)) => leased += grant.bytes,
                Some(to_worker::Message::Retire(_)) | None => return Ok(()),
                Some(_) => {}
            },
            _ = pulse.tick(), if !frozen => {
                sequence += 1;
                let hoarded = |hoard: &[Vec<u8>]| hoard.iter().map(|part| part.len() as u64).sum::<u64>();
                if greedy && hoarded(&hoard) < leased + GREED {
                    // Every page is touched, so that all of it is really held.
                    hoard.push(vec![1u8; GREED as usize / 4]);
                }
                let held = (1 << 20) + hoarded(&hoard);
                let message = Pulse { sequence, device_bytes: held, peak_bytes: held };
                say.send(wrap(from_worker::Message::Pulse(message))).await?;
            }
        }
    }
}

fn done(task: &Task, outputs: Vec<NamedSegment>) -> TaskDone {
    TaskDone { task_id: task.task_id, outputs, ..TaskDone::default() }
}

/// Seals both slots for checkpoints: one holds noise, the other a whole checkpoint of a step that the run does not have.
fn lie_about_checkpoints(task: &Task) -> anyhow::Result<()> {
    let body = [7u8; 64];
    let beyond = [&checkpoint::head(1 << 30, &body)[..], &body].concat();
    for (number, (segment, payload)) in (4u64..).zip(task.checkpoints.iter().zip([vec![0xA5; 96], beyond])) {
        let memory = ShmemConf::new().os_id(format!("/{}", segment.name)).open()?;
        let header = Header {
            element_type: segment.element_type(),
            shape: vec![payload.len() as u64],
            capacity: segment.capacity,
            writer: segment.writer,
            sequence: number,
        };
        let fields = header.encode()?;
        // SAFETY: the slot has a header page and room for far more than these bytes, and nobody reads it before this process is
        // dead.
        unsafe {
            std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.as_ptr().add(HEADER_BYTES), payload.len());
            std::ptr::copy_nonoverlapping(fields.as_ptr(), memory.as_ptr(), fields.len());
        }
    }
    Ok(())
}

/// Writes every output of the task wrongly, and reports it as if it were right.
fn lie(task: &Task, fault: Fault) -> anyhow::Result<Vec<NamedSegment>> {
    for named in &task.outputs {
        let message = named.segment.clone().context("a segment")?;
        let memory = ShmemConf::new().os_id(format!("/{}", message.name)).open()?;
        let shape = if message.shape.is_empty() { vec![1, 77, 1] } else { message.shape.clone() };
        let mut header = Header {
            element_type: message.element_type(),
            shape,
            capacity: message.capacity,
            writer: message.writer,
            sequence: message.sequence,
        };
        let fields = match fault {
            Fault::LyingShape => {
                // Terabytes, in a header that is consistent in itself: only the message and the mapping tell.
                header.shape = vec![1 << 20, 1 << 20];
                header.capacity = u64::MAX;
                header.encode()?.to_vec()
            }
            Fault::LyingWriter => {
                header.writer += 1;
                header.encode()?.to_vec()
            }
            Fault::Garbage => (0..128u32).map(|i| (i * 37 % 251) as u8 | 1).collect(),
            _ => continue,
        };
        // SAFETY: the mapping has at least the header page, and nobody reads it before this worker says that it is done.
        unsafe { std::ptr::copy_nonoverlapping(fields.as_ptr(), memory.as_ptr(), fields.len().min(HEADER_BYTES)) };
    }
    Ok(task.outputs.clone())
}

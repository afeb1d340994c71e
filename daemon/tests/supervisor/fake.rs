//! A worker that misbehaves on demand. The test program starts itself again as this, through a script that turns the
//! worker's command line into variables, because a test program has a command line of its own.

use std::io::{Read as _, Write as _};
use std::os::fd::FromRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;
use sd_proto::worker::v1::link_client::LinkClient;
use sd_proto::worker::v1::{
    FromWorker, Hello, LeaseReturned, Pulse, Task, TaskDone, TaskError, TaskFailed, TaskPhase, TaskProgress, ToWorker,
    WorkerStage, from_worker::Message, to_worker,
};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const ARGUMENTS: &str = "SDD_FAKE_ARGUMENTS";
const MODE: &str = "SDD_FAKE_MODE";
const TOKEN: &str = "SDD_FAKE_TOKEN";

/// Writes the script that is given to the supervisor as the worker program.
pub(crate) fn script(folder: &Path, mode: &str) -> PathBuf {
    let path = folder.join(format!("sd-worker-{mode}"));
    let program = std::env::current_exe().unwrap();
    let text = format!(
        "#!/bin/sh\n{ARGUMENTS}=\"$*\" {MODE}={mode} exec {} --exact fake::worker --nocapture --test-threads=1\n",
        program.display()
    );
    write_script(&path, &text);
    path
}

/// Writes a file that can be run. By a child process, because a descriptor that is open for writing while another test
/// thread forks makes the exec fail with "text file busy".
pub(crate) fn write_script(path: &Path, text: &str) {
    let mut child = std::process::Command::new("/bin/sh")
        .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
}

/// The worker itself; as a test of its own it does nothing.
#[test]
fn worker() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else { return };
    let mode = std::env::var(MODE).unwrap();
    let words: Vec<&str> = arguments.split(' ').collect();
    let value = |name: &str| words[words.iter().position(|word| *word == name).unwrap() + 1];
    assert_eq!(words[0], "serve");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let code = runtime.block_on(run(&mode, Path::new(value("--socket")), value("--incarnation").parse().unwrap()));
    std::process::exit(code);
}

fn token() -> Vec<u8> {
    if let Ok(hex) = std::env::var(TOKEN) {
        return (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    }
    let mut token = Vec::new();
    // SAFETY: the descriptor is ours by contract with the supervisor, and nothing else in this process knows it.
    unsafe { std::fs::File::from_raw_fd(sd_proto::TOKEN_FD) }.read_to_end(&mut token).unwrap();
    token
}

async fn connect(socket: &Path) -> LinkClient<tonic::transport::Channel> {
    let path = socket.to_path_buf();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://worker");
    LinkClient::new(endpoint.connect_with_connector(connector).await.unwrap())
}

async fn run(mode: &str, socket: &Path, incarnation: u64) -> i32 {
    let mut token = token();
    match mode {
        "silent" => std::future::pending::<()>().await,
        "exits" => {
            for line in 0..100 {
                eprintln!("complaint {line}");
            }
            return 64;
        }
        "impostor" => {
            // Another process with the right token; this one only waits for it.
            let hex: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
            let other = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "fake::worker", "--nocapture"])
                .envs([(TOKEN, hex.as_str()), (MODE, "good")])
                .status()
                .unwrap();
            eprintln!("the impostor ended with {:?}", other.code());
            std::future::pending::<()>().await;
        }
        "wrong-token" => token[31] ^= 1,
        _ => {}
    }
    let hello = Hello {
        token,
        protocol: if mode == "wrong-protocol" { 99 } else { sd_proto::LINK_PROTOCOL },
        pid: std::process::id(),
        stage: if mode == "wrong-stage" { WorkerStage::Vae } else { WorkerStage::Diffusion } as i32,
        device: "cpu".into(),
        version: "fake".into(),
    };
    let mut client = connect(socket).await;
    let (sender, queue) = mpsc::channel(64);
    let send = |message| {
        let sender = sender.clone();
        async move { sender.send(FromWorker { incarnation, message: Some(message) }).await.unwrap() }
    };
    send(Message::Hello(hello.clone())).await;
    let mut orders = match client.attach(ReceiverStream::new(queue)).await {
        Ok(response) => response.into_inner(),
        Err(_) => return 73,
    };
    let Ok(Some(ToWorker { message: Some(to_worker::Message::Welcome(welcome)) })) = orders.message().await else {
        // Refused. Stays alive, to see whether it is killed for that.
        if mode == "good" {
            return 73;
        }
        return std::future::pending().await;
    };
    if mode == "twice" {
        let (again, queue) = mpsc::channel(4);
        again.send(FromWorker { incarnation, message: Some(Message::Hello(hello)) }).await.unwrap();
        let _ = client.attach(ReceiverStream::new(queue)).await;
        std::future::pending::<()>().await;
    }
    let pulses = sender.clone();
    tokio::spawn(async move {
        for sequence in 1.. {
            let pulse = Pulse { sequence, device_bytes: 1000 + sequence, peak_bytes: 2000 };
            if pulses.send(FromWorker { incarnation, message: Some(Message::Pulse(pulse)) }).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(welcome.pulse_interval_ms.into())).await;
        }
    });
    if mode == "deaf" {
        std::future::pending::<()>().await;
    }
    while let Ok(Some(order)) = orders.message().await {
        match order.message {
            Some(to_worker::Message::Task(task)) if task.job_id == "unlink" => {
                // Every descriptor closes, and the process lives on as something else.
                let error = std::process::Command::new("/bin/sleep").arg("1000").exec();
                panic!("cannot become another program: {error}");
            }
            Some(to_worker::Message::Task(task)) => perform(&task, incarnation, &sender).await,
            Some(to_worker::Message::Cancel(cancel)) if mode != "stubborn" => {
                let task_id = cancel.task_id;
                let failed = TaskFailed { task_id, error: TaskError::Cancelled as i32, message: "cancelled".into() };
                send(Message::Failed(failed)).await;
            }
            Some(to_worker::Message::Grant(grant)) => {
                let returned = LeaseReturned { lease_id: grant.lease_id, bytes: grant.bytes / 2 };
                send(Message::LeaseReturned(returned)).await;
            }
            Some(to_worker::Message::Retire(_)) if mode != "stubborn" => return 0,
            _ => {}
        }
    }
    if mode == "stubborn" { std::future::pending().await } else { 73 }
}

/// The job's name says how the task goes.
async fn perform(task: &Task, incarnation: u64, sender: &mpsc::Sender<FromWorker>) {
    let task_id = task.task_id;
    let send = |message| {
        let sender = sender.clone();
        async move { sender.send(FromWorker { incarnation, message: Some(message) }).await.unwrap() }
    };
    let step = |done| TaskProgress { task_id, phase: TaskPhase::Computing as i32, done, total: 4, heartbeat: done };
    let done = TaskDone { task_id, compute_micros: 5, ..TaskDone::default() };
    match task.job_id.as_str() {
        "good" => {
            for number in 1..=4 {
                send(Message::Progress(step(number))).await;
            }
            send(Message::Done(done)).await;
        }
        "bad-request" => {
            let error = TaskError::BadRequest as i32;
            send(Message::Failed(TaskFailed { task_id, error, message: "no such sampler".into() })).await;
        }
        // Says that it begins, and then never anything more; the pulse goes on.
        "hang" => send(Message::Progress(step(1))).await,
        "freeze" => raise(Signal::SIGSTOP).unwrap(),
        "murder" => {
            send(Message::Progress(step(1))).await;
            // A stranger's kill -9, from outside the daemon.
            kill(Pid::this(), Signal::SIGKILL).unwrap();
        }
        "crash" => std::process::abort(),
        "out-of-memory" => {
            eprintln!("tensor of 9 GiB does not fit");
            std::process::exit(71);
        }
        "other-task" => send(Message::Done(TaskDone { task_id: task_id + 1000, ..TaskDone::default() })).await,
        "done-and-die" => {
            send(Message::Done(done)).await;
            // Until the message has left the process.
            tokio::time::sleep(Duration::from_millis(100)).await;
            std::process::exit(70);
        }
        "other-incarnation" => {
            let message = Some(Message::Done(done.clone()));
            sender.send(FromWorker { incarnation: incarnation + 1, message }).await.unwrap();
            send(Message::Failed(TaskFailed { task_id, error: TaskError::Internal as i32, message: "own".into() }))
                .await;
        }
        other => panic!("unknown job {other}"),
    }
}

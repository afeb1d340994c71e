//! The daemon as a process: its start, its locks and sockets, its end. Its worker program is never run here.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::UnixStream;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

/// A host of its own: locks, sockets and cache in one folder.
struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn names(&self, name: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(name)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sdd"));
        command.env_clear().env("HOME", self.folder.path()).env("SDD_WORKER_BINARY", "/bin/true");
        command.env("SDD_LOCK_DIR", self.path("locks")).args(flags).stderr(Stdio::piped());
        command
    }

    /// Starts a daemon and waits until it serves.
    fn start(&self, flags: &[&str]) -> Daemon {
        let (owner, theirs) = (None, None);
        self.start_with(flags, owner, theirs)
    }

    fn start_private(&self, flags: &[&str]) -> (Daemon, OwnedFd) {
        let (theirs, ours) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let daemon = self.start_with(flags, Some(&theirs), None);
        (daemon, ours)
    }

    fn start_with(&self, flags: &[&str], owner: Option<&OwnedFd>, notify: Option<&PathBuf>) -> Daemon {
        let (ready, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
        let mut command = self.command(flags);
        command.arg("--ready-fd").arg(theirs.as_raw_fd().to_string());
        if let Some(owner) = owner {
            command.arg("--private-owner-fd").arg(owner.as_raw_fd().to_string());
        }
        if let Some(notify) = notify {
            command.env("NOTIFY_SOCKET", notify);
        }
        let inherited = [Some(theirs.as_raw_fd()), owner.map(|fd| fd.as_raw_fd())];
        // SAFETY: fcntl is safe between fork and exec; the descriptors are open in the parent until after the spawn.
        unsafe {
            command.pre_exec(move || {
                inherited.iter().flatten().for_each(|fd| {
                    libc::fcntl(*fd, libc::F_SETFD, 0);
                });
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        drop(theirs);
        let mut endpoint = String::new();
        BufReader::new(std::fs::File::from(ready)).read_line(&mut endpoint).unwrap();
        if endpoint.is_empty() {
            let mut log = String::new();
            child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
            panic!("not ready: {log}");
        }
        Daemon { child, endpoint: endpoint.trim().into() }
    }
}

struct Daemon {
    child: Child,
    endpoint: String,
}

impl Daemon {
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits for its end, for at most so long; returns how it ended and its log.
    fn end_within(mut self, limit: Duration) -> (ExitStatus, String) {
        let pid = Pid::from_raw(self.child.id() as i32);
        let (done, watch) = std::sync::mpsc::channel::<()>();
        let guard = std::thread::spawn(move || {
            if watch.recv_timeout(limit).is_err() {
                let _ = kill(pid, Signal::SIGKILL);
            }
        });
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        let status = self.child.wait().unwrap();
        let _ = done.send(());
        guard.join().unwrap();
        (status, log)
    }

    async fn channel(&self) -> Channel {
        let Some(path) = self.endpoint.strip_prefix("unix:").map(PathBuf::from) else {
            return Channel::from_shared(format!("http://{}", self.endpoint)).unwrap().connect().await.unwrap();
        };
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        tonic::transport::Endpoint::from_static("http://sdd").connect_with_connector(connector).await.unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bound of an end without work; generous, because other tests run beside this one.
const SOON: Duration = Duration::from_secs(20);

async fn status_of(channel: Channel, service: &str) -> ServingStatus {
    let request = HealthCheckRequest { service: service.into() };
    HealthClient::new(channel).check(request).await.unwrap().into_inner().status()
}

#[tokio::test]
async fn it_serves_health_and_reflection_and_leaves_nothing_after_a_signal() {
    let host = Host::new();
    let run = host.path("run");
    let daemon = host.start(&["--runtime-dir", run.to_str().unwrap()]);
    assert_eq!(daemon.endpoint, format!("unix:{}", run.join("sdd.sock").display()));
    let channel = daemon.channel().await;
    for service in ["", "sd.v1.Generation", "sd.v1.Control"] {
        assert_eq!(status_of(channel.clone(), service).await, ServingStatus::Serving, "{service}");
    }
    let ask = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..ServerReflectionRequest::default()
    };
    let stream = ServerReflectionClient::new(channel).server_reflection_info(tokio_stream::iter([ask])).await.unwrap();
    let answer: ServerReflectionResponse = stream.into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else { panic!("{answer:?}") };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert!(names.contains(&"sd.v1.Generation") && names.contains(&"sd.v1.Control"), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("Link")), "the workers' link is nobody's business: {names:?}");
    assert_eq!(host.names("run").len(), 2, "the clients' socket and the workers'");
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.end_within(SOON);
    assert!(status.success(), "{status}: {log}");
    assert!(host.names("run").is_empty());
    assert_eq!(host.names("locks"), ["device-cpu.lock"], "only the lock file that all daemons share");
}

#[test]
fn a_second_daemon_names_the_first_and_exits_75() {
    let host = Host::new();
    let [one, two] = ["one", "two"].map(|name| host.path(name));
    let first = host.start(&["--runtime-dir", one.to_str().unwrap()]);
    let second = host.command(&["--runtime-dir", two.to_str().unwrap()]).output().unwrap();
    assert_eq!(second.status.code(), Some(75), "{second:?}");
    let message = String::from_utf8(second.stderr).unwrap();
    let last = message.lines().last().unwrap();
    assert!(last.contains(&format!("pid {}", first.child.id())) && last.contains(&first.endpoint), "{message}");
    assert!(!two.exists(), "nothing was bound");
    // With locks of its own, the socket still is the first one's.
    let locks = host.path("other-locks");
    let flags = ["--runtime-dir", one.to_str().unwrap(), "--lock-dir", locks.to_str().unwrap()];
    let third = host.command(&flags).output().unwrap();
    assert_eq!(third.status.code(), Some(75), "{third:?}");
    assert!(String::from_utf8_lossy(&third.stderr).contains("already listens"), "{third:?}");
    assert!(one.join("sdd.sock").exists());
}

#[tokio::test]
async fn what_a_killed_daemon_left_is_swept_by_the_next() {
    let host = Host::new();
    let run = host.path("run");
    let flags = ["--runtime-dir", run.to_str().unwrap()];
    let killed = host.start(&flags);
    killed.signal(Signal::SIGKILL);
    killed.end_within(SOON);
    let left = host.names("run");
    assert_eq!(left.len(), 2, "{left:?}");
    let next = host.start(&flags);
    assert_eq!(status_of(next.channel().await, "").await, ServingStatus::Serving);
    let now = host.names("run");
    assert!(now.len() == 2 && now[0] != left[0] && now[1] == "sdd.sock", "{left:?} then {now:?}");
    next.signal(Signal::SIGINT);
    let (status, log) = next.end_within(SOON);
    assert!(status.success() && log.contains("dead daemons left"), "{log}");
}

#[tokio::test]
async fn a_private_daemon_ends_with_its_owner_and_removes_its_folder() {
    let host = Host::new();
    let run = host.path("private");
    let (daemon, owner) = host.start_private(&["--runtime-dir", run.to_str().unwrap()]);
    // A client that only watches does not keep it.
    let channel = daemon.channel().await;
    assert_eq!(status_of(channel.clone(), "").await, ServingStatus::Serving);
    drop(owner);
    let (status, log) = tokio::task::spawn_blocking(move || daemon.end_within(SOON)).await.unwrap();
    assert!(status.success(), "{log}");
    assert!(!run.exists());
    drop(channel);
}

#[tokio::test]
async fn a_stream_that_a_client_keeps_open_does_not_hold_up_the_end() {
    let host = Host::new();
    let run = host.path("run");
    let daemon = host.start(&["--runtime-dir", run.to_str().unwrap()]);
    let channel = daemon.channel().await;
    let endless = tokio_stream::pending::<ServerReflectionRequest>();
    let open = ServerReflectionClient::new(channel.clone()).server_reflection_info(endless).await.unwrap();
    let mut watch =
        HealthClient::new(channel).watch(HealthCheckRequest { service: "sd.v1.Generation".into() }).await.unwrap();
    assert_eq!(watch.get_mut().message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    daemon.signal(Signal::SIGTERM);
    let last = watch.get_mut().message().await.unwrap().unwrap().status();
    assert_eq!(last, ServingStatus::NotServing, "health says so before the end");
    let (status, log) = tokio::task::spawn_blocking(move || daemon.end_within(SOON)).await.unwrap();
    assert!(status.success(), "{log}");
    drop(open);
}

#[tokio::test]
async fn it_listens_on_several_endpoints_and_tells_the_service_manager() {
    let host = Host::new();
    let [run, extra, notify] = ["run", "extra.sock", "notify"].map(|name| host.path(name));
    let manager = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    let listen = format!("unix:{}", extra.display());
    let flags = ["--runtime-dir", run.to_str().unwrap(), "--listen", "127.0.0.1:0", "--listen", &listen];
    let daemon = host.start_with(&flags, None, Some(&notify));
    let said = || {
        let mut text = [0u8; 64];
        let length = manager.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..length]).into_owned()
    };
    assert_eq!(said(), "READY=1");
    assert!(daemon.endpoint.starts_with("127.0.0.1:") && !daemon.endpoint.ends_with(":0"), "{}", daemon.endpoint);
    assert_eq!(status_of(daemon.channel().await, "").await, ServingStatus::Serving);
    assert!(extra.exists());
    daemon.signal(Signal::SIGTERM);
    assert_eq!(said(), "STOPPING=1");
    let (status, log) = daemon.end_within(SOON);
    assert!(status.success() && !extra.exists(), "{log}");
}

#[test]
fn what_the_host_does_not_have_is_refused_before_the_start() {
    let host = Host::new();
    let run = host.path("run");
    for (flag, word) in [("devices.cpu.budget=900TiB", "budget"), ("limits.shared_memory=900TiB", "shm")] {
        let output = host.command(&["--runtime-dir", run.to_str().unwrap(), "--set", flag]).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(word), "{output:?}");
    }
    // A folder that others may enter is not made private behind their back.
    std::fs::create_dir_all(&run).unwrap();
    std::fs::set_permissions(&run, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = host.command(&["--runtime-dir", run.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("0700"), "{output:?}");
}

#[tokio::test]
async fn an_idle_daemon_is_small() {
    let host = Host::new();
    let run = host.path("run");
    let daemon = host.start(&["--runtime-dir", run.to_str().unwrap()]);
    assert_eq!(status_of(daemon.channel().await, "").await, ServingStatus::Serving);
    let text = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let field = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kib: u64 = field.trim().trim_end_matches(" kB").parse().unwrap();
    println!("an idle daemon has {kib} KiB of anonymous memory");
    assert!(kib < 20 << 10, "{kib} KiB");
}

#[test]
fn accepted_jobs_have_a_folder_that_this_user_alone_enters_unless_the_daemon_is_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let host = Host::new();
    let (private, owner) = host.start_private(&["--runtime-dir", host.path("p").to_str().unwrap()]);
    drop(owner);
    assert!(private.end_within(Duration::from_secs(20)).0.success());
    let folder = host.path(".local/state/sdd");
    assert!(!folder.exists(), "a private daemon records nothing");
    let socket = format!("unix:{}", host.path("s").display());
    let runtime = host.path("r");
    let flags = ["--runtime-dir", runtime.to_str().unwrap(), "--listen", &socket];
    drop(host.start(&[&flags[..], &["--set", "durable=false"]].concat()));
    assert!(!folder.exists());
    drop(host.start(&flags));
    assert_eq!(std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);

    // Where the folder was named, a daemon that cannot use it says so instead of losing jobs later.
    std::fs::write(host.path("file"), "").unwrap();
    let state = format!("state_dir={}", host.path("file").join("state").display());
    let output = host.command(&[&flags[..], &["--set", &state]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("set state_dir to a folder"), "{output:?}");
}

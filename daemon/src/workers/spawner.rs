//! The one thread that spawns every worker.
//!
//! The kernel's parent-death signal follows the *thread* that spawned the child, not the process: a child of a pool's
//! thread would be killed when that thread is retired. So one thread spawns them all and lives as long as the daemon;
//! when the daemon dies, however it dies, the kernel kills every worker.
#![allow(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;

use sd_proto::TOKEN_FD;
use tokio::sync::oneshot;

use super::process;

/// What to spawn.
#[derive(Debug)]
pub struct SpawnRequest {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Bytes for the child to read on [`TOKEN_FD`]; at most what a pipe holds.
    pub token: Option<[u8; sd_proto::TOKEN_BYTES]>,
    /// Whether standard output is captured; else it goes nowhere.
    pub capture_stdout: bool,
}

/// A child that was spawned: its pid and the read ends of its pipes. Whoever receives it reaps it.
#[derive(Debug)]
pub struct Spawned {
    /// Process id, and id of its own process group.
    pub pid: u32,
    /// Its standard error.
    pub stderr: OwnedFd,
    /// Its standard output, if captured.
    pub stdout: Option<OwnedFd>,
}

type Job = (SpawnRequest, oneshot::Sender<io::Result<Spawned>>);

/// Handle of the spawning thread. The thread lives until the last handle is dropped.
#[derive(Debug, Clone)]
pub struct Spawner {
    jobs: mpsc::Sender<Job>,
}

impl Spawner {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start() -> io::Result<Self> {
        let (jobs, inbox) = mpsc::channel::<Job>();
        thread::Builder::new().name("spawner".into()).stack_size(256 << 10).spawn(move || {
            for (request, reply) in inbox {
                if let Err(unclaimed) = reply.send(spawn(&request))
                    && let Ok(spawned) = unclaimed
                {
                    // Whoever asked has gone: nobody else would ever reap this child.
                    abandon(spawned.pid);
                }
            }
        })?;
        Ok(Self { jobs })
    }

    /// Spawns a child.
    ///
    /// # Errors
    /// What the system says: no such program, no permission, no process left.
    pub async fn spawn(&self, request: SpawnRequest) -> io::Result<Spawned> {
        let (reply, answer) = oneshot::channel();
        self.jobs.send((request, reply)).map_err(|_| io::Error::other("the spawning thread has ended"))?;
        answer.await.map_err(|_| io::Error::other("the spawning thread has ended"))?
    }
}

fn abandon(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(pid as i32);
    let _ = nix::sys::signal::killpg(pid, nix::sys::signal::Signal::SIGKILL);
    let _ = nix::sys::wait::waitpid(pid, None);
}

/// Whether a variable of the daemon's environment is handed to workers: what the loader, the log and the devices need.
/// Nothing else is, so that no secret of the daemon's environment ends up in a process that parses foreign files.
fn passes(name: &OsStr) -> bool {
    const NAMES: [&str; 14] = [
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "RUST_LOG",
        "RUST_BACKTRACE",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "MALLOC_ARENA_MAX",
        "LLVM_PROFILE_FILE",
        "ASAN_OPTIONS",
    ];
    const PREFIXES: [&str; 4] = ["CUDA_", "NCCL_", "RAYON_", "SDD_"];
    let Some(name) = name.to_str() else { return false };
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn spawn(request: &SpawnRequest) -> io::Result<Spawned> {
    process::reserve_token_descriptor();
    let token = request.token.as_ref().map(token_pipe).transpose()?;
    let token_number = token.as_ref().map(|fd| fd.as_raw_fd());
    let parent = std::process::id() as libc::pid_t;
    let mut command = Command::new(&request.program);
    command
        .args(&request.arguments)
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| passes(name)))
        .stdin(Stdio::null())
        .stdout(if request.capture_stdout { Stdio::piped() } else { Stdio::null() })
        .stderr(Stdio::piped())
        .process_group(0);
    // SAFETY: the closure runs in the forked child and calls nothing but system calls that are safe there (no allocation,
    // no lock); it captures two integers.
    unsafe {
        command.pre_exec(move || prepare_child(parent, token_number));
    }
    let mut child = command.spawn()?;
    drop(token);
    let stderr = child.stderr.take().map(OwnedFd::from).ok_or_else(|| io::Error::other("stderr was not captured"));
    let stderr = stderr.inspect_err(|_| abandon(child.id()))?;
    Ok(Spawned { pid: child.id(), stderr, stdout: child.stdout.take().map(OwnedFd::from) })
}

/// A pipe that already holds the token; its write end is closed, so the child reads the token and then the end.
fn token_pipe(token: &[u8; sd_proto::TOKEN_BYTES]) -> io::Result<OwnedFd> {
    let (read, mut write) = io::pipe()?;
    write.write_all(token)?;
    Ok(read.into())
}

/// Runs in the child between fork and exec.
fn prepare_child(parent: libc::pid_t, token: Option<i32>) -> io::Result<()> {
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: system calls on integers alone, safe between fork and exec. Every descriptor but the standard ones and the
    // token's becomes close-on-exec; the standard library's own, by which it learns that the exec failed, already is.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // The daemon may have died before that call: then no signal will ever come.
        if libc::getppid() != parent {
            libc::_exit(sd_proto::exit::WorkerExit::LostLink as i32);
        }
        let first_other = match token {
            Some(number) if number != TOKEN_FD => {
                check(libc::dup2(number, TOKEN_FD))?;
                TOKEN_FD + 1
            }
            Some(number) => {
                check(libc::fcntl(number, libc::F_SETFD, 0))?;
                TOKEN_FD + 1
            }
            None => TOKEN_FD,
        };
        let close_on_exec = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
        if libc::syscall(libc::SYS_close_range, first_other, libc::c_uint::MAX, close_on_exec) < 0 {
            // Before Linux 5.11: one by one. What is not open says so and does not matter.
            for number in first_other..4096 {
                libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC);
            }
        }
        // Signals that the daemon blocks or ignores are the worker's own business.
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::time::Duration;

    use super::super::exit::RawStatus;
    use super::super::process::Process;
    use super::*;

    async fn shell(script: &str, token: Option<[u8; 32]>) -> (Process, String) {
        let spawner = Spawner::start().unwrap();
        let spawned = spawner
            .spawn(SpawnRequest {
                program: "/bin/sh".into(),
                arguments: vec!["-c".into(), script.into()],
                token,
                capture_stdout: true,
            })
            .await
            .unwrap();
        let process = Process::adopt(spawned.pid).unwrap();
        let mut text = String::new();
        let mut stdout = tokio::net::unix::pipe::Receiver::from_owned_fd(spawned.stdout.unwrap()).unwrap();
        tokio::io::AsyncReadExt::read_to_string(&mut stdout, &mut text).await.unwrap();
        (process, text)
    }

    #[tokio::test]
    async fn the_token_arrives_by_its_descriptor_and_no_other_is_open() {
        let leak = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: clears close-on-exec of a descriptor of ours, as a careless library would.
        unsafe { libc::fcntl(leak.as_raw_fd(), libc::F_SETFD, 0) };
        let (mut process, text) = shell("head -c 64 <&3; echo; ls /proc/$$/fd | tr '\\n' ' '", Some([b'k'; 32])).await;
        process.ended().await;
        assert_eq!(process.reap(), RawStatus::Code(0));
        let (token, descriptors) = text.split_once('\n').unwrap();
        assert_eq!(token, "k".repeat(32));
        let open: Vec<&str> = descriptors.split_whitespace().collect();
        // 10 and above are the shell's own copies of its script or terminal.
        assert!(open.iter().all(|n| n.parse::<i32>().unwrap() <= 3 || *n == "10" || *n == "255"), "{open:?}");
    }

    #[tokio::test]
    async fn the_environment_is_the_allowed_part_and_the_group_is_its_own() {
        let (mut process, text) = shell("env; ps -o pgid= -p $$; echo pid $$", None).await;
        process.ended().await;
        process.reap();
        assert!(text.lines().any(|line| line.starts_with("PATH=")), "{text}");
        assert!(!text.contains("CARGO"), "cargo's variables are not for workers: {text}");
        let pid = text.lines().find_map(|line| line.strip_prefix("pid ")).unwrap();
        assert!(text.lines().any(|line| line.trim() == pid), "the child leads its group: {text}");
    }

    #[tokio::test]
    async fn codes_signals_and_a_whole_group_end_as_they_should() {
        let (mut process, _) = shell("exit 71", None).await;
        process.ended().await;
        assert_eq!(process.reap(), RawStatus::Code(71));
        let (mut process, _) = shell("kill -SEGV $$", None).await;
        process.ended().await;
        assert_eq!(process.reap(), RawStatus::Signal(libc::SIGSEGV));
        // A grandchild in the group dies with it.
        let (mut process, text) = shell("sleep 1000 >/dev/null 2>&1 & echo $!; exec >&-; wait", None).await;
        let grandchild: i32 = text.trim().parse().unwrap();
        process.signal(nix::sys::signal::Signal::SIGKILL);
        process.ended().await;
        assert_eq!(process.reap(), RawStatus::Signal(libc::SIGKILL));
        let gone = async {
            // Orphans are reaped by init, or stay zombies where there is none: dead either way.
            while std::fs::read_to_string(format!("/proc/{grandchild}/stat")).is_ok_and(|stat| !stat.contains(") Z")) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), gone).await.unwrap();
    }

    #[tokio::test]
    async fn a_missing_program_is_an_error_and_leaves_no_child() {
        let spawner = Spawner::start().unwrap();
        let request = SpawnRequest {
            program: "/nonexistent/sd-worker".into(),
            arguments: Vec::new(),
            token: Some([1; 32]),
            capture_stdout: false,
        };
        assert_eq!(spawner.spawn(request).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    /// What the next test runs as a process of its own: spawns a child as the daemon would, tells its pid, and waits to be
    /// killed.
    #[tokio::test]
    async fn helper_parent() {
        if std::env::var_os("SDD_TEST_HELPER_PARENT").is_none() {
            return;
        }
        let spawner = Spawner::start().unwrap();
        let request = SpawnRequest {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), "exec sleep 1000".into()],
            token: None,
            capture_stdout: false,
        };
        let spawned = spawner.spawn(request).await.unwrap();
        println!("child {}", spawned.pid);
        std::future::pending::<()>().await;
    }

    #[test]
    fn the_kernel_kills_the_children_of_a_killed_daemon() {
        use std::io::BufRead as _;
        let mut parent = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "workers::spawner::tests::helper_parent", "--nocapture"])
            .env("SDD_TEST_HELPER_PARENT", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = io::BufReader::new(parent.stdout.take().unwrap()).lines();
        let child = lines
            .map(Result::unwrap)
            .find_map(|line| Some(line.split_once("child ")?.1.trim().parse::<i32>().unwrap()))
            .unwrap();
        let pidfd = {
            // SAFETY: two integers; the child lives, because its parent does.
            let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) } as i32;
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            // SAFETY: just returned to us alone.
            unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) }
        };
        parent.kill().unwrap();
        assert_eq!(parent.wait().unwrap().signal(), Some(libc::SIGKILL));
        let mut polled = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&pidfd), nix::poll::PollFlags::POLLIN)];
        let ready = nix::poll::poll(&mut polled, nix::poll::PollTimeout::try_from(3000).unwrap()).unwrap();
        assert_eq!(ready, 1, "the child outlived its parent");
    }
}

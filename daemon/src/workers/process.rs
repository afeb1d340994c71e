//! A child process of ours: held by a pidfd, signalled as a group, reaped once by its one owner.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::exit::RawStatus;

/// A child that has not been reaped yet. It leads a process group of its own, so its pid names the group as well, and
/// neither can be reused before [`reap`](Process::reap).
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: AsyncFd<OwnedFd>,
    reaped: bool,
}

impl Process {
    /// Takes over a child that was just spawned and that nobody else waits for.
    ///
    /// # Errors
    /// The kernel has no pidfd (before Linux 5.3), or no descriptor is left. The child is killed and reaped then.
    pub fn adopt(pid: u32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid as i32);
        match open_pidfd(pid).and_then(watch) {
            Ok(pidfd) => Ok(Self { pid, pidfd, reaped: false }),
            Err(error) => {
                let _ = killpg(pid, Signal::SIGKILL);
                let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED);
                Err(error)
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw() as u32
    }

    /// Waits until the process has ended, without reaping it. Cancel-safe.
    pub async fn ended(&self) {
        // An error here means that the runtime goes away; then nobody listens either.
        if let Ok(mut guard) = self.pidfd.readable().await {
            guard.retain_ready();
        }
    }

    /// Signals the whole group. Nothing happens once the process is reaped.
    pub fn signal(&self, signal: Signal) {
        if !self.reaped {
            let _ = killpg(self.pid, signal);
        }
    }

    /// Reaps the process, which must have [`ended`](Process::ended), and kills what is left of its group first.
    pub fn reap(&mut self) -> RawStatus {
        self.signal(Signal::SIGKILL);
        let status = waitid(Id::PIDFd(self.pidfd.get_ref().as_fd()), WaitPidFlag::WEXITED);
        self.reaped = true;
        match status {
            Ok(WaitStatus::Exited(_, code)) => RawStatus::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => RawStatus::Signal(signal as i32),
            Ok(_) | Err(_) => RawStatus::Unknown,
        }
    }
}

impl Drop for Process {
    /// A process whose owner goes away, by a panic or the end of the runtime, is not left behind.
    fn drop(&mut self) {
        if !self.reaped {
            self.signal(Signal::SIGKILL);
            let _ = waitid(Id::PIDFd(self.pidfd.get_ref().as_fd()), WaitPidFlag::WEXITED);
        }
    }
}

fn watch(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the descriptor, so it stays open and the same until the AsyncFd is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

fn open_pidfd(pid: Pid) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), libc::PIDFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, close-on-exec, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The kernel's count of processes that its out-of-memory killer took: of the host, and of our control group where it
/// says so. Its rise while a worker lived tells that kill from a stranger's.
pub fn oom_kills() -> u64 {
    let count = |path: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    count("/proc/vmstat") + count("/sys/fs/cgroup/memory.events")
}

/// Moves an inherited descriptor out of the low numbers and makes it close-on-exec, so that it stays ours alone; its old
/// number is taken by `/dev/null`.
///
/// # Errors
/// There is no such descriptor.
pub fn adopt_descriptor(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with F_DUPFD_CLOEXEC touches no memory; a wrong number is an error, not undefined.
    let moved = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 16) };
    if moved < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor and nobody else knows it.
    let moved = unsafe { OwnedFd::from_raw_fd(moved) };
    let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    // SAFETY: both are open descriptors; `number` was given to us by whoever started this process, for our use alone.
    unsafe { libc::dup3(null.as_raw_fd(), number, libc::O_CLOEXEC) };
    Ok(moved)
}

/// Makes sure that the number on which a child finds its token is taken in this process, so that it can never be the
/// descriptor by which the standard library learns that an exec failed.
pub fn reserve_token_descriptor() {
    // SAFETY: F_GETFD touches no memory.
    if unsafe { libc::fcntl(sd_proto::TOKEN_FD, libc::F_GETFD) } >= 0 {
        return;
    }
    let Ok(null) = fs::OpenOptions::new().read(true).open("/dev/null") else { return };
    if null.as_raw_fd() == sd_proto::TOKEN_FD {
        std::mem::forget(null);
        return;
    }
    // SAFETY: the target number was free a moment ago; the copy is never closed.
    unsafe { libc::dup3(null.as_raw_fd(), sd_proto::TOKEN_FD, libc::O_CLOEXEC) };
}

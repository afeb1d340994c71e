//! The last lines of a worker's standard error, and their way into the daemon's own log.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

/// Lines kept.
pub const KEPT_LINES: usize = 40;
/// Bytes kept of one line; the rest of a longer one is dropped.
pub const KEPT_BYTES: usize = 400;

/// A bounded ring of lines that is filled byte by byte.
#[derive(Debug, Default)]
pub struct Tail {
    lines: VecDeque<String>,
    partial: Vec<u8>,
    cut: bool,
}

impl Tail {
    /// Takes bytes as they were read; calls `on_line` for every line that they complete.
    pub fn push(&mut self, bytes: &[u8], mut on_line: impl FnMut(&str)) {
        for byte in bytes {
            match byte {
                b'\n' => self.end_line(&mut on_line),
                _ if self.partial.len() < KEPT_BYTES => self.partial.push(*byte),
                _ => self.cut = true,
            }
        }
    }

    /// Ends a last line without a newline.
    pub fn finish(&mut self, mut on_line: impl FnMut(&str)) {
        if !self.partial.is_empty() {
            self.end_line(&mut on_line);
        }
    }

    fn end_line(&mut self, on_line: &mut impl FnMut(&str)) {
        let mut line: String = String::from_utf8_lossy(&self.partial).chars().filter(|c| !c.is_control()).collect();
        if std::mem::take(&mut self.cut) {
            line.push('…');
        }
        self.partial.clear();
        on_line(&line);
        if self.lines.len() == KEPT_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// The lines kept, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}

/// Reads a worker's standard error to its end on a task of its own.
#[derive(Debug)]
pub struct StderrReader {
    tail: Arc<Mutex<Tail>>,
    task: tokio::task::JoinHandle<()>,
}

impl StderrReader {
    /// Starts reading the read end of the worker's pipe.
    ///
    /// # Errors
    /// The descriptor is not a pipe, or cannot be watched.
    pub fn start(incarnation: u64, pipe: OwnedFd) -> std::io::Result<Self> {
        let mut receiver = pipe::Receiver::from_owned_fd(pipe)?;
        let tail = Arc::new(Mutex::new(Tail::default()));
        let shared = Arc::clone(&tail);
        let task = tokio::spawn(async move {
            let forward = |line: &str| tracing::info!(target: "sd_worker", incarnation, "{line}");
            let mut buffer = [0u8; 4096];
            loop {
                let read = receiver.read(&mut buffer).await.unwrap_or(0);
                let mut tail = shared.lock().unwrap_or_else(PoisonError::into_inner);
                if read == 0 {
                    tail.finish(forward);
                    break;
                }
                tail.push(&buffer[..read], forward);
            }
        });
        Ok(Self { tail, task })
    }

    /// The last lines, once the pipe has ended or `patience` is over (a grandchild may hold it open).
    pub async fn finish(mut self, patience: std::time::Duration) -> Vec<String> {
        if tokio::time::timeout(patience, &mut self.task).await.is_err() {
            self.task.abort();
        }
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).lines()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_lines_stay_and_long_ones_are_cut() {
        let mut tail = Tail::default();
        let mut seen = 0;
        for i in 0..100 {
            tail.push(format!("line {i}\n").as_bytes(), |_| seen += 1);
        }
        tail.push(&[b'x'; 10_000], |_| seen += 1);
        tail.push(b"\n\x1b[31mlast, without newline", |_| seen += 1);
        tail.finish(|_| seen += 1);
        let lines = tail.lines();
        assert_eq!(seen, 102);
        assert_eq!(lines.len(), KEPT_LINES);
        assert_eq!(lines[0], "line 62");
        assert_eq!(lines[38].chars().count(), KEPT_BYTES + 1);
        assert!(lines[38].ends_with('…'));
        assert_eq!(lines[39], "[31mlast, without newline");
    }
}

//! Bounds on what clients may ask for and on what is kept for them.

use std::time::Duration;

/// Bounds of requests, queue and memory. The defaults suit one machine of one user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a prompt, and of a negative prompt. A prompt's length bounds the shared memory of its conditioning.
    pub prompt_bytes: usize,
    /// Denoising steps.
    pub steps: u32,
    /// Images of one request.
    pub count: u32,
    /// Edge of a picture in pixels.
    pub edge: u32,
    /// Bytes of an image file in a request.
    pub image_file_bytes: usize,
    /// Jobs that wait.
    pub queued_jobs: usize,
    /// Jobs of one tenant that wait.
    pub queued_jobs_per_tenant: usize,
    /// Jobs whose stages run by turns.
    pub running_jobs: usize,
    /// Ended jobs that can still be looked up.
    pub ended_jobs: usize,
    /// Bytes of events, pictures included, kept of ended jobs. The last ended job is kept whole whatever its size.
    pub ended_bytes: usize,
    /// After a job was told to stop, how long its stage may take before the job ends without it. The workers have a
    /// shorter deadline of their own, after which they are killed, so this one is met only if the daemon itself errs.
    pub stop: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            prompt_bytes: 16 << 10,
            steps: 1000,
            count: 64,
            edge: 8192,
            image_file_bytes: 30 << 20,
            queued_jobs: 256,
            queued_jobs_per_tenant: 128,
            running_jobs: 2,
            ended_jobs: 256,
            ended_bytes: 32 << 20,
            stop: Duration::from_secs(10),
        }
    }
}

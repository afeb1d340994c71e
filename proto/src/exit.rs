//! Exit codes, one enum a program, so that a death is classified by its status and never by a broken stream.

/// How an `sd-worker` ends by itself. Anything else is a signal or a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum WorkerExit {
    /// Retired or asked to stop.
    Clean = 0,
    /// Command line not understood.
    BadArguments = 64,
    /// Model files missing, truncated, or of another architecture.
    BadWeights = 65,
    /// A bug: a panic or an error without a better name.
    Internal = 70,
    /// Could not allocate what it needed.
    OutOfMemory = 71,
    /// The device vanished or its context is poisoned.
    DeviceLost = 72,
    /// The daemon's link broke or was refused.
    LostLink = 73,
}

impl WorkerExit {
    /// The exit code's name, where it is one of ours. Rust's own code for a panic (101) is [`WorkerExit::Internal`].
    pub fn from_code(code: i32) -> Option<Self> {
        match code {
            0 => Some(Self::Clean),
            64 => Some(Self::BadArguments),
            65 => Some(Self::BadWeights),
            70 | 101 => Some(Self::Internal),
            71 => Some(Self::OutOfMemory),
            72 => Some(Self::DeviceLost),
            73 => Some(Self::LostLink),
            _ => None,
        }
    }

    /// The number that the process exits with.
    pub fn code(self) -> i32 {
        self as i32
    }
}

/// How `sdd` and `sdctl` end, after the conventions of `sysexits.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ProgramExit {
    /// Done.
    Success = 0,
    /// The job failed, or something without a better name.
    Failure = 1,
    /// Bad command line or configuration; nothing was bound or submitted.
    Usage = 64,
    /// Input data is bad: an image file, a model folder.
    Data = 65,
    /// No daemon answers at the given endpoint, or the named model does not exist.
    Unavailable = 69,
    /// A bug.
    Internal = 70,
    /// Needs more than the budget or the host has.
    Capacity = 71,
    /// Output could not be written.
    Output = 73,
    /// Another daemon holds the device; its endpoint is in the message.
    Held = 75,
    /// Not permitted to this tenant.
    Permission = 77,
    /// Cancelled by Ctrl-C.
    Interrupted = 130,
}

impl ProgramExit {
    /// The number that the process exits with.
    pub fn code(self) -> i32 {
        self as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_codes_round_trip() {
        use WorkerExit::*;
        for exit in [Clean, BadArguments, BadWeights, Internal, OutOfMemory, DeviceLost, LostLink] {
            assert_eq!(WorkerExit::from_code(exit.code()), Some(exit));
        }
        assert_eq!(WorkerExit::from_code(101), Some(Internal), "a Rust panic");
        assert_eq!(WorkerExit::from_code(1), None);
    }
}

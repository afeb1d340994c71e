//! Why a request is not admitted, in words: what is wrong with its fields, or what it needs and what there is.

use sd_proto::v1::Stage;

use crate::config::memory::Mode;
use crate::models::ModelError;
use crate::residency::Bytes;

/// A field of the request that cannot be accepted, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The field, as the contract names it.
    pub field: &'static str,
    /// Value, limit and remedy.
    pub description: String,
}

/// Why a request is not admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// Fields are wrong; all that are, at once.
    #[error("{}", .0.iter().map(|v| format!("{}: {}", v.field, v.description)).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<Violation>),
    /// No such model, or one that cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Paths are taken only from the daemon's own user over its Unix socket.
    #[error(
        "model {0:?} is a path: paths are taken only from the daemon's own user over its unix socket, others name a \
         registered model"
    )]
    PathNotAllowed(String),
    /// A stage would need more than the device's whole budget.
    #[error("{0}")]
    DoesNotFit(Box<DoesNotFit>),
    /// The check itself broke.
    #[error("the request could not be checked: {0}: this is a bug of sdd")]
    Broken(String),
}

/// A request that is too large for the budget, with the numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{width} × {height} does not fit: {} {} ({breakdown}), but {} may be used on device {device}: {}",
    self.subject(), Bytes(*need), Bytes(*limit), self.remedy()
)]
pub struct DoesNotFit {
    /// Pixels asked for.
    pub width: u32,
    /// Pixels asked for.
    pub height: u32,
    /// The stage with the largest need.
    pub stage: Stage,
    /// Whether all stages are counted together, because the mode moves none.
    pub together: bool,
    /// Bytes that it needs.
    pub need: u64,
    /// Bytes that may be used.
    pub limit: u64,
    /// What the need is made of.
    pub breakdown: String,
    /// Where.
    pub device: String,
    /// The mode that was to be used.
    pub mode: Mode,
    /// The mode that moves least of those in which it fits, if any does.
    pub fitting: Option<Mode>,
    /// The largest size of this shape that fits, if any does.
    pub largest: Option<(u32, u32)>,
}

impl DoesNotFit {
    fn subject(&self) -> String {
        match self.together {
            true => format!("with offload mode {} all stages stay, and together they need", self.mode),
            false => format!("stage {} needs", stage_title(self.stage)),
        }
    }

    /// What would fit.
    pub fn remedy(&self) -> String {
        let mode = self.fitting.map(|mode| format!("offload mode {mode} would fit it"));
        let size = self
            .largest
            .map(|(width, height)| format!("the largest size of this shape that fits is {width} × {height}"));
        match (mode, size) {
            (Some(mode), Some(size)) => format!("{mode}; {size}; or raise the device's budget"),
            (Some(mode), None) => format!("{mode}; or raise the device's budget"),
            (None, Some(size)) => format!("{size}; or raise the device's budget"),
            (None, None) => "no size fits, raise the device's budget".into(),
        }
    }
}

pub(super) fn stage_title(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "?",
        Stage::Encode => "encode",
        Stage::VaeEncode => "vae encode",
        Stage::Denoise => "denoise",
        Stage::Decode => "decode",
    }
}

//! Samplers, schedules, stages and states as people write them.

use sd_proto::v1::{
    DecisionKind, FailureReason, JobState, LeasePurpose, LeaseState, OffloadMode, Sampler, Schedule, Stage, WorkerState,
};

/// A sampler's canonical name, what else it is called, and what it is.
struct SamplerName {
    sampler: Sampler,
    name: &'static str,
    /// In the reduced form of [`reduce`].
    aliases: &'static [&'static str],
    about: &'static str,
}

const SAMPLERS: [SamplerName; 8] = [
    SamplerName {
        sampler: Sampler::Ddim,
        name: "ddim",
        aliases: &["ddim", "ddimscheduler"],
        about: "the classic, deterministic unless --eta is given",
    },
    SamplerName {
        sampler: Sampler::Euler,
        name: "euler",
        aliases: &["euler", "keuler", "eulerdiscrete", "eulerdiscretescheduler"],
        about: "simple and good",
    },
    SamplerName {
        sampler: Sampler::EulerAncestral,
        name: "euler_a",
        aliases: &["eulera", "keulera", "eulerancestral", "keulerancestral", "eulerancestraldiscretescheduler"],
        about: "adds noise at every step; more varied",
    },
    SamplerName {
        sampler: Sampler::Heun,
        name: "heun",
        aliases: &["heun", "kheun", "heundiscrete", "heundiscretescheduler"],
        about: "second order: two model calls a step",
    },
    SamplerName {
        sampler: Sampler::Dpmpp2m,
        name: "dpmpp_2m",
        aliases: &[
            "dpmpp2m",
            "kdpmpp2m",
            "dpm2m",
            "dpmsolverpp2m",
            "dpmsolvermultistep",
            "dpmsolvermultistepscheduler",
        ],
        about: "good in few steps",
    },
    SamplerName {
        sampler: Sampler::Dpmpp2mSde,
        name: "dpmpp_2m_sde",
        aliases: &["dpmpp2msde", "kdpmpp2msde", "dpm2msde", "dpmpp2msdegpu", "sdedpmsolverpp2m"],
        about: "dpmpp_2m with noise at every step",
    },
    SamplerName {
        sampler: Sampler::Lcm,
        name: "lcm",
        aliases: &["lcm", "lcmscheduler"],
        about: "for latent consistency models: 2 to 8 steps",
    },
    SamplerName {
        sampler: Sampler::Unipc,
        name: "unipc",
        aliases: &["unipc", "unipcbh2", "unipcmultistep", "unipcmultistepscheduler"],
        about: "a predictor with corrector, good in few steps",
    },
];

struct ScheduleName {
    schedule: Schedule,
    name: &'static str,
    aliases: &'static [&'static str],
}

const SCHEDULES: [ScheduleName; 6] = [
    ScheduleName { schedule: Schedule::Leading, name: "leading", aliases: &["leading"] },
    ScheduleName { schedule: Schedule::Trailing, name: "trailing", aliases: &["trailing"] },
    ScheduleName { schedule: Schedule::Linspace, name: "linspace", aliases: &["linspace"] },
    ScheduleName { schedule: Schedule::Karras, name: "karras", aliases: &["karras", "ka"] },
    ScheduleName { schedule: Schedule::Exponential, name: "exponential", aliases: &["exponential", "exp"] },
    ScheduleName { schedule: Schedule::SgmUniform, name: "sgm_uniform", aliases: &["sgmuniform", "sgm"] },
];

/// A name that stands for nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} {text:?}: use one of {choices}")]
pub struct UnknownName {
    kind: &'static str,
    text: String,
    choices: String,
}

/// Lower case, "++" as "pp", letters and digits only: what is left when spellings differ.
fn reduce(text: &str) -> String {
    text.to_lowercase().replace("++", "pp").chars().filter(|c| c.is_alphanumeric()).collect()
}

/// Reads a sampler's name in any of the field's spellings. One that names its schedule too ("DPM++ 2M Karras") gives both.
///
/// # Errors
/// [`UnknownName`] lists all names.
pub fn parse_sampler(text: &str) -> Result<(Sampler, Option<Schedule>), UnknownName> {
    let reduced = reduce(text);
    let find = |name: &str| SAMPLERS.iter().find(|s| s.aliases.contains(&name)).map(|s| s.sampler);
    if let Some(sampler) = find(&reduced) {
        return Ok((sampler, None));
    }
    for schedule in &SCHEDULES {
        for alias in schedule.aliases {
            if let Some(sampler) = reduced.strip_suffix(alias).and_then(find) {
                return Ok((sampler, Some(schedule.schedule)));
            }
        }
    }
    Err(UnknownName { kind: "sampler", text: text.into(), choices: SAMPLERS.map(|s| s.name).join(", ") })
}

/// Reads a schedule's name; "auto" is the model's own.
///
/// # Errors
/// [`UnknownName`] lists all names.
pub fn parse_schedule(text: &str) -> Result<Schedule, UnknownName> {
    let reduced = reduce(text);
    if ["auto", "automatic", "default"].contains(&reduced.as_str()) {
        return Ok(Schedule::Unspecified);
    }
    SCHEDULES.iter().find(|s| s.aliases.contains(&reduced.as_str())).map(|s| s.schedule).ok_or_else(|| UnknownName {
        kind: "schedule",
        text: text.into(),
        choices: format!("{}, auto", SCHEDULES.map(|s| s.name).join(", ")),
    })
}

/// Every sampler's canonical name with a few words about it, for help texts.
pub fn samplers() -> impl Iterator<Item = (&'static str, &'static str)> {
    SAMPLERS.iter().map(|s| (s.name, s.about))
}

/// Every schedule's canonical name.
pub fn schedules() -> impl Iterator<Item = &'static str> {
    SCHEDULES.iter().map(|s| s.name)
}

/// A sampler's canonical name; "model's own" where it is not chosen.
pub fn sampler(sampler: Sampler) -> &'static str {
    SAMPLERS.iter().find(|s| s.sampler == sampler).map_or("model's own", |s| s.name)
}

/// A schedule's canonical name; "model's own" where it is not chosen.
pub fn schedule(schedule: Schedule) -> &'static str {
    SCHEDULES.iter().find(|s| s.schedule == schedule).map_or("model's own", |s| s.name)
}

/// A stage as one word.
pub fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "unknown",
        Stage::Encode => "encode",
        Stage::VaeEncode => "vae_encode",
        Stage::Denoise => "denoise",
        Stage::Decode => "decode",
    }
}

/// What a stage does, for people.
pub fn stage_activity(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "working",
        Stage::Encode => "reading the prompt",
        Stage::VaeEncode => "reading the picture",
        Stage::Denoise => "denoising",
        Stage::Decode => "decoding",
    }
}

/// A job's state as one word.
pub fn job_state(state: JobState) -> &'static str {
    match state {
        JobState::Unspecified => "unknown",
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::Succeeded => "succeeded",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
    }
}

/// A worker's state as one word.
pub fn worker_state(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Unspecified => "unknown",
        WorkerState::Starting => "starting",
        WorkerState::Idle => "idle",
        WorkerState::Busy => "busy",
        WorkerState::Stopping => "stopping",
    }
}

/// A lease's purpose as one word.
pub fn lease_purpose(purpose: LeasePurpose) -> &'static str {
    match purpose {
        LeasePurpose::Unspecified => "unknown",
        LeasePurpose::Context => "context",
        LeasePurpose::Weights => "weights",
        LeasePurpose::WorkingSet => "working_set",
    }
}

/// A lease's state as one word.
pub fn lease_state(state: LeaseState) -> &'static str {
    match state {
        LeaseState::Unspecified => "unknown",
        LeaseState::Granted => "granted",
        LeaseState::Revoked => "revoked",
        LeaseState::Unproven => "unproven",
    }
}

/// A failure's reason as one word for programs.
pub fn failure_reason(reason: FailureReason) -> &'static str {
    match reason {
        FailureReason::Unspecified => "unknown",
        FailureReason::InvalidRequest => "invalid_request",
        FailureReason::Model => "model",
        FailureReason::DoesNotFit => "does_not_fit",
        FailureReason::OutOfMemory => "out_of_memory",
        FailureReason::WorkerDied => "worker_died",
        FailureReason::WorkerHung => "worker_hung",
        FailureReason::Protocol => "protocol",
        FailureReason::Shutdown => "shutdown",
        FailureReason::Internal => "internal",
    }
}

/// Offload modes by the names that users know.
const MODES: [(OffloadMode, &str); 6] = [
    (OffloadMode::Auto, "auto"),
    (OffloadMode::None, "none"),
    (OffloadMode::CondOnly, "cond_only"),
    (OffloadMode::CondDiffusion, "cond_diffusion"),
    (OffloadMode::Aggressive, "aggressive"),
    (OffloadMode::LayerStreaming, "layer_streaming"),
];

/// Every offload mode's name.
pub fn offload_modes() -> impl Iterator<Item = &'static str> {
    MODES.iter().map(|(_, name)| *name)
}

/// An offload mode's name; "as configured" where it is not chosen.
pub fn offload_mode(mode: OffloadMode) -> &'static str {
    MODES.iter().find(|(other, _)| *other == mode).map_or("as configured", |(_, name)| name)
}

/// Reads an offload mode's name, with dashes or underscores.
///
/// # Errors
/// [`UnknownName`] lists all names.
pub fn parse_offload_mode(text: &str) -> Result<OffloadMode, UnknownName> {
    let same = |name: &str| reduce(name) == reduce(text);
    MODES.iter().find(|(_, name)| same(name)).map(|(mode, _)| *mode).ok_or_else(|| UnknownName {
        kind: "offload mode",
        text: text.into(),
        choices: MODES.map(|(_, name)| name).join(", "),
    })
}

/// What a decision about memory was, as one word.
pub fn decision_kind(kind: DecisionKind) -> &'static str {
    match kind {
        DecisionKind::Unspecified => "note",
        DecisionKind::Waits => "waits",
        DecisionKind::Granted => "granted",
        DecisionKind::Refused => "refused",
        DecisionKind::TakesBack => "takes_back",
        DecisionKind::Proven => "proven",
        DecisionKind::Killed => "killed",
        DecisionKind::Overdraft => "overdraft",
        DecisionKind::Capacity => "capacity",
        DecisionKind::Degraded => "degraded",
        DecisionKind::Recovered => "recovered",
        DecisionKind::Keeps => "keeps",
        DecisionKind::Retries => "retries",
        DecisionKind::Quarantined => "quarantined",
        DecisionKind::Cached => "cached",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_names_and_the_web_uis_spellings_are_read() {
        for (text, sampler, schedule) in [
            ("ddim", Sampler::Ddim, None),
            ("DDIM trailing", Sampler::Ddim, Some(Schedule::Trailing)),
            ("euler", Sampler::Euler, None),
            ("k_euler", Sampler::Euler, None),
            ("Euler a", Sampler::EulerAncestral, None),
            ("euler_ancestral", Sampler::EulerAncestral, None),
            ("Heun", Sampler::Heun, None),
            ("dpm++2m", Sampler::Dpmpp2m, None),
            ("DPM++ 2M Karras", Sampler::Dpmpp2m, Some(Schedule::Karras)),
            ("DPM++ 2M SDE Exponential", Sampler::Dpmpp2mSde, Some(Schedule::Exponential)),
            ("dpmpp-2m-sde", Sampler::Dpmpp2mSde, None),
            ("Euler SGM Uniform", Sampler::Euler, Some(Schedule::SgmUniform)),
            ("LCM", Sampler::Lcm, None),
            ("UniPC", Sampler::Unipc, None),
            ("UniPCMultistepScheduler", Sampler::Unipc, None),
        ] {
            assert_eq!(parse_sampler(text), Ok((sampler, schedule)), "{text}");
        }
        for (name, _) in samplers() {
            assert_eq!(sampler(parse_sampler(name).unwrap().0), name);
        }
        for name in schedules() {
            assert_eq!(schedule(parse_schedule(name).unwrap()), name);
        }
    }

    #[test]
    fn no_spelling_names_two_samplers() {
        let mut all: Vec<&str> = SAMPLERS.iter().flat_map(|s| s.aliases).copied().collect();
        let total = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), total);
    }

    #[test]
    fn offload_modes_are_read_in_either_spelling() {
        for name in offload_modes() {
            assert_eq!(offload_mode(parse_offload_mode(name).unwrap()), name);
        }
        assert_eq!(parse_offload_mode("Layer-Streaming"), Ok(OffloadMode::LayerStreaming));
        let error = parse_offload_mode("lazy").unwrap_err().to_string();
        assert!(offload_modes().all(|name| error.contains(name)), "{error}");
    }

    #[test]
    fn an_unknown_name_lists_all() {
        let error = parse_sampler("plms").unwrap_err().to_string();
        for (name, _) in samplers() {
            assert!(error.contains(name), "{error}");
        }
        assert!(parse_schedule("cosine").unwrap_err().to_string().contains("sgm_uniform"));
        assert_eq!(parse_schedule("Automatic"), Ok(Schedule::Unspecified));
    }
}

//! Messages about memory: decisions, fits, configuration, what operators did.

use sd_client::names;
use sd_client::proto::{
    ConfigValue, Decision, ExplainJobResponse, FitResponse, ForeignProcess, LoadedStage, MemoryRequest, OffloadMode,
    Quarantined, StageFit,
};
use serde_json::{Value, json};

use super::{object, plan, time};

/// What of a text is worth a field.
fn text(text: &str) -> Value {
    if text.is_empty() { Value::Null } else { json!(text) }
}

fn number(number: u64) -> Value {
    if number == 0 { Value::Null } else { json!(number) }
}

/// What a request says about memory; only what is set.
pub(in crate::cli) fn memory(memory: &MemoryRequest) -> Value {
    let mode = memory.mode();
    object([
        ("mode", if mode == OffloadMode::Unspecified { Value::Null } else { json!(names::offload_mode(mode)) }),
        ("offload_cond_stage", json!(memory.offload_cond_stage)),
        ("offload_diffusion", json!(memory.offload_diffusion)),
        ("reload_cond_stage", json!(memory.reload_cond_stage)),
        ("reload_diffusion", json!(memory.reload_diffusion)),
        ("vae_tiling", json!(memory.vae_tiling)),
        ("vae_tile_size", number(memory.vae_tile_size.into())),
        ("vae_tile_overlap", number(memory.vae_tile_overlap.into())),
    ])
}

/// A decision about memory; only what it has.
pub(in crate::cli) fn decision(decision: &Decision) -> Value {
    object([
        ("sequence", json!(decision.sequence)),
        ("time", time(decision.time.as_ref())),
        ("kind", json!(names::decision_kind(decision.kind()))),
        ("device", text(&decision.device)),
        ("job_id", text(&decision.job_id)),
        ("incarnation", number(decision.incarnation)),
        ("holder", text(&decision.holder)),
        ("lease_id", number(decision.lease_id)),
        ("bytes", number(decision.bytes)),
        ("rung", text(&decision.rung)),
        ("proof", text(&decision.proof)),
        ("wanted_by", text(&decision.wanted_by)),
        ("text", json!(decision.text)),
    ])
}

/// A job with its decisions.
pub(in crate::cli) fn explanation(explained: &ExplainJobResponse) -> Value {
    json!({
        "job": explained.job.as_ref().map_or(Value::Null, super::job),
        "decisions": explained.decisions.iter().map(decision).collect::<Vec<_>>(),
    })
}

/// What a request would need.
pub(in crate::cli) fn fit(fit: &FitResponse) -> Value {
    let stage = |stage: &StageFit| {
        json!({
            "stage": names::stage(stage.stage()), "device": stage.device, "context_bytes": stage.context_bytes,
            "weights_bytes": stage.weights_bytes, "weights_floor_bytes": stage.weights_floor_bytes,
            "working_set_bytes": stage.working_set_bytes, "source": stage.source,
        })
    };
    object([
        ("fits", json!(fit.fits)),
        ("device", json!(fit.device)),
        ("budget_bytes", json!(fit.budget_bytes)),
        ("mode", text(&fit.mode)),
        ("fitting_mode", text(&fit.fitting_mode)),
        ("largest_width", number(fit.largest_width.into())),
        ("largest_height", number(fit.largest_height.into())),
        ("advice", text(&fit.advice)),
        ("stages", fit.stages.iter().map(stage).collect()),
        ("plan", fit.plan.as_ref().map_or(Value::Null, plan)),
    ])
}

/// One value of the configuration.
pub(in crate::cli) fn config(value: &ConfigValue) -> Value {
    json!({ "key": value.key, "value": value.value, "origin": value.origin })
}

/// A stage that was loaded.
pub(in crate::cli) fn loaded(stage: &LoadedStage) -> Value {
    json!({
        "stage": stage.stage, "incarnation": stage.incarnation, "weights_bytes": stage.weights_bytes,
        "weights_total_bytes": stage.weights_total_bytes,
    })
}

/// A stage that is held back.
pub(in crate::cli) fn quarantined(entry: &Quarantined) -> Value {
    json!({
        "model": entry.model, "stage": entry.stage, "since": time(entry.since.as_ref()), "deaths": entry.deaths,
        "reason": entry.reason, "stderr": entry.stderr,
    })
}

/// Another program's process on a device.
pub(in crate::cli) fn foreign(process: &ForeignProcess) -> Value {
    json!({ "pid": process.pid, "name": process.name, "bytes": process.bytes })
}

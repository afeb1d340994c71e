//! What `--json` prints: the messages of the interface with names for numbers of enums, seconds for durations, RFC 3339 for
//! times, and no file contents.

mod memory;

use std::path::Path;

use sd_client::names;
use sd_client::proto::job_event::Event;
use sd_client::proto::{
    Component, Device, Emphasis, Failure, GetStatusResponse, ImageRequest, Job, JobEvent, JobTimings, Lease, Model,
    NumericPlan, ProgressPhase, StageTiming, Worker,
};
use serde_json::{Map, Value, json};

use super::human;

pub(super) use memory::{config, decision, explanation, fit, loaded, memory, quarantined};

fn seconds(duration: Option<&prost_types::Duration>) -> Value {
    duration.map_or(Value::Null, |d| json!(human::wire_duration(Some(d)).as_secs_f64()))
}

fn time(time: Option<&prost_types::Timestamp>) -> Value {
    time.map_or(Value::Null, |t| Value::String(t.to_string()))
}

/// An object from pairs, those without a value left out.
fn object<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    let present = pairs.into_iter().filter(|(_, value)| !value.is_null());
    Value::Object(present.map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>())
}

/// A request; only what is set, and of files only their bytes.
pub(super) fn request(request: &ImageRequest) -> Value {
    let set = |number: u32| (number != 0).then_some(number);
    let file = |bytes: &[u8]| (!bytes.is_empty()).then_some(bytes.len());
    object([
        ("model", json!(request.model)),
        ("prompt", json!(request.prompt)),
        ("negative_prompt", json!(request.negative_prompt)),
        ("width", json!(set(request.width))),
        ("height", json!(set(request.height))),
        ("steps", json!(request.steps)),
        ("guidance_scale", json!(request.guidance_scale)),
        ("seed", json!(request.seed)),
        ("count", json!(request.count.max(1))),
        ("sampler", json!(names::sampler(request.sampler()))),
        ("schedule", json!(names::schedule(request.schedule()))),
        ("zero_terminal_snr", json!(request.zero_terminal_snr)),
        ("eta", json!(request.eta)),
        ("guidance_rescale", json!(request.guidance_rescale)),
        ("emphasis", json!(request.emphasis() != Emphasis::Off)),
        ("clip_skip", json!(set(request.clip_skip))),
        ("init_image_bytes", json!(file(&request.init_image))),
        ("mask_bytes", json!(file(&request.mask))),
        ("strength", json!(request.strength)),
        ("memory", request.memory.as_ref().map_or(Value::Null, memory)),
    ])
}

fn plan(plan: &NumericPlan) -> Value {
    json!({
        "version": plan.version, "device": plan.device, "dtype": plan.dtype, "backend": plan.backend, "batch": plan.batch,
        "vae_tile": plan.vae_tile, "vae_tile_overlap": plan.vae_tile_overlap, "vae_dtype": plan.vae_dtype,
    })
}

fn stage_timing(timing: &StageTiming) -> Value {
    object([
        ("stage", json!(names::stage(timing.stage()))),
        ("image_index", json!(timing.image_index)),
        ("waited", seconds(timing.waited.as_ref())),
        ("loaded", seconds(timing.loaded.as_ref())),
        ("computed", seconds(timing.computed.as_ref())),
        ("total", seconds(timing.total.as_ref())),
        ("resident_segments", json!((timing.segments > 0).then_some(timing.resident_segments))),
        ("segments", json!((timing.segments > 0).then_some(timing.segments))),
        ("streamed_bytes", json!(timing.streamed_bytes)),
        ("peak_bytes", json!(timing.peak_bytes)),
        ("leased_bytes", json!(timing.leased_bytes)),
        ("cached", json!(timing.cached)),
        ("retries", json!(timing.retries)),
        ("resumed_at", json!(timing.resumed_at)),
    ])
}

fn timings(timings: &JobTimings) -> Value {
    object([
        ("queued", seconds(timings.queued.as_ref())),
        ("total", seconds(timings.total.as_ref())),
        ("stages", timings.stages.iter().map(stage_timing).collect()),
    ])
}

fn failure(failure: &Failure) -> Value {
    json!({
        "reason": names::failure_reason(failure.reason()), "stage": names::stage(failure.stage()),
        "message": failure.message, "stderr": failure.stderr,
    })
}

/// An event as one object; of a picture, `path` says where it was saved.
pub(super) fn event(event: &JobEvent, path: Option<&Path>) -> Value {
    let (name, fields) = match &event.event {
        Some(Event::Queued(queued)) => (
            "queued",
            object([
                ("position", json!(queued.position)),
                ("estimated_wait", seconds(queued.estimated_wait.as_ref())),
                ("request", queued.effective.as_ref().map_or(Value::Null, request)),
                ("plan", queued.plan.as_ref().map_or(Value::Null, plan)),
            ]),
        ),
        Some(Event::StageStarted(started)) => (
            "stage_started",
            json!({
                "stage": names::stage(started.stage()), "image_index": started.image_index,
                "incarnation": started.incarnation, "number": started.number, "of": started.of,
            }),
        ),
        Some(Event::Progress(progress)) => (
            "progress",
            json!({
                "stage": names::stage(progress.stage()), "image_index": progress.image_index,
                "phase": phase(progress.phase()), "done": progress.done, "total": progress.total,
            }),
        ),
        Some(Event::StageFinished(finished)) => (
            "stage_finished",
            object([
                ("stage", json!(names::stage(finished.stage()))),
                ("image_index", json!(finished.image_index)),
                ("timing", finished.timing.as_ref().map_or(Value::Null, stage_timing)),
            ]),
        ),
        Some(Event::Image(image)) => (
            "image",
            object([
                ("index", json!(image.index)),
                ("seed", json!(image.seed)),
                ("width", json!(image.width)),
                ("height", json!(image.height)),
                ("path", path.map_or(Value::Null, |path| json!(path.to_string_lossy()))),
                ("bytes", json!(image.png.len())),
                ("parameters", json!(image.parameters)),
            ]),
        ),
        Some(Event::Succeeded(succeeded)) => {
            let degraded = (!succeeded.degraded.is_empty()).then_some(&succeeded.degraded);
            let timings = succeeded.timings.as_ref().map_or(Value::Null, timings);
            ("succeeded", object([("timings", timings), ("degraded", json!(degraded))]))
        }
        Some(Event::Failed(failed)) => ("failed", failure(failed)),
        Some(Event::Cancelled(cancelled)) => ("cancelled", json!({ "reason": cancelled.reason })),
        Some(Event::Note(note)) => ("note", json!({ "text": note.text })),
        // Its own number and time in a field of its own: those of the event are the job's.
        Some(Event::Decision(made)) => ("decision", json!({ "decision": decision(made) })),
        None => ("unknown", json!({})),
    };
    let mut out = Map::new();
    out.insert("event".into(), json!(name));
    out.insert("job_id".into(), json!(event.job_id));
    out.insert("sequence".into(), json!(event.sequence));
    out.insert("time".into(), time(event.time.as_ref()));
    if let Value::Object(fields) = fields {
        out.extend(fields);
    }
    Value::Object(out)
}

fn phase(phase: ProgressPhase) -> &'static str {
    match phase {
        ProgressPhase::Unspecified => "unknown",
        ProgressPhase::Starting => "starting",
        ProgressPhase::Loading => "loading",
        ProgressPhase::Computing => "computing",
    }
}

/// A job.
pub(super) fn job(job: &Job) -> Value {
    object([
        ("id", json!(job.id)),
        ("tenant", json!(job.tenant)),
        ("state", json!(names::job_state(job.state()))),
        ("submitted", time(job.submitted.as_ref())),
        ("finished", time(job.finished.as_ref())),
        ("position", json!(job.position)),
        ("stage", json!(names::stage(job.stage()))),
        ("images_done", json!(job.images_done)),
        ("request", job.request.as_ref().map_or(Value::Null, request)),
        ("failure", job.failure.as_ref().map_or(Value::Null, failure)),
        ("plan", job.plan.as_ref().map_or(Value::Null, plan)),
        ("timings", job.timings.as_ref().map_or(Value::Null, timings)),
    ])
}

/// A model.
pub(super) fn model(model: &Model) -> Value {
    let component = |c: &Component| {
        json!({
            "stage": c.stage, "class_name": c.class_name, "tensors": c.tensors, "file_bytes": c.file_bytes,
            "weights_bytes": c.weights_bytes, "precision": c.precision,
        })
    };
    json!({
        "name": model.name, "path": model.path, "is_default": model.is_default, "family": model.family,
        "file_bytes": model.file_bytes, "precision": model.precision, "default_width": model.default_width,
        "default_height": model.default_height, "default_steps": model.default_steps,
        "default_guidance_scale": model.default_guidance_scale, "default_sampler": model.default_sampler,
        "components": model.components.iter().map(component).collect::<Vec<_>>(), "problem": model.problem,
    })
}

/// A worker.
pub(super) fn worker(worker: &Worker) -> Value {
    json!({
        "incarnation": worker.incarnation, "pid": worker.pid, "stage": worker.stage, "model": worker.model,
        "device": worker.device, "state": names::worker_state(worker.state()), "leased_bytes": worker.leased_bytes,
        "resident_bytes": worker.resident_bytes, "age": seconds(worker.age.as_ref()), "job_id": worker.job_id,
        "weights_bytes": worker.weights_bytes, "weights_total_bytes": worker.weights_total_bytes, "pinned": worker.pinned,
    })
}

/// A lease.
pub(super) fn lease(lease: &Lease) -> Value {
    json!({
        "id": lease.id, "device": lease.device, "incarnation": lease.incarnation,
        "purpose": names::lease_purpose(lease.purpose()), "bytes": lease.bytes,
        "state": names::lease_state(lease.state()), "age": seconds(lease.age.as_ref()), "job_id": lease.job_id,
        "holder": lease.holder,
    })
}

/// A daemon's state, and how it was found.
pub(super) fn status(status: &GetStatusResponse, found: &str) -> Value {
    let device = |d: &Device| {
        json!({
            "id": d.id, "name": d.name, "total_bytes": d.total_bytes, "budget_bytes": d.budget_bytes,
            "leased_bytes": d.leased_bytes, "unproven_bytes": d.unproven_bytes, "degraded": d.degraded,
            "capacity_bytes": d.capacity_bytes, "held_until": time(d.held_until.as_ref()),
            "foreign": d.foreign.iter().map(memory::foreign).collect::<Vec<_>>(),
        })
    };
    json!({
        "version": status.version, "instance": status.instance, "pid": status.pid,
        "started": time(status.started.as_ref()), "endpoint": status.endpoint, "found": found,
        "devices": status.devices.iter().map(device).collect::<Vec<_>>(), "queued_jobs": status.queued_jobs,
        "running_jobs": status.running_jobs, "draining": status.draining,
        "shared_memory_bytes": status.shared_memory_bytes,
        "shared_memory_free_bytes": status.shared_memory_free_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_client::proto::{ImageReady, Queued, Sampler, Schedule};

    #[test]
    fn events_carry_names_and_no_bytes() {
        let image =
            ImageReady { index: 1, seed: u64::MAX, width: 8, height: 8, png: vec![1, 2, 3], parameters: "p".into() };
        let time = Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 0 });
        let value = JobEvent { job_id: "j".into(), sequence: 7, time, event: Some(Event::Image(image)) };
        assert_eq!(
            event(&value, Some(Path::new("a.png"))),
            json!({
                "event": "image", "job_id": "j", "sequence": 7, "time": "2027-01-15T08:00:00Z", "index": 1, "seed": u64::MAX,
                "width": 8, "height": 8, "path": "a.png", "bytes": 3, "parameters": "p",
            })
        );
    }

    #[test]
    fn a_request_shows_what_is_set() {
        let effective = ImageRequest {
            prompt: "x".into(),
            steps: Some(20),
            sampler: Sampler::Dpmpp2m.into(),
            schedule: Schedule::Karras.into(),
            init_image: vec![0; 9],
            ..Default::default()
        };
        let queued = Queued { effective: Some(effective), ..Default::default() };
        let value = event(&JobEvent { event: Some(Event::Queued(queued)), ..Default::default() }, None);
        let request = &value["request"];
        assert_eq!((&request["steps"], &request["sampler"]), (&json!(20), &json!("dpmpp_2m")));
        assert_eq!((&request["schedule"], &request["init_image_bytes"]), (&json!("karras"), &json!(9)));
        assert!(request.get("width").is_none() && value.get("estimated_wait").is_none());
    }
}

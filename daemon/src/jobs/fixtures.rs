//! Requests and models for tests.

use std::sync::Arc;

use sd_proto::v1::{NumericPlan, Sampler, Schedule};

use super::request::Admitted;
use crate::models::Model;
use crate::stages::memory::MemoryPlan;

/// A model like the one that is built in.
pub(crate) fn model() -> Arc<Model> {
    Arc::new(Model {
        name: "default".into(),
        dir: "models/default".into(),
        report: serde_json::from_str(include_str!("../models/sample_report.json")).expect("the sample is a report"),
    })
}

/// A plan of the CPU.
pub(crate) fn numeric_plan() -> NumericPlan {
    let (device, dtype, backend) = ("cpu".into(), "f32".into(), "candle".into());
    NumericPlan { version: 1, device, dtype, backend, batch: 1, vae_dtype: "f32".into(), ..NumericPlan::default() }
}

/// An ordinary request.
pub(crate) fn admitted() -> Admitted {
    Admitted {
        model: model(),
        prompt: "a red heart".into(),
        negative_prompt: String::new(),
        width: 256,
        height: 192,
        steps: 20,
        guidance_scale: 4.0,
        seed: 1,
        count: 1,
        sampler: Sampler::Ddim,
        schedule: Schedule::Unspecified,
        zero_terminal_snr: None,
        eta: 0.0,
        guidance_rescale: 0.0,
        emphasis: true,
        clip_skip: 0,
        initial: None,
        plan: numeric_plan(),
        memory: MemoryPlan::default(),
        asked_memory: None,
    }
}

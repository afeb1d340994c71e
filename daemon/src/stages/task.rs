//! A stage run as the task that a worker is sent.

use sd_proto::v1::Stage;
use sd_proto::worker::v1::task::Work;
use sd_proto::worker::v1::{DecodeWork, DenoiseWork, EncodeWork, VaeEncodeWork};

use super::plan::StageRun;
use crate::jobs::request::{Admitted, sampler_name, schedule_name};

/// What the worker is to do; `None` for the unspecified stage, which no plan has.
pub fn work(request: &Admitted, run: &StageRun) -> Option<Work> {
    let (width, height) = (request.width, request.height);
    let seed = request.image_seed(run.image);
    Some(match run.stage {
        Stage::Unspecified => return None,
        Stage::Encode => Work::Encode(EncodeWork {
            prompt: request.prompt.clone(),
            negative_prompt: request.negative_prompt.clone(),
            guidance: request.guided(),
            emphasis: request.emphasis,
            clip_skip: request.clip_skip,
        }),
        Stage::VaeEncode => Work::VaeEncode(VaeEncodeWork { width, height, seed }),
        Stage::Denoise => Work::Denoise(DenoiseWork {
            width,
            height,
            seed,
            steps: request.steps,
            guidance_scale: request.guidance_scale,
            guidance_rescale: request.guidance_rescale,
            sampler: sampler_name(request.sampler).into(),
            schedule: schedule_name(request.schedule).into(),
            zero_terminal_snr: request.zero_terminal_snr,
            eta: request.eta,
            strength: request.initial.as_ref().map(|initial| initial.strength),
        }),
        Stage::Decode => Work::Decode(DecodeWork { width, height }),
    })
}

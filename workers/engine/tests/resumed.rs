//! A run that is interrupted after any step and goes on from its checkpoint, in a fresh sampler, ends with the undisturbed
//! run's bytes: every sampler, from noise and from a picture with a mask.

use std::ops::ControlFlow;

use anyhow::Result;
use sd_engine::models::Unet;
use sd_engine::pipeline::{DenoiseInputs, DenoiseRequest, PipelineError, StageObserver, denoise, denoise_from};
use sd_engine::residency::SegmentEvent;
use sd_engine::sampling::{Checkpoint, SamplerKind, ScheduleChoice, SchedulerConfig};
use sd_engine::tensor::to_f32;
use sd_engine::testkit::{Fixture, noise};

/// Keeps every checkpoint's bytes.
#[derive(Default)]
struct Keeper {
    kept: Vec<Vec<u8>>,
    /// Steps after which it breaks the run off.
    patience: Option<usize>,
}

impl StageObserver for Keeper {
    fn on_block(&mut self, _: &SegmentEvent<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn on_step(&mut self, _: usize, _: usize) -> ControlFlow<()> {
        if self.patience == Some(self.kept.len()) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn on_checkpoint(&mut self, make: &dyn Fn() -> Result<Checkpoint, PipelineError>) -> Result<(), PipelineError> {
        self.kept.push(make()?.to_bytes());
        Ok(())
    }
}

struct Prepared {
    unet: Unet,
    inputs: DenoiseInputs,
    _folder: tempfile::TempDir,
}

impl Prepared {
    fn new() -> Result<Self> {
        let (fixture, folder) = (Fixture::open("sd15")?, tempfile::tempdir()?);
        fixture.write_model(folder.path())?;
        let unet = Unet::load(&folder.path().join("unet"), &mut |_| ControlFlow::Continue(()))?;
        let conditioning = noise("conditioning", &[2, 77, unet.config().conditioning_width])?;
        let inputs = DenoiseInputs { conditioning, image_latents: None, latent_mask: None, masked_image_latents: None };
        Ok(Self { unet, inputs, _folder: folder })
    }

    /// Interrupts a run after every one of its steps, and goes on to the end from each.
    fn check(&self, config: &SchedulerConfig, request: &DenoiseRequest, inputs: &DenoiseInputs) -> Result<()> {
        let mut keeper = Keeper::default();
        let undisturbed = bits(&denoise(&self.unet, config, request, inputs, &mut keeper)?)?;
        let kept = keeper.kept;
        anyhow::ensure!(kept.len() >= 2, "a run of {} steps", kept.len());
        for (index, bytes) in kept.iter().enumerate() {
            let checkpoint = Checkpoint::from_bytes(bytes)?;
            assert_eq!((checkpoint.done, checkpoint.total), (index + 1, kept.len()));
            let mut keeper = Keeper::default();
            let resumed = denoise_from(&self.unet, config, request, inputs, Some(&checkpoint), &mut keeper)?;
            assert_eq!(bits(&resumed)?, undisturbed, "{:?} after {} steps", request.sampler, index + 1);
            assert_eq!(keeper.kept, kept[index + 1..], "{:?}: the checkpoints that follow", request.sampler);
        }
        // Broken off after every single step.
        let (mut last, mut result) = (None::<Checkpoint>, None);
        for _ in 0..kept.len() {
            let mut keeper = Keeper { patience: Some(1), ..Keeper::default() };
            match denoise_from(&self.unet, config, request, inputs, last.as_ref(), &mut keeper) {
                Ok(latents) => result = Some(bits(&latents)?),
                Err(PipelineError::Cancelled) => {}
                Err(error) => return Err(error.into()),
            }
            last = keeper.kept.first().map(|bytes| Checkpoint::from_bytes(bytes)).transpose()?;
        }
        assert_eq!(result, Some(undisturbed), "{:?} broken off after every step", request.sampler);
        Ok(())
    }
}

fn bits(latents: &candle_core::Tensor) -> Result<Vec<u32>> {
    Ok(to_f32(latents)?.into_iter().map(f32::to_bits).collect())
}

fn config(more: &str) -> Result<SchedulerConfig> {
    let base = r#""_class_name":"DDIMScheduler","beta_start":0.00085,"beta_end":0.012,"beta_schedule":"scaled_linear""#;
    Ok(SchedulerConfig::from_json(&format!("{{{base}{more}}}"))?)
}

fn request(sampler: SamplerKind) -> DenoiseRequest {
    DenoiseRequest {
        seed: 7,
        latent_size: (8, 8),
        steps: 4,
        guidance_scale: 5.0,
        guidance_rescale: 0.3,
        sampler: Some(sampler),
        schedule: ScheduleChoice::default(),
        eta: 0.7,
        strength: None,
    }
}

#[test]
fn every_sampler_goes_on_after_every_step_with_the_undisturbed_bytes() -> Result<()> {
    let prepared = Prepared::new()?;
    for kind in SamplerKind::ALL {
        prepared.check(&config("")?, &request(kind), &prepared.inputs)?;
    }
    // The longest memories.
    for kind in [SamplerKind::Dpmpp2m, SamplerKind::Dpmpp2mSde, SamplerKind::Unipc] {
        let third = config(r#","solver_order":3,"lower_order_final":false"#)?;
        prepared.check(&third, &DenoiseRequest { steps: 6, ..request(kind) }, &prepared.inputs)?;
    }
    Ok(())
}

#[test]
fn a_picture_that_is_painted_over_goes_on_too() -> Result<()> {
    let prepared = Prepared::new()?;
    let shape = [1, prepared.unet.config().out_channels, 8, 8];
    let mask = noise("mask", &[1, 1, 8, 8])?.ge(0f32)?.to_dtype(candle_core::DType::F32)?;
    let inputs = DenoiseInputs {
        image_latents: Some(noise("image", &shape)?),
        latent_mask: Some(mask),
        ..prepared.inputs.clone()
    };
    for kind in [SamplerKind::EulerAncestral, SamplerKind::Heun] {
        let request = DenoiseRequest { strength: Some(0.8), steps: 5, ..request(kind) };
        prepared.check(&config("")?, &request, &inputs)?;
    }
    Ok(())
}

#[test]
fn a_checkpoint_of_another_run_is_refused() -> Result<()> {
    let prepared = Prepared::new()?;
    let (config, euler) = (config("")?, request(SamplerKind::Euler));
    let mut keeper = Keeper::default();
    denoise(&prepared.unet, &config, &euler, &prepared.inputs, &mut keeper)?;
    let checkpoint = Checkpoint::from_bytes(&keeper.kept[1])?;
    for other in [
        request(SamplerKind::Ddim),
        DenoiseRequest { steps: 5, ..euler.clone() },
        DenoiseRequest { latent_size: (8, 16), ..euler.clone() },
    ] {
        let mut keeper = Keeper::default();
        let refused = denoise_from(&prepared.unet, &config, &other, &prepared.inputs, Some(&checkpoint), &mut keeper);
        assert!(matches!(refused, Err(PipelineError::Internal(_))), "{other:?}");
    }
    Ok(())
}

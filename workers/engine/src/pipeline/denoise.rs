//! Noise to latents: the loop over a sampler's steps, with guidance, image to image and inpainting.

use candle_core::{D, Tensor};

use super::{PipelineError, StageObserver};
use crate::models::Unet;
use crate::residency::SegmentEvent;
use crate::sampling::{
    self, Checkpoint, Generator, NoiseSource as _, Sampler, SamplerKind, SamplerRequest, SavedTensor, ScheduleChoice,
    SchedulerConfig,
};

/// How one image is denoised.
#[derive(Debug, Clone, PartialEq)]
pub struct DenoiseRequest {
    /// Seed of the generator, as torch's CPU generator takes it.
    pub seed: u64,
    /// Rows and columns of the latents.
    pub latent_size: (usize, usize),
    /// Steps of the whole schedule.
    pub steps: usize,
    /// Classifier-free guidance scale; acts where the conditioning has two rows.
    pub guidance_scale: f64,
    /// Share by which the guided prediction is brought to the deviation of the conditional one (Lin et al. 2023, 3.4).
    pub guidance_rescale: f64,
    /// `None`: the one that the model's configuration names.
    pub sampler: Option<SamplerKind>,
    /// Timesteps and noise levels.
    pub schedule: ScheduleChoice,
    /// DDIM's share of fresh noise.
    pub eta: f64,
    /// Share of the steps that is run on an initial image.
    pub strength: Option<f64>,
}

/// What flows into denoising, all f32.
#[derive(Debug, Clone)]
pub struct DenoiseInputs {
    /// `[1, tokens, width]`, or `[2, tokens, width]` with the negative prompt's row first.
    pub conditioning: Tensor,
    /// `[1, c, h, w]`, scaled: image to image and inpainting.
    pub image_latents: Option<Tensor>,
    /// `[1, 1, h, w]`, 1 where it is painted anew.
    pub latent_mask: Option<Tensor>,
    /// `[1, c, h, w]`, for inpainting models of 9 input channels.
    pub masked_image_latents: Option<Tensor>,
}

/// Denoises one image and returns its latents `[1, c, h, w]`, not yet divided by the autoencoder's scale.
///
/// The generator is drawn from in the order of diffusers' pipelines, so that a seed means the same picture there: the posterior
/// of the initial image (drawn when it was encoded, skipped here), the noise, the posterior of the masked image (likewise), then
/// what the sampler draws.
///
/// # Errors
/// A request that the model cannot meet, a cancelled run, or an output that is not finite.
pub fn denoise(
    unet: &Unet,
    config: &SchedulerConfig,
    request: &DenoiseRequest,
    inputs: &DenoiseInputs,
    observer: &mut dyn StageObserver,
) -> Result<Tensor, PipelineError> {
    denoise_from(unet, config, request, inputs, None, observer)
}

/// Goes on with a run that was interrupted after `checkpoint`, or begins it. The same request and inputs give the same latents,
/// bit for bit, however often the run was interrupted.
///
/// # Errors
/// As [`denoise`]; a checkpoint that is not of this run.
pub fn denoise_from(
    unet: &Unet,
    config: &SchedulerConfig,
    request: &DenoiseRequest,
    inputs: &DenoiseInputs,
    checkpoint: Option<&Checkpoint>,
    observer: &mut dyn StageObserver,
) -> Result<Tensor, PipelineError> {
    let mut sampler = sampling::build(
        config,
        &SamplerRequest {
            sampler: request.sampler,
            schedule: request.schedule,
            steps: request.steps,
            strength: request.strength,
            eta: request.eta,
        },
    )?;
    let painter = Painter::new(unet, request, inputs)?;
    let mut generator = Generator::new(request.seed);
    if inputs.image_latents.is_some() {
        generator.randn(painter.elements);
    }
    let noise = painter.noise(&mut generator)?;
    if inputs.latent_mask.is_some() {
        generator.randn(painter.elements);
    }
    let mut latents = painter.begin(&noise, &*sampler)?;
    observer.on_tensor("prepare_latents.0", &latents);
    let guided = inputs.conditioning.dim(0)? == 2;
    let scale = (!guided).then_some(request.guidance_scale);
    let mut run = unet.begin(&inputs.conditioning, scale)?;
    let (first, calls, total) = (sampler.start(), sampler.timesteps().len(), sampler.model_calls());
    let mut begin = first;
    if let Some(checkpoint) = checkpoint {
        check(checkpoint, &*sampler, &latents)?;
        sampler.restore(&checkpoint.history, latents.device())?;
        latents = checkpoint.latents.load(latents.device())?;
        generator = checkpoint.generator.clone();
        begin += checkpoint.done;
    }
    unet.residency().expect(calls - begin);
    for index in begin..calls {
        let done = index - first;
        let mut input = painter.input(&sampler.scale_model_input(&latents, index)?)?;
        if guided {
            input = Tensor::cat(&[&input, &input], 0)?;
        }
        let timestep = sampler.timesteps()[index];
        observer.on_tensor(&format!("unet.{done}.in.0"), &input);
        let mut blocks = |event: &SegmentEvent<'_>| observer.on_block(event);
        let mut output = run.forward(&input, timestep, &mut blocks)?;
        observer.on_tensor(&format!("unet.{done}.out.0"), &output);
        if guided {
            output = guide(&output, request.guidance_scale, request.guidance_rescale)?;
        }
        latents = sampler.step(&output, index, &latents, &mut generator)?;
        latents = painter.keep(latents, &noise, index, &*sampler)?;
        observer.on_tensor(&format!("step.{done}.latents"), &latents);
        observer.on_checkpoint(&|| {
            Ok(Checkpoint {
                sampler: sampler.kind(),
                done: done + 1,
                total,
                latents: SavedTensor::save(&latents)?,
                history: sampler.history()?,
                generator: generator.clone(),
            })
        })?;
        if observer.on_step(done + 1, total).is_break() && done + 1 < total {
            return Err(PipelineError::Cancelled);
        }
    }
    if !super::decode::is_finite(&latents)? {
        return Err(PipelineError::NonFinite { what: "the latents" });
    }
    Ok(latents)
}

/// Whether a checkpoint is one of this run.
fn check(checkpoint: &Checkpoint, sampler: &dyn Sampler, latents: &Tensor) -> Result<(), PipelineError> {
    let (kind, total) = (sampler.kind(), sampler.model_calls());
    if checkpoint.sampler != kind || checkpoint.total != total || checkpoint.done > total {
        let Checkpoint { sampler, done, total: of, .. } = checkpoint;
        let text =
            format!("a checkpoint after {done} of {of} calls of {sampler} was given to a run of {total} of {kind}");
        return Err(PipelineError::Internal(text));
    }
    if checkpoint.latents.shape != latents.dims() {
        let (found, expected) = (&checkpoint.latents.shape, latents.dims());
        let text = format!("a checkpoint of shape {found:?} was given to a run of shape {expected:?}");
        return Err(PipelineError::Internal(text));
    }
    Ok(())
}

/// Classifier-free guidance (Ho & Salimans 2022): `negative + scale × (positive − negative)`, rows in that order.
fn guide(pair: &Tensor, scale: f64, rescale: f64) -> Result<Tensor, PipelineError> {
    let (negative, positive) = (pair.narrow(0, 0, 1)?, pair.narrow(0, 1, 1)?);
    let guided = (&negative + ((&positive - &negative)? * scale)?)?;
    if rescale <= 0.0 {
        return Ok(guided);
    }
    let ratio = (deviation(&positive)? / deviation(&guided)?)?;
    let rescaled = guided.broadcast_mul(&ratio)?;
    Ok(((rescaled * rescale)? + (guided * (1.0 - rescale))?)?)
}

/// Standard deviation over all but the batch, with Bessel's correction, as torch's `std`; `[1, 1, 1, 1]`.
fn deviation(values: &Tensor) -> Result<Tensor, PipelineError> {
    let flat = values.flatten_from(1)?;
    let count = flat.dim(D::Minus1)?;
    let centred = flat.broadcast_sub(&flat.mean_keepdim(1)?)?;
    let variance = (centred.sqr()?.sum_keepdim(1)? / (count - 1) as f64)?;
    Ok(variance.sqrt()?.reshape((1, 1, 1, 1))?)
}

/// What image to image and inpainting add to plain sampling.
struct Painter<'a> {
    inputs: &'a DenoiseInputs,
    shape: (usize, usize, usize, usize),
    elements: usize,
    /// Whether the model itself looks at mask and masked image (9 input channels).
    model_sees_mask: bool,
    /// An inpainting run that keeps nothing of the image's noise: strength 1.
    from_noise: bool,
}

impl<'a> Painter<'a> {
    fn new(unet: &Unet, request: &DenoiseRequest, inputs: &'a DenoiseInputs) -> Result<Self, PipelineError> {
        let channels = unet.config().out_channels;
        let (rows, columns) = request.latent_size;
        let shape = (1, channels, rows, columns);
        let model_sees_mask = unet.config().in_channels == 2 * channels + 1;
        if model_sees_mask && (inputs.latent_mask.is_none() || inputs.masked_image_latents.is_none()) {
            return Err(PipelineError::Request(
                "this is an inpainting model: it needs an initial image and a mask".into(),
            ));
        }
        let plane = |channels| (1, channels, rows, columns);
        for (tensor, expected, what) in [
            (&inputs.image_latents, shape, "image latents"),
            (&inputs.latent_mask, plane(1), "latent mask"),
            (&inputs.masked_image_latents, shape, "masked image latents"),
        ] {
            if let Some(tensor) = tensor
                && tensor.dims4()? != expected
            {
                let text = format!("{what} of shape {:?} do not fit {expected:?}", tensor.dims());
                return Err(PipelineError::Internal(text));
            }
        }
        let from_noise =
            inputs.image_latents.is_none() || (inputs.latent_mask.is_some() && request.strength == Some(1.0));
        Ok(Self { inputs, shape, elements: channels * rows * columns, model_sees_mask, from_noise })
    }

    fn noise(&self, generator: &mut Generator) -> Result<Tensor, PipelineError> {
        let like = Tensor::zeros(self.shape, candle_core::DType::F32, self.inputs.conditioning.device())?;
        Ok(generator.noise_like(&like)?)
    }

    /// The sample before the first step.
    fn begin(&self, noise: &Tensor, sampler: &dyn Sampler) -> Result<Tensor, PipelineError> {
        match &self.inputs.image_latents {
            Some(image) if !self.from_noise => Ok(sampler.add_noise(image, noise, sampler.start())?),
            Some(_) | None => Ok((noise * sampler.init_noise_sigma())?),
        }
    }

    /// What the model is shown.
    fn input(&self, latents: &Tensor) -> Result<Tensor, PipelineError> {
        match (&self.inputs.latent_mask, &self.inputs.masked_image_latents) {
            (Some(mask), Some(masked)) if self.model_sees_mask => Ok(Tensor::cat(&[latents, mask, masked], 1)?),
            _ => Ok(latents.clone()),
        }
    }

    /// Puts back what the mask keeps, at the noise level of the next call; a model that sees the mask does that itself.
    fn keep(
        &self,
        latents: Tensor,
        noise: &Tensor,
        index: usize,
        sampler: &dyn Sampler,
    ) -> Result<Tensor, PipelineError> {
        let (Some(mask), Some(image)) = (&self.inputs.latent_mask, &self.inputs.image_latents) else {
            return Ok(latents);
        };
        if self.model_sees_mask {
            return Ok(latents);
        }
        let kept = if index + 1 < sampler.timesteps().len() {
            sampler.add_noise(image, noise, index + 1)?
        } else {
            image.clone()
        };
        let keep = mask.affine(-1.0, 1.0)?;
        Ok((kept.broadcast_mul(&keep)? + latents.broadcast_mul(mask)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn guidance_goes_from_the_negative_through_the_positive() {
        let pair = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0, 3.0, 2.0, 5.0, 8.0], (2, 1, 2, 2), &Device::Cpu).unwrap();
        let plain = guide(&pair, 2.0, 0.0).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(plain, [5.0, 2.0, 7.0, 12.0]);
        let full = guide(&pair, 2.0, 1.0).unwrap();
        let positive = pair.narrow(0, 1, 1).unwrap();
        let (a, b) = (deviation(&full).unwrap(), deviation(&positive).unwrap());
        let difference = (a - b).unwrap().abs().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()[0];
        assert!(difference < 1e-5, "rescaled fully, the deviation is the conditional prediction's: {difference}");
    }

    #[test]
    fn deviation_has_bessels_correction() {
        let values = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], (1, 1, 2, 2), &Device::Cpu).unwrap();
        let deviation = deviation(&values).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()[0];
        assert!((deviation - 1.290_994_4).abs() < 1e-6);
    }
}

//! The networks against recorded pipelines of diffusers: every call of the text encoder, of the UNet, and both halves of
//! the autoencoder, from model folders whose weights follow from their names.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use sd_engine::models::{AutoencoderKl, ClipTextModel, Unet, VaeHalf};
use sd_engine::residency::Uninterrupted;
use sd_engine::testkit::{Fixture, Layout, compare};

/// Of the largest magnitude. The issue asks for 1e-4; float32 sums of these sizes in another order differ by less.
const TOLERANCE: f64 = 1e-5;

fn close(what: &str, found: &Tensor, expected: &Tensor) -> Result<()> {
    let difference = compare(found, expected).with_context(|| what.to_owned())?;
    anyhow::ensure!(difference <= TOLERANCE, "{what} differs by {difference:.2e} of its largest magnitude");
    Ok(())
}

fn proceed(_: &sd_engine::residency::LoadEvent<'_>) -> std::ops::ControlFlow<()> {
    std::ops::ControlFlow::Continue(())
}

fn text_encoder(fixture: &Fixture, folder: &std::path::Path) -> Result<()> {
    let model = ClipTextModel::load(&folder.join("text_encoder"), &mut proceed)?;
    let mut calls = 0;
    while fixture.has(&format!("text_encoder.{calls}.in.0")) {
        let ids = fixture.ids(&format!("text_encoder.{calls}.in.0"))?;
        let out = model.forward(&ids, 0, &mut Uninterrupted)?;
        let expected = |key: &str| fixture.tensor(&format!("text_encoder.{calls}.out.{key}"));
        close(&format!("text encoder call {calls}"), &out.last_hidden_state, expected("last_hidden_state")?)?;
        close(&format!("pooled of call {calls}"), &out.pooled, expected("pooler_output")?)?;
        close(&format!("conditioning of call {calls}"), &out.conditioning, expected("last_hidden_state")?)?;
        calls += 1;
    }
    anyhow::ensure!(calls > 0, "no call of the text encoder was recorded");
    Ok(())
}

fn unet(fixture: &Fixture, folder: &std::path::Path) -> Result<()> {
    let model = Unet::load(&folder.join("unet"), &mut proceed)?;
    let conditioning = fixture.tensor("unet.0.in.encoder_hidden_states")?;
    // One run for all steps, so that what the run keeps between them is checked too.
    let mut run = model.begin(conditioning, None)?;
    let mut calls = 0;
    while fixture.has(&format!("unet.{calls}.in.0")) {
        let latents = fixture.tensor(&format!("unet.{calls}.in.0"))?;
        let timestep = fixture.number(&format!("unet.{calls}.in.1"))?;
        let out = run.forward(latents, timestep, &mut Uninterrupted)?;
        close(&format!("unet call {calls}"), &out, fixture.tensor(&format!("unet.{calls}.out.0"))?)?;
        calls += 1;
    }
    anyhow::ensure!(calls == 4, "{calls} calls of the unet were recorded");
    Ok(())
}

fn autoencoder(fixture: &Fixture, folder: &std::path::Path) -> Result<()> {
    let halves = [VaeHalf::Encoder, VaeHalf::Decoder];
    let model = AutoencoderKl::load(&folder.join("vae"), &halves, &mut proceed)?;
    let decoded = model.decode(fixture.tensor("vae.0.in")?, &mut Uninterrupted)?;
    close("decoded image", &decoded, fixture.tensor("vae.0.out")?)?;
    let last = fixture.tensor("step.3.latents")?;
    close("latents for the decoder", &model.from_diffusion(last)?, fixture.tensor("vae.0.in")?)?;
    close("latents and back", &model.to_diffusion(&model.from_diffusion(last)?)?, last)?;
    let (mean, logvar) = model.encode(fixture.tensor("vae_encode.in")?, &mut Uninterrupted)?;
    close("encoded image", &mean, fixture.tensor("vae_encode.mode")?)?;
    anyhow::ensure!(logvar.dims() == mean.dims(), "mean and variance differ in shape");
    Ok(())
}

fn everything(name: &str) -> Result<()> {
    let fixture = Fixture::open(name)?;
    let folder = tempfile::tempdir()?;
    fixture.write_model(folder.path())?;
    text_encoder(&fixture, folder.path())?;
    unet(&fixture, folder.path())?;
    autoencoder(&fixture, folder.path())
}

#[test]
fn sd15() -> Result<()> {
    everything("sd15")
}

#[test]
fn sd15_euler() -> Result<()> {
    everything("sd15_euler")
}

#[test]
fn sd15_lcm() -> Result<()> {
    everything("sd15_lcm")
}

#[test]
fn sd21() -> Result<()> {
    everything("sd21")
}

#[test]
fn shards_give_the_same_bytes_and_half_precision_nearly() -> Result<()> {
    let fixture = Fixture::open("sd15")?;
    let run = |layout| -> Result<Tensor> {
        let folder = tempfile::tempdir()?;
        fixture.write_model_as(folder.path(), layout)?;
        let model = Unet::load(&folder.path().join("unet"), &mut proceed)?;
        let mut run = model.begin(fixture.tensor("unet.0.in.encoder_hidden_states")?, None)?;
        let timestep = fixture.number("unet.0.in.1")?;
        Ok(run.forward(fixture.tensor("unet.0.in.0")?, timestep, &mut Uninterrupted)?)
    };
    let single = run(Layout::Single(safetensors::Dtype::F32))?;
    assert_eq!(compare(&run(Layout::Shards(3))?, &single)?, 0.0);
    let variant = run(Layout::Fp16Variant)?;
    assert_eq!(compare(&run(Layout::Single(safetensors::Dtype::F16))?, &variant)?, 0.0);
    assert_eq!(variant.dtype(), DType::F32);
    // Weights rounded to 11 and 8 bits: far from equal, near enough to be the same network.
    let (half, brain) =
        (compare(&variant, &single)?, compare(&run(Layout::Single(safetensors::Dtype::BF16))?, &single)?);
    anyhow::ensure!(half > 0.0 && half < 5e-3, "f16 weights differ by {half:.2e}");
    anyhow::ensure!(brain > half && brain < 4e-2, "bf16 weights differ by {brain:.2e}");
    Ok(())
}

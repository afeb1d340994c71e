//! The default model, whose weights are f16, against diffusers in f32.

use anyhow::{Context, Result};
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, ClipTextModel, Unet, VaeHalf};
use sd_engine::residency::{LoadEvent, Uninterrupted};
use sd_engine::testkit::{DefaultModel, compare_sliced, noise};

const TOLERANCE: f64 = 1e-4;

fn proceed(_: &LoadEvent<'_>) -> std::ops::ControlFlow<()> {
    std::ops::ControlFlow::Continue(())
}

fn check(fixture: &DefaultModel, name: &str, found: &Tensor, step: usize) -> Result<()> {
    let expected = fixture.outputs.get(name).with_context(|| format!("nothing recorded under {name}"))?;
    let difference = compare_sliced(found, expected, step).with_context(|| name.to_owned())?;
    println!("{name}: {difference:.2e}");
    anyhow::ensure!(
        difference <= TOLERANCE,
        "{name} differs by {difference:.2e} of its largest magnitude (after a new training, run tests/fixtures/make.py default)"
    );
    Ok(())
}

#[test]
fn text_encoder() -> Result<()> {
    let fixture = DefaultModel::open()?;
    let model = ClipTextModel::load(&DefaultModel::folder().join("text_encoder"), &mut proceed)?;
    let out = model.forward(&fixture.ids, 0, &mut Uninterrupted)?;
    check(&fixture, "text", &out.last_hidden_state, fixture.step)
}

#[test]
fn unet() -> Result<()> {
    let fixture = DefaultModel::open()?;
    let model = Unet::load(&DefaultModel::folder().join("unet"), &mut proceed)?;
    let conditioning = noise("conditioning", &[2, 77, model.config().conditioning_width])?;
    for (name, height, width, step) in [("unet", 32, 32, fixture.step), ("unet_odd", 9, 13, fixture.small_step)] {
        let latents = noise("latents", &[2, model.config().in_channels, height, width])?;
        let out = model.begin(&conditioning, None)?.forward(&latents, 601.0, &mut Uninterrupted)?;
        check(&fixture, name, &out, step)?;
    }
    Ok(())
}

#[test]
fn autoencoder() -> Result<()> {
    let fixture = DefaultModel::open()?;
    let halves = [VaeHalf::Encoder, VaeHalf::Decoder];
    let model = AutoencoderKl::load(&DefaultModel::folder().join("vae"), &halves, &mut proceed)?;
    let z = noise("z", &[1, model.config().latent_channels, 32, 32])?;
    check(&fixture, "decoded", &model.decode(&z, &mut Uninterrupted)?, fixture.step)?;
    let (mean, _) = model.encode(&noise("pixels", &[1, 3, 128, 128])?, &mut Uninterrupted)?;
    check(&fixture, "encoded", &mean, fixture.small_step)
}

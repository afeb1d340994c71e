//! The networks in layouts that no recorded pipeline has: inpainting's nine channels, missing middles, several
//! transformers a layer, odd sizes, batches, guidance embeddings, and the rest of what a configuration may say.

use anyhow::{Context, Result};
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, ClipTextModel, Unet, VaeHalf};
use sd_engine::residency::{LoadEvent, Uninterrupted};
use sd_engine::testkit::{Case, Layouts, Network, compare_sliced, noise};

const TOLERANCE: f64 = 2e-5;

fn proceed(_: &LoadEvent<'_>) -> std::ops::ControlFlow<()> {
    std::ops::ControlFlow::Continue(())
}

fn outputs(case: &Case, folder: &std::path::Path) -> Result<Vec<(String, Tensor)>> {
    case.write_config(folder)?;
    let config = folder.join("config.json");
    match &case.network {
        Network::Unet(run) => {
            let config = sd_engine::models::UnetConfig::read(&config)?;
            case.write_weights(folder, "diffusion_pytorch_model", &Unet::declarations(&config))?;
            let model = Unet::load(folder, &mut proceed)?;
            let latents = noise("latents", &[run.batch, config.in_channels, run.height, run.width])?;
            let conditioning = noise("conditioning", &[run.batch, run.tokens, config.conditioning_width])?;
            let mut steps = model.begin(&conditioning, run.guidance)?;
            let sample = steps.forward(&latents, run.timestep, &mut Uninterrupted)?;
            // A second step of the same run works on what the first one kept.
            let again = steps.forward(&latents, run.timestep, &mut Uninterrupted)?;
            anyhow::ensure!(sd_engine::testkit::compare(&again, &sample)? == 0.0, "the second step differs");
            Ok(vec![("sample".into(), sample)])
        }
        Network::Vae(run) => {
            let config = sd_engine::models::AutoencoderKlConfig::read(&config)?;
            let halves = [VaeHalf::Encoder, VaeHalf::Decoder];
            let declared: Vec<_> = halves.iter().flat_map(|&h| AutoencoderKl::declarations(&config, h)).collect();
            case.write_weights(folder, "diffusion_pytorch_model", &declared)?;
            let model = AutoencoderKl::load(folder, &halves, &mut proceed)?;
            let z = noise("z", &[run.batch, config.latent_channels, run.height, run.width])?;
            let factor = config.factor();
            let pixels = noise("pixels", &[run.batch, 3, run.height * factor, run.width * factor])?;
            let (mean, logvar) = model.encode(&pixels, &mut Uninterrupted)?;
            let decoded = model.decode(&z, &mut Uninterrupted)?;
            Ok(vec![("decoded".into(), decoded), ("mean".into(), mean), ("logvar".into(), logvar)])
        }
        Network::Text(run) => {
            let config = sd_engine::models::ClipTextConfig::read(&config)?;
            case.write_weights(folder, "model", &ClipTextModel::declarations(&config))?;
            let model = ClipTextModel::load(folder, &mut proceed)?;
            let out = model.forward(&run.ids, 1, &mut Uninterrupted)?;
            let mut list = vec![("last".into(), out.last_hidden_state), ("skip.1".into(), out.conditioning)];
            match out.projected {
                Some(projected) => list.push(("projected".into(), projected)),
                None => list.push(("pooled".into(), out.pooled)),
            }
            list.extend(out.hidden_states.into_iter().enumerate().map(|(i, h)| (format!("hidden.{i}"), h)));
            Ok(list)
        }
    }
}

#[test]
fn every_layout_gives_what_diffusers_gives() -> Result<()> {
    let layouts = Layouts::open()?;
    assert!(layouts.cases.len() >= 20, "{} cases", layouts.cases.len());
    let mut failures = Vec::new();
    for case in &layouts.cases {
        let folder = tempfile::tempdir()?;
        let found = outputs(case, folder.path()).with_context(|| format!("case {}", case.name))?;
        assert_eq!(found.len(), case.outputs.len(), "case {}", case.name);
        for (name, tensor) in found {
            let expected = case.outputs.get(&name).with_context(|| format!("{}: no {name}", case.name))?;
            let difference = compare_sliced(&tensor, expected, layouts.step)
                .with_context(|| format!("case {}, {name}", case.name))?;
            if difference > TOLERANCE {
                failures.push(format!("case {}: {name} differs by {difference:.2e}", case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}

//! The published models: their configurations declare as many parameters as they have, and their files' older names load.

use std::path::Path;

use anyhow::Result;
use sd_engine::inspect::inspect;
use sd_engine::models::{AutoencoderKl, AutoencoderKlConfig, ClipTextConfig, ClipTextModel, Unet, UnetConfig, VaeHalf};
use sd_engine::residency::{Declarations, LoadEvent, Uninterrupted};
use sd_engine::testkit::{Fixture, Layout, NewTensor, compare, write_weights};
use serde_json::{Value, json};

fn config<C, E>(read: impl Fn(&Path) -> Result<C, E>, text: &Value) -> Result<C>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("config.json");
    std::fs::write(&path, text.to_string())?;
    Ok(read(&path)?)
}

fn numbers(declarations: &[Declarations]) -> usize {
    let parameters = declarations.iter().flat_map(Declarations::parameters);
    parameters.map(|p| p.shapes[0].iter().product::<usize>()).sum()
}

/// Each as its repository has it, without the fields that say the default. Totals are those of diffusers' and
/// transformers' classes of these configurations.
#[test]
fn published_configurations_have_the_published_parameters() -> Result<()> {
    let unet = |text: Value| -> Result<usize> { Ok(numbers(&Unet::declarations(&config(UnetConfig::read, &text)?))) };
    assert_eq!(unet(json!({"cross_attention_dim": 768, "attention_head_dim": 8}))?, 859_520_964, "SD 1.5");
    let inpainting = json!({"cross_attention_dim": 768, "attention_head_dim": 8, "in_channels": 9});
    assert_eq!(unet(inpainting)?, 859_535_364, "SD 1.5 inpainting");
    let sd2 =
        json!({"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": true});
    assert_eq!(unet(sd2)?, 865_910_724, "SD 2.1");
    let lcm = json!({"cross_attention_dim": 768, "attention_head_dim": 8, "time_cond_proj_dim": 256});
    assert_eq!(unet(lcm)?, 859_520_964 + 256 * 320, "LCM of SD 1.5");

    let text = |text: Value| -> Result<usize> {
        Ok(numbers(&ClipTextModel::declarations(&config(ClipTextConfig::read, &text)?)))
    };
    let clip_l = json!({"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12});
    assert_eq!(text(clip_l)?, 123_060_480, "CLIP ViT-L");
    let clip_h = json!({"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
                        "num_hidden_layers": 23, "hidden_act": "gelu"});
    assert_eq!(text(clip_h)?, 340_387_840, "OpenCLIP ViT-H without its last layer");

    let vae = json!({"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
                     "down_block_types": vec!["DownEncoderBlock2D"; 4], "up_block_types": vec!["UpDecoderBlock2D"; 4]});
    let vae = config(AutoencoderKlConfig::read, &vae)?;
    let halves = [VaeHalf::Encoder, VaeHalf::Decoder];
    let declared: Vec<_> = halves.iter().flat_map(|&h| AutoencoderKl::declarations(&vae, h)).collect();
    assert_eq!(numbers(&declared), 83_653_863, "KL f8");
    Ok(())
}

/// Rewrites a file of the fixture under other names; seeds stay.
fn rename(
    fixture: &Fixture,
    folder: &Path,
    part: &str,
    stem: &str,
    name: impl Fn(&str) -> String,
    more: &[NewTensor],
) -> Result<()> {
    let mut tensors: Vec<NewTensor> = fixture.weights(&format!("{part}/{stem}.safetensors")).to_vec();
    anyhow::ensure!(!tensors.is_empty(), "the fixture has no {part}");
    for tensor in &mut tensors {
        tensor.name = name(&tensor.name);
    }
    tensors.extend_from_slice(more);
    Ok(write_weights(&folder.join(part), stem, &tensors, Layout::Single(safetensors::Dtype::F32))?)
}

#[test]
fn older_names_load_and_buffers_are_passed_over() -> Result<()> {
    let fixture = Fixture::open("sd15")?;
    let folder = tempfile::tempdir()?;
    fixture.write_model(folder.path())?;
    let mut proceed = |_: &LoadEvent<'_>| std::ops::ControlFlow::Continue(());
    let mut decode = || -> Result<_> {
        let vae = AutoencoderKl::load(&folder.path().join("vae"), &[VaeHalf::Decoder], &mut proceed)?;
        Ok(vae.decode(fixture.tensor("vae.0.in")?, &mut Uninterrupted)?)
    };
    let before = decode()?;
    // Names of attention layers in files from before diffusers 0.12, as those of Stable Diffusion 1.
    let old = |name: &str| {
        [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")]
            .iter()
            .fold(name.to_owned(), |name, (new, old)| name.replace(&format!(".{new}."), &format!(".{old}.")))
    };
    rename(&fixture, folder.path(), "vae", "diffusion_pytorch_model", old, &[])?;
    assert_eq!(compare(&decode()?, &before)?, 0.0);

    let ids = fixture.ids("text_encoder.0.in.0")?;
    let expected = fixture.tensor("text_encoder.0.out.last_hidden_state")?;
    let bare = |name: &str| name.trim_start_matches("text_model.").to_owned();
    let buffer = NewTensor::new("embeddings.position_ids", &[1, 77]);
    rename(&fixture, folder.path(), "text_encoder", "model", bare, &[buffer])?;
    let text = ClipTextModel::load(&folder.path().join("text_encoder"), &mut proceed)?;
    let found = text.forward(&ids, 0, &mut Uninterrupted)?.last_hidden_state;
    assert!(compare(&found, expected)? < 1e-5);
    inspect(folder.path())?;
    // A tensor under both names is one too many.
    let twice = [NewTensor::new("text_model.final_layer_norm.bias", &[32])];
    rename(&fixture, folder.path(), "text_encoder", "model", bare, &twice)?;
    let error = inspect(folder.path()).expect_err("a tensor is there twice").to_string();
    assert!(error.contains("final_layer_norm.bias") && error.contains("twice"), "{error}");
    Ok(())
}

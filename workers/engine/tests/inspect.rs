//! What a folder is said to be, and what is said of folders that are none.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use sd_engine::formats::Precision;
use sd_engine::inspect::{Family, InspectError, Stage, Task, inspect};
use sd_engine::models::{AutoencoderKl, ClipTextModel, Unet, VaeHalf};
use sd_engine::testkit::{DefaultModel, Fixture, Layout};

/// A written model that is changed before it is inspected.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(name: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        Fixture::open(name)?.write_model_as(folder.path(), Layout::Single(safetensors::Dtype::F16))?;
        Ok(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Sets fields of a configuration.
    fn set(&self, file: &str, fields: &[(&str, serde_json::Value)]) -> Result<()> {
        let path = self.path().join(file);
        let mut config: serde_json::Map<_, _> = serde_json::from_slice(&std::fs::read(&path)?)?;
        config.extend(fields.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
        Ok(std::fs::write(path, serde_json::to_vec(&config)?)?)
    }

    /// The refusal's text, which must have these words.
    fn refused(&self, words: &[&str]) -> InspectError {
        let error = inspect(self.path()).expect_err("the folder should be refused");
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{text:?} lacks {word:?}");
        }
        error
    }
}

#[test]
fn the_default_model_is_described() -> Result<()> {
    let folder = DefaultModel::folder();
    let start = Instant::now();
    let report = inspect(&folder)?;
    let took = start.elapsed();
    assert_eq!(report.family, Family::Sd1);
    assert_eq!((report.defaults.width, report.defaults.height), (256, 256));
    assert_eq!((report.defaults.steps, report.defaults.guidance_scale), (20, 4.0), "sdd.json has its say");
    assert_eq!((report.sampler.as_str(), report.diffusion.prediction_type.as_str()), ("ddim", "v_prediction"));
    assert_eq!((report.vae.scale_factor, report.vae.latent_channels, report.diffusion.in_channels), (8, 4, 4));
    assert_eq!(report.text.hidden_size, report.diffusion.conditioning_width);
    let stages: Vec<Stage> = report.components.iter().map(|c| c.stage).collect();
    assert_eq!(stages, [Stage::Text, Stage::Diffusion, Stage::Vae]);
    let mut file_bytes = 0;
    for component in &report.components {
        assert_eq!(component.precision, Precision::F16);
        assert!(component.weights_bytes >= 4 * component.parameters, "{component:?}");
        file_bytes += component.file_bytes;
    }
    assert!(file_bytes > 20_000_000 && file_bytes < 30_000_000);
    assert!(took.as_millis() < 500, "inspecting took {took:?}");
    // What is said is what is bound.
    let bytes = |task: Task| {
        let mut tasks = report.components.iter().flat_map(|c| &c.tasks);
        tasks.find(|t| t.task == task).map(|t| t.weights_bytes)
    };
    let text = ClipTextModel::open(&folder.join("text_encoder"))?;
    assert_eq!(bytes(Task::Encode), Some(text.residency().total_bytes()));
    assert_eq!(bytes(Task::Denoise), Some(Unet::open(&folder.join("unet"))?.residency().total_bytes()));
    let vae = AutoencoderKl::open(&folder.join("vae"))?;
    assert_eq!(bytes(Task::Decode), Some(vae.residency(VaeHalf::Decoder).total_bytes()));
    assert_eq!(bytes(Task::VaeEncode), Some(vae.residency(VaeHalf::Encoder).total_bytes()));
    Ok(())
}

#[test]
fn families_are_told_apart() -> Result<()> {
    let report = inspect(Folder::new("sd15_lcm")?.path())?;
    assert_eq!((report.family, report.sampler.as_str(), report.defaults.steps), (Family::Sd1, "lcm", 4));
    assert_eq!(report.defaults.guidance_scale, 1.0);
    let report = inspect(Folder::new("sd21")?.path())?;
    assert_eq!((report.family, report.diffusion.prediction_type.as_str()), (Family::Sd2, "v_prediction"));
    assert_eq!((report.defaults.width, report.defaults.steps, report.defaults.guidance_scale), (64, 25, 7.5));
    let report = inspect(Folder::new("sd15_euler")?.path())?;
    assert_eq!((report.sampler.as_str(), report.scheduler.as_deref()), ("euler", Some("EulerDiscreteScheduler")));
    let json = serde_json::to_value(&report)?;
    assert_eq!((&json["family"], &json["components"][0]["stage"]), (&"sd1".into(), &"text".into()));
    Ok(())
}

#[test]
fn fingerprints_follow_contents() -> Result<()> {
    let folder = Folder::new("sd15")?;
    let before = inspect(folder.path())?;
    assert_eq!(inspect(folder.path())?.fingerprint, before.fingerprint);
    assert_eq!(inspect(Folder::new("sd15")?.path())?.fingerprint, before.fingerprint, "the place does not matter");
    // Another training has the same header: one number of the first tensor differs.
    let file = folder.path().join("unet/diffusion_pytorch_model.safetensors");
    let mut bytes = std::fs::read(&file)?;
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into()?) as usize;
    bytes[header + 2] ^= 1;
    std::fs::write(&file, bytes)?;
    let after = inspect(folder.path())?;
    assert_ne!(after.fingerprint, before.fingerprint);
    assert_eq!(after.components[0].fingerprint, before.components[0].fingerprint, "the text encoder is the same");
    assert_ne!(after.components[1].fingerprint, before.components[1].fingerprint);
    Ok(())
}

#[test]
fn other_architectures_are_named() -> Result<()> {
    for (class, name) in [
        ("FluxPipeline", "FLUX.1"),
        ("StableDiffusionXLPipeline", "Stable Diffusion XL"),
        ("StableDiffusion3Pipeline", "Stable Diffusion 3"),
        ("WanPipeline", "Wan"),
        ("SomethingNewPipeline", "SomethingNewPipeline"),
    ] {
        let folder = Folder::new("sd15")?;
        folder.set("model_index.json", &[("_class_name", class.into())])?;
        let error = folder.refused(&[class, name, "Stable Diffusion 1.x and 2.x"]);
        assert!(matches!(error, InspectError::Architecture { .. }), "{error:?}");
    }
    Ok(())
}

#[test]
fn what_is_no_model_is_told_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let says = |path: &Path, words: &[&str]| {
        let text = inspect(path).expect_err("no model").to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text} lacks one of {words:?}");
    };
    says(&folder.path().join("nowhere"), &["nowhere", "does not exist"]);
    says(folder.path(), &["model_index.json", "empty"]);
    let file = folder.path().join("v1-5.safetensors");
    std::fs::write(&file, "x")?;
    says(&file, &["is a file", "from_single_file"]);
    says(folder.path(), &["model_index.json", "v1-5.safetensors"]);
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner)?;
    std::fs::remove_file(file)?;
    std::fs::write(inner.join("model_index.json"), "nonsense")?;
    says(folder.path(), &["folder inner is one"]);
    says(&inner, &["not a pipeline's index"]);
    Ok(())
}

#[test]
fn missing_parts_are_all_named() -> Result<()> {
    let folder = Folder::new("sd15")?;
    for part in ["vae", "tokenizer", "scheduler"] {
        std::fs::remove_dir_all(folder.path().join(part))?;
    }
    std::fs::remove_file(folder.path().join("unet/config.json"))?;
    folder.refused(&["vae is missing", "tokenizer is missing", "scheduler is missing", "unet/config.json"]);
    let folder = Folder::new("sd15")?;
    std::fs::remove_file(folder.path().join("tokenizer/merges.txt"))?;
    std::fs::remove_file(folder.path().join("text_encoder/model.safetensors"))?;
    folder.refused(&["merges.txt", "text_encoder has no weights"]);
    Ok(())
}

#[test]
fn weights_that_do_not_fit_the_configuration_are_listed() -> Result<()> {
    let folder = Folder::new("sd15")?;
    folder.set("unet/config.json", &[("cross_attention_dim", 48.into())])?;
    let InspectError::Problems { problems, .. } =
        folder.refused(&["[64, 32]", "[64, 48]", "width 48", "and ", " more"])
    else {
        panic!("another kind of error")
    };
    assert!(problems.len() > 20, "every one is found: {}", problems.len());

    let folder = Folder::new("sd15")?;
    folder.set("unet/config.json", &[("layers_per_block", 1.into())])?;
    folder.refused(&["has no place in this configuration"]);
    folder.set("unet/config.json", &[("layers_per_block", 3.into())])?;
    folder.refused(&["down_blocks.0.resnets.2", "is missing"]);

    let folder = Folder::new("sd15")?;
    let vae = folder.path().join("vae/diffusion_pytorch_model.safetensors");
    let bytes = std::fs::read(&vae)?;
    std::fs::write(&vae, &bytes[..bytes.len() / 2])?;
    folder.refused(&["vae/diffusion_pytorch_model.safetensors is truncated", "download it again"]);
    Ok(())
}

#[test]
fn fields_that_change_the_result_are_refused_by_name_and_value() -> Result<()> {
    let cases: &[(&str, &str, serde_json::Value)] = &[
        ("unet/config.json", "class_embed_type", "timestep".into()),
        ("unet/config.json", "addition_embed_type", "text_time".into()),
        ("unet/config.json", "encoder_hid_dim_type", "text_proj".into()),
        ("unet/config.json", "dual_cross_attention", true.into()),
        ("unet/config.json", "resnet_out_scale_factor", 1.5.into()),
        ("unet/config.json", "mid_block_type", "UNetMidBlock2DSimpleCrossAttn".into()),
        ("unet/config.json", "act_fn", "mish".into()),
        ("unet/config.json", "attention_type", "gated".into()),
        ("unet/config.json", "time_embedding_type", "fourier".into()),
        ("unet/config.json", "attention_head_dim", 7.into()),
        ("unet/config.json", "layers_per_block", serde_json::json!([2, 2])),
        ("unet/config.json", "down_block_types", serde_json::json!(["KDownBlock2D", "DownBlock2D", "DownBlock2D"])),
        ("unet/config.json", "transformer_layers_per_block", serde_json::json!([[1], [1], [1]])),
        ("unet/config.json", "in_channels", "four".into()),
        ("vae/config.json", "latents_mean", serde_json::json!([0.1])),
        ("vae/config.json", "act_fn", "relu".into()),
        ("vae/config.json", "norm_num_groups", 5.into()),
        ("vae/config.json", "_class_name", "AutoencoderTiny".into()),
        ("text_encoder/config.json", "hidden_act", "relu".into()),
        ("text_encoder/config.json", "num_attention_heads", 5.into()),
        ("text_encoder/config.json", "architectures", serde_json::json!(["T5EncoderModel"])),
    ];
    for (file, field, value) in cases {
        let folder = Folder::new("sd15")?;
        folder.set(file, &[(field, value.clone())])?;
        folder.refused(&[file, &format!("{field} = {value} is not supported")]);
    }
    let folder = Folder::new("sd15")?;
    // What diffusers ignores is ignored, as are values that say what holds anyway.
    folder.set(
        "unet/config.json",
        &[("future_field", 7.into()), ("resnet_out_scale_factor", 1.into()), ("_name_or_path", "x".into())],
    )?;
    inspect(folder.path())?;
    Ok(())
}

#[test]
fn parts_of_different_models_are_told() -> Result<()> {
    let folder = Folder::new("sd15")?;
    let other = tempfile::tempdir()?;
    Fixture::open("sd15")?.write_model(other.path())?;
    folder.set("vae/config.json", &[("latent_channels", 8.into())])?;
    folder.refused(&["vae has latents of 8"]);
    let bad = Folder::new("sd15")?;
    std::fs::write(bad.path().join("sdd.json"), r#"{"defaults": {"stepps": 3}}"#)?;
    bad.refused(&["sdd.json", "stepps"]);
    Ok(())
}

//! Networks of layouts that no recorded pipeline has.

use std::path::Path;

use serde::Deserialize;

use super::fixture::{FixtureError, read_gz};
use super::write::{Layout, NewTensor, write_weights};
use crate::residency::Declarations;

/// Every `step`-th number of a tensor.
#[derive(Clone, Debug, Deserialize)]
pub struct SlicedTensor {
    /// Its whole shape.
    pub shape: Vec<usize>,
    /// The numbers.
    pub values: Vec<f32>,
}

/// How a UNet was run; inputs are [`super::noise`] of `latents` and `conditioning`.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "fields say what they are")]
pub struct UnetRunShape {
    pub batch: usize,
    pub height: usize,
    pub width: usize,
    pub tokens: usize,
    pub timestep: f64,
    pub guidance: Option<f64>,
}

/// How an autoencoder was run; inputs are [`super::noise`] of `z` and `pixels`.
#[derive(Clone, Debug, Deserialize)]
#[expect(missing_docs, reason = "fields say what they are")]
pub struct VaeRunShape {
    pub batch: usize,
    pub height: usize,
    pub width: usize,
}

/// How a text encoder was run.
#[derive(Clone, Debug, Deserialize)]
pub struct TextRun {
    /// Token ids.
    pub ids: Vec<Vec<u32>>,
}

/// Which network, and how it was run.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", content = "run", rename_all = "lowercase")]
pub enum Network {
    /// UNet2DConditionModel.
    Unet(UnetRunShape),
    /// AutoencoderKL.
    Vae(VaeRunShape),
    /// CLIPTextModel or CLIPTextModelWithProjection.
    Text(TextRun),
}

/// One network and its outputs.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// The network.
    #[serde(flatten)]
    pub network: Network,
    /// Its `config.json`.
    pub config: serde_json::Value,
    /// What it gave, by name.
    pub outputs: std::collections::BTreeMap<String, SlicedTensor>,
}

/// All cases.
#[derive(Clone, Debug, Deserialize)]
pub struct Layouts {
    /// Outputs hold every `step`-th number.
    pub step: usize,
    /// The cases.
    pub cases: Vec<Case>,
}

impl Layouts {
    /// Reads them.
    ///
    /// # Errors
    /// If the file is missing or broken.
    pub fn open() -> Result<Self, FixtureError> {
        serde_json::from_slice(&read_gz("layouts.json.gz")?)
            .map_err(|e| FixtureError::Invalid(format!("layouts.json.gz: {e}")))
    }
}

impl Case {
    /// Writes `config.json` to `folder`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write_config(&self, folder: &Path) -> Result<(), FixtureError> {
        std::fs::create_dir_all(folder)?;
        Ok(std::fs::write(folder.join("config.json"), self.config.to_string())?)
    }

    /// Writes seeded weights for everything that `declarations` name.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write_weights(&self, folder: &Path, stem: &str, declarations: &[Declarations]) -> Result<(), FixtureError> {
        let tensors: Vec<NewTensor> = declarations
            .iter()
            .flat_map(Declarations::parameters)
            .map(|p| NewTensor::new(p.name, p.shapes.first().map_or(&[], Vec::as_slice)))
            .collect();
        write_weights(folder, stem, &tensors, Layout::Single(safetensors::Dtype::F32))
    }
}

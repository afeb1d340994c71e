//! What `sd-worker inspect FOLDER` prints, as far as the daemon needs it. The worker's engine defines the document; what
//! is not named here is skipped, so that a newer worker may say more.

use sd_proto::v1::{Sampler, Stage};
use serde::Deserialize;

use crate::jobs::request::sampler_of_name;

/// A model folder as its inspection describes it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ModelReport {
    /// "sd1", "sd2", "sd1-inpaint", …
    pub family: String,
    /// Changes with configurations and weights.
    pub fingerprint: String,
    /// Version of the engine's numerics.
    pub numerics_version: u32,
    /// The kernels that the workers run on this machine.
    pub backend: String,
    /// The parts that stages run.
    pub components: Vec<ComponentReport>,
    /// The text encoder.
    pub text: TextReport,
    /// The diffusion model.
    pub diffusion: DiffusionReport,
    /// The autoencoder.
    pub vae: VaeReport,
    /// The sampler that the scheduler configuration stands for.
    pub sampler: String,
    /// What a request that says nothing gets.
    pub defaults: Defaults,
}

/// One part of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ComponentReport {
    /// "text", "diffusion", "vae".
    pub stage: String,
    /// Its class in the field's libraries.
    pub class_name: String,
    /// Tensors in its files.
    pub tensors: u32,
    /// Bytes of its files.
    pub file_bytes: u64,
    /// Bytes of all its weights once loaded.
    pub weights_bytes: u64,
    /// "f32", "f16", "bf16", "mixed".
    pub precision: String,
    /// What it does.
    pub tasks: Vec<TaskReport>,
}

/// What one task needs of a part.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TaskReport {
    /// "encode", "denoise", "decode", "vae_encode".
    pub task: String,
    /// Bytes of the weights that it uses.
    pub weights_bytes: u64,
    /// Bytes of its largest segment: the least that streaming must hold.
    pub largest_segment_bytes: u64,
    /// Bytes of each of its blocks, in the order in which they run.
    #[serde(default)]
    pub block_bytes: Vec<u64>,
    /// What it takes beside.
    pub working_set: WorkingSet,
}

impl TaskReport {
    /// Bytes that so many blocks hold at most, with what runs before and after all blocks.
    pub fn bytes_of_blocks(&self, blocks: u32) -> u64 {
        let blocks = blocks as usize;
        if self.block_bytes.is_empty() {
            return self.largest_segment_bytes.saturating_mul(blocks as u64 + 2).min(self.weights_bytes);
        }
        let mut largest = self.block_bytes.clone();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        let all: u64 = largest.iter().sum();
        let ends = self.weights_bytes.saturating_sub(all);
        ends + largest.iter().take(blocks).sum::<u64>()
    }
}

/// Memory that a task takes beside weights, at most: `fixed_bytes + bytes_per_pixel · width · height`, in pixels of the
/// image, and `bytes_per_token` for each token of conditioning beyond `fixed_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct WorkingSet {
    /// Whatever the size.
    pub fixed_bytes: u64,
    /// For each pixel of the image.
    pub bytes_per_pixel: u64,
    /// Tokens, over prompt and negative prompt, that `fixed_bytes` covers.
    pub fixed_tokens: u64,
    /// For each token beyond these.
    pub bytes_per_token: u64,
    /// In tiles, beside `fixed_bytes`; absent where a task has none.
    #[serde(default)]
    pub tiled: Option<TileCost>,
}

/// Memory that a half of the autoencoder takes in tiles: `bytes_per_pixel` for each pixel of the picture, and
/// `bytes_per_tile_pixel` for each pixel of the tiles that go together, `margin` around each counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct TileCost {
    /// The distance of tiles is a multiple of so many pixels.
    pub unit: u64,
    /// Pixels around a tile that are computed with it.
    pub margin: u64,
    /// For each pixel of a tile.
    pub bytes_per_tile_pixel: u64,
    /// For each pixel of the picture.
    pub bytes_per_pixel: u64,
}

impl TileCost {
    /// Bytes for a picture of `width` × `height` pixels in tiles of this edge and overlap, so many together.
    pub fn bytes(&self, (tile, overlap, batch): (u32, u32, u32), width: u32, height: u32) -> u64 {
        let (width, height) = (u64::from(width), u64::from(height));
        let unit = self.unit.max(1);
        let apart = u64::from(tile - overlap.min(tile / 2)) / unit * unit;
        let step = apart.max(unit);
        let edge = |edge: u64| edge.min(step + 2 * self.margin);
        let together = u64::from(batch.max(1)).min(width.div_ceil(step) * height.div_ceil(step));
        let at_work = together.saturating_mul(edge(width) * edge(height)).saturating_mul(self.bytes_per_tile_pixel);
        (width * height).saturating_mul(self.bytes_per_pixel).saturating_add(at_work)
    }
}

impl WorkingSet {
    /// Bytes for an image of `width` × `height` pixels under `tokens` of conditioning.
    pub fn bytes(&self, width: u32, height: u32, tokens: u64) -> u64 {
        let pixels = u64::from(width) * u64::from(height);
        let more = tokens.saturating_sub(self.fixed_tokens);
        let sized = pixels.saturating_mul(self.bytes_per_pixel);
        self.fixed_bytes.saturating_add(sized).saturating_add(more.saturating_mul(self.bytes_per_token))
    }
}

/// The text encoder's numbers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TextReport {
    /// Width of its hidden states, which is that of the conditioning.
    pub hidden_size: u64,
    /// Layers.
    pub layers: u32,
    /// Tokens of one chunk, start and end included.
    pub max_tokens: u64,
}

/// The diffusion model's numbers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DiffusionReport {
    /// Channels that it reads.
    pub in_channels: u64,
    /// Channels of the latents that it writes.
    pub out_channels: u64,
    /// Whether guidance is an input of the network (few-step models), instead of a second pass.
    #[serde(default)]
    pub guidance_embedding: bool,
}

/// The autoencoder's numbers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VaeReport {
    /// Channels of the latents.
    pub latent_channels: u64,
    /// Pixels a latent edge.
    pub scale_factor: u32,
}

/// What a request that says nothing gets.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Defaults {
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Denoising steps.
    pub steps: u32,
    /// Guidance scale.
    pub guidance_scale: f64,
    /// Sampler's name.
    pub sampler: String,
}

impl ModelReport {
    /// Whether the diffusion model paints into a picture: it reads mask and masked picture beside the latents.
    pub fn is_inpainting(&self) -> bool {
        self.diffusion.in_channels == 2 * self.diffusion.out_channels + 1
    }

    /// The sampler that the scheduler configuration stands for.
    pub fn scheduler_sampler(&self) -> Option<Sampler> {
        sampler_of_name(&self.sampler)
    }

    /// Tokens of one chunk of conditioning, at least 1.
    pub fn chunk_tokens(&self) -> u64 {
        self.text.max_tokens.max(1)
    }

    /// Pixels a latent edge, at least 1; sizes are multiples of it.
    pub fn scale_factor(&self) -> u32 {
        self.vae.scale_factor.max(1)
    }

    /// The precision of the weights: of the diffusion model, which is the most of them.
    pub fn precision(&self) -> &str {
        self.components.iter().find(|c| c.stage == "diffusion").map_or("", |c| &c.precision)
    }

    /// Bytes of all weights of a part ("text", "diffusion", "vae") once loaded; 0 where there is none.
    pub fn stage_weights(&self, stage: &str) -> u64 {
        self.components.iter().filter(|part| part.stage == stage).map(|part| part.weights_bytes).sum()
    }

    /// What a stage needs, and of which part.
    pub fn task(&self, stage: Stage) -> Option<(&ComponentReport, &TaskReport)> {
        let name = match stage {
            Stage::Unspecified => return None,
            Stage::Encode => "encode",
            Stage::VaeEncode => "vae_encode",
            Stage::Denoise => "denoise",
            Stage::Decode => "decode",
        };
        self.components.iter().find_map(|part| Some((part, part.tasks.iter().find(|task| task.task == name)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workers_own_description_is_understood() {
        let report: ModelReport = serde_json::from_str(include_str!("sample_report.json")).unwrap();
        assert_eq!(report.family, "sd1");
        assert_eq!((report.text.hidden_size, report.chunk_tokens(), report.scale_factor()), (192, 77, 8));
        assert_eq!((report.defaults.width, report.defaults.steps), (256, 20));
        assert_eq!(report.scheduler_sampler(), Some(Sampler::Ddim));
        assert_eq!(report.precision(), "f16");
        assert!(!report.is_inpainting());
        for stage in [Stage::Encode, Stage::VaeEncode, Stage::Denoise, Stage::Decode] {
            let (part, task) = report.task(stage).unwrap();
            assert!(0 < task.weights_bytes && task.weights_bytes <= part.weights_bytes, "{stage:?}");
            let small = task.working_set.bytes(64, 64, 154);
            assert!(small > 0 && small <= task.working_set.bytes(512, 512, 154), "{stage:?}");
        }
        assert!(report.task(Stage::Unspecified).is_none());
    }

    #[test]
    fn tiles_take_less_than_the_whole_and_more_of_them_take_more() {
        let cost = TileCost { unit: 16, margin: 10, bytes_per_tile_pixel: 500, bytes_per_pixel: 60 };
        let of = |tile, batch| cost.bytes((tile, 64, batch), 1024, 1024);
        // One tile: (192 + 20)² pixels beside the picture's maps.
        assert_eq!(of(256, 1), 1024 * 1024 * 60 + 212 * 212 * 500);
        assert!(of(128, 1) < of(256, 1) && of(256, 1) < of(256, 2) && of(256, 2) < 1024 * 1024 * 560);
        assert_eq!(of(256, 36), of(256, 1000), "no more tiles than there are");
    }

    #[test]
    fn blocks_that_are_counted_are_the_largest_there_are() {
        let working_set =
            WorkingSet { fixed_bytes: 0, bytes_per_pixel: 0, fixed_tokens: 0, bytes_per_token: 0, tiled: None };
        let (task, block_bytes) = ("denoise".to_owned(), vec![10, 30, 20]);
        let report = TaskReport { task, weights_bytes: 65, largest_segment_bytes: 30, block_bytes, working_set };
        let of = |blocks| report.bytes_of_blocks(blocks);
        assert_eq!((of(0), of(1), of(2), of(99)), (5, 35, 55, 65));
        let unknown = TaskReport { block_bytes: Vec::new(), ..report.clone() };
        assert_eq!((unknown.bytes_of_blocks(0), unknown.bytes_of_blocks(u32::MAX)), (60, 65));
    }
}

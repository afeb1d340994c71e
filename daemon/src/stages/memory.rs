//! How a job uses memory: fixed at admission, from the request, the model's and the daemon's configuration.
//!
//! What of it decides a picture's bytes (tiles, the VAE's type) stands in the numeric plan as well; the rest decides only when
//! bytes move.

use sd_proto::v1::{OffloadMode, Stage};
use sd_proto::worker::v1::{ElementType, TaskMemory, WeightStorage};

/// How the autoencoder is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VaePlan {
    /// Edge of a tile in pixels; 0: whole.
    pub tile: u32,
    /// Overlap of two tiles in pixels.
    pub overlap: u32,
    /// Tiles that go through each layer together.
    pub batch: u32,
    /// Whether its weights may stay; else they are streamed, one pass a batch of tiles.
    pub resident: bool,
    /// What it computes in.
    pub element_type: ElementType,
}

/// How one job uses memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// When stages leave their device.
    pub mode: OffloadMode,
    /// Whether the next segment is read while one runs.
    pub prefetch: bool,
    /// Where weights are kept that do not stay on the device.
    pub storage: WeightStorage,
    /// Rows of a matrix product at once; 0: all.
    pub token_chunk: u32,
    /// Rows of a feed-forward layer at once; 0: all.
    pub mlp_chunk: u32,
    /// Blocks of the diffusion model that may stay at most; `None`: as many as are granted.
    pub diffusion_blocks: Option<u32>,
    /// Layers of the text encoder that may stay at most; `None`: as many as are granted.
    pub text_layers: Option<u32>,
    /// The autoencoder.
    pub vae: VaePlan,
}

impl Default for MemoryPlan {
    fn default() -> Self {
        Self {
            mode: OffloadMode::Auto,
            prefetch: false,
            storage: WeightStorage::Ram,
            token_chunk: 0,
            mlp_chunk: 0,
            diffusion_blocks: None,
            text_layers: None,
            vae: VaePlan { tile: 0, overlap: 0, batch: 1, resident: true, element_type: ElementType::F32 },
        }
    }
}

impl MemoryPlan {
    /// What the worker of a stage is told.
    pub fn task(&self, stage: Stage) -> TaskMemory {
        let resident_blocks = match stage {
            Stage::Encode => self.text_layers,
            Stage::Denoise => self.diffusion_blocks,
            Stage::VaeEncode | Stage::Decode => (!self.vae.resident).then_some(0),
            Stage::Unspecified => None,
        };
        TaskMemory {
            prefetch: self.prefetch,
            storage: self.storage as i32,
            token_chunk: self.token_chunk,
            mlp_chunk: self.mlp_chunk,
            vae_tile: self.vae.tile,
            vae_tile_overlap: self.vae.overlap,
            vae_tile_batch: self.vae.batch,
            vae_type: self.vae.element_type as i32,
            resident_blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_told_its_own_bound_on_blocks() {
        let plan = MemoryPlan { diffusion_blocks: Some(4), text_layers: Some(2), ..MemoryPlan::default() };
        assert_eq!(plan.task(Stage::Denoise).resident_blocks, Some(4));
        assert_eq!(plan.task(Stage::Encode).resident_blocks, Some(2));
        assert_eq!(plan.task(Stage::Decode).resident_blocks, None);
        let streamed = MemoryPlan { vae: VaePlan { resident: false, ..plan.vae }, ..plan };
        assert_eq!(streamed.task(Stage::Decode).resident_blocks, Some(0));
    }
}

//! How a job uses memory: fixed at admission, from the request, the model's and the daemon's configuration, in that order.
//!
//! What of it decides a picture's bytes (tiles, the VAE's type) stands in the numeric plan as well; the rest decides only when
//! bytes move.

use sd_proto::v1::{MemoryRequest, NumericPlan, OffloadMode, Stage};
use sd_proto::worker::v1::{ElementType, TaskMemory, WeightStorage, WorkerStage};

use super::plan::worker_stage;
use crate::config::LEAST_TILE;
use crate::config::memory::{Count, Estimation, Gigabytes, MaxVram, Mode, Prefetch, Settings, TextStorage, VaeType};
use crate::config::memory::{RawMemory, Storage};
use crate::config::placement::{self, ByStage};
use crate::config::presets::{BLOCK_BYTES, LAYER_BYTES};
use crate::ids::DeviceId;

/// Edges of tiles that are tried where nobody names one, largest first.
pub const TILES: [u32; 3] = [512, 256, LEAST_TILE];
/// Fewest rows that a cheaper plan computes at once.
const LEAST_CHUNK: u32 = 256;
/// One megabyte, as `streaming_min_vram` counts.
const MB: u64 = 1_000_000;

/// How much of a stage's weights may stay on the device: an upper bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resident {
    /// As much as is granted.
    Granted,
    /// So many blocks or layers, as somebody wrote.
    Blocks(u32),
    /// So many bytes, which a preset's count stands for. Never a reason to stream what its grant holds whole.
    Bytes(u64),
}

/// When a stage's weights leave the device because the mode says so. The ledger takes what somebody needs in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaves {
    /// Never by the mode.
    Never,
    /// Before another stage that would not find room beside it.
    WhenShort,
    /// As soon as it has run.
    AfterUse,
}

/// How the autoencoder is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VaePlan {
    /// Edge of a tile in pixels; 0: whole.
    pub tile: u32,
    /// Overlap of two tiles in pixels.
    pub overlap: u32,
    /// Tiles that go through each layer together.
    pub batch: u32,
    /// What it computes in.
    pub element_type: ElementType,
}

/// How tiles are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Always, never, or where the whole does not fit.
    pub wanted: Option<bool>,
    /// Edge in pixels; 0: as fits.
    pub size: u32,
    /// Overlap in pixels; tiles fit together without any.
    pub overlap: u32,
}

impl Tiling {
    /// The overlap of tiles of this edge: as asked, half of the edge at most, in whole latents.
    pub fn overlap_of(self, edge: u32) -> u32 {
        self.overlap.min(edge / 2 / 8 * 8)
    }
}

/// What of a device is not to be used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// How much of the device may be used.
    pub max_vram: MaxVram,
    /// What stays free of the budget, as somebody wrote.
    pub reserve: u64,
    /// What a preset would keep free of it; never a reason to stream what the grant holds whole.
    pub preset_reserve: u64,
    /// What stays free while a model is streamed.
    pub streaming_spare: u64,
    /// Whether somebody wrote that.
    pub spare_written: bool,
}

/// How one job uses memory.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryPlan {
    /// When stages leave their device.
    pub mode: Mode,
    /// The same for each stage.
    pub leaves: ByStage<Leaves>,
    /// Whether a stage that left comes back after the job, where there is room.
    pub reload: ByStage<bool>,
    /// Whether moves are logged.
    pub log: bool,
    /// Whether working sets are estimated by a dry run.
    pub dry_run: bool,
    /// Whether the next segment is read while one runs.
    pub prefetch: bool,
    /// Where weights are kept that do not stay on the device.
    pub storage: ByStage<WeightStorage>,
    /// Where each stage computes.
    pub devices: ByStage<DeviceId>,
    /// Rows of a matrix product at once; 0: all.
    pub token_chunk: u32,
    /// Rows of a feed-forward layer at once; 0: all.
    pub mlp_chunk: u32,
    /// What of the weights may stay.
    pub resident: ByStage<Resident>,
    /// The autoencoder.
    pub vae: VaePlan,
    /// How its tiles are chosen.
    pub tiling: Tiling,
    /// What of the device is not to be used.
    pub bounds: Bounds,
    /// What people should know about it.
    pub notices: Vec<String>,
}

impl Default for MemoryPlan {
    fn default() -> Self {
        Self::resolve(&Settings::default(), None)
    }
}

/// What follows from a mode for each stage.
fn leaves(mode: Mode) -> ByStage<Leaves> {
    let (never, short, after) = (Leaves::Never, Leaves::WhenShort, Leaves::AfterUse);
    let (text, diffusion, vae) = match mode {
        Mode::Auto | Mode::None => (never, never, never),
        Mode::CondOnly => (short, never, never),
        Mode::CondDiffusion => (short, short, never),
        Mode::Aggressive => (after, after, after),
        Mode::LayerStreaming => (short, never, short),
    };
    ByStage { text, diffusion, vae }
}

/// An override of one stage over what the mode says.
fn overridden(by_mode: Leaves, over: Option<bool>) -> Leaves {
    match (over, by_mode) {
        (None, _) => by_mode,
        (Some(false), _) => Leaves::Never,
        (Some(true), Leaves::AfterUse) => Leaves::AfterUse,
        (Some(true), Leaves::Never | Leaves::WhenShort) => Leaves::WhenShort,
    }
}

impl MemoryPlan {
    /// What a request gets: what it asks for over what is configured for its model. Tiles are not chosen yet.
    pub fn resolve(settings: &Settings, asked: Option<&MemoryRequest>) -> Self {
        let asked = asked.copied().unwrap_or_default();
        let mut notices = Vec::new();
        let mode = Mode::from_proto(asked.mode()).unwrap_or(settings.get(|m| m.offload_mode, Mode::Auto).value);
        let mut leaves = leaves(mode);
        let sequential = settings.get(|m| m.sequential, true);
        if sequential.value && sequential.written {
            if mode == Mode::None {
                notices.push("sequential is ignored: offload mode none moves nothing after loading".into());
            } else {
                leaves = ByStage::all(Leaves::AfterUse);
            }
        }
        let written = &settings.written;
        leaves.text = overridden(leaves.text, asked.offload_cond_stage.or(written.offload_cond_stage));
        leaves.diffusion = overridden(leaves.diffusion, asked.offload_diffusion.or(written.offload_diffusion));

        let flag = |asked: Option<bool>, get: fn(&RawMemory) -> Option<bool>, fallback| {
            asked.unwrap_or(settings.get(get, fallback).value)
        };
        let reload_text = flag(asked.reload_cond_stage, |m| m.reload_cond_stage, true);
        let reload_diffusion = flag(asked.reload_diffusion, |m| m.reload_diffusion, true);
        let tiling = Tiling {
            wanted: asked.vae_tiling.or(written.vae_tiling),
            size: if asked.vae_tile_size > 0 { asked.vae_tile_size } else { written.vae_tile_size.unwrap_or(0) },
            overlap: match asked.vae_tile_overlap {
                0 => written.vae_tile_overlap.unwrap_or(0),
                overlap => overlap,
            },
        };
        let resident = resident(settings, mode, &mut notices);
        // Unset it is f32 on the CPU, whatever a preset made for GPUs says.
        let vae_type = written.vae_dtype.unwrap_or(VaeType::F32);
        let batch = settings.get(|m| m.vae_tile_batch, 1).value;
        Self {
            mode,
            leaves,
            reload: ByStage { text: reload_text, diffusion: reload_diffusion, vae: reload_diffusion },
            log: flag(None, |m| m.offload_log, false),
            dry_run: settings.get(|m| m.vram_estimation, Estimation::DryRun).value == Estimation::DryRun,
            prefetch: settings.get(|m| m.streaming_prefetch, Prefetch(0)).value.0 > 0,
            storage: storage(settings),
            // Checked when the configuration was read.
            devices: placement::devices(written.backend.as_deref()).unwrap_or_else(|_| ByStage::all(DeviceId::cpu())),
            token_chunk: settings.get(|m| m.token_chunk, 0).value,
            mlp_chunk: settings.get(|m| m.mlp_chunk, 0).value,
            resident,
            vae: VaePlan { tile: 0, overlap: 0, batch: batch.max(1), element_type: vae_type.to_link() },
            tiling,
            bounds: bounds(settings),
            notices,
        }
    }

    /// The mode in the words of the contract.
    pub fn mode(&self) -> OffloadMode {
        self.mode.to_proto()
    }

    /// Whether a stage may be run with less than all of its weights on the device.
    pub fn streams(&self, stage: Stage) -> bool {
        let by_mode = match self.mode {
            Mode::Auto | Mode::LayerStreaming => true,
            Mode::None | Mode::CondOnly | Mode::CondDiffusion | Mode::Aggressive => false,
        };
        by_mode || matches!(self.resident_of(stage), Resident::Blocks(_))
    }

    /// What of a stage's weights may stay.
    pub fn resident_of(&self, stage: Stage) -> Resident {
        *self.resident.of(worker_stage(stage).unwrap_or(WorkerStage::Diffusion))
    }

    /// Whether all stages have to fit the device side by side, because none is ever moved.
    pub fn stays(&self) -> bool {
        self.mode == Mode::None
    }

    /// Whether a stage leaves the device by the mode, so that each should run for all images before the next does.
    pub fn moves(&self) -> bool {
        self.leaves.named().iter().any(|(_, leaves)| **leaves != Leaves::Never)
    }

    /// Fixes the tiles of the VAE, in the numeric plan too. `edge` 0: whole.
    pub fn set_tiles(&mut self, plan: &mut NumericPlan, edge: u32) {
        self.vae.tile = edge;
        self.vae.overlap = if edge == 0 { 0 } else { self.tiling.overlap_of(edge) };
        plan.vae_tile = edge;
        plan.vae_tile_overlap = self.vae.overlap;
    }

    /// What the worker of a stage is told.
    pub fn task(&self, stage: Stage) -> TaskMemory {
        let resident_blocks = match self.resident_of(stage) {
            Resident::Blocks(blocks) => Some(blocks),
            Resident::Granted | Resident::Bytes(_) => None,
        };
        TaskMemory {
            prefetch: self.prefetch,
            storage: *self.storage.of(worker_stage(stage).unwrap_or(WorkerStage::Diffusion)) as i32,
            token_chunk: self.token_chunk,
            mlp_chunk: self.mlp_chunk,
            vae_tile: self.vae.tile,
            vae_tile_overlap: self.vae.overlap,
            vae_tile_batch: self.vae.batch,
            vae_type: self.vae.element_type as i32,
            resident_blocks,
        }
    }

    /// The next cheaper way to run a stage that ran out of memory, and why, for people; `None` where there is none. Tiles change the
    /// numeric plan, so a picture made that way is marked; chunks and streaming change no byte.
    pub fn cheaper(&self, stage: Stage, plan: &NumericPlan, size: (u32, u32)) -> Option<(Self, NumericPlan, String)> {
        match stage {
            Stage::Unspecified => None,
            Stage::VaeEncode | Stage::Decode => {
                if self.vae.tile > 0 && self.vae.batch > 1 {
                    let vae = VaePlan { batch: 1, ..self.vae };
                    return Some((Self { vae, ..self.clone() }, plan.clone(), "one tile of the VAE at a time".into()));
                }
                let now = if self.vae.tile == 0 { size.0.max(size.1) } else { self.vae.tile };
                match TILES.into_iter().find(|edge| *edge < now) {
                    Some(edge) => {
                        let (mut cheaper, mut numeric) = (self.clone(), plan.clone());
                        cheaper.set_tiles(&mut numeric, edge);
                        let overlap = cheaper.vae.overlap;
                        Some((cheaper, numeric, format!("the VAE in tiles of {edge} pixels that overlap by {overlap}")))
                    }
                    None => self.streamed(stage).map(|(cheaper, why)| (cheaper, plan.clone(), why)),
                }
            }
            Stage::Encode | Stage::Denoise => {
                self.chunked().or_else(|| self.streamed(stage)).map(|(cheaper, why)| (cheaper, plan.clone(), why))
            }
        }
    }

    /// Half the rows at once.
    fn chunked(&self) -> Option<(Self, String)> {
        let half = |rows: u32| match rows {
            0 => 4096,
            rows => (rows / 2).max(LEAST_CHUNK.min(rows)),
        };
        let (token_chunk, mlp_chunk) = (half(self.token_chunk), half(self.mlp_chunk));
        if (token_chunk, mlp_chunk) == (self.token_chunk, self.mlp_chunk) {
            return None;
        }
        let why = format!("{token_chunk} rows of a product and {mlp_chunk} of a feed-forward layer at once");
        Some((Self { token_chunk, mlp_chunk, ..self.clone() }, why))
    }

    /// Weights streamed, none of them resident.
    fn streamed(&self, stage: Stage) -> Option<(Self, String)> {
        if self.resident_of(stage) == Resident::Blocks(0) {
            return None;
        }
        let mut resident = self.resident.clone();
        match worker_stage(stage)? {
            WorkerStage::Text => resident.text = Resident::Blocks(0),
            WorkerStage::Diffusion | WorkerStage::Unspecified => resident.diffusion = Resident::Blocks(0),
            WorkerStage::Vae => resident.vae = Resident::Blocks(0),
        }
        Some((Self { resident, ..self.clone() }, "all its weights streamed".into()))
    }
}

/// What of each stage's weights may stay: counts that somebody wrote are counts, a preset's stand for bytes.
fn resident(settings: &Settings, mode: Mode, notices: &mut Vec<String>) -> ByStage<Resident> {
    let counted = |get: fn(&RawMemory) -> Option<Count>, bytes: u64| {
        let count = settings.get(get, Count::Granted);
        match (count.value, count.written) {
            (Count::Granted, _) => Resident::Granted,
            (Count::AtMost(blocks), true) => Resident::Blocks(blocks),
            (Count::AtMost(blocks), false) => Resident::Bytes(u64::from(blocks) * bytes),
        }
    };
    let vae = settings.get(|m| m.vae_resident, true);
    let mut resident = ByStage {
        text: counted(|m| m.te_gpu_layers, LAYER_BYTES),
        diffusion: counted(|m| m.dit_gpu_blocks, BLOCK_BYTES),
        vae: match (vae.value, vae.written) {
            (true, _) => Resident::Granted,
            (false, true) => Resident::Blocks(0),
            (false, false) => Resident::Bytes(0),
        },
    };
    if mode == Mode::None && resident.named().iter().any(|(_, resident)| matches!(resident, Resident::Blocks(_))) {
        notices.push(
            "dit_gpu_blocks, te_gpu_layers and vae_resident are ignored: offload mode none keeps all weights on the device".into(),
        );
        resident = ByStage::all(Resident::Granted);
    }
    resident
}

/// Where each stage's weights are kept: `params_backend` over `te_offload` over `offload`.
fn storage(settings: &Settings) -> ByStage<WeightStorage> {
    // Checked when the configuration was read.
    let named = placement::storage(settings.written.params_backend.as_deref()).unwrap_or(ByStage {
        text: None,
        diffusion: None,
        vae: None,
    });
    let base = settings.get(|m| m.offload, Storage::Ram).value;
    let text = match settings.get(|m| m.te_offload, TextStorage::Same).value {
        TextStorage::Same => base,
        TextStorage::Ram => Storage::Ram,
        TextStorage::Disk => Storage::Disk,
    };
    ByStage {
        text: named.text.unwrap_or(text).to_link(),
        diffusion: named.diffusion.unwrap_or(base).to_link(),
        vae: named.vae.unwrap_or(base).to_link(),
    }
}

fn bounds(settings: &Settings) -> Bounds {
    let reserve = settings.get(|m| m.reserve_gb, Gigabytes(0.0));
    let spare = settings.get(|m| m.streaming_min_vram, 0);
    let bytes = reserve.value.bytes();
    Bounds {
        max_vram: settings.written.max_vram.unwrap_or(MaxVram(0.0)),
        reserve: if reserve.written { bytes } else { 0 },
        preset_reserve: if reserve.written { 0 } else { bytes },
        streaming_spare: u64::from(spare.value) * MB,
        spare_written: spare.written,
    }
}

impl Bounds {
    /// Bytes that may be leased of a device of `total` bytes and a budget.
    pub fn limit(&self, total: u64, budget: u64) -> u64 {
        self.max_vram.of(total).map_or(budget, |most| most.min(budget)).saturating_sub(self.reserve)
    }

    /// Bytes of `limit` that stay free while a model is streamed. What nobody wrote was made for large cards: an eighth of
    /// the limit at most, and for a preset's reserve a quarter, as 6 of 24 GB.
    pub fn spare(&self, limit: u64) -> u64 {
        let spare = if self.spare_written { self.streaming_spare } else { self.streaming_spare.min(limit / 8) };
        spare.max(self.preset_reserve.min(limit / 4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str, asked: MemoryRequest) -> MemoryPlan {
        let daemon: RawMemory = toml::from_str(text).unwrap();
        let memory = crate::config::Memory { daemon, models: std::collections::BTreeMap::new() };
        MemoryPlan::resolve(&memory.of("default"), Some(&asked))
    }

    fn configured(text: &str) -> MemoryPlan {
        plan(text, MemoryRequest::default())
    }

    #[test]
    fn a_mode_says_which_stages_leave() {
        let words = |plan: &MemoryPlan| plan.leaves.named().map(|(_, leaves)| *leaves);
        use Leaves::{AfterUse, Never, WhenShort};
        for (mode, expected, streams) in [
            ("auto", [Never, Never, Never], true),
            ("none", [Never, Never, Never], false),
            ("cond_only", [WhenShort, Never, Never], false),
            ("cond_diffusion", [WhenShort, WhenShort, Never], false),
            ("aggressive", [AfterUse, AfterUse, AfterUse], false),
            ("layer_streaming", [WhenShort, Never, WhenShort], true),
        ] {
            let plan = configured(&format!("offload_mode = \"{mode}\""));
            assert_eq!(words(&plan), expected, "{mode}");
            assert_eq!(plan.streams(Stage::Denoise), streams, "{mode}");
            assert_eq!(plan.stays(), mode == "none");
        }
    }

    #[test]
    fn a_request_counts_over_an_override_over_a_mode_over_a_preset() {
        let text =
            "preset = \"8gb\"\noffload_mode = \"cond_only\"\noffload_cond_stage = false\noffload_diffusion = true";
        let configured_plan = configured(text);
        assert_eq!((configured_plan.leaves.text, configured_plan.leaves.diffusion), (Leaves::Never, Leaves::WhenShort));
        let asked = plan(
            text,
            MemoryRequest {
                mode: OffloadMode::Aggressive as i32,
                offload_cond_stage: Some(true),
                offload_diffusion: Some(false),
                reload_diffusion: Some(false),
                vae_tile_size: 256,
                ..MemoryRequest::default()
            },
        );
        assert_eq!(asked.mode, Mode::Aggressive);
        assert_eq!((asked.leaves.text, asked.leaves.diffusion), (Leaves::AfterUse, Leaves::Never));
        assert_eq!((asked.reload.text, asked.reload.diffusion), (true, false));
        assert_eq!((asked.tiling.size, asked.tiling.overlap_of(256)), (256, 0));
        let wide = configured("vae_tile_overlap = 64");
        assert_eq!((wide.tiling.overlap_of(512), wide.tiling.overlap_of(96)), (64, 48));
    }

    #[test]
    fn sequential_forces_when_it_is_written_and_is_ignored_with_a_notice_under_none() {
        assert_eq!(configured("preset = \"24gb\"").leaves, ByStage::all(Leaves::Never), "a preset's is a permission");
        assert_eq!(configured("sequential = true").leaves, ByStage::all(Leaves::AfterUse));
        let none = configured("sequential = true\noffload_mode = \"none\"");
        assert_eq!(none.leaves, ByStage::all(Leaves::Never));
        assert!(none.notices[0].contains("sequential"), "{:?}", none.notices);
    }

    #[test]
    fn counts_that_are_written_are_counts_and_those_of_presets_stand_for_bytes() {
        let written = configured("dit_gpu_blocks = 4\nvae_resident = false");
        assert_eq!(written.task(Stage::Denoise).resident_blocks, Some(4));
        assert_eq!(written.task(Stage::Decode).resident_blocks, Some(0));
        assert_eq!(written.task(Stage::Encode).resident_blocks, None);
        let preset = configured("preset = \"12gb\"");
        assert_eq!(preset.resident_of(Stage::Denoise), Resident::Bytes(4 * 390_000_000));
        assert_eq!(preset.resident_of(Stage::Encode), Resident::Bytes(16 * 310_000_000));
        assert_eq!(preset.task(Stage::Denoise).resident_blocks, None);
        let none = configured("offload_mode = \"none\"\nte_gpu_layers = 1");
        assert_eq!((none.resident_of(Stage::Encode), none.notices.len()), (Resident::Granted, 1));
        assert!(configured("offload_mode = \"cond_only\"\ndit_gpu_blocks = 4").streams(Stage::Denoise));
    }

    #[test]
    fn storage_and_types_go_to_the_stage_they_are_meant_for() {
        let plan = configured("offload = \"disk\"\nte_offload = \"ram\"\nparams_backend = \"vae=cpu\"");
        let storage = |stage| plan.task(stage).storage();
        assert_eq!(storage(Stage::Encode), WeightStorage::Ram);
        assert_eq!(storage(Stage::Denoise), WeightStorage::Disk);
        assert_eq!(storage(Stage::Decode), WeightStorage::Ram);
        assert_eq!(plan.task(Stage::Decode).vae_type(), ElementType::F32, "a preset's f16 is for GPUs");
        assert_eq!(configured("vae_dtype = \"fp16\"").task(Stage::Decode).vae_type(), ElementType::F16);
    }

    #[test]
    fn what_a_user_reserves_is_kept_and_what_a_preset_reserves_is_a_share() {
        let gib = 1u64 << 30;
        let written = configured("reserve_gb = 2.0\nmax_vram = -1.0").bounds;
        assert_eq!(written.limit(16 * gib, 12 * gib), 12 * gib - 2_000_000_000);
        assert_eq!(written.limit(8 * gib, 8 * gib), 7 * gib - 2_000_000_000);
        let preset = configured("preset = \"24gb\"").bounds;
        assert_eq!(preset.limit(24 * gib, 20 * gib), 20 * gib);
        assert_eq!(preset.spare(40 * gib), 6_000_000_000);
        assert_eq!(preset.spare(gib), gib / 4);
        assert_eq!(configured("streaming_min_vram = 512\nreserve_gb = 0").bounds.spare(gib), 512_000_000);
    }

    #[test]
    fn a_cheaper_plan_is_found_until_nothing_is_left_to_save() {
        let numeric = crate::jobs::fixtures::numeric_plan();
        let mut now = (configured(""), numeric.clone());
        let mut steps = Vec::new();
        while let Some((memory, plan, why)) = now.0.cheaper(Stage::Decode, &now.1, (1024, 768)) {
            steps.push((memory.vae.tile, memory.vae.batch, plan.vae_tile, why));
            now = (memory, plan);
            assert!(steps.len() < 20, "{steps:?}");
        }
        let tiles: Vec<u32> = steps.iter().map(|step| step.0).collect();
        assert_eq!(tiles, [512, 512, 256, 128, 128], "{steps:?}");
        let mut denoise = configured("");
        let mut count = 0;
        while let Some((memory, plan, _)) = denoise.cheaper(Stage::Denoise, &numeric, (512, 512)) {
            assert_eq!(plan, numeric, "chunks and streaming change no byte");
            denoise = memory;
            count += 1;
            assert!(count < 20);
        }
        assert_eq!((denoise.token_chunk, denoise.resident_of(Stage::Denoise)), (256, Resident::Blocks(0)));
        assert!(configured("").cheaper(Stage::Unspecified, &numeric, (8, 8)).is_none());
    }
}

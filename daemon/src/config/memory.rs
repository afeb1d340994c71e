//! `[memory]` as it is written: presets, counts, offload modes, under the names that users know.
//!
//! Every value is optional. What a table leaves out comes from the table below it (a model's from the daemon's), and in the end
//! from the preset; [`Settings`] says both the value and whether somebody wrote it, because a preset's counts stand for
//! bytes and a user's are counts.

use std::collections::BTreeMap;

use serde::Serialize;

use super::presets::Preset;
pub use super::spellings::{Count, Estimation, Gigabytes, MaxVram, Mode, Prefetch, Storage, TextStorage, VaeType};

/// `[memory]`, or `[model_memory.NAME]`, as written. The documentation of each key is in [`super::KEYS`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct RawMemory {
    pub preset: Option<Preset>,
    pub dit_gpu_blocks: Option<Count>,
    pub te_gpu_layers: Option<Count>,
    pub offload: Option<Storage>,
    pub te_offload: Option<TextStorage>,
    pub sequential: Option<bool>,
    pub token_chunk: Option<u32>,
    pub mlp_chunk: Option<u32>,
    pub reserve_gb: Option<Gigabytes>,
    pub vae_tile_batch: Option<u32>,
    pub vae_resident: Option<bool>,
    pub vae_dtype: Option<VaeType>,
    pub offload_mode: Option<Mode>,
    pub offload_cond_stage: Option<bool>,
    pub offload_diffusion: Option<bool>,
    pub reload_cond_stage: Option<bool>,
    pub reload_diffusion: Option<bool>,
    pub offload_log: Option<bool>,
    pub vram_estimation: Option<Estimation>,
    pub streaming_prefetch: Option<Prefetch>,
    pub streaming_min_vram: Option<u32>,
    pub max_vram: Option<MaxVram>,
    pub vae_tiling: Option<bool>,
    pub vae_tile_size: Option<u32>,
    pub vae_tile_overlap: Option<u32>,
    pub backend: Option<String>,
    pub params_backend: Option<String>,
}

/// Keys that a preset fills.
pub const PRESET_KEYS: [&str; 11] = [
    "dit_gpu_blocks",
    "te_gpu_layers",
    "offload",
    "te_offload",
    "sequential",
    "token_chunk",
    "mlp_chunk",
    "reserve_gb",
    "vae_tile_batch",
    "vae_resident",
    "vae_dtype",
];

impl RawMemory {
    /// This table over another: what is not written here comes from there. A preset that is named here replaces what presets
    /// fill, so nothing of that is taken from there.
    pub fn over(&self, below: &Self) -> Self {
        let below = if self.preset.is_some() { below.without_preset() } else { below.clone() };
        Self {
            preset: self.preset.or(below.preset),
            dit_gpu_blocks: self.dit_gpu_blocks.or(below.dit_gpu_blocks),
            te_gpu_layers: self.te_gpu_layers.or(below.te_gpu_layers),
            offload: self.offload.or(below.offload),
            te_offload: self.te_offload.or(below.te_offload),
            sequential: self.sequential.or(below.sequential),
            token_chunk: self.token_chunk.or(below.token_chunk),
            mlp_chunk: self.mlp_chunk.or(below.mlp_chunk),
            reserve_gb: self.reserve_gb.or(below.reserve_gb),
            vae_tile_batch: self.vae_tile_batch.or(below.vae_tile_batch),
            vae_resident: self.vae_resident.or(below.vae_resident),
            vae_dtype: self.vae_dtype.or(below.vae_dtype),
            offload_mode: self.offload_mode.or(below.offload_mode),
            offload_cond_stage: self.offload_cond_stage.or(below.offload_cond_stage),
            offload_diffusion: self.offload_diffusion.or(below.offload_diffusion),
            reload_cond_stage: self.reload_cond_stage.or(below.reload_cond_stage),
            reload_diffusion: self.reload_diffusion.or(below.reload_diffusion),
            offload_log: self.offload_log.or(below.offload_log),
            vram_estimation: self.vram_estimation.or(below.vram_estimation),
            streaming_prefetch: self.streaming_prefetch.or(below.streaming_prefetch),
            streaming_min_vram: self.streaming_min_vram.or(below.streaming_min_vram),
            max_vram: self.max_vram.or(below.max_vram),
            vae_tiling: self.vae_tiling.or(below.vae_tiling),
            vae_tile_size: self.vae_tile_size.or(below.vae_tile_size),
            vae_tile_overlap: self.vae_tile_overlap.or(below.vae_tile_overlap),
            backend: self.backend.clone().or(below.backend),
            params_backend: self.params_backend.clone().or(below.params_backend),
        }
    }

    /// This table without what a preset fills, and without one.
    pub fn without_preset(&self) -> Self {
        Self {
            preset: None,
            dit_gpu_blocks: None,
            te_gpu_layers: None,
            offload: None,
            te_offload: None,
            sequential: None,
            token_chunk: None,
            mlp_chunk: None,
            reserve_gb: None,
            vae_tile_batch: None,
            vae_resident: None,
            vae_dtype: None,
            ..self.clone()
        }
    }

    /// What holds where nobody writes anything, but for what presets fill.
    pub fn defaults() -> Self {
        Self {
            preset: Some(Preset::Auto),
            offload_mode: Some(Mode::Auto),
            reload_cond_stage: Some(true),
            reload_diffusion: Some(true),
            offload_log: Some(false),
            vram_estimation: Some(Estimation::DryRun),
            streaming_prefetch: Some(Prefetch(0)),
            streaming_min_vram: Some(512),
            ..Self::default()
        }
    }

    /// The value of a key as TOML; `None` where it is not set, or there is no such key.
    pub fn value(&self, key: &str) -> Option<String> {
        let toml::Value::Table(table) = toml::Value::try_from(self).ok()? else { return None };
        table.get(key).map(ToString::to_string)
    }
}

/// A value, and whether somebody wrote it or a preset or default gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<T> {
    /// The value.
    pub value: T,
    /// Whether it was written.
    pub written: bool,
}

/// The memory configuration of a daemon.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    /// `[memory]`.
    pub daemon: RawMemory,
    /// `[model_memory.NAME]`.
    pub models: BTreeMap<String, RawMemory>,
}

impl Memory {
    /// What holds for a model.
    pub fn of(&self, model: &str) -> Settings {
        let written = match self.models.get(model) {
            Some(own) => own.over(&self.daemon),
            None => self.daemon.clone(),
        };
        Settings::new(written)
    }

    /// What holds for the daemon as a whole.
    pub fn settings(&self) -> Settings {
        Settings::new(self.daemon.clone())
    }
}

/// What was written, over a preset, over defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The preset that counts.
    pub preset: Preset,
    /// What somebody wrote.
    pub written: RawMemory,
    /// All of it: written, preset, defaults.
    pub effective: RawMemory,
}

impl Settings {
    fn new(written: RawMemory) -> Self {
        let preset = written.preset.unwrap_or(Preset::Auto);
        let under = preset.values().over(&RawMemory { preset: Some(preset), ..RawMemory::defaults() });
        let effective = RawMemory { preset: None, ..written.clone() }.over(&under);
        Self { preset, written, effective }
    }

    /// A value that a preset or a default gives where nobody writes it; `fallback` is never used but for a key that
    /// neither fills.
    pub fn get<T>(&self, key: impl Fn(&RawMemory) -> Option<T>, fallback: T) -> Setting<T> {
        let written = key(&self.written);
        match written {
            Some(value) => Setting { value, written: true },
            None => Setting { value: key(&self.effective).unwrap_or(fallback), written: false },
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new(RawMemory::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> RawMemory {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn every_spelling_is_understood_and_printed_in_one() {
        for (text, key, printed) in [
            ("preset = \"gb24\"", "preset", "\"24gb\""),
            ("preset = \"minimal\"", "preset", "\"minimal\""),
            ("dit_gpu_blocks = -1", "dit_gpu_blocks", "-1"),
            ("te_gpu_layers = \"7\"", "te_gpu_layers", "7"),
            ("vae_dtype = \"fp16\"", "vae_dtype", "\"f16\""),
            ("vae_dtype = \"fp32\"", "vae_dtype", "\"f32\""),
            ("vae_dtype = \"bf16\"", "vae_dtype", "\"bf16\""),
            ("reserve_gb = 6", "reserve_gb", "6.0"),
            ("max_vram = -1.5", "max_vram", "-1.5"),
            ("offload_mode = \"layer-streaming\"", "offload_mode", "\"layer_streaming\""),
            ("streaming_prefetch = true", "streaming_prefetch", "1"),
            ("te_offload = \"none\"", "te_offload", "\"none\""),
            ("vram_estimation = \"dryrun\"", "vram_estimation", "\"dryrun\""),
        ] {
            assert_eq!(table(text).value(key).as_deref(), Some(printed), "{text}");
        }
        for text in [
            "preset = \"48gb\"",
            "dit_gpu_blocks = -2",
            "dit_gpu_blocks = 1.5",
            "reserve_gb = -1",
            "reserve_gb = nan",
            "max_vram = inf",
            "offload = \"tape\"",
            "vae_dtype = \"f8\"",
            "offload_mode = \"sometimes\"",
            "dit_gpu_block = 3",
        ] {
            assert!(toml::from_str::<RawMemory>(text).is_err(), "{text}");
        }
        let error = toml::from_str::<RawMemory>("offload_mode = \"sometimes\"").unwrap_err().to_string();
        assert!(error.contains("cond_diffusion") && error.contains("auto"), "{error}");
    }

    #[test]
    fn a_preset_that_is_named_replaces_what_presets_fill_and_nothing_else() {
        let daemon = table("dit_gpu_blocks = 9\noffload_mode = \"aggressive\"");
        let memory =
            Memory { daemon, models: [("big".to_owned(), table("preset = \"8gb\"\ntoken_chunk = 64"))].into() };
        let plain = memory.of("other");
        let blocks = |settings: &Settings| settings.get(|m| m.dit_gpu_blocks, Count::Granted);
        assert_eq!(blocks(&plain), Setting { value: Count::AtMost(9), written: true });
        let big = memory.of("big");
        assert_eq!((big.preset, blocks(&big)), (Preset::Gb8, Setting { value: Count::AtMost(0), written: false }));
        assert_eq!(big.get(|m| m.token_chunk, 0), Setting { value: 64, written: true });
        assert_eq!(big.get(|m| m.offload_mode, Mode::Auto), Setting { value: Mode::Aggressive, written: true });
        assert_eq!(Settings::default().get(|m| m.reload_diffusion, false), Setting { value: true, written: false });
    }

    #[test]
    fn a_bound_on_the_device_counts_down_from_its_total_when_it_is_negative() {
        let total = 24 << 30;
        assert_eq!(MaxVram(8.0).of(total), Some(8 << 30));
        assert_eq!(MaxVram(-1.5).of(total), Some((24 << 30) - (3 << 29)));
        assert_eq!(MaxVram(-100.0).of(total), Some(0));
        assert_eq!(MaxVram(0.0).of(total), None);
    }

    #[test]
    fn the_list_of_what_presets_fill_is_what_they_fill() {
        for preset in Preset::ALL {
            let values = preset.values();
            for key in PRESET_KEYS {
                assert!(values.value(key).is_some(), "{preset}: {key}");
            }
            let toml::Value::Table(all) = toml::Value::try_from(&values).unwrap() else { panic!("a table") };
            assert_eq!(all.len(), PRESET_KEYS.len(), "{preset}");
        }
    }
}

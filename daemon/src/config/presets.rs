//! Presets of `[memory]`, named after the cards that they were made for.

use std::fmt::Write as _;

use serde::de::{Deserialize, Deserializer};
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

use super::memory::{Count, Gigabytes, PRESET_KEYS, RawMemory, Storage, TextStorage, VaeType};
use super::raw::KEYS;
use super::spellings::{read_as_text, words};
use super::values::Text;

/// Bytes of a diffusion block for which the presets' counts were made.
pub const BLOCK_BYTES: u64 = 390_000_000;
/// Bytes of a text encoder's layer for which the presets' counts were made.
pub const LAYER_BYTES: u64 = 310_000_000;

words! {
    /// A preset.
    Preset, "preset" {
        /// Whatever is granted.
        Auto = "auto",
        /// A card of 24 GB.
        Gb24 = "24gb" | "gb24",
        /// A card of 16 GB.
        Gb16 = "16gb" | "gb16",
        /// A card of 12 GB.
        Gb12 = "12gb" | "gb12",
        /// A card of 8 GB.
        Gb8 = "8gb" | "gb8",
        /// As little as can be.
        Minimal = "minimal",
    }
}

impl Preset {
    /// What it fills.
    pub fn values(self) -> RawMemory {
        let base = RawMemory {
            dit_gpu_blocks: Some(Count::Granted),
            te_gpu_layers: Some(Count::AtMost(50)),
            offload: Some(Storage::Ram),
            te_offload: Some(TextStorage::Same),
            sequential: Some(true),
            token_chunk: Some(16384),
            mlp_chunk: Some(8192),
            reserve_gb: Some(Gigabytes(6.0)),
            vae_tile_batch: Some(4),
            vae_resident: Some(true),
            vae_dtype: Some(VaeType::F16),
            ..RawMemory::default()
        };
        let counts = |blocks, layers, base| RawMemory {
            dit_gpu_blocks: Some(Count::AtMost(blocks)),
            te_gpu_layers: Some(Count::AtMost(layers)),
            ..base
        };
        let chunks = |token, mlp, batch, base| RawMemory {
            token_chunk: Some(token),
            mlp_chunk: Some(mlp),
            vae_tile_batch: Some(batch),
            ..base
        };
        let disk = |base| RawMemory { offload: Some(Storage::Disk), ..base };
        match self {
            Self::Auto => RawMemory { te_gpu_layers: Some(Count::Granted), ..base },
            Self::Gb24 => base,
            Self::Gb16 => counts(14, 30, chunks(8192, 4096, 2, base)),
            Self::Gb12 => counts(4, 16, chunks(8192, 2048, 1, base)),
            Self::Gb8 => disk(counts(0, 4, chunks(4096, 1024, 1, base))),
            Self::Minimal => RawMemory { vae_resident: Some(false), ..disk(counts(0, 0, chunks(2048, 512, 1, base))) },
        }
    }

    /// Gigabytes of host memory below which it warns.
    fn host_gigabytes(self) -> Option<u64> {
        match self {
            Self::Auto | Self::Minimal => None,
            Self::Gb24 => Some(48),
            Self::Gb16 | Self::Gb12 => Some(32),
            Self::Gb8 => Some(16),
        }
    }

    /// What is to be said where the host has less memory than the preset counts on.
    pub fn warning(self, host_bytes: u64) -> Option<String> {
        let wanted = self.host_gigabytes()?;
        let bytes = wanted * 1_000_000_000;
        (host_bytes < bytes).then(|| {
            format!(
                "preset {self} counts on {wanted} GB of host memory, this host has {:.1} GB: weights that leave the device \
                 may be read from disk again; a smaller preset keeps fewer",
                host_bytes as f64 / 1e9
            )
        })
    }

    /// The preset as a file for `--memory`: its values are shown as comments, because one that is written is a user's own: a
    /// count then, where a preset's stands for bytes.
    pub fn file(self) -> String {
        let values = self.values();
        let mut text = format!(
            "# The preset {self}, for `sdd --memory FILE`. What is a comment below is what it fills; write a line to go over it:\n\
             # a count that is written is a count, one of the preset stands for bytes (0.39 GB a block, 0.31 GB a layer).\n\
             # Generated from the code; a test keeps them equal.\n\n[memory]\npreset = \"{self}\"\n"
        );
        for key in PRESET_KEYS {
            let name = format!("memory.{key}");
            let help = KEYS.iter().find(|known| known.name == name).map_or("", |key| key.help);
            let _ = write!(text, "\n# {help}\n# {key} = {}\n", values.value(key).unwrap_or_default());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_have_the_values_that_users_know() {
        let row = |preset: Preset| {
            let values = preset.values();
            PRESET_KEYS.map(|key| values.value(key).unwrap_or_default()).join(" ")
        };
        for (preset, expected) in [
            (Preset::Gb24, r#"-1 50 "ram" "none" true 16384 8192 6.0 4 true "f16""#),
            (Preset::Gb16, r#"14 30 "ram" "none" true 8192 4096 6.0 2 true "f16""#),
            (Preset::Gb12, r#"4 16 "ram" "none" true 8192 2048 6.0 1 true "f16""#),
            (Preset::Gb8, r#"0 4 "disk" "none" true 4096 1024 6.0 1 true "f16""#),
            (Preset::Minimal, r#"0 0 "disk" "none" true 2048 512 6.0 1 false "f16""#),
            (Preset::Auto, r#"-1 -1 "ram" "none" true 16384 8192 6.0 4 true "f16""#),
        ] {
            assert_eq!(row(preset), expected, "{preset}");
        }
    }

    #[test]
    fn a_preset_warns_below_its_host_memory_and_not_at_it() {
        for (preset, gigabytes) in [(Preset::Gb24, 48), (Preset::Gb16, 32), (Preset::Gb12, 32), (Preset::Gb8, 16)] {
            let enough = gigabytes * 1_000_000_000;
            assert_eq!(preset.warning(enough), None);
            let text = preset.warning(enough - 1).unwrap();
            assert!(text.contains(&gigabytes.to_string()) && text.contains(preset.name()), "{text}");
        }
        assert_eq!((Preset::Auto.warning(1), Preset::Minimal.warning(1)), (None, None));
    }

    #[test]
    fn the_files_in_configs_are_what_the_code_says() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
        for preset in Preset::ALL {
            let path = folder.join(format!("{preset}.toml"));
            if std::env::var_os("SDD_WRITE_CONFIGS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, preset.file()).unwrap();
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            assert_eq!(text, preset.file(), "{}: write it anew with SDD_WRITE_CONFIGS=1", path.display());
        }
        let files = std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(files, Preset::ALL.len(), "a file for each preset and no other");
    }
}

//! Words and numbers of `[memory]`: how each is written, read and printed.

use std::fmt;
use std::str::FromStr;

use sd_proto::v1::OffloadMode;
use sd_proto::worker::v1::{ElementType, WeightStorage};
use serde::de::{Deserialize, Deserializer};
use serde::{Serialize, Serializer};

use super::values::Text;

/// One gigabyte, as the presets count: 10⁹ bytes.
const GB: f64 = 1e9;
/// One gibibyte, as `max_vram` counts.
const GIB: f64 = 1_073_741_824.0;

/// Reads a value from its text, whatever TOML type it is written as.
macro_rules! read_as_text {
    ($($kind:ty: $expected:literal),* $(,)?) => {$(
        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Text(std::marker::PhantomData, $expected))
            }
        }
    )*};
}

/// A word of a fixed list: its spellings, the first of which is printed.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $what:literal { $($(#[$variant_doc:meta])* $variant:ident = $($spelling:literal)|+),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $($(#[$variant_doc])* $variant),+ }

        impl $name {
            /// Every one, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// As it is printed.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => [$($spelling),+][0]),+ }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text { $($($spelling)|+ => Ok(Self::$variant),)+ _ => {
                    let known: Vec<&str> = Self::ALL.iter().map(|word| word.name()).collect();
                    Err(format!(concat!("{:?} is no ", $what, ": write one of {}"), text, known.join(", ")))
                } }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(self.name()) }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        read_as_text!($name: $what);
    };
}
pub(super) use {read_as_text, words};

words! {
    /// When stages leave their device.
    Mode, "offload mode" {
        /// Whatever is needed, when it is needed.
        Auto = "auto",
        /// Never a byte after loading.
        None = "none",
        /// The text encoder before denoising.
        CondOnly = "cond_only" | "cond-only",
        /// Also the diffusion model before decoding.
        CondDiffusion = "cond_diffusion" | "cond-diffusion",
        /// Every stage right after use.
        Aggressive = "aggressive",
        /// Encoder and VAE before the first block; blocks streamed as far as room demands.
        LayerStreaming = "layer_streaming" | "layer-streaming",
    }
}

impl Mode {
    /// In the words of the contract.
    pub fn to_proto(self) -> OffloadMode {
        match self {
            Self::Auto => OffloadMode::Auto,
            Self::None => OffloadMode::None,
            Self::CondOnly => OffloadMode::CondOnly,
            Self::CondDiffusion => OffloadMode::CondDiffusion,
            Self::Aggressive => OffloadMode::Aggressive,
            Self::LayerStreaming => OffloadMode::LayerStreaming,
        }
    }

    /// From the contract; `None` where nothing is said.
    pub fn from_proto(mode: OffloadMode) -> Option<Self> {
        Some(match mode {
            OffloadMode::Unspecified => return None,
            OffloadMode::Auto => Self::Auto,
            OffloadMode::None => Self::None,
            OffloadMode::CondOnly => Self::CondOnly,
            OffloadMode::CondDiffusion => Self::CondDiffusion,
            OffloadMode::Aggressive => Self::Aggressive,
            OffloadMode::LayerStreaming => Self::LayerStreaming,
        })
    }
}

words! {
    /// Where weights are kept that do not stay on the device.
    Storage, "place for weights" {
        /// In host memory.
        Ram = "ram" | "cpu",
        /// In their files.
        Disk = "disk",
    }
}

impl Storage {
    /// As a worker is told.
    pub fn to_link(self) -> WeightStorage {
        match self {
            Self::Ram => WeightStorage::Ram,
            Self::Disk => WeightStorage::Disk,
        }
    }
}

words! {
    /// Where the text encoder's weights are kept that do not stay on the device.
    TextStorage, "place for the text encoder's weights" {
        /// Where the others' are.
        Same = "none",
        /// In host memory.
        Ram = "ram" | "cpu",
        /// In their files.
        Disk = "disk",
    }
}

words! {
    /// What the autoencoder computes in.
    VaeType, "type for the VAE" {
        /// 16 bits.
        F16 = "f16" | "fp16",
        /// 16 bits, with the range of 32.
        Bf16 = "bf16",
        /// 32 bits.
        F32 = "f32" | "fp32",
    }
}

impl VaeType {
    /// As a worker is told.
    pub fn to_link(self) -> ElementType {
        match self {
            Self::F16 => ElementType::F16,
            Self::Bf16 => ElementType::Bf16,
            Self::F32 => ElementType::F32,
        }
    }
}

words! {
    /// How a task's working set is estimated before it has ever been measured.
    Estimation, "way to estimate" {
        /// The worker walks the model at the very shape.
        DryRun = "dryrun" | "dry-run" | "dry_run",
        /// From the architecture's numbers a pixel.
        Formula = "formula",
    }
}

/// How many blocks or layers stay on the device: an upper bound, never a demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// As many as are granted (written −1).
    Granted,
    /// At most so many.
    AtMost(u32),
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().parse::<i64>() {
            Ok(-1) => Ok(Self::Granted),
            Ok(count) if (0..=i64::from(u32::MAX)).contains(&count) => Ok(Self::AtMost(count as u32)),
            Ok(_) | Err(_) => Err(format!("{text:?} is no count: write 0 or more, or -1 for as many as are granted")),
        }
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Granted => serializer.serialize_i64(-1),
            Self::AtMost(count) => serializer.serialize_i64(i64::from(*count)),
        }
    }
}

/// Gigabytes (10⁹) that are left free, 0 or more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gigabytes(pub f64);

impl Gigabytes {
    /// In bytes.
    pub fn bytes(self) -> u64 {
        (self.0 * GB) as u64
    }
}

impl FromStr for Gigabytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().parse::<f64>() {
            Ok(number) if (0.0..=1e6).contains(&number) => Ok(Self(number)),
            Ok(_) | Err(_) => Err(format!("{text:?} is no number of gigabytes: write 0 or more, as in 6.0")),
        }
    }
}

/// Gibibytes that may be used of a device, or, below zero, that are spared of it; 0 sets no bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaxVram(pub f64);

impl MaxVram {
    /// Bytes that may be used of a device that has `total`; `None` without a bound.
    pub fn of(self, total: u64) -> Option<u64> {
        let bytes = (self.0.abs() * GIB) as u64;
        if self.0 > 0.0 {
            Some(bytes)
        } else if self.0 < 0.0 {
            Some(total.saturating_sub(bytes))
        } else {
            None
        }
    }
}

impl FromStr for MaxVram {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().parse::<f64>() {
            Ok(number) if (-1e6..=1e6).contains(&number) => Ok(Self(number)),
            Ok(_) | Err(_) => {
                Err(format!("{text:?} is no number of GiB: write one, below zero for what is to be spared, as in -1.5"))
            }
        }
    }
}

/// Layers that are read ahead while one runs: 0 none, else the next. `true` and `false` are understood too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefetch(pub u32);

impl FromStr for Prefetch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "true" | "yes" => Ok(Self(1)),
            "false" | "no" => Ok(Self(0)),
            number => number
                .parse()
                .map(Self)
                .map_err(|_| format!("{text:?} is no number of layers to read ahead: write 0 for none, or 1")),
        }
    }
}

impl Serialize for Gigabytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

impl Serialize for MaxVram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

impl Serialize for Prefetch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.0)
    }
}

read_as_text! {
    Count: "a count: 0 or more, or -1",
    Gigabytes: "a number of gigabytes",
    MaxVram: "a number of GiB",
    Prefetch: "a number of layers, or true or false",
}

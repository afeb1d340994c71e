//! The default text-to-image model, embedded in the program that links this crate.
//!
//! The files are a model folder in diffusers layout (see the model card, `models/README.md`). Workers map weights
//! from files, so [`materialize`] writes the folder into a cache once and later calls reuse it.
#![forbid(unsafe_code)]

mod cache;

pub use cache::{MaterializeError, materialize};

mod table {
    include!(concat!(env!("OUT_DIR"), "/table.rs"));
}

/// Every file of the model: its path relative to the model folder, with `/` as the separator, and its bytes.
///
/// Sorted by path.
pub fn files() -> &'static [(&'static str, &'static [u8])] {
    table::FILES
}

/// A short hash of all paths and bytes, in hexadecimal: two builds with the same id embed the same model.
pub fn id() -> &'static str {
    table::ID
}

/// The sum of all files' lengths in bytes.
pub fn total_bytes() -> u64 {
    files().iter().map(|(_, bytes)| bytes.len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::{files, id, total_bytes};

    /// Room for the model in the repository and in the program, weights and all.
    const LIMIT: u64 = 28_000_000;

    #[test]
    fn a_whole_model_is_embedded_within_its_limit() {
        let names: Vec<&str> = files().iter().map(|(name, _)| *name).collect();
        for needed in [
            "model_index.json",
            "scheduler/scheduler_config.json",
            "sdd.json",
            "text_encoder/config.json",
            "text_encoder/model.safetensors",
            "tokenizer/merges.txt",
            "tokenizer/vocab.json",
            "unet/config.json",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/config.json",
            "vae/diffusion_pytorch_model.safetensors",
        ] {
            assert!(names.contains(&needed), "{needed} is missing among {names:?}");
        }
        assert!(names.is_sorted());
        assert!(total_bytes() <= LIMIT, "{} bytes are more than {LIMIT}", total_bytes());
    }

    #[test]
    fn the_weights_are_complete_safetensors_files() {
        for (name, bytes) in files().iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            let text = std::str::from_utf8(&bytes[8..8 + header as usize]).expect("a UTF-8 header");
            let end = text
                .split("\"data_offsets\":[")
                .skip(1)
                .map(|rest| {
                    rest.split([',', ']']).nth(1).expect("two offsets").trim().parse::<u64>().expect("a number")
                })
                .max()
                .expect("at least one tensor");
            assert_eq!(8 + header + end, bytes.len() as u64, "{name}");
        }
    }

    #[test]
    fn the_id_is_twelve_hexadecimal_digits() {
        assert_eq!(id().len(), 12);
        assert!(id().bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}

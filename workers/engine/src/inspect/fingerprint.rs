//! Telling models apart without reading them whole.

use crate::formats::SafetensorsFile;

/// FNV-1a, 128 bits: no defence against forgery, and none is needed to tell one's own models apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fingerprint(u128);

/// Places of a file whose bytes are taken in: trainings of one architecture have equal headers.
const SAMPLES: usize = 32;
/// Bytes taken at each.
const SAMPLE_BYTES: usize = 64;

impl Fingerprint {
    pub(super) fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// Takes in `bytes` and their count.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().chain(&(bytes.len() as u64).to_le_bytes()) {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }

    /// Takes in size, header and samples of `file`, which touches at most one page for each sample.
    pub(super) fn add_file(&mut self, file: &SafetensorsFile) {
        self.add(&file.len().to_le_bytes());
        self.add(file.header_bytes());
        let data = file.data_bytes();
        let step = (data.len() / SAMPLES).max(SAMPLE_BYTES);
        for sample in data.chunks(step) {
            self.add(&sample[..sample.len().min(SAMPLE_BYTES)]);
        }
    }

    pub(super) fn hex(self) -> String {
        format!("{:032x}", self.0)
    }
}

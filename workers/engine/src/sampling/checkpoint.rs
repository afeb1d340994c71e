//! All that a run needs to go on after a step, as bytes: latents, the sampler's memory, the generator, and how many calls are
//! done. What follows from the request (schedule, noise, conditioning) is not in it.
//!
//! Little-endian, without a checksum of its own: whoever keeps it adds that. Numbers are kept bit for bit, so that a run which
//! goes on is the undisturbed run.

use super::{Generator, History, SamplerKind, SamplingError, SavedTensor};

/// Version of the bytes.
const VERSION: u8 = 1;
/// Dimensions that a tensor can have here.
const MAX_RANK: usize = 8;

/// A run after some of its calls.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Whose memory this is.
    pub sampler: SamplerKind,
    /// Calls of the model that are done, counted from the run's first.
    pub done: usize,
    /// Calls of the whole run.
    pub total: usize,
    /// The sample after them.
    pub latents: SavedTensor,
    /// What the sampler remembers.
    pub history: History,
    /// Where the random numbers stand.
    pub generator: Generator,
}

impl Checkpoint {
    /// The bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Out(vec![VERSION]);
        let kind = SamplerKind::ALL.iter().position(|kind| *kind == self.sampler).unwrap_or_default();
        out.0.push(kind as u8);
        out.number(self.done);
        out.number(self.total);
        self.generator.write(&mut out);
        out.tensor(&self.latents);
        match &self.history {
            History::None => out.0.push(0),
            History::Heun { sample, derivative } => {
                out.0.push(1);
                out.tensor(sample);
                out.tensor(derivative);
            }
            History::Multistep { originals } => {
                out.0.push(2);
                out.tensors(originals);
            }
            History::Unipc { outputs, last_sample, last_order } => {
                out.0.push(3);
                out.tensors(outputs);
                out.tensors(last_sample.as_slice());
                out.number(*last_order);
            }
        }
        out.0
    }

    /// Reads them back.
    ///
    /// # Errors
    /// The bytes are not what [`Checkpoint::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SamplingError> {
        let mut from = In(bytes);
        let version = from.byte()?;
        if version != VERSION {
            return Err(SamplingError::State(format!("a checkpoint of version {version}, expected {VERSION}")));
        }
        let kind = from.byte()?;
        let sampler = SamplerKind::ALL.get(usize::from(kind)).copied();
        let sampler = sampler.ok_or_else(|| SamplingError::State(format!("a checkpoint of unknown sampler {kind}")))?;
        let (done, total) = (from.number()?, from.number()?);
        let generator = Generator::read(&mut from)?;
        let latents = from.tensor()?;
        let history = match from.byte()? {
            0 => History::None,
            1 => History::Heun { sample: from.tensor()?, derivative: from.tensor()? },
            2 => History::Multistep { originals: from.tensors()? },
            3 => {
                let (outputs, mut last) = (from.tensors()?, from.tensors()?);
                History::Unipc { outputs, last_sample: last.pop(), last_order: from.number()? }
            }
            other => return Err(SamplingError::State(format!("a checkpoint with unknown memory {other}"))),
        };
        if !from.0.is_empty() {
            return Err(SamplingError::State(format!("a checkpoint with {} bytes too many", from.0.len())));
        }
        Ok(Self { sampler, done, total, latents, history, generator })
    }
}

/// Bytes being written.
pub(super) struct Out(pub(super) Vec<u8>);

impl Out {
    pub(super) fn word(&mut self, word: u32) {
        self.0.extend(word.to_le_bytes());
    }

    pub(super) fn number(&mut self, number: usize) {
        self.0.extend((number as u64).to_le_bytes());
    }

    fn tensor(&mut self, tensor: &SavedTensor) {
        self.0.push(tensor.shape.len() as u8);
        tensor.shape.iter().for_each(|size| self.number(*size));
        self.0.reserve(4 * tensor.values.len());
        tensor.values.iter().for_each(|value| self.0.extend(value.to_le_bytes()));
    }

    fn tensors(&mut self, tensors: &[SavedTensor]) {
        self.0.push(tensors.len() as u8);
        tensors.iter().for_each(|tensor| self.tensor(tensor));
    }
}

/// Bytes being read.
pub(super) struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], SamplingError> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or_else(|| SamplingError::State("a checkpoint ends too early, it is damaged".into()))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn byte(&mut self) -> Result<u8, SamplingError> {
        Ok(self.take(1)?[0])
    }

    pub(super) fn word(&mut self) -> Result<u32, SamplingError> {
        let mut word = [0; 4];
        word.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(word))
    }

    pub(super) fn long(&mut self) -> Result<u64, SamplingError> {
        let mut long = [0; 8];
        long.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(long))
    }

    pub(super) fn number(&mut self) -> Result<usize, SamplingError> {
        let number = self.long()?;
        usize::try_from(number).map_err(|_| SamplingError::State(format!("{number} in a checkpoint is too large")))
    }

    fn tensor(&mut self) -> Result<SavedTensor, SamplingError> {
        let rank = usize::from(self.byte()?);
        if rank > MAX_RANK {
            return Err(SamplingError::State(format!("a checkpoint with a tensor of rank {rank}, it is damaged")));
        }
        let shape = (0..rank).map(|_| self.number()).collect::<Result<Vec<_>, _>>()?;
        let bytes = shape.iter().try_fold(4usize, |bytes, size| bytes.checked_mul(*size)).unwrap_or(usize::MAX);
        let values = self.take(bytes)?.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(SavedTensor { shape, values })
    }

    fn tensors(&mut self) -> Result<Vec<SavedTensor>, SamplingError> {
        (0..self.byte()?).map(|_| self.tensor()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(seed: f32) -> SavedTensor {
        let values = (0..12).map(|i| (seed + i as f32).sin() / 3.0).collect();
        SavedTensor { shape: vec![1, 3, 2, 2], values }
    }

    fn histories() -> Vec<History> {
        vec![
            History::None,
            History::Heun { sample: tensor(1.0), derivative: tensor(2.0) },
            History::Multistep { originals: Vec::new() },
            History::Multistep { originals: vec![tensor(3.0), tensor(4.0), tensor(5.0)] },
            History::Unipc { outputs: Vec::new(), last_sample: None, last_order: 0 },
            History::Unipc { outputs: vec![tensor(6.0)], last_sample: Some(tensor(7.0)), last_order: 1 },
        ]
    }

    fn checkpoint(history: History) -> Checkpoint {
        let mut generator = Generator::new(9);
        // An odd number of scalar draws leaves the second half of a pair behind.
        generator.randn(700);
        generator.randn(3);
        let latents = SavedTensor { shape: vec![1, 2, 1, 3], values: vec![f32::NAN, -0.0, 1e-40, 3.5, f32::MAX, -1.0] };
        Checkpoint { sampler: SamplerKind::Unipc, done: 3, total: 20, latents, history, generator }
    }

    #[test]
    fn every_memory_reads_back_bit_for_bit() {
        for history in histories() {
            let written = checkpoint(history);
            let bytes = written.to_bytes();
            let read = Checkpoint::from_bytes(&bytes).unwrap();
            // NaN is not equal to itself: the bytes are.
            assert_eq!(read.to_bytes(), bytes);
            assert_eq!((read.history, read.generator), (written.history, written.generator));
            assert_eq!((read.sampler, read.done, read.total), (SamplerKind::Unipc, 3, 20));
        }
    }

    #[test]
    fn bytes_that_are_cut_or_prolonged_are_refused() {
        for history in histories() {
            let bytes = checkpoint(history).to_bytes();
            for length in (0..bytes.len()).step_by(7).chain([bytes.len() - 1]) {
                assert!(Checkpoint::from_bytes(&bytes[..length]).is_err(), "cut to {length}");
            }
            assert!(Checkpoint::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
        }
        assert!(Checkpoint::from_bytes(&[9; 4000]).is_err());
    }
}

//! The header of a safetensors file: eight bytes of length, then JSON from tensor names to dtype, shape and byte range.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};

use super::WeightsError;

/// Headers above this many bytes are refused; the format's reference reader has the same limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header, which hold its length.
const LENGTH_BYTES: usize = 8;

/// Where one tensor lies and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderEntry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Bytes of the file.
    pub(super) bytes: Range<usize>,
}

/// What one tensor's entry claims, unchecked.
#[derive(Deserialize)]
struct Claim {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's object in order of appearance, so that a repeated name is seen.
struct Claims(Vec<(String, serde_json::Value)>);

impl<'de> Deserialize<'de> for Claims {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Claims;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Claims, A::Error> {
                let mut out = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    out.push(entry);
                }
                Ok(Claims(out))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

/// The bytes that hold the header's JSON.
fn header_range(path: &Path, file: &[u8]) -> Result<Range<usize>, WeightsError> {
    let path = path.to_path_buf();
    if file.starts_with(b"PK\x03\x04") || file.starts_with(b"\x80\x02") || file.starts_with(b"\x80\x04") {
        return Err(WeightsError::Pickle { path });
    }
    if file.starts_with(b"version https://git-lfs") {
        return Err(WeightsError::LfsPointer { path });
    }
    let Some(length) = file.first_chunk::<LENGTH_BYTES>() else {
        let reason = format!("it has {} bytes, and the length of a header alone takes 8", file.len());
        return Err(WeightsError::NotSafetensors { path, reason });
    };
    let header = u64::from_le_bytes(*length);
    let rest = (file.len() - LENGTH_BYTES) as u64;
    if header > rest {
        // Text read as a length gives an absurd number: then it was never this format.
        if length.iter().all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace()) {
            let reason = format!("it starts with the text {:?}", String::from_utf8_lossy(length));
            return Err(WeightsError::NotSafetensors { path, reason });
        }
        return Err(WeightsError::HeaderTooLong { path, header, file: file.len() as u64 });
    }
    if header > MAX_HEADER_BYTES {
        return Err(WeightsError::HeaderTooLarge { path, header, limit: MAX_HEADER_BYTES });
    }
    let range = LENGTH_BYTES..LENGTH_BYTES + header as usize;
    if file.get(range.start) != Some(&b'{') {
        return Err(WeightsError::NotSafetensors { path, reason: "its header does not start with '{'".into() });
    }
    Ok(range)
}

/// One tensor's entry, checked against its own shape and the data's length.
fn check_claim(
    path: &Path,
    tensor: &str,
    claim: Claim,
    data_start: usize,
    file_len: usize,
) -> Result<HeaderEntry, WeightsError> {
    let bad = |reason: String| WeightsError::BadRange { path: path.to_path_buf(), tensor: tensor.into(), reason };
    let dtype: Dtype = serde_json::from_value(claim.dtype.clone().into()).map_err(|_| {
        WeightsError::UnsupportedDtype { path: path.to_path_buf(), tensor: tensor.into(), dtype: claim.dtype.clone() }
    })?;
    let bits = claim
        .shape
        .iter()
        .try_fold(dtype.bitsize() as u64, |product, &axis| product.checked_mul(axis))
        .ok_or_else(|| bad(format!("the shape {:?} overflows", claim.shape)))?;
    let (begin, end) = claim.data_offsets;
    if begin > end {
        return Err(bad(format!("its range {begin}..{end} runs backwards")));
    }
    if end > (file_len - data_start) as u64 {
        return Err(WeightsError::Truncated {
            path: path.to_path_buf(),
            tensor: tensor.into(),
            needed: end.saturating_add(data_start as u64),
            file: file_len as u64,
        });
    }
    if bits % 8 != 0 || end - begin != bits / 8 {
        let (shape, found) = (&claim.shape, end - begin);
        return Err(bad(format!("{:?} of shape {shape:?} takes {} bytes, but its range has {found}", dtype, bits / 8)));
    }
    Ok(HeaderEntry {
        dtype,
        // Every axis is bounded by the file's length unless another axis is zero.
        shape: claim.shape.iter().map(|&axis| usize::try_from(axis).unwrap_or(usize::MAX)).collect(),
        bytes: data_start + begin as usize..data_start + end as usize,
    })
}

/// Every tensor of `file`, whose ranges are checked to follow one another without overlap, hole or rest.
pub(super) fn parse(path: &Path, file: &[u8]) -> Result<BTreeMap<String, HeaderEntry>, WeightsError> {
    let range = header_range(path, file)?;
    let data_start = range.end;
    let claims: Claims = serde_json::from_slice(&file[range])
        .map_err(|e| WeightsError::BadHeader { path: path.to_path_buf(), reason: e.to_string() })?;
    let mut entries = BTreeMap::new();
    for (tensor, value) in claims.0 {
        if tensor == "__metadata__" {
            continue;
        }
        let claim: Claim = serde_json::from_value(value).map_err(|e| WeightsError::BadHeader {
            path: path.to_path_buf(),
            reason: format!("tensor {tensor}: {e}"),
        })?;
        let entry = check_claim(path, &tensor, claim, data_start, file.len())?;
        if entries.contains_key(&tensor) {
            return Err(WeightsError::Duplicate { path: path.to_path_buf(), tensor });
        }
        entries.insert(tensor, entry);
    }
    check_tiling(path, &entries, data_start, file.len())?;
    Ok(entries)
}

/// Checks that the ranges tile the file from `data_start` to its end.
fn check_tiling(
    path: &Path,
    entries: &BTreeMap<String, HeaderEntry>,
    data_start: usize,
    file_len: usize,
) -> Result<(), WeightsError> {
    let mut order: Vec<_> = entries.iter().collect();
    order.sort_by_key(|(name, entry)| (entry.bytes.start, entry.bytes.end, *name));
    let mut at = data_start;
    let mut before = "the header";
    for (name, entry) in order {
        if entry.bytes.start != at {
            let how = if entry.bytes.start < at { "overlaps" } else { "leaves a hole after" };
            let reason = format!("its range {:?} {how} {before}, which ends at {at}", entry.bytes);
            return Err(WeightsError::BadRange { path: path.to_path_buf(), tensor: name.clone(), reason });
        }
        at = entry.bytes.end;
        before = name;
    }
    if at != file_len {
        return Err(WeightsError::TrailingBytes { path: path.to_path_buf(), extra: (file_len - at) as u64 });
    }
    Ok(())
}

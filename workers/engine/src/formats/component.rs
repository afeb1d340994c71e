//! Which files of a component's folder hold its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{SafetensorsFile, WeightsError};

/// Name endings of pickled weights.
const PICKLES: [&str; 4] = [".bin", ".ckpt", ".pt", ".pth"];

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens the weights in `folder`: `{stem}.safetensors`, else shards named by `{stem}.safetensors.index.json`, else a
/// variant of either (`{stem}.fp16.safetensors`, `{stem}.safetensors.index.fp16.json`), else the only safetensors file
/// there is. `stem` is `model` for transformers and `diffusion_pytorch_model` for diffusers.
///
/// # Errors
/// If nothing usable is there, or what is there lies; see [`WeightsError`].
pub fn component_files(folder: &Path, stem: &str) -> Result<Vec<SafetensorsFile>, WeightsError> {
    let names = weight_files_in(folder)?;
    let expected = format!("{stem}.safetensors");
    if names.contains(&expected) {
        return Ok(vec![SafetensorsFile::open(&folder.join(&expected))?]);
    }
    let index = format!("{expected}.index.json");
    if names.contains(&index) {
        return open_shards(&folder.join(index));
    }
    let variant = |name: &&String| name.starts_with(&format!("{stem}.")) && !is_shard(name);
    let singles: Vec<_> = names.iter().filter(variant).filter(|n| n.ends_with(".safetensors")).collect();
    let indexes: Vec<_> = names.iter().filter(variant).filter(|n| n.ends_with(".json")).collect();
    match (singles.as_slice(), indexes.as_slice()) {
        ([one], []) => return Ok(vec![SafetensorsFile::open(&folder.join(one))?]),
        ([], [one]) => return open_shards(&folder.join(one)),
        // A full set and its shards, or several precisions: fp16 is the one that people mean.
        _ => {
            if let Some(fp16) = singles.iter().find(|n| n.contains(".fp16.")) {
                return Ok(vec![SafetensorsFile::open(&folder.join(fp16))?]);
            }
        }
    }
    let any: Vec<String> = names.iter().filter(|n| n.ends_with(".safetensors")).cloned().collect();
    match any.as_slice() {
        [one] => Ok(vec![SafetensorsFile::open(&folder.join(one))?]),
        [] => match names.iter().find(|name| PICKLES.iter().any(|p| name.ends_with(p))) {
            Some(pickle) => Err(WeightsError::Pickle { path: folder.join(pickle) }),
            None => Err(WeightsError::NoWeights { path: folder.to_path_buf(), expected }),
        },
        _ => Err(WeightsError::Ambiguous { path: folder.to_path_buf(), expected, found: any }),
    }
}

/// Names of weight files, pickles and indexes in `folder`.
///
/// # Errors
/// If the folder cannot be read.
pub fn weight_files_in(folder: &Path) -> Result<BTreeSet<String>, WeightsError> {
    let io = |source| WeightsError::Io { path: folder.to_path_buf(), source };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        let index = name.contains(".safetensors.index.") && name.ends_with(".json");
        if index || name.ends_with(".safetensors") || PICKLES.iter().any(|p| name.ends_with(p)) {
            names.insert(name);
        }
    }
    Ok(names)
}

/// Whether `name` is one of several shards, as in `model-00001-of-00002.safetensors`.
fn is_shard(name: &str) -> bool {
    name.strip_suffix(".safetensors").is_some_and(|n| n.contains("-of-"))
}

/// Opens every shard that `index` names and checks that each has the tensors that the index says.
fn open_shards(index: &Path) -> Result<Vec<SafetensorsFile>, WeightsError> {
    let bad = |reason: String| WeightsError::BadIndex { path: index.to_path_buf(), reason };
    let text = std::fs::read(index).map_err(|source| WeightsError::Io { path: index.to_path_buf(), source })?;
    let parsed: Index = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    let folder = index.parent().map(PathBuf::from).unwrap_or_default();
    let shards: BTreeSet<&String> = parsed.weight_map.values().collect();
    if shards.is_empty() {
        return Err(bad("it names no shard".into()));
    }
    let mut files = BTreeMap::new();
    for shard in shards {
        if Path::new(shard).file_name().is_none_or(|name| name != shard.as_str()) {
            return Err(bad(format!("the shard {shard:?} is not a plain file name")));
        }
        let path = folder.join(shard);
        if !path.exists() {
            return Err(WeightsError::MissingShard { index: index.to_path_buf(), shard: shard.clone() });
        }
        files.insert(shard.clone(), SafetensorsFile::open(&path)?);
    }
    for (tensor, shard) in &parsed.weight_map {
        if files[shard].tensor(tensor).is_none() {
            let (tensor, shard) = (tensor.clone(), shard.clone());
            return Err(WeightsError::IndexMismatch { index: index.to_path_buf(), tensor, shard });
        }
    }
    Ok(files.into_values().collect())
}

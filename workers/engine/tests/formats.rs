//! Weight files that lie, and the layouts in which honest ones come.

use std::path::Path;

use anyhow::Result;
use safetensors::Dtype;
use sd_engine::formats::{SafetensorsFile, WeightSet, WeightsError, component_files, scan_non_finite};
use sd_engine::models::Unet;
use sd_engine::testkit::{Layout, NewTensor, seeded, write_safetensors, write_weights};

/// A file of this header text and this many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(std::iter::repeat_n(0u8, data));
    bytes
}

fn open(bytes: impl AsRef<[u8]>) -> Result<Result<SafetensorsFile, WeightsError>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, bytes)?;
    Ok(SafetensorsFile::open(&path))
}

/// Checks the kind of error, and that it names the file and says these words.
macro_rules! refused {
    ($bytes:expr, $kind:pat, $($word:expr),*) => {{
        let error = open(&$bytes)?.expect_err("the file should be refused");
        let text = error.to_string();
        assert!(matches!(error, $kind), "{error:?}");
        $(assert!(text.contains($word), "{text:?} lacks {:?}", $word);)*
        assert!(text.contains("m.safetensors"), "{text:?} does not name the file");
    }};
}

const ONE: &str = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;

#[test]
fn an_honest_file_is_read() -> Result<()> {
    let honest = open(file(ONE, 24))?.expect("it is honest");
    let tensor = honest.tensor("a").expect("it has one tensor");
    assert_eq!((tensor.shape, tensor.bytes.len(), tensor.dtype), (&[2usize, 3][..], 24, Dtype::F32));
    assert_eq!(honest.header_bytes().len() + honest.data_bytes().len(), honest.len() as usize);
    let spaced = r#"  {"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#;
    refused!(file(spaced, 4), WeightsError::NotSafetensors { .. }, "'{'");
    let metadata = r#"{"__metadata__":{"format":"pt"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   "#;
    assert_eq!(open(file(metadata, 4))?.expect("honest too").tensors().count(), 1);
    Ok(())
}

#[test]
fn files_that_are_something_else_are_named() -> Result<()> {
    refused!([0u8; 0], WeightsError::Empty { .. }, "empty", "again");
    refused!(b"abc", WeightsError::NotSafetensors { .. }, "3 bytes");
    refused!(b"{\"error\": \"not found\"}", WeightsError::NotSafetensors { .. }, "error");
    refused!(b"<!DOCTYPE html><html>", WeightsError::NotSafetensors { .. }, "<!DOCTYP");
    refused!(b"PK\x03\x04rest of an archive", WeightsError::Pickle { .. }, "pickle", "safe_serialization");
    refused!(b"\x80\x02}q\x00(X\x0a\x00\x00\x00", WeightsError::Pickle { .. }, "pickle");
    refused!(b"version https://git-lfs.github.com/spec/v1\n", WeightsError::LfsPointer { .. }, "git lfs pull");
    let folder = tempfile::tempdir()?;
    assert!(matches!(SafetensorsFile::open(folder.path()), Err(WeightsError::NotAFile { .. })));
    let missing = SafetensorsFile::open(&folder.path().join("none.safetensors"));
    assert!(matches!(missing, Err(WeightsError::Io { .. })));
    Ok(())
}

#[test]
fn headers_that_lie_about_length_are_refused() -> Result<()> {
    let mut long = file(ONE, 24);
    long[..8].copy_from_slice(&1_000_000u64.to_le_bytes());
    refused!(long, WeightsError::HeaderTooLong { header: 1_000_000, .. }, "1000000", "truncated");
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refused!(long, WeightsError::HeaderTooLong { .. }, "18446744073709551615");
    // A sparse file that is longer than any header may be.
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("m.safetensors");
    std::fs::write(&path, 200_000_000u64.to_le_bytes())?;
    std::fs::OpenOptions::new().write(true).open(&path)?.set_len(300_000_000)?;
    assert!(matches!(SafetensorsFile::open(&path), Err(WeightsError::HeaderTooLarge { header: 200_000_000, .. })));
    Ok(())
}

#[test]
fn headers_that_lie_about_tensors_are_refused() -> Result<()> {
    let tensor = |fields: &str| format!(r#"{{"a":{{{fields}}}}}"#);
    let whole = file(ONE, 24);
    refused!(whole[..whole.len() - 1], WeightsError::Truncated { .. }, "truncated", "a ends at");
    refused!(file(ONE, 25), WeightsError::TrailingBytes { extra: 1, .. }, "1 bytes");
    refused!(file("{\"a\":", 0), WeightsError::BadHeader { .. }, "header");
    refused!(file("{\"a\": 3}", 0), WeightsError::BadHeader { .. }, "tensor a");
    refused!(file("[1,2]", 0), WeightsError::NotSafetensors { .. }, "'{'");
    let negative = tensor(r#""dtype":"F32","shape":[-2],"data_offsets":[0,8]"#);
    refused!(file(&negative, 8), WeightsError::BadHeader { .. }, "tensor a");
    let twice = format!("{},{}", &ONE[..ONE.len() - 1], &ONE[1..]);
    refused!(file(&twice, 24), WeightsError::Duplicate { .. }, "a appears twice");
    let backwards = tensor(r#""dtype":"F32","shape":[1],"data_offsets":[8,4]"#);
    refused!(file(&backwards, 8), WeightsError::BadRange { .. }, "backwards");
    let size = tensor(r#""dtype":"F16","shape":[2,3],"data_offsets":[0,24]"#);
    refused!(file(&size, 24), WeightsError::BadRange { .. }, "12 bytes", "24");
    let huge = tensor(r#""dtype":"F32","shape":[4294967296,4294967296,16],"data_offsets":[0,24]"#);
    refused!(file(&huge, 24), WeightsError::BadRange { .. }, "overflows");
    let far = tensor(r#""dtype":"F32","shape":[6],"data_offsets":[18446744073709551591,18446744073709551615]"#);
    refused!(file(&far, 24), WeightsError::Truncated { .. }, "truncated");
    let strange = tensor(r#""dtype":"F31","shape":[6],"data_offsets":[0,24]"#);
    refused!(file(&strange, 24), WeightsError::UnsupportedDtype { .. }, "F31", "BF16");
    let two = |second: &str| {
        format!(r#"{},"b":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#, &ONE[..ONE.len() - 1])
    };
    refused!(file(&two("[20,28]"), 28), WeightsError::BadRange { .. }, "b", "overlaps a");
    refused!(file(&two("[28,36]"), 36), WeightsError::BadRange { .. }, "b", "hole after a");
    refused!(file(&two("[0,8]"), 24), WeightsError::BadRange { .. }, "overlaps");
    Ok(())
}

#[test]
fn every_truncation_and_every_flipped_byte_of_a_header_is_survived() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("m.safetensors");
    write_safetensors(&path, &[NewTensor::new("a.weight", &[3, 4]), NewTensor::new("a.bias", &[3])], Dtype::F32)?;
    let whole = std::fs::read(&path)?;
    for end in 0..whole.len() {
        assert!(open(&whole[..end])?.is_err(), "cut at {end}");
    }
    let header = SafetensorsFile::open(&path)?.header_bytes().len();
    for at in 0..header {
        for bit in 0..8 {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            // Some are other honest files (a letter of a name); none may panic, and what opens can be read.
            if let Ok(file) = open(&flipped)? {
                assert!(file.tensors().all(|t| t.bytes.len() <= whole.len()));
            }
        }
    }
    Ok(())
}

fn tensors() -> Vec<NewTensor> {
    (0..5).map(|i| NewTensor::new(format!("layer.{i}.weight"), &[2, 3])).collect()
}

/// Opens `folder` as a component whose names need no change.
fn component(folder: &Path) -> Result<WeightSet, sd_engine::models::ModelError> {
    Unet::weights(folder)
}

#[test]
fn every_layout_gives_the_same_tensors() -> Result<()> {
    for layout in [Layout::Single(Dtype::F32), Layout::Single(Dtype::BF16), Layout::Fp16Variant, Layout::Shards(2)] {
        let folder = tempfile::tempdir()?;
        write_weights(folder.path(), "diffusion_pytorch_model", &tensors(), layout)?;
        let weights = component(folder.path())?;
        assert_eq!(weights.len(), 5, "{layout:?}");
        let found = weights.tensor_f32("layer.3.weight", &[2, 3])?.flatten_all()?.to_vec1::<f32>()?;
        for (found, exact) in found.iter().zip(seeded("layer.3.weight", &[2, 3])) {
            assert!((found - exact).abs() <= exact.abs() / 128.0, "{layout:?}: {found} for {exact}");
        }
    }
    Ok(())
}

#[test]
fn the_full_file_is_preferred_then_shards_then_variants_then_the_only_one() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path();
    let first = |path: &Path| -> Result<String> {
        let files = component_files(path, "model")?;
        Ok(files[0].path().file_name().unwrap_or_default().to_string_lossy().into_owned())
    };
    write_safetensors(&path.join("other.safetensors"), &tensors(), Dtype::F32)?;
    assert_eq!(first(path)?, "other.safetensors");
    write_safetensors(&path.join("another.safetensors"), &tensors(), Dtype::F32)?;
    let error = component_files(path, "model").expect_err("two files of other names");
    assert!(matches!(&error, WeightsError::Ambiguous { found, .. } if found.len() == 2), "{error:?}");
    write_weights(path, "model", &tensors(), Layout::Fp16Variant)?;
    assert_eq!(first(path)?, "model.fp16.safetensors");
    write_weights(path, "model", &tensors(), Layout::Shards(2))?;
    assert_eq!(first(path)?, "model-00001-of-00002.safetensors");
    write_weights(path, "model", &tensors(), Layout::Single(Dtype::F32))?;
    assert_eq!(first(path)?, "model.safetensors");
    Ok(())
}

#[test]
fn variants_of_indexes_are_found() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path();
    write_weights(path, "model", &tensors(), Layout::Shards(2))?;
    std::fs::rename(path.join("model.safetensors.index.json"), path.join("model.safetensors.index.fp16.json"))?;
    assert_eq!(component_files(path, "model")?.len(), 2);
    Ok(())
}

#[test]
fn incomplete_sets_are_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path();
    let error = component_files(path, "model").expect_err("an empty folder");
    assert!(matches!(error, WeightsError::NoWeights { .. }) && error.to_string().contains("model.safetensors"));
    std::fs::write(path.join("pytorch_model.bin"), b"PK\x03\x04")?;
    let error = component_files(path, "model").expect_err("pickles alone");
    assert!(matches!(error, WeightsError::Pickle { .. }) && error.to_string().contains("convert"), "{error}");

    write_weights(path, "model", &tensors(), Layout::Shards(2))?;
    let shard = path.join("model-00002-of-00002.safetensors");
    let index = path.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index)?;
    std::fs::write(&index, text.replace("layer.4.weight", "layer.9.weight"))?;
    let error = component_files(path, "model").expect_err("a tensor that no shard has");
    assert!(matches!(&error, WeightsError::IndexMismatch { tensor, .. } if tensor == "layer.9.weight"), "{error:?}");
    std::fs::write(&index, text.replace("model-00002", "../model-00002"))?;
    assert!(matches!(component_files(path, "model"), Err(WeightsError::BadIndex { .. })), "paths are no names");
    std::fs::write(&index, "{}")?;
    assert!(matches!(component_files(path, "model"), Err(WeightsError::BadIndex { .. })));
    std::fs::write(&index, &text)?;
    std::fs::remove_file(&shard)?;
    let error = component_files(path, "model").expect_err("a missing shard");
    assert!(matches!(&error, WeightsError::MissingShard { shard, .. } if shard.contains("00002")), "{error:?}");
    Ok(())
}

#[test]
fn tensors_that_do_not_fit_are_named_with_both_shapes() -> Result<()> {
    let folder = tempfile::tempdir()?;
    write_weights(folder.path(), "diffusion_pytorch_model", &tensors(), Layout::Single(Dtype::F32))?;
    let weights = component(folder.path())?;
    let text = weights.check("layer.7.weight", &[&[2, 3]]).expect_err("no such tensor").to_string();
    assert!(text.contains("layer.7.weight") && text.contains("[2, 3]") && text.contains("missing"), "{text}");
    let text = weights.check("layer.1.weight", &[&[3, 2]]).expect_err("another shape").to_string();
    assert!(text.contains("[2, 3]") && text.contains("[3, 2]") && text.contains(".safetensors"), "{text}");
    assert!(weights.check("layer.1.weight", &[&[9], &[2, 3]]).is_ok(), "any of the shapes will do");
    Ok(())
}

#[test]
fn numbers_that_are_not_finite_are_found_by_name() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for (dtype, nan) in
        [(Dtype::F32, vec![0, 0, 0xc0, 0x7f]), (Dtype::F16, vec![0, 0x7c]), (Dtype::BF16, vec![0xc0, 0xff])]
    {
        write_weights(folder.path(), "diffusion_pytorch_model", &tensors(), Layout::Single(dtype))?;
        assert_eq!(scan_non_finite(&component(folder.path())?), [], "{dtype:?}");
        let path = folder.path().join("diffusion_pytorch_model.safetensors");
        let mut bytes = std::fs::read(&path)?;
        let end = bytes.len() - nan.len();
        bytes[end..].copy_from_slice(&nan);
        std::fs::write(&path, bytes)?;
        let found = scan_non_finite(&component(folder.path())?);
        assert_eq!(found.len(), 1, "{dtype:?}");
        assert_eq!((found[0].tensor.as_str(), found[0].count), ("layer.4.weight", 1));
    }
    Ok(())
}

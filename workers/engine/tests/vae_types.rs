//! The autoencoder streamed, and in short types.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, TilePlan, VaeHalf};
use sd_engine::ops::ComputeType;
use sd_engine::pipeline::{self, PipelineError, Unwatched};
use sd_engine::residency::{LoadEvent, SegmentEvent, Uninterrupted};
use sd_engine::testkit::{DefaultModel, Fixture, compare, noise, scale_weights};

const TILES: TilePlan = TilePlan { tile: 48, overlap: 0, batch: 2 };

fn proceed(_: &LoadEvent<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn load(folder: &Path, compute: ComputeType) -> Result<AutoencoderKl> {
    let mut vae = AutoencoderKl::open(folder)?;
    vae.compute_in(compute);
    for half in [VaeHalf::Encoder, VaeHalf::Decoder] {
        vae.residency(half).set_limit(u64::MAX);
        vae.residency(half).load(&mut proceed)?;
    }
    Ok(vae)
}

fn default_model(compute: ComputeType) -> Result<AutoencoderKl> {
    load(&DefaultModel::folder().join("vae"), compute)
}

fn values(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.flatten_all()?.to_vec1()?)
}

#[test]
fn a_streamed_run_gives_the_same_bytes_and_binds_each_layer_once() -> Result<()> {
    let resident = default_model(ComputeType::F32)?;
    let streamed = AutoencoderKl::open(&DefaultModel::folder().join("vae"))?;
    let z = noise("z", &[1, 4, 9, 14])?;
    let image = resident.decode(&z, &mut Uninterrupted)?;
    for plan in [TilePlan::WHOLE, TILES] {
        let mut bound = Vec::new();
        let mut observer = |event: &SegmentEvent<'_>| {
            assert!(!event.resident, "{event:?}");
            if event.part == 0 && bound.last() != Some(&event.index) {
                bound.push(event.index);
            }
            ControlFlow::Continue(())
        };
        let found = streamed.decode_in(&z, &plan, &mut observer)?;
        let segments = streamed.residency(VaeHalf::Decoder).segments().len();
        assert_eq!(bound, (0..segments).collect::<Vec<_>>(), "each segment once, in order");
        assert_eq!(values(&found)?, values(&resident.decode_in(&z, &plan, &mut Uninterrupted)?)?, "{plan:?}");
        let (found, _) = streamed.encode_in(&image, &plan, &mut Uninterrupted)?;
        assert_eq!(values(&found)?, values(&resident.encode_in(&image, &plan, &mut Uninterrupted)?.0)?, "{plan:?}");
        assert_eq!(streamed.bytes(), 0, "nothing stays");
    }
    Ok(())
}

#[test]
fn a_short_type_gives_its_own_numbers_near_those_of_f32() -> Result<()> {
    let z = noise("z", &[1, 4, 9, 14])?;
    let exact = default_model(ComputeType::F32)?;
    let image = exact.decode(&z, &mut Uninterrupted)?;
    let (mean, _) = exact.encode(&image, &mut Uninterrupted)?;
    for (compute, tolerance) in [(ComputeType::F16, 0.02), (ComputeType::Bf16, 0.1)] {
        let vae = default_model(compute)?;
        let found = vae.decode(&z, &mut Uninterrupted)?;
        let (found_mean, _) = vae.encode(&image, &mut Uninterrupted)?;
        for (what, found, expected) in [("decode", &found, &image), ("encode", &found_mean, &mean)] {
            let mut rounded = values(found)?;
            compute.round(&mut rounded);
            assert_eq!(rounded, values(found)?, "{what}: every number is one of {}", compute.name());
            let difference = compare(found, expected)?;
            println!("{what} in {}: {difference:.2e}", compute.name());
            assert!(difference > 1e-5, "{what} in {} is computed in f32", compute.name());
            assert!(difference <= tolerance, "{what} in {} differs by {difference:.2e}", compute.name());
        }
        // Statistics that differ in their last bits may round a number here and there to its neighbour.
        let tiled = compare(&vae.decode_in(&z, &TILES, &mut Uninterrupted)?, &found)?;
        assert!(tiled <= tolerance, "in tiles, {} differs by {tiled:.2e}", compute.name());
    }
    Ok(())
}

#[test]
fn changing_the_type_and_back_gives_the_same_bytes() -> Result<()> {
    let z = noise("z", &[1, 4, 4, 5])?;
    let mut vae = default_model(ComputeType::F32)?;
    let first = values(&vae.decode(&z, &mut Uninterrupted)?)?;
    vae.compute_in(ComputeType::Bf16);
    assert_eq!(vae.bytes(), 0, "weights of the former type are gone");
    let short = values(&vae.decode(&z, &mut Uninterrupted)?)?;
    assert_ne!(short, first);
    vae.compute_in(ComputeType::F32);
    assert_eq!(values(&vae.decode(&z, &mut Uninterrupted)?)?, first);
    Ok(())
}

/// A model whose first feature maps are beyond 65,504: f16 has no such numbers, bf16 and f32 do.
#[test]
fn f16_overflows_where_its_range_ends_and_the_others_do_not() -> Result<()> {
    let folder = tempfile::tempdir()?;
    Fixture::open("sd15")?.write_model(folder.path())?;
    let vae = folder.path().join("vae");
    scale_weights(&vae.join("diffusion_pytorch_model.safetensors"), |name| {
        ["decoder.conv_in.weight", "encoder.conv_in.weight"].contains(&name).then_some(50_000.0)
    })?;
    let z = noise("z", &[1, 4, 6, 7])?;
    let pixels = noise("pixels", &[1, 3, 48, 56])?;
    for (compute, finite) in [(ComputeType::F16, false), (ComputeType::Bf16, true), (ComputeType::F32, true)] {
        let model = load(&vae, compute)?;
        for plan in [TilePlan::WHOLE, TilePlan { tile: 32, overlap: 0, batch: 1 }] {
            let image = model.decode_in(&z, &plan, &mut Uninterrupted)?;
            let (mean, _) = model.encode_in(&pixels, &plan, &mut Uninterrupted)?;
            for found in [image, mean] {
                let found = values(&found)?.iter().all(|v| v.is_finite());
                assert_eq!(found, finite, "{} in {plan:?}", compute.name());
            }
            let pixels = pipeline::decode(&model, &model.to_diffusion(&z)?, &plan, &mut Unwatched);
            match (pixels, finite) {
                (Ok(pixels), true) => assert_eq!(pixels.len(), 3 * 48 * 56),
                (Err(PipelineError::NonFinite { .. }), false) => {}
                (other, _) => panic!("{} in {plan:?}: {other:?}", compute.name()),
            }
        }
    }
    Ok(())
}

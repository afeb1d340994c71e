//! The autoencoder in tiles, against the whole.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, AutoencoderKlConfig, TilePlan, VaeHalf};
use sd_engine::ops;
use sd_engine::residency::{LoadEvent, Uninterrupted};
use sd_engine::testkit::{DefaultModel, Layouts, Network, noise};

const HALVES: [VaeHalf; 2] = [VaeHalf::Encoder, VaeHalf::Decoder];

fn proceed(_: &LoadEvent<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn load(folder: &Path) -> Result<AutoencoderKl> {
    Ok(AutoencoderKl::load(folder, &HALVES, &mut proceed)?)
}

fn default_model() -> Result<AutoencoderKl> {
    load(&DefaultModel::folder().join("vae"))
}

fn tiles(tile: usize, overlap: usize) -> TilePlan {
    TilePlan { tile, overlap, batch: 1 }
}

fn values(x: &Tensor) -> Result<Vec<f32>> {
    Ok(x.flatten_all()?.to_vec1()?)
}

/// Peak signal to noise in dB, the range of `expected` for a signal.
fn psnr(found: &Tensor, expected: &Tensor) -> Result<f64> {
    assert_eq!(found.dims(), expected.dims());
    let (found, expected) = (values(found)?, values(expected)?);
    let low = expected.iter().fold(f32::INFINITY, |a, &b| a.min(b));
    let high = expected.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let squares: f64 = found.iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let error = squares / found.len() as f64;
    Ok(10.0 * (f64::from(high - low).powi(2) / error.max(1e-30)).log10())
}

/// Latents as a denoiser leaves them: smooth, of unit variance, with some detail.
fn latents(vae: &AutoencoderKl, h: usize, w: usize) -> Result<Tensor> {
    let channels = vae.config().latent_channels;
    let detail = values(&noise("z", &[1, channels, h, w])?)?;
    let value = |i: usize| {
        let (c, y, x) = (i / (h * w), i / w % h, i % w);
        let wave = (y as f32 * 0.31 + c as f32).sin() + (x as f32 * 0.23 - c as f32 * 2.0).cos();
        wave * 0.8 + detail[i] * 0.3
    };
    let numbers = (0..channels * h * w).map(value).collect();
    Ok(Tensor::from_vec(numbers, (1, channels, h, w), &candle_core::Device::Cpu)?)
}

#[test]
fn a_decode_in_tiles_is_the_whole_one_to_rounding() -> Result<()> {
    let vae = default_model()?;
    for (h, w) in [(16, 16), (13, 9), (1, 21), (11, 1)] {
        let z = latents(&vae, h, w)?;
        let whole = vae.decode(&z, &mut Uninterrupted)?;
        for plan in [tiles(64, 0), tiles(64, 32), tiles(48, 5), tiles(16, 0)] {
            let tiled = vae.decode_in(&z, &plan, &mut Uninterrupted)?;
            let quality = psnr(&tiled, &whole)?;
            println!("{h}×{w} latents in {plan:?}: {quality:.1} dB");
            assert!(quality >= 100.0, "{h}×{w} latents in {plan:?}: {quality:.1} dB");
        }
        let same = vae.decode_in(&z, &tiles(8 * h.max(w), 0), &mut Uninterrupted)?;
        assert_eq!(values(&same)?, values(&whole)?, "a tile as large as the picture is the whole");
    }
    Ok(())
}

#[test]
fn an_encode_in_tiles_is_the_whole_one_to_rounding() -> Result<()> {
    let vae = default_model()?;
    for (h, w) in [(128, 128), (104, 72), (8, 168), (88, 8)] {
        let image = vae.decode(&latents(&vae, h / 8, w / 8)?, &mut Uninterrupted)?;
        let (mean, logvar) = vae.encode(&image, &mut Uninterrupted)?;
        for plan in [tiles(64, 0), tiles(48, 24), tiles(16, 0)] {
            let (tiled, tiled_logvar) = vae.encode_in(&image, &plan, &mut Uninterrupted)?;
            let quality = psnr(&tiled, &mean)?.min(psnr(&tiled_logvar, &logvar)?);
            println!("{h}×{w} pixels in {plan:?}: {quality:.1} dB");
            assert!(quality >= 100.0, "{h}×{w} pixels in {plan:?}: {quality:.1} dB");
        }
    }
    Ok(())
}

#[test]
fn every_layout_gives_in_tiles_what_it_gives_whole() -> Result<()> {
    let mut count = 0;
    for case in Layouts::open()?.cases {
        let Network::Vae(run) = &case.network else { continue };
        count += 1;
        let folder = tempfile::tempdir()?;
        case.write_config(folder.path())?;
        let config = AutoencoderKlConfig::read(&folder.path().join("config.json"))?;
        let declared: Vec<_> = HALVES.iter().flat_map(|&half| AutoencoderKl::declarations(&config, half)).collect();
        case.write_weights(folder.path(), "diffusion_pytorch_model", &declared)?;
        let vae = load(folder.path())?;
        let factor = config.factor();
        let (h, w) = (run.height + 6, run.width + 9);
        let z = noise("z", &[run.batch, config.latent_channels, h, w])?;
        let pixels = noise("pixels", &[run.batch, 3, h * factor, w * factor])?;
        let decoded = vae.decode(&z, &mut Uninterrupted)?;
        let (mean, _) = vae.encode(&pixels, &mut Uninterrupted)?;
        for plan in [tiles(8, 0), tiles(8, 4), tiles(4, 0)] {
            let tiled = vae.decode_in(&z, &plan, &mut Uninterrupted)?;
            let (tiled_mean, _) = vae.encode_in(&pixels, &plan, &mut Uninterrupted)?;
            let quality = psnr(&tiled, &decoded)?.min(psnr(&tiled_mean, &mean)?);
            println!("{} in {plan:?}: {quality:.1} dB", case.name);
            assert!(quality >= 100.0, "{} in {plan:?}: {quality:.1} dB", case.name);
        }
    }
    assert!(count >= 4, "{count} layouts of autoencoders");
    Ok(())
}

#[test]
fn a_batch_of_tiles_and_the_number_of_threads_change_no_byte() -> Result<()> {
    let vae = default_model()?;
    let z = latents(&vae, 9, 22)?;
    let image = vae.decode(&z, &mut Uninterrupted)?;
    let both = |batch| -> Result<_> {
        let plan = TilePlan { batch, ..tiles(48, 16) };
        let decoded = values(&vae.decode_in(&z, &plan, &mut Uninterrupted)?)?;
        Ok((decoded, values(&vae.encode_in(&image, &plan, &mut Uninterrupted)?.0)?))
    };
    let one = both(1)?;
    for batch in [0, 2, 3, 100] {
        assert!(both(batch)? == one, "a batch of {batch}");
    }
    for threads in [1, 3] {
        ops::set_threads(threads)?;
        assert!(both(2)? == one, "{threads} threads");
    }
    Ok(())
}

/// Where two tiles meet, lines differ no more from their neighbours than the same lines of a whole picture do.
#[test]
fn there_is_no_seam_between_tiles() -> Result<()> {
    let vae = default_model()?;
    let z = latents(&vae, 20, 20)?;
    let whole = values(&vae.decode(&z, &mut Uninterrupted)?)?;
    let (side, tile) = (160, 64);
    for overlap in [0, 16, 32] {
        let tiled = values(&vae.decode_in(&z, &tiles(tile, overlap), &mut Uninterrupted)?)?;
        let step_at = |picture: &[f32], column: usize| -> f64 {
            let rows = picture.chunks_exact(side);
            rows.map(|row| f64::from((row[column] - row[column - 1]).abs())).sum()
        };
        for column in (tile - overlap..side).step_by(tile - overlap) {
            let (found, expected) = (step_at(&tiled, column), step_at(&whole, column));
            let ratio = found / expected;
            assert!((ratio - 1.0).abs() < 1e-4, "a seam at column {column}, overlap {overlap}: {ratio}");
        }
    }
    Ok(())
}

#[test]
fn a_tiled_run_asks_at_every_tile_and_stops_where_it_is_told() -> Result<()> {
    let vae = default_model()?;
    let z = latents(&vae, 12, 16)?;
    let plan = tiles(32, 0);
    let tiles = 3 * 4;
    let mut seen = Vec::new();
    vae.decode_in(&z, &plan, &mut |event: &sd_engine::residency::SegmentEvent<'_>| {
        seen.push((event.progress(), event.name.to_owned()));
        ControlFlow::Continue(())
    })?;
    assert!(seen.windows(2).all(|pair| pair[0].0.0 <= pair[1].0.0), "progress goes up");
    let total = vae.residency(VaeHalf::Decoder).segments().len() * tiles;
    assert!(seen.iter().all(|((done, of), _)| done < of && *of == total));
    let last = seen.iter().filter(|(_, name)| name.contains("up_blocks.3.layers.0")).count();
    assert_eq!(last, 1 + 3 * tiles, "three sweeps");
    let stop = seen.iter().position(|(_, name)| name.contains("up_blocks.3.layers.0")).context("no such segment")? + 5;
    let mut asked = 0;
    let stopped = vae.decode_in(&z, &plan, &mut |_: &sd_engine::residency::SegmentEvent<'_>| {
        asked += 1;
        if asked > stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(asked, stop + 1, "nothing is computed after the stop");
    let error = stopped.err().context("it was not stopped")?.to_string();
    assert!(error.contains("cancelled") && error.contains("up_blocks.3.layers.0"), "{error}");
    Ok(())
}

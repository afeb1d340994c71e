//! The estimate of each task's memory against what an allocator counts. It has a program of its own, since the count is
//! of everything in the process.

use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use sd_engine::inspect::{ModelReport, Task, inspect};
use sd_engine::models::{AutoencoderKl, ClipTextModel, TilePlan, Unet, VaeHalf};
use sd_engine::ops::{Chunks, Linear, by_chunks, linear_add, linear_geglu};
use sd_engine::residency::{LoadEvent, Uninterrupted};
use sd_engine::testkit::{CountingAllocator, DefaultModel, Fixture};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The largest sum of bytes that `work` had allocated at once, beyond what was there before.
fn peak<T>(work: impl FnOnce() -> Result<T>) -> Result<u64> {
    let (done, bytes) = ALLOCATOR.peak_of(work);
    done.map(|_| bytes)
}

fn proceed(_: &LoadEvent<'_>) -> std::ops::ControlFlow<()> {
    std::ops::ControlFlow::Continue(())
}

fn estimate(report: &ModelReport, task: Task, width: usize, height: usize, tokens: u64) -> Result<u64> {
    let mut tasks = report.components.iter().flat_map(|c| &c.tasks);
    let task = tasks.find(|t| t.task == task).ok_or_else(|| anyhow::anyhow!("{task:?} is not in the report"))?;
    Ok(task.working_set.bytes(width as u64, height as u64, tokens))
}

/// Estimates are bounds, and near enough at large sizes to admit what fits.
fn check(what: &str, estimate: u64, measured: u64, large: bool) -> Result<()> {
    println!("{what}: measured {measured}, estimated {estimate}, ratio {:.2}", estimate as f64 / measured as f64);
    anyhow::ensure!(measured <= estimate, "{what} took {measured} bytes, above the estimate of {estimate}");
    anyhow::ensure!(
        !large || estimate <= 2 * measured,
        "{what} took {measured} bytes, far below the {estimate} of the estimate"
    );
    Ok(())
}

fn measure(folder: &Path, sizes: &[(usize, usize)]) -> Result<()> {
    let report = inspect(folder)?;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let text = ClipTextModel::load(&folder.join("text_encoder"), &mut proceed)?;
    for rows in [2, 8, 20] {
        let measured = peak(|| Ok(text.forward(&vec![vec![1; 77]; rows], 0, &mut Uninterrupted)?))?;
        check(
            &format!("text, {rows} rows"),
            estimate(&report, Task::Encode, 0, 0, 77 * rows as u64)?,
            measured,
            false,
        )?;
    }
    let unet = Unet::load(&folder.join("unet"), &mut proceed)?;
    let halves = [VaeHalf::Encoder, VaeHalf::Decoder];
    let vae = AutoencoderKl::load(&folder.join("vae"), &halves, &mut proceed)?;
    let factor = report.vae.scale_factor;
    for &(width, height) in sizes {
        let large = width * height >= 256 * 256;
        let (w, h) = (width / factor, height / factor);
        for chunks in [1, 4] {
            let conditioning = zeros(&[2, 77 * chunks, report.text.hidden_size])?;
            let measured = peak(|| {
                let latents = zeros(&[2, report.diffusion.in_channels, h, w])?;
                let mut run = unet.begin(&conditioning, None)?;
                for timestep in [900.0, 1.0] {
                    run.forward(&latents, timestep, &mut Uninterrupted)?;
                }
                Ok(())
            })?;
            let tokens = 2 * 77 * chunks as u64;
            let bound = estimate(&report, Task::Denoise, width, height, tokens)?;
            check(&format!("denoise {width}×{height}, {chunks} chunks"), bound, measured, large && width >= 512)?;
        }
        let measured = peak(|| Ok(vae.decode(&zeros(&[1, report.vae.latent_channels, h, w])?, &mut Uninterrupted)?))?;
        check(
            &format!("decode {width}×{height}"),
            estimate(&report, Task::Decode, width, height, 0)?,
            measured,
            large,
        )?;
        let measured = peak(|| Ok(vae.encode(&zeros(&[1, 3, height, width])?, &mut Uninterrupted)?))?;
        check(
            &format!("encode {width}×{height}"),
            estimate(&report, Task::VaeEncode, width, height, 0)?,
            measured,
            large,
        )?;
    }
    Ok(())
}

/// What chunks of rows leave of a pass, and the bound on it.
fn check_chunks(folder: &Path) -> Result<()> {
    let mut unet = Unet::load(&folder.join("unet"), &mut proceed)?;
    let (side, conditioning) =
        (64, Tensor::zeros((2, 77, unet.config().conditioning_width), DType::F32, &Device::Cpu)?);
    let mut measure = |chunks| {
        unet.set_chunks(chunks);
        peak(|| {
            let latents = Tensor::zeros((2, 4, side, side), DType::F32, &Device::Cpu)?;
            Ok(unet.begin(&conditioning, None)?.forward(&latents, 1.0, &mut Uninterrupted)?)
        })
    };
    measure(Chunks::default())?;
    let whole = measure(Chunks::default())?;
    let chunked = measure(Chunks { tokens: 256, mlp: 128 })?;
    let flow = Unet::flow_in_chunks(unet.config());
    let bound = 2 * (side * side) as u64 * flow.bytes_per_pixel() + 256 * flow.bytes_per_row() + (4 << 20);
    println!("a pass took {whole} bytes, {chunked} in chunks, estimated {bound}");
    // Feature maps that no chunk divides are most of what is left of a small model's pass.
    anyhow::ensure!(chunked < whole / 10 * 9, "{chunked} of {whole} bytes are left in chunks");
    anyhow::ensure!(chunked <= bound && bound <= 2 * chunked, "{chunked} bytes in chunks, estimated {bound}");
    // The feed-forward layer alone: its wide rows are never more than a chunk.
    let tensor = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu);
    let (x, wide) = (tensor(&[8192, 64])?, Linear::new(tensor(&[512, 64])?, None)?);
    let narrow = Linear::new(tensor(&[64, 256])?, None)?;
    let layer = |rows| peak(|| Ok(by_chunks(&x, rows, 64, |x| linear_add(&linear_geglu(x, &wide)?, &narrow, x))?));
    layer(0)?;
    let (whole, chunked) = (layer(0)?, layer(512)?);
    println!("a feed-forward layer took {whole} bytes, {chunked} in chunks");
    anyhow::ensure!(chunked < whole / 2, "{chunked} of {whole} bytes are left in chunks");
    Ok(())
}

/// What tiles take against their estimate and against the whole, resident and streamed.
fn measure_tiles(folder: &Path, [width, height]: [usize; 2], tiles: &[TilePlan], large: bool) -> Result<()> {
    let report = inspect(folder)?;
    let factor = report.vae.scale_factor;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (z, image) =
        (|| zeros(&[1, report.vae.latent_channels, height / factor, width / factor]), || zeros(&[1, 3, height, width]));
    let estimate = |task, plan: &TilePlan| -> Result<(u64, u64)> {
        let mut tasks = report.components.iter().flat_map(|c| &c.tasks);
        let task = tasks.find(|t| t.task == task).ok_or_else(|| anyhow::anyhow!("{task:?} is not in the report"))?;
        Ok((task.working_set.bytes_in(plan, width as u64, height as u64), task.largest_segment_bytes))
    };
    let modes: &[bool] = if large { &[false] } else { &[false, true] };
    for &streamed in modes {
        let halves: &[VaeHalf] = if streamed { &[] } else { &[VaeHalf::Encoder, VaeHalf::Decoder] };
        let vae = AutoencoderKl::load(&folder.join("vae"), halves, &mut proceed)?;
        for plan in tiles {
            let what = format!("{width}×{height}, {plan:?}, streamed {streamed}");
            // A segment that is bound has its numbers as the file gives them and packed, for a moment.
            let with_weights = |(bytes, segment): (u64, u64)| bytes + if streamed { 3 * segment } else { 0 };
            let decode = peak(|| Ok(vae.decode_in(&z()?, plan, &mut Uninterrupted)?))?;
            let bound = with_weights(estimate(Task::Decode, plan)?);
            check(&format!("decode {what}"), bound, decode, large)?;
            let encode = peak(|| Ok(vae.encode_in(&image()?, plan, &mut Uninterrupted)?))?;
            let bound = with_weights(estimate(Task::VaeEncode, plan)?);
            check(&format!("encode {what}"), bound, encode, large)?;
        }
    }
    Ok(())
}

/// All tests here count what the whole program allocates, so they take turns.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn chunks_of_rows_take_less_and_no_more_than_estimated() -> Result<()> {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = tempfile::tempdir()?;
    Fixture::open("sd21")?.write_model(folder.path())?;
    check_chunks(folder.path())
}

#[test]
fn tiles_take_what_is_estimated_and_less_than_half_of_the_whole() -> Result<()> {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let tiles = |tile, overlap, batch| TilePlan { tile, overlap, batch };
    let folder = DefaultModel::folder();
    measure_tiles(&folder, [520, 328], &[tiles(128, 32, 3)], true)?;
    measure_tiles(&folder, [72, 104], &[tiles(16, 0, 1), tiles(64, 0, 100), tiles(48, 24, 2)], false)?;
    let vae = AutoencoderKl::load(&folder.join("vae"), &[VaeHalf::Encoder, VaeHalf::Decoder], &mut proceed)?;
    let z = Tensor::zeros((1, 4, 64, 64), DType::F32, &Device::Cpu)?;
    let image = Tensor::zeros((1, 3, 512, 512), DType::F32, &Device::Cpu)?;
    let decode = |plan: TilePlan| peak(|| Ok(vae.decode_in(&z, &plan, &mut Uninterrupted)?));
    let (whole, tiled) = (decode(TilePlan::WHOLE)?, decode(tiles(128, 0, 1))?);
    println!("decode 512²: whole {whole}, tiles of 128 {tiled}, {:.2}", whole as f64 / tiled as f64);
    anyhow::ensure!(whole >= 2 * tiled, "decode 512²: whole {whole}, tiles of 128 {tiled}");
    let encode = |plan: TilePlan| peak(|| Ok(vae.encode_in(&image, &plan, &mut Uninterrupted)?));
    let (whole, tiled) = (encode(TilePlan::WHOLE)?, encode(tiles(128, 0, 1))?);
    println!("encode 512²: whole {whole}, tiles of 128 {tiled}, {:.2}", whole as f64 / tiled as f64);
    anyhow::ensure!(whole >= tiled + (24 << 20), "encode 512²: whole {whole}, tiles of 128 {tiled}");
    let fixture = tempfile::tempdir()?;
    Fixture::open("sd21")?.write_model(fixture.path())?;
    measure_tiles(fixture.path(), [264, 136], &[tiles(64, 0, 1), tiles(64, 16, 4)], false)
}

#[test]
fn estimates_bound_what_is_allocated_and_are_near_it() -> Result<()> {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    measure(&DefaultModel::folder(), &[(64, 64), (72, 104), (256, 256), (520, 328)])?;
    let folder = tempfile::tempdir()?;
    Fixture::open("sd21")?.write_model(folder.path())?;
    measure(folder.path(), &[(64, 64), (72, 72), (136, 264), (512, 512)])
}

//! What tiles cost in time and save in memory, against the whole in the same run, with the default model.
//!
//! `cargo bench -p sd-engine --bench vae_tiles -- [--threads=N] [--rounds=N] [--size=PIXELS] [--folder=VAE]`. Times are the fastest of all
//! rounds; bytes are the most that was allocated at once beside the weights, and the estimate that admission goes by.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use sd_engine::models::{AutoencoderKl, TilePlan, VaeHalf};
use sd_engine::ops;
use sd_engine::residency::{LoadEvent, Uninterrupted};
use sd_engine::testkit::{CountingAllocator, noise};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The fastest of `rounds`, and the most bytes of the last.
fn measure(rounds: usize, mut work: impl FnMut() -> Result<()>) -> Result<(Duration, usize)> {
    let (mut fastest, mut bytes) = (Duration::MAX, 0);
    for _ in 0..rounds {
        let start = Instant::now();
        let (done, peak) = ALLOCATOR.peak_of(&mut work);
        done?;
        fastest = fastest.min(start.elapsed());
        bytes = peak as usize;
    }
    Ok((fastest, bytes))
}

fn main() -> Result<()> {
    let text = |name: &str| std::env::args().find_map(|a| Some(a.strip_prefix(name)?.strip_prefix('=')?.to_owned()));
    let number = |name: &str, default: usize| text(name).and_then(|value| value.parse().ok()).unwrap_or(default);
    let (threads, rounds, size) = (number("--threads", 2), number("--rounds", 3), number("--size", 1024));
    ops::set_threads(threads)?;
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/default/vae");
    let folder = text("--folder").map_or(default, Into::into);
    let mut proceed = |_: &LoadEvent<'_>| ControlFlow::Continue(());
    let vae = AutoencoderKl::load(&folder, &[VaeHalf::Encoder, VaeHalf::Decoder], &mut proceed)?;
    let (factor, channels) = (vae.config().factor(), vae.config().latent_channels);
    let z = noise("z", &[1, channels, size / factor, size / factor])?;
    let image = noise("pixels", &[1, 3, size, size])?;
    let tiles = |tile, overlap, batch| TilePlan { tile, overlap, batch };
    let plans =
        [TilePlan::WHOLE, tiles(512, 0, 1), tiles(256, 0, 1), tiles(256, 0, 4), tiles(256, 64, 1), tiles(128, 0, 1)];
    println!("{:28} {:>9} {:>6} {:>9} {:>6} {:>9}", "", "ms", "times", "MiB", "of", "estimate");
    for (name, half) in [("decode", VaeHalf::Decoder), ("encode", VaeHalf::Encoder)] {
        let mut whole = None;
        for plan in plans {
            let (time, bytes) = measure(rounds, || {
                match half {
                    VaeHalf::Decoder => drop(vae.decode_in(&z, &plan, &mut Uninterrupted)?),
                    VaeHalf::Encoder => drop(vae.encode_in(&image, &plan, &mut Uninterrupted)?),
                }
                Ok(())
            })?;
            let (whole_time, whole_bytes) = *whole.get_or_insert((time, bytes));
            let estimate = AutoencoderKl::working_set(vae.config(), half, &plan, size as u64, size as u64);
            let what = match plan.tile {
                0 => format!("{name} {size}², whole"),
                tile => format!("{name} {size}², {tile}/{}, {} at once", plan.overlap, plan.batch),
            };
            println!(
                "{what:28} {:9.0} {:6.2} {:9.1} {:6.2} {:9.1}",
                time.as_secs_f64() * 1e3,
                time.as_secs_f64() / whole_time.as_secs_f64(),
                bytes as f64 / f64::from(1 << 20),
                bytes as f64 / whole_bytes as f64,
                estimate as f64 / f64::from(1 << 20),
            );
        }
    }
    Ok(())
}

//! Times the default model's networks, and diffusers beside them.
//!
//! `cargo bench -p sd-engine --bench models -- [--threads=N] [--rounds=N] [PART]`. With `SDD_PEER_PYTHON` set to a Python that has torch,
//! diffusers and transformers, `models_peer.py` runs the same in the same run, in turn with ours, in f32 on as many
//! threads. Figures are the fastest of all rounds, by the clock and by processor time: other processes only ever add to
//! either, and to the latter little.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use sd_engine::models::{AutoencoderKl, ClipTextModel, Unet, UnetRun, VaeHalf};
use sd_engine::ops;
use sd_engine::residency::{LoadEvent, Uninterrupted};
use sd_engine::testkit::noise;

/// What is timed: a prompt and a negative prompt, one guided step at 256², its decoding, and its encoding.
const PARTS: [&str; 4] = ["text", "unet", "decode", "encode"];

/// By the clock and by the processor.
#[derive(Clone, Copy, Debug)]
struct Times {
    wall: Duration,
    cpu: Duration,
}

impl Times {
    const LONGEST: Self = Self { wall: Duration::MAX, cpu: Duration::MAX };

    fn fastest(self, other: Self) -> Self {
        Self { wall: self.wall.min(other.wall), cpu: self.cpu.min(other.cpu) }
    }
}

/// Processor time of all threads of this process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux, and `time` is a place for its answer.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

struct Ours<'a> {
    text: &'a ClipTextModel,
    ids: Vec<Vec<u32>>,
    run: UnetRun<'a>,
    latents: Tensor,
    vae: &'a AutoencoderKl,
    z: Tensor,
    pixels: Tensor,
}

impl Ours<'_> {
    fn time(&mut self, part: &str) -> Result<Times> {
        let (wall, cpu) = (Instant::now(), cpu_time());
        match part {
            "text" => drop(self.text.forward(&self.ids, 0, &mut Uninterrupted)?),
            "unet" => drop(self.run.forward(&self.latents, 601.0, &mut Uninterrupted)?),
            "decode" => drop(self.vae.decode(&self.z, &mut Uninterrupted)?),
            _ => drop(self.vae.encode(&self.pixels, &mut Uninterrupted)?),
        }
        Ok(Times { wall: wall.elapsed(), cpu: cpu_time() - cpu })
    }
}

struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &str, folder: &Path, threads: usize) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/models_peer.py");
        let mut child = Command::new(python)
            .arg(script)
            .arg(folder)
            .arg(threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {python}"))?;
        let input = child.stdin.take().context("the peer has no stdin")?;
        let output = BufReader::new(child.stdout.take().context("the peer has no stdout")?);
        Ok(Self { child, input, output })
    }

    fn time(&mut self, part: &str) -> Result<Times> {
        writeln!(self.input, "{part}")?;
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "the peer ended");
        let (wall, cpu) = line.trim().split_once(' ').context("the peer says no times")?;
        Ok(Times { wall: Duration::from_secs_f64(wall.parse()?), cpu: Duration::from_secs_f64(cpu.parse()?) })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn main() -> Result<()> {
    let number = |name: &str, default: usize| {
        let found = std::env::args().find_map(|a| a.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
        found.unwrap_or(default)
    };
    let (threads, rounds) = (number("--threads", 2), number("--rounds", 30));
    ops::set_threads(threads)?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/default");
    let mut proceed = |_: &LoadEvent<'_>| ControlFlow::Continue(());
    let start = Instant::now();
    let text = ClipTextModel::load(&folder.join("text_encoder"), &mut proceed)?;
    let unet = Unet::load(&folder.join("unet"), &mut proceed)?;
    let vae = AutoencoderKl::load(&folder.join("vae"), &[VaeHalf::Encoder, VaeHalf::Decoder], &mut proceed)?;
    let bytes = text.bytes() + unet.bytes() + vae.bytes();
    println!("loaded {:.1} MB of f32 in {:.0} ms", bytes as f64 / 1e6, start.elapsed().as_secs_f64() * 1e3);
    let conditioning = noise("conditioning", &[2, 77, unet.config().conditioning_width])?;
    let mut ours = Ours {
        text: &text,
        ids: vec![vec![5; 77]; 2],
        run: unet.begin(&conditioning, None)?,
        latents: noise("latents", &[2, unet.config().in_channels, 32, 32])?,
        vae: &vae,
        z: noise("z", &[1, vae.config().latent_channels, 32, 32])?,
        pixels: noise("pixels", &[1, 3, 256, 256])?,
    };
    let mut peer = match std::env::var("SDD_PEER_PYTHON") {
        Ok(python) => Some(Peer::start(&python, &folder, threads)?),
        Err(_) => None,
    };
    println!("{:8} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}", "", "ms", "cpu ms", "peer ms", "peer cpu", "ratio", "cpu");
    let chosen = std::env::args().skip(1).find(|a| PARTS.contains(&a.as_str()));
    for part in PARTS.into_iter().filter(|part| chosen.as_ref().is_none_or(|c| c == part)) {
        let (mut mine, mut theirs) = (Times::LONGEST, Times::LONGEST);
        for _ in 0..rounds {
            mine = mine.fastest(ours.time(part)?);
            if let Some(peer) = &mut peer {
                theirs = theirs.fastest(peer.time(part)?);
            }
        }
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        print!("{part:8} {:10.2} {:10.2}", ms(mine.wall), ms(mine.cpu));
        if peer.is_some() {
            let (wall, cpu) = (ms(theirs.wall), ms(theirs.cpu));
            print!(" {wall:10.2} {cpu:10.2} {:8.2} {:8.2}", ms(mine.wall) / wall, ms(mine.cpu) / cpu);
        }
        println!();
    }
    Ok(())
}

//! Times every operation at the shapes that matter, and torch beside it.
//!
//! `cargo bench -p sd-engine --bench ops -- [--threads=N] [--cpu-time] [PART OF A NAME]`. With `SDD_PEER_PYTHON` set to a Python that has torch,
//! each case is also timed by `ops_peer.py` in the same run, in turn with ours, in f32 on as many threads. Every figure
//! is the fastest of many repetitions, since other processes only ever add time. On a machine that is busy throughout,
//! `--cpu-time` compares the processor time of one thread instead.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use sd_engine::ops::{self, Activation, AttentionMask, Conv2d, Linear, Padding, UpsampleConv2d};
use serde_json::{Value, json};

/// One operation at one shape. Images are square, with a batch of one.
#[derive(Clone, Copy, Debug)]
enum Case {
    Conv { side: usize, cin: usize, cout: usize, kernel: usize, stride: usize },
    UpConv { side: usize, cin: usize, cout: usize },
    Linear { m: usize, k: usize, n: usize, act: Activation },
    Attention { sq: usize, skv: usize, heads: usize, d: usize, causal: bool },
    GroupNorm { side: usize, c: usize, groups: usize, act: Activation },
    LinearGeglu { m: usize, k: usize, n: usize },
    LayerNorm { m: usize, c: usize },
    Geglu { m: usize, c: usize },
    Silu { m: usize, c: usize },
    Concat { side: usize, a: usize, b: usize },
}

const fn conv(side: usize, cin: usize, cout: usize) -> Case {
    Case::Conv { side, cin, cout, kernel: 3, stride: 1 }
}

const fn linear(m: usize, k: usize, n: usize) -> Case {
    Case::Linear { m, k, n, act: Activation::None }
}

const fn attention(sq: usize, skv: usize, heads: usize, d: usize) -> Case {
    Case::Attention { sq, skv, heads, d, causal: false }
}

const fn norm_silu(side: usize, c: usize, groups: usize) -> Case {
    Case::GroupNorm { side, c, groups, act: Activation::Silu }
}

/// What the default model runs: its UNet at latents of 32², its VAE decoder up to 256².
const DEFAULT_MODEL: &[Case] = &[
    conv(32, 4, 64),
    conv(32, 64, 64),
    conv(16, 128, 128),
    conv(8, 160, 160),
    conv(8, 320, 160),
    conv(32, 128, 64),
    conv(32, 64, 4),
    Case::Conv { side: 32, cin: 64, cout: 64, kernel: 3, stride: 2 },
    Case::Conv { side: 32, cin: 128, cout: 64, kernel: 1, stride: 1 },
    Case::UpConv { side: 16, cin: 128, cout: 128 },
    linear(1, 64, 256),
    linear(256, 128, 128),
    linear(256, 128, 1024),
    linear(64, 160, 160),
    Case::LinearGeglu { m: 256, k: 128, n: 1024 },
    linear(77, 192, 160),
    attention(256, 256, 4, 32),
    attention(256, 77, 4, 32),
    attention(64, 64, 4, 40),
    norm_silu(32, 64, 32),
    norm_silu(16, 128, 32),
    Case::LayerNorm { m: 256, c: 128 },
    Case::Geglu { m: 256, c: 512 },
    conv(32, 128, 128),
    conv(64, 128, 128),
    conv(64, 96, 96),
    conv(128, 96, 64),
    conv(128, 64, 64),
    conv(256, 64, 32),
    conv(256, 32, 32),
    conv(256, 32, 3),
    Case::UpConv { side: 32, cin: 128, cout: 128 },
    Case::UpConv { side: 128, cin: 64, cout: 64 },
    norm_silu(256, 32, 16),
    norm_silu(128, 64, 16),
    attention(1024, 1024, 1, 128),
];

/// Stable Diffusion 1.5 at 512², its text encoder, and its VAE decoder.
const SD15: &[Case] = &[
    conv(64, 4, 320),
    conv(64, 320, 320),
    conv(32, 640, 640),
    conv(16, 1280, 1280),
    conv(8, 1280, 1280),
    conv(8, 2560, 1280),
    conv(64, 960, 320),
    conv(64, 320, 4),
    Case::Conv { side: 64, cin: 320, cout: 320, kernel: 3, stride: 2 },
    Case::Conv { side: 64, cin: 640, cout: 320, kernel: 1, stride: 1 },
    Case::UpConv { side: 32, cin: 640, cout: 640 },
    linear(1, 1280, 1280),
    linear(4096, 320, 320),
    linear(4096, 320, 2560),
    Case::LinearGeglu { m: 4096, k: 320, n: 2560 },
    Case::LinearGeglu { m: 256, k: 1280, n: 10240 },
    linear(4096, 1280, 320),
    linear(1024, 640, 5120),
    linear(256, 1280, 1280),
    linear(64, 1280, 10240),
    linear(77, 768, 640),
    Case::Linear { m: 77, k: 768, n: 3072, act: Activation::QuickGelu },
    linear(77, 3072, 768),
    linear(1024, 1024, 1024),
    attention(4096, 4096, 8, 40),
    attention(4096, 77, 8, 40),
    attention(1024, 1024, 8, 80),
    attention(256, 256, 8, 160),
    Case::Attention { sq: 77, skv: 77, heads: 12, d: 64, causal: true },
    norm_silu(64, 320, 32),
    norm_silu(32, 640, 32),
    norm_silu(64, 960, 32),
    Case::GroupNorm { side: 64, c: 320, groups: 32, act: Activation::None },
    Case::LayerNorm { m: 4096, c: 320 },
    Case::LayerNorm { m: 77, c: 768 },
    Case::Geglu { m: 4096, c: 1280 },
    Case::Silu { m: 4096, c: 320 },
    Case::Concat { side: 64, a: 320, b: 320 },
    conv(64, 512, 512),
    conv(128, 512, 512),
    conv(256, 256, 256),
    conv(512, 128, 128),
    conv(512, 128, 3),
    Case::UpConv { side: 128, cin: 512, cout: 512 },
    norm_silu(512, 128, 32),
    attention(4096, 4096, 1, 512),
];

fn label(act: Activation) -> &'static str {
    match act {
        Activation::None => "none",
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::QuickGelu => "quick_gelu",
        Activation::GeluTanh => "gelu_tanh",
    }
}

impl Case {
    /// What the peer is asked for.
    fn request(&self) -> Value {
        match *self {
            Case::Conv { side, cin, cout, kernel, stride } => {
                json!({"op": "conv", "side": side, "cin": cin, "cout": cout, "kernel": kernel, "stride": stride})
            }
            Case::UpConv { side, cin, cout } => json!({"op": "upconv", "side": side, "cin": cin, "cout": cout}),
            Case::Linear { m, k, n, act } => json!({"op": "linear", "m": m, "k": k, "n": n, "act": label(act)}),
            Case::Attention { sq, skv, heads, d, causal } => {
                json!({"op": "attention", "sq": sq, "skv": skv, "heads": heads, "d": d, "causal": causal})
            }
            Case::GroupNorm { side, c, groups, act } => {
                json!({"op": "group_norm", "side": side, "c": c, "groups": groups, "act": label(act)})
            }
            Case::LinearGeglu { m, k, n } => json!({"op": "linear_geglu", "m": m, "k": k, "n": n}),
            Case::LayerNorm { m, c } => json!({"op": "layer_norm", "m": m, "c": c}),
            Case::Geglu { m, c } => json!({"op": "geglu", "m": m, "c": c}),
            Case::Silu { m, c } => json!({"op": "silu", "m": m, "c": c}),
            Case::Concat { side, a, b } => json!({"op": "concat", "side": side, "a": a, "b": b}),
        }
    }

    fn name(&self) -> String {
        match *self {
            Case::Conv { side, cin, cout, kernel, stride } => {
                format!("conv {kernel}×{kernel}/{stride} {cin}→{cout} at {side}²")
            }
            Case::UpConv { side, cin, cout } => format!("upsample + conv {cin}→{cout} at {side}²"),
            Case::Linear { m, k, n, act } => format!("linear {m}×{k}→{n} {}", label(act)),
            Case::Attention { sq, skv, heads, d, causal } => {
                format!("attention {sq}×{skv} {heads}×{d}{}", if causal { " causal" } else { "" })
            }
            Case::GroupNorm { side, c, groups, act } => format!("group_norm {c}/{groups} at {side}² {}", label(act)),
            Case::LinearGeglu { m, k, n } => format!("linear + geglu {m}×{k}→{n}"),
            Case::LayerNorm { m, c } => format!("layer_norm {m}×{c}"),
            Case::Geglu { m, c } => format!("geglu {m}×{c}"),
            Case::Silu { m, c } => format!("silu {m}×{c}"),
            Case::Concat { side, a, b } => format!("concat {a}+{b} at {side}²"),
        }
    }

    /// Multiplications and additions, where they are what takes the time; of the operation as torch does it.
    fn flops(&self) -> Option<f64> {
        let product = |m: usize, k: usize, n: usize| Some(2.0 * m as f64 * k as f64 * n as f64);
        match *self {
            Case::Conv { side, cin, cout, kernel, stride } => {
                product((side / stride).pow(2), cin * kernel * kernel, cout)
            }
            Case::UpConv { side, cin, cout } => product(4 * side * side, cin * 9, cout),
            Case::Linear { m, k, n, .. } | Case::LinearGeglu { m, k, n } => product(m, k, n),
            Case::Attention { sq, skv, heads, d, causal } => {
                product(sq * heads, skv, 2 * d).map(|f| if causal { f / 2.0 } else { f })
            }
            Case::GroupNorm { .. } | Case::LayerNorm { .. } | Case::Geglu { .. } => None,
            Case::Silu { .. } | Case::Concat { .. } => None,
        }
    }

    /// The operation with its inputs made.
    fn prepare(&self) -> Result<Box<dyn Fn() -> candle_core::Result<Tensor> + Send + Sync>> {
        let random = |dims: &[usize]| Tensor::randn(0f32, 1f32, dims, &Device::Cpu);
        Ok(match *self {
            Case::Conv { side, cin, cout, kernel, stride } => {
                let x = random(&[1, side, side, cin])?;
                let w = random(&[cout, cin, kernel, kernel])?;
                let conv = Conv2d::new(w, Some(random(&[cout])?), stride, Padding::uniform(kernel / 2))?;
                Box::new(move || ops::conv2d(&x, &conv))
            }
            Case::UpConv { side, cin, cout } => {
                let x = random(&[1, side, side, cin])?;
                let conv = UpsampleConv2d::new(random(&[cout, cin, 3, 3])?, Some(random(&[cout])?))?;
                Box::new(move || ops::conv2d_upsampled(&x, &conv))
            }
            Case::Linear { m, k, n, act } => {
                let (x, layer) = (random(&[m, k])?, Linear::new(random(&[n, k])?, Some(random(&[n])?))?);
                Box::new(move || ops::linear(&x, &layer, act))
            }
            Case::Attention { sq, skv, heads, d, causal } => {
                let (q, k, v) =
                    (random(&[1, sq, heads, d])?, random(&[1, skv, heads, d])?, random(&[1, skv, heads, d])?);
                let mask = if causal { AttentionMask::Causal } else { AttentionMask::None };
                let scale = 1.0 / (d as f32).sqrt();
                Box::new(move || ops::attention(&q, &k, &v, scale, mask))
            }
            Case::GroupNorm { side, c, groups, act } => {
                let (x, w, b) = (random(&[1, side, side, c])?, random(&[c])?, random(&[c])?);
                Box::new(move || ops::group_norm(&x, groups, &w, &b, 1e-5, act))
            }
            Case::LinearGeglu { m, k, n } => {
                let (x, layer) = (random(&[m, k])?, Linear::new(random(&[n, k])?, Some(random(&[n])?))?);
                Box::new(move || ops::linear_geglu(&x, &layer))
            }
            Case::LayerNorm { m, c } => {
                let (x, w, b) = (random(&[m, c])?, random(&[c])?, random(&[c])?);
                Box::new(move || ops::layer_norm(&x, Some(&w), Some(&b), 1e-5))
            }
            Case::Geglu { m, c } => {
                let x = random(&[m, 2 * c])?;
                Box::new(move || ops::geglu(&x))
            }
            Case::Silu { m, c } => {
                let x = random(&[m, c])?;
                Box::new(move || ops::silu(&x))
            }
            Case::Concat { side, a, b } => {
                let (a, b) = (random(&[1, side, side, a])?, random(&[1, side, side, b])?);
                Box::new(move || ops::concat_channels(&[&a, &b]))
            }
        })
    }
}

/// What a repetition costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    Wall,
    /// Of the thread that runs the operation, which must be the only one.
    Cpu,
}

impl Clock {
    fn now(self) -> Duration {
        let id = match self {
            Clock::Wall => libc::CLOCK_MONOTONIC,
            Clock::Cpu => libc::CLOCK_THREAD_CPUTIME_ID,
        };
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `now` is a valid place for the result.
        unsafe { libc::clock_gettime(id, &mut now) };
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    }
}

/// The fastest of many runs, for about `budget`.
fn fastest(
    run: &(dyn Fn() -> candle_core::Result<Tensor> + Send + Sync),
    budget: Duration,
    clock: Clock,
) -> Result<Duration> {
    ops::install(|| {
        let begin = Instant::now();
        let mut best = Duration::MAX;
        let mut runs = 0;
        while runs < 3 || begin.elapsed() < budget {
            let start = clock.now();
            std::hint::black_box(run()?);
            best = best.min(clock.now() - start);
            runs += 1;
        }
        Ok(best)
    })?
}

/// The peer process: one line of JSON in, one out.
struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &str, threads: usize) -> Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/ops_peer.py");
        let mut child = Command::new(python)
            .args([script, &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the peer {python}"))?;
        let to = child.stdin.take().context("the peer's input")?;
        let from = BufReader::new(child.stdout.take().context("the peer's output")?);
        Ok(Self { child, to, from })
    }

    /// Milliseconds by layout.
    fn time(&mut self, case: &Case, budget: Duration, clock: Clock) -> Result<Vec<(String, f64)>> {
        let mut request = case.request();
        request["seconds"] = json!(budget.as_secs_f64());
        request["cpu"] = json!(clock == Clock::Cpu);
        writeln!(self.to, "{request}")?;
        self.to.flush()?;
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            bail!("the peer ended: {:?}", self.child.wait()?);
        }
        let answer: serde_json::Map<String, Value> = serde_json::from_str(&line)?;
        Ok(answer.into_iter().filter_map(|(k, v)| Some((k, v.as_f64()?))).collect())
    }
}

fn main() -> Result<()> {
    // `cargo bench` passes flags of the standard harness.
    let filter = std::env::args().skip(1).find(|a| !a.starts_with("--")).unwrap_or_default();
    if let Some(n) = std::env::args().find_map(|a| a.strip_prefix("--threads=").map(str::to_owned)) {
        ops::set_threads(n.parse().context("--threads takes a number")?)?;
    }
    let clock = if std::env::args().any(|a| a == "--cpu-time") {
        ops::set_threads(1)?;
        Clock::Cpu
    } else {
        Clock::Wall
    };
    let rounds = 3;
    let budget = Duration::from_millis(150);
    let mut peer = match std::env::var("SDD_PEER_PYTHON") {
        Ok(python) => Some(Peer::start(&python, ops::threads()?)?),
        Err(_) => None,
    };
    println!("f32, {} threads, {clock:?} time, fastest of {rounds} rounds of {budget:?}", ops::threads()?);
    println!("{:<40} {:>9} {:>8} {:>18} {:>6}", "operation", "ms", "GFLOP/s", "torch ms", "ratio");
    let mut ratios = Vec::new();
    for (title, cases) in [("default model", DEFAULT_MODEL), ("SD1.5 at 512²", SD15)] {
        println!("-- {title}");
        for case in cases.iter().filter(|c| c.name().contains(&filter)) {
            let run = case.prepare()?;
            let mut ours = Duration::MAX;
            let mut theirs: Option<(String, f64)> = None;
            for _ in 0..rounds {
                if let Some(peer) = &mut peer {
                    for (layout, ms) in peer.time(case, budget, clock)? {
                        if theirs.as_ref().is_none_or(|(_, best)| ms < *best) {
                            theirs = Some((layout, ms));
                        }
                    }
                }
                ours = ours.min(fastest(&*run, budget, clock)?);
            }
            let ms = ours.as_secs_f64() * 1e3;
            let rate = case.flops().map_or(String::new(), |f| format!("{:.0}", f / ms / 1e6));
            let (torch, ratio) = match theirs {
                Some((layout, t)) => {
                    ratios.push(ms / t);
                    (format!("{t:.3} {layout}"), format!("{:.2}", ms / t))
                }
                None => (String::new(), String::new()),
            };
            println!("{:<40} {ms:>9.3} {rate:>8} {torch:>18} {ratio:>6}", case.name());
        }
    }
    if !ratios.is_empty() {
        let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let worse = ratios.iter().filter(|r| **r > 1.0).count();
        println!("geometric mean of ratios {mean:.2}; above 1.0: {worse} of {}", ratios.len());
    }
    Ok(())
}

//! Long fault runs of the real programs: every kind of fault, many times, each at a seeded random moment of a job.
//!
//! After each round the hit job must have ended exactly once in bounded time, and the next call must make the same bytes
//! as the first one. At the end nothing may be left, and the daemon must not have grown. Prints a Markdown table; a round
//! that fails prints how to repeat it, and the run goes on. Ends with 1 where anything was wrong.

mod client;
mod kind;
mod report;
mod round;
mod world;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use sd_tests::random::Random;

use client::Job;
use kind::Kind;
use report::{Growth, Row, table};
use round::Setting;
use world::World;

const USAGE: &str = "\
usage: soak [--rounds N] [--seed N] [--kinds A,B] [--jobs N] [--steps N] [--edge PIXELS]
  --rounds  rounds of each kind (5)
  --seed    of the first round of each kind; the next round has the next one (1)
  --kinds   only these kinds (all)
  --jobs    clients at once in the kind `crowd` (3)
  --steps   denoising steps of a job (8)
  --edge    edge of a picture (128)";

struct Arguments {
    rounds: u64,
    seed: u64,
    kinds: Vec<Kind>,
    jobs: usize,
    job: Job,
}

fn arguments() -> anyhow::Result<Arguments> {
    let job = Job { steps: 8, edge: 128 };
    let mut parsed = Arguments { rounds: 5, seed: 1, kinds: Kind::all(), jobs: 3, job };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next().with_context(|| format!("{name} without a value\n{USAGE}"))?;
        let number = || value.parse::<u64>().with_context(|| format!("{name} {value}"));
        match name.as_str() {
            "--rounds" => parsed.rounds = number()?,
            "--seed" => parsed.seed = number()?,
            "--jobs" => parsed.jobs = number()? as usize,
            "--steps" => parsed.job.steps = u32::try_from(number()?)?,
            "--edge" => parsed.job.edge = u32::try_from(number()?)?,
            "--kinds" => {
                let find = |wanted: &str| Kind::all().into_iter().find(|kind| kind.name() == wanted);
                let known = || Kind::all().into_iter().map(Kind::name).collect::<Vec<_>>().join(", ");
                let kinds = value
                    .split(',')
                    .map(|kind| find(kind).with_context(|| format!("unknown kind {kind}: one of {}", known())));
                parsed.kinds = kinds.collect::<Result<_, _>>()?;
            }
            _ => bail!("unknown argument {name}\n{USAGE}"),
        }
    }
    ensure!(parsed.jobs > 0 && parsed.rounds > 0, "at least one round and one client\n{USAGE}");
    Ok(parsed)
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = arguments()?;
    let began = Instant::now();
    let mut world = World::new(arguments.job)?;
    let usual = world.control()?;
    let setting = Setting { usual, clients: arguments.jobs };
    println!("an undisturbed warm call takes {} ms; programs of {}", usual.as_millis(), world::build());
    let (mut rows, mut wrong, mut growth) = (Vec::new(), Vec::new(), Growth::default());
    growth.add(world.held()?);
    for kind in &arguments.kinds {
        let row = rounds(&mut world, *kind, &arguments, &setting, &mut growth, &mut wrong)?;
        println!("{}: {} rounds, {} failed, {:.0?} so far", row.kind, row.rounds, row.failed, began.elapsed());
        rows.push(row);
    }
    wrong.extend(growth.wrong());
    wrong.extend(world.end().into_iter().map(|left| format!("left over at the end: {left}")));
    println!("\n{}\n{}\n", table(&rows), growth.line());
    println!("{:.0?} in all.", began.elapsed());
    if wrong.is_empty() {
        println!("Nothing was left over: no process, no segment, no lock file, no socket.");
        return Ok(ExitCode::SUCCESS);
    }
    wrong.iter().for_each(|what| println!("WRONG: {what}"));
    Ok(ExitCode::FAILURE)
}

/// All rounds of one kind. A world that a failed round has left unusable is replaced.
fn rounds(
    world: &mut World,
    kind: Kind,
    arguments: &Arguments,
    setting: &Setting,
    growth: &mut Growth,
    wrong: &mut Vec<String>,
) -> anyhow::Result<Row> {
    let mut row = Row::new(kind.name());
    for number in 0..arguments.rounds {
        let seed = arguments.seed.wrapping_add(number);
        let mut random = Random::new(seed ^ kind.salt());
        row.rounds += 1;
        match round::run(world, kind, setting, &mut random) {
            Ok(round) => {
                row.add(&round);
                // The life of a daemon that was killed says nothing about growth.
                if kind != Kind::Daemon {
                    growth.add(world.held()?);
                }
            }
            Err(error) => {
                row.failed += 1;
                let what = format!("round failed: --kinds {} --rounds 1 --seed {seed}: {error:#}", kind.name());
                println!("{what}");
                wrong.push(what);
                world.set_fault(None)?;
                if world.control().is_err() {
                    println!("the daemon no longer serves: a new one is started");
                    *world = World::new(arguments.job)?;
                    *growth = Growth::default();
                    growth.add(world.held()?);
                }
            }
        }
    }
    let settled = client::within(Duration::from_secs(5), || world.surplus() == 0);
    if !settled {
        row.surplus = world.surplus();
        wrong.push(format!("{} processes too many after {}", row.surplus, row.kind));
    }
    Ok(row)
}

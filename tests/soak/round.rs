//! One round: a job, a fault at a random moment of it, its end, and the next call.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use sd_tests::random::Random;

use super::client::{Client, Ended, end_of, within};
use super::kind::Kind;
use super::world::{BOUND, LONG, World};

/// What a round showed.
#[derive(Debug)]
pub(crate) struct Round {
    /// How each of its jobs ended.
    pub(crate) outcomes: Vec<String>,
    /// From the fault to the end of the client that it hit.
    pub(crate) terminal: Duration,
    /// How long the next call took.
    pub(crate) next: Duration,
}

/// What all rounds share.
pub(crate) struct Setting {
    /// How long an undisturbed call takes here, about.
    pub(crate) usual: Duration,
    /// Clients at once in [`Kind::Crowd`].
    pub(crate) clients: usize,
}

fn pause(random: &mut Random, at_most: Duration) {
    std::thread::sleep(Duration::from_micros(random.below(at_most.as_micros() as u64)));
}

/// Runs one round.
///
/// # Errors
/// What does not hold.
pub(crate) fn run(world: &mut World, kind: Kind, setting: &Setting, random: &mut Random) -> anyhow::Result<Round> {
    world.set_fault(None)?;
    // Every other round starts with no process, so that starting and loading are hit too.
    if random.below(2) == 0 && kind != Kind::Idle {
        world.kill_idle(None)?;
    }
    let (outcomes, terminal) = match kind {
        Kind::Crowd => crowd(world, setting, random)?,
        Kind::Daemon => daemon(world, setting, random)?,
        Kind::Worker(..) | Kind::Idle | Kind::Faulty(_) | Kind::Once(_) | Kind::CtrlC | Kind::Cancel | Kind::Client => {
            alone(world, kind, setting, random)?
        }
    };
    if let Some(wrong) = outcomes.iter().find(|outcome| !kind.allows(outcome)) {
        anyhow::bail!("a job ended with {wrong}");
    }
    ensure!(terminal < BOUND, "the end came after {terminal:?}");
    world.set_fault(None)?;
    if kind.quarantines() {
        world.clear_quarantine()?;
    }
    let next = world.control()?;
    Ok(Round { outcomes, terminal, next })
}

/// One client, and a fault in its job.
fn alone(
    world: &mut World,
    kind: Kind,
    setting: &Setting,
    random: &mut Random,
) -> anyhow::Result<(Vec<String>, Duration)> {
    match kind {
        Kind::Faulty(lie) | Kind::Once(lie) => {
            // A larger picture that the autoencoder has no memory for is decoded in tiles, and is another one then.
            let stages = if lie.contains("memory") { 2 } else { 3 };
            let stage = ["text", "diffusion", "vae"][random.below(stages) as usize];
            let times = if matches!(kind, Kind::Once(_)) { ":1" } else { "" };
            world.set_fault(Some(&format!("{stage}:{lie}{times}")))?;
            world.kill_idle(Some(stage))?;
        }
        // Not waited for: their deaths and the job cross.
        Kind::Idle => world.workers(None).iter().for_each(|worker| worker.signal(Signal::SIGKILL)),
        Kind::Worker(..) | Kind::CtrlC | Kind::Cancel | Kind::Client | Kind::Crowd | Kind::Daemon => {}
    }
    let mut client = world.client()?;
    let mut fault = client.started;
    match kind {
        Kind::Worker(signal, stage) => {
            let appears = within(LONG, || client.has_ended() || !world.workers(Some(stage)).is_empty());
            ensure!(appears, "no {stage} worker started");
            // Encoding comes first and is short.
            pause(random, if stage == "text" { setting.usual / 4 } else { setting.usual });
            fault = Instant::now();
            world.workers(Some(stage)).iter().for_each(|worker| worker.signal(signal));
        }
        Kind::CtrlC | Kind::Client => {
            accepted(&mut client)?;
            pause(random, setting.usual);
            fault = Instant::now();
            client.signal(if kind == Kind::CtrlC { Signal::SIGINT } else { Signal::SIGKILL });
        }
        Kind::Cancel => {
            accepted(&mut client)?;
            pause(random, setting.usual);
            let job = client.job().context("an accepted job has a name")?;
            fault = Instant::now();
            let mut other =
                world.sandbox.sdctl(["cancel", &job, "-q", "--endpoint", &world.daemon.endpoint]).spawn()?;
            let status = end_of(&mut other, BOUND).context("cancelling")?;
            ensure!(status.success(), "cancelling ended with {status}");
        }
        Kind::Idle | Kind::Faulty(_) | Kind::Once(_) | Kind::Crowd | Kind::Daemon => {}
    }
    let ended = client.wait()?;
    let (outcome, at) = settle(world, &ended)?;
    Ok((vec![outcome], at.saturating_duration_since(fault)))
}

fn accepted(client: &mut Client) -> anyhow::Result<()> {
    let told = within(BOUND, || client.has_ended() || client.job().is_some());
    ensure!(told, "the job was not accepted within {BOUND:?}");
    Ok(())
}

/// How a job ended, by its client and by the daemon's log, and when. A killed client's job ends without it.
fn settle(world: &World, ended: &Ended) -> anyhow::Result<(String, Instant)> {
    let Some(job) = &ended.job else {
        ensure!(ended.outcome == "killed", "no job was accepted: {}", ended.said);
        return Ok(("cancelled".into(), ended.at));
    };
    let last = world.replay(job, BOUND)?;
    match ended.outcome.as_str() {
        "killed" => return Ok((last, Instant::now())),
        // Who presses Ctrl-C is told no more; the job may have been faster.
        "interrupted" => return Ok((last, ended.at)),
        _ => {}
    }
    let same = match ended.outcome.as_str() {
        "succeeded" | "cancelled" => last == ended.outcome,
        _ => last == "failed",
    };
    ensure!(same, "the client was told {}, the log says {last}: {}", ended.outcome, ended.said);
    if ended.outcome == "succeeded" {
        world.check_picture(ended.picture.as_deref())?;
    }
    Ok((ended.outcome.clone(), ended.at))
}

/// Several clients at once; workers and clients are killed at random.
fn crowd(world: &mut World, setting: &Setting, random: &mut Random) -> anyhow::Result<(Vec<String>, Duration)> {
    let mut clients = Vec::new();
    for _ in 0..setting.clients {
        clients.push(world.client()?);
        pause(random, setting.usual / 4);
    }
    let mut fault = Instant::now();
    for _ in 0..=random.below(3) {
        pause(random, setting.usual);
        fault = Instant::now();
        let workers = world.workers(None);
        let victim = random.below(workers.len() as u64 + 1) as usize;
        match workers.get(victim) {
            Some(worker) => worker.signal(Signal::SIGKILL),
            None => {
                let at = random.below(clients.len() as u64) as usize;
                clients[at].signal(Signal::SIGKILL);
            }
        }
    }
    let ended: Vec<Ended> = clients.into_iter().map(Client::wait).collect::<Result<_, _>>()?;
    let settled: Vec<_> = ended.iter().map(|ended| settle(world, ended)).collect::<Result<_, _>>()?;
    let last = settled.iter().map(|(_, at)| *at).max().unwrap_or(fault);
    Ok((settled.into_iter().map(|(outcome, _)| outcome).collect(), last.saturating_duration_since(fault)))
}

/// The daemon is killed in the middle of a job, and started again.
fn daemon(world: &mut World, setting: &Setting, random: &mut Random) -> anyhow::Result<(Vec<String>, Duration)> {
    let mut client = world.client()?;
    accepted(&mut client)?;
    pause(random, setting.usual);
    let fault = Instant::now();
    world.kill_daemon()?;
    let ended = client.wait()?;
    if ended.outcome == "succeeded" {
        world.check_picture(ended.picture.as_deref())?;
    }
    world.restart()?;
    Ok((vec![ended.outcome], ended.at.saturating_duration_since(fault)))
}

//! `sdctl load`, `unload`, `pin`, `unpin`, `release` and `quarantine`: what operators do while jobs run.

use std::time::Duration;

use sd_client::proto::Worker;
use sd_client::{CallError, Client};
use sd_proto::exit::ProgramExit;
use serde_json::json;

use super::args::{Global, LoadArgs, PinArgs, QuarantineArgs, QuarantineCommand, ReleaseArgs, StageName, UnloadArgs};
use super::generate::model;
use super::lists::{existing, print_json, print_table};
use super::progress::Progress;
use super::report::Trouble;
use super::table::Table;
use super::{human, json, screen};

/// How often the workers are looked at for a bar: an answer from memory.
const LOOK: Duration = Duration::from_millis(150);

fn names_of(stages: &[StageName]) -> Vec<String> {
    stages.iter().map(|stage| stage.name().to_owned()).collect()
}

/// Waits for an answer and meanwhile shows, of the daemon's workers, what `text` makes of them.
async fn meanwhile<T>(
    global: &Global,
    client: &Client,
    call: impl Future<Output = Result<T, CallError>>,
    text: impl Fn(&[Worker]) -> String,
) -> Result<T, Trouble> {
    let progress = Progress::new(global.quiet || global.json);
    tokio::pin!(call);
    loop {
        let look = async {
            tokio::time::sleep(LOOK).await;
            client.workers().await.unwrap_or_default()
        };
        tokio::select! {
            biased;
            answer = &mut call => return Ok(answer?),
            workers = look => progress.waiting(&text(&workers)),
        }
    }
}

/// The workers of a model. A model that was named by its path goes by its folder's name there.
fn of_model<'a>(workers: &'a [Worker], model: &'a str) -> impl Iterator<Item = &'a Worker> {
    workers.iter().filter(move |worker| worker.model == model || model.ends_with(&format!("/{}", worker.model)))
}

/// `sdctl load`.
pub(super) async fn load(global: &Global, args: LoadArgs) -> Result<ProgramExit, Trouble> {
    let model = model(&args.model)?;
    let session = existing(global).await?;
    let client = session.client();
    // Before it comes, so that nobody takes it off in between.
    if args.pin {
        client.pin(&model, true).await?;
    }
    let stages = names_of(&args.stage);
    let text = |workers: &[Worker]| {
        let held: Vec<String> = of_model(workers, &model)
            .map(|worker| format!("{} {}", worker.stage, human::bytes(worker.resident_bytes)))
            .collect();
        if held.is_empty() { format!("loading {model}") } else { format!("loading {model}: {}", held.join(", ")) }
    };
    let loaded = meanwhile(global, client, client.load(&model, &stages), text).await?;
    if global.json {
        return print_json(loaded.iter().map(json::loaded));
    }
    let mut table = Table::new(&["STAGE", ">WORKER", ">HOLDS", ">OF"]);
    for stage in &loaded {
        table.row([
            stage.stage.clone(),
            stage.incarnation.to_string(),
            human::bytes(stage.weights_bytes),
            human::bytes(stage.weights_total_bytes),
        ]);
    }
    if global.quiet {
        return Ok(ProgramExit::Success);
    }
    print_table(global, &table, "nothing was loaded")
}

/// `sdctl unload`.
pub(super) async fn unload(global: &Global, args: UnloadArgs) -> Result<ProgramExit, Trouble> {
    let model = model(&args.model)?;
    let session = existing(global).await?;
    let client = session.client();
    let stages = names_of(&args.stage);
    let wanted = |worker: &Worker| stages.is_empty() || stages.contains(&worker.stage);
    let text = |workers: &[Worker]| leaving(of_model(workers, &model).filter(|worker| wanted(worker)));
    let freed = meanwhile(global, client, client.unload(&model, &stages), text).await?;
    told(global, "unloaded", freed.workers, freed.bytes, &format!("nothing of {model} was on a device"))
}

/// Who is still there.
fn leaving<'a>(workers: impl Iterator<Item = &'a Worker>) -> String {
    let left: Vec<String> = workers
        .map(|worker| match worker.job_id.as_str() {
            "" => worker.stage.clone(),
            job => format!("{} (works for job {job})", worker.stage),
        })
        .collect();
    if left.is_empty() { "waiting for the proof".into() } else { format!("waiting for {}", left.join(", ")) }
}

fn told(global: &Global, what: &str, workers: u32, bytes: u64, nothing: &str) -> Result<ProgramExit, Trouble> {
    if global.json {
        screen::out(format_args!("{:#}", json!({ "workers": workers, "bytes": bytes })))?;
    } else if !global.quiet && workers == 0 {
        screen::say(human::line(nothing));
    } else if !global.quiet {
        let workers = if workers == 1 { "1 process".into() } else { format!("{workers} processes") };
        screen::out(format_args!("{what}: {workers}, {} are free", human::bytes(bytes)))?;
    }
    Ok(ProgramExit::Success)
}

/// `sdctl pin` and `unpin`.
pub(super) async fn pin(global: &Global, args: PinArgs, pinned: bool) -> Result<ProgramExit, Trouble> {
    let model = model(&args.model)?;
    existing(global).await?.client().pin(&model, pinned).await?;
    if global.json {
        screen::out(format_args!("{:#}", json!({ "model": model, "pinned": pinned })))?;
    } else if !global.quiet {
        let text = if pinned { "is pinned: it stays, whoever needs room" } else { "may be taken off again" };
        screen::out(format_args!("{} {text}", human::line(&model)))?;
    }
    Ok(ProgramExit::Success)
}

/// `sdctl release`.
pub(super) async fn release(global: &Global, args: ReleaseArgs) -> Result<ProgramExit, Trouble> {
    let session = existing(global).await?;
    let client = session.client();
    let here = |workers: &[Worker]| leaving(workers.iter().filter(|worker| worker.device == args.device));
    let freed = meanwhile(global, client, client.release(&args.device, args.hold), here).await?;
    if args.hold == Some(Duration::ZERO) && !global.json {
        if !global.quiet {
            screen::out(format_args!("{} is this daemon's again", human::line(&args.device)))?;
        }
        return Ok(ProgramExit::Success);
    }
    let exit = told(global, "released", freed.workers, freed.bytes, &format!("nothing was on {}", args.device))?;
    if let (Some(hold), false, false) = (args.hold, global.json, global.quiet) {
        let hold = human::duration(hold);
        screen::say(format_args!("nothing is granted on {} for {hold}; jobs wait", human::line(&args.device)));
    }
    Ok(exit)
}

/// `sdctl quarantine`.
pub(super) async fn quarantine(global: &Global, args: QuarantineArgs) -> Result<ProgramExit, Trouble> {
    let session = existing(global).await?;
    match args.command.unwrap_or(QuarantineCommand::List) {
        QuarantineCommand::List => quarantined(global, session.client()).await,
        QuarantineCommand::Clear { model: name, stage } => {
            let name = name.map_or_else(|| Ok(String::new()), |name| model(&name))?;
            let stage = stage.map_or("", StageName::name);
            let cleared = session.client().clear_quarantine(&name, stage).await?;
            if global.json {
                screen::out(format_args!("{:#}", json!({ "cleared": cleared })))?;
            } else if !global.quiet {
                screen::out(format_args!("cleared: {}", human::count(cleared.into(), "stage")))?;
            }
            Ok(ProgramExit::Success)
        }
    }
}

async fn quarantined(global: &Global, client: &Client) -> Result<ProgramExit, Trouble> {
    let entries = client.quarantine().await?;
    if global.json {
        return print_json(entries.iter().map(json::quarantined));
    }
    if entries.is_empty() && !global.quiet {
        screen::say("nothing is held back");
    }
    for entry in &entries {
        let deaths = human::count(entry.deaths.into(), "death");
        let since = entry.since.as_ref().map_or_else(String::new, |time| format!(" since {time}"));
        let title = format!("{} of {} is held back{since}, after {deaths}: {}", entry.stage, entry.model, entry.reason);
        screen::out(human::line(&title))?;
        for line in &entry.stderr {
            screen::out(format_args!("  {}", human::line(line)))?;
        }
    }
    Ok(ProgramExit::Success)
}

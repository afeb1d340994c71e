//! `sdctl models`, `inspect`, `jobs` and `ps`, and what all lists share.

use sd_client::proto::{Job, JobState, Model};
use sd_client::{CallError, Client, Notice, Places, Session, StartPolicy, names};
use sd_proto::exit::ProgramExit;
use serde_json::Value;

use super::args::{Global, JobsArgs};
use super::report::Trouble;
use super::table::Table;
use super::{human, json, screen};

/// A running daemon, for what only one that runs can tell.
pub(super) async fn existing(global: &Global) -> Result<Session, Trouble> {
    let places = Places::from_environment(global.endpoint.clone())?;
    Ok(Session::existing(&places, &mut |notice| tell(global, notice)).await?)
}

fn tell(global: &Global, notice: Notice) {
    match notice {
        Notice::Skipped(why) | Notice::Waiting(why) if !global.quiet => {
            screen::say(format_args!("sdctl: {}", human::line(&why)));
        }
        Notice::Skipped(_) | Notice::Waiting(_) | Notice::Starting | Notice::Joined(_) => {}
    }
}

/// Asks a daemon, or a private one where none runs. One that goes away meanwhile is replaced once.
pub(super) async fn ask<T>(
    global: &Global,
    question: impl AsyncFn(&Client) -> Result<T, CallError>,
) -> Result<T, Trouble> {
    let places = Places::from_environment(global.endpoint.clone())?;
    let policy = StartPolicy { verbose: global.verbose, ..StartPolicy::default() };
    let mut again = true;
    loop {
        let session = Session::open(&places, &policy, &mut |notice| tell(global, notice)).await?;
        let answer = question(session.client()).await;
        let replaceable = session.replaceable();
        session.close().await;
        match answer {
            Err(error) if again && replaceable && error.daemon_is_gone() => again = false,
            answer => return Ok(answer?),
        }
    }
}

pub(super) fn print_json(values: impl IntoIterator<Item = Value>) -> Result<ProgramExit, Trouble> {
    screen::out(format_args!("{:#}", Value::Array(values.into_iter().collect())))?;
    Ok(ProgramExit::Success)
}

pub(super) fn print_table(global: &Global, table: &Table, nothing: &str) -> Result<ProgramExit, Trouble> {
    if !table.is_empty() {
        screen::out(table.render())?;
    } else if !global.quiet {
        screen::say(nothing);
    }
    Ok(ProgramExit::Success)
}

/// An empty cell reads as an error; a dash says that there is nothing.
pub(super) fn or_dash(text: impl Into<String>) -> String {
    let text = text.into();
    if text.is_empty() { "-".into() } else { text }
}

/// `sdctl models`.
pub(super) async fn models(global: &Global) -> Result<ProgramExit, Trouble> {
    let models = ask(global, async |client: &Client| client.models().await).await?;
    if global.json {
        return print_json(models.iter().map(json::model));
    }
    let mut table = Table::new(&["NAME", "FAMILY", ">FILES", "PRECISION", ">SIZE", ">STEPS", "SAMPLER", "STATE"]);
    for model in &models {
        let name = if model.is_default { format!("{} (default)", model.name) } else { model.name.clone() };
        let size = match (model.default_width, model.default_height) {
            (0, _) | (_, 0) => "-".into(),
            (width, height) => format!("{width}x{height}"),
        };
        let steps = if model.default_steps == 0 { "-".into() } else { model.default_steps.to_string() };
        let state = if model.problem.is_empty() { "ok".into() } else { human::shorten(&model.problem, 60) };
        table.row([
            name,
            or_dash(&model.family),
            human::bytes(model.file_bytes),
            or_dash(&model.precision),
            size,
            steps,
            or_dash(&model.default_sampler),
            state,
        ]);
    }
    print_table(global, &table, "no models")
}

/// `sdctl inspect`.
pub(super) async fn inspect(global: &Global, name: &str) -> Result<ProgramExit, Trouble> {
    let name = super::generate::model(name)?;
    let model = ask(global, async |client: &Client| client.inspect(&name).await).await?;
    if global.json {
        screen::out(format_args!("{:#}", json::model(&model)))?;
    } else {
        print_model(global, &model)?;
    }
    if model.problem.is_empty() {
        return Ok(ProgramExit::Success);
    }
    Err(Trouble::data(format!("model {} cannot be used: {}", model.name, model.problem)))
}

fn print_model(global: &Global, model: &Model) -> Result<(), Trouble> {
    let mut facts = Table::new(&["MODEL", &human::line(&model.name)]);
    facts.row(["path".into(), or_dash(&model.path)]);
    facts.row(["family".into(), or_dash(&model.family)]);
    facts.row(["files".into(), format!("{} in {}", human::bytes(model.file_bytes), or_dash(&model.precision))]);
    let size = format!("{}x{}", model.default_width, model.default_height);
    let guidance = model.default_guidance_scale;
    let steps = human::count(model.default_steps.into(), "step");
    let sampler = or_dash(&model.default_sampler);
    facts.row(["defaults".into(), format!("{size}, {steps}, cfg {guidance}, sampler {sampler}")]);
    screen::out(facts.render())?;
    let mut table = Table::new(&["STAGE", "CLASS", ">TENSORS", ">FILES", ">ON DEVICE", "PRECISION"]);
    for part in &model.components {
        table.row([
            part.stage.clone(),
            part.class_name.clone(),
            part.tensors.to_string(),
            human::bytes(part.file_bytes),
            human::bytes(part.weights_bytes),
            or_dash(&part.precision),
        ]);
    }
    if !table.is_empty() {
        screen::out("")?;
        print_table(global, &table, "")?;
    }
    Ok(())
}

/// `sdctl jobs`.
pub(super) async fn jobs(global: &Global, args: JobsArgs) -> Result<ProgramExit, Trouble> {
    let jobs = existing(global).await?.client().list(!args.all, args.limit).await?;
    if global.json {
        return print_json(jobs.iter().map(json::job));
    }
    let mut table = Table::new(&["JOB", "STATE", ">DONE", ">AGE", ">TOOK", "MODEL", "PROMPT"]);
    for job in &jobs {
        let request = job.request.clone().unwrap_or_default();
        let age = age(job.submitted.as_ref()).map_or_else(|| "-".into(), human::duration);
        let took = job.timings.as_ref().and_then(|t| t.total.as_ref());
        table.row([
            job.id.clone(),
            state(job),
            format!("{}/{}", job.images_done, request.count.max(1)),
            age,
            took.map_or_else(|| "-".into(), |total| human::duration(human::wire_duration(Some(total)))),
            or_dash(&request.model),
            human::shorten(&request.prompt, 48),
        ]);
    }
    print_table(global, &table, if args.all { "no jobs" } else { "no job waits or runs (--all shows ended ones)" })
}

fn state(job: &Job) -> String {
    let name = names::job_state(job.state());
    match (job.state(), &job.failure) {
        (JobState::Queued, _) => format!("{name} behind {}", job.position),
        (JobState::Running, _) => format!("{name} {}", names::stage(job.stage())),
        (JobState::Failed, Some(failure)) => format!("{name} {}", names::failure_reason(failure.reason())),
        (JobState::Failed | JobState::Succeeded | JobState::Cancelled | JobState::Unspecified, _) => name.into(),
    }
}

fn age(since: Option<&prost_types::Timestamp>) -> Option<std::time::Duration> {
    let since = std::time::SystemTime::try_from(*since?).ok()?;
    since.elapsed().ok()
}

/// `sdctl ps`.
pub(super) async fn workers(global: &Global) -> Result<ProgramExit, Trouble> {
    let workers = existing(global).await?.client().workers().await?;
    if global.json {
        return print_json(workers.iter().map(json::worker));
    }
    let mut table = Table::new(&[
        ">WORKER", ">PID", "STAGE", "MODEL", "DEVICE", "STATE", ">WEIGHTS", ">LEASED", ">USED", ">AGE", "JOB",
    ]);
    for worker in &workers {
        let weights = match worker.weights_total_bytes {
            0 => "-".into(),
            all => format!("{} of {}", human::bytes(worker.weights_bytes), human::bytes(all)),
        };
        let pinned = if worker.pinned { ", pinned" } else { "" };
        table.row([
            worker.incarnation.to_string(),
            worker.pid.to_string(),
            worker.stage.clone(),
            worker.model.clone(),
            worker.device.clone(),
            format!("{}{pinned}", names::worker_state(worker.state())),
            weights,
            human::bytes(worker.leased_bytes),
            human::bytes(worker.resident_bytes),
            human::duration(human::wire_duration(worker.age.as_ref())),
            or_dash(&worker.job_id),
        ]);
    }
    print_table(global, &table, "no workers")
}

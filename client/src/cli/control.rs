//! `sdctl status`, `cancel` and `drain`.

use sd_client::names;
use sd_client::proto::JobState;
use sd_proto::exit::ProgramExit;
use serde_json::json;

use super::args::{DrainArgs, Global};
use super::lists::existing;
use super::report::Trouble;
use super::table::Table;
use super::{human, json, screen};

/// `sdctl status`.
pub(super) async fn status(global: &Global) -> Result<ProgramExit, Trouble> {
    let session = existing(global).await?;
    let status = session.client().status().await?;
    if global.json {
        screen::out(format_args!("{:#}", json::status(&status, &session.source().to_string())))?;
        return Ok(ProgramExit::Success);
    }
    let state = if status.draining { "draining" } else { "serving" };
    screen::out(human::line(&format!(
        "sdd {} is {state} at {} (pid {}, instance {}, found by {})",
        status.version,
        session.client().endpoint(),
        status.pid,
        status.instance,
        session.source(),
    )))?;
    screen::out(format_args!("jobs: {} running, {} queued", status.running_jobs, status.queued_jobs))?;
    screen::out(format_args!(
        "shared memory: {} held, {} free on the host",
        human::bytes(status.shared_memory_bytes),
        human::bytes(status.shared_memory_free_bytes),
    ))?;
    let mut table = Table::new(&["DEVICE", "NAME", ">TOTAL", ">BUDGET", ">CAPACITY", ">LEASED", ">UNPROVEN", "STATE"]);
    for device in &status.devices {
        table.row([
            device.id.clone(),
            device.name.clone(),
            human::bytes(device.total_bytes),
            human::bytes(device.budget_bytes),
            human::bytes(device.capacity_bytes),
            human::bytes(device.leased_bytes),
            human::bytes(device.unproven_bytes),
            match &device.held_until {
                Some(until) => format!("given to other programs until {until}"),
                None if device.degraded => "degraded".into(),
                None => "ok".into(),
            },
        ]);
    }
    screen::out(table.render())?;
    let mut foreign = Table::new(&["DEVICE", ">PID", "OTHER PROGRAM", ">HOLDS"]);
    for (device, process) in status.devices.iter().flat_map(|d| d.foreign.iter().map(move |process| (d, process))) {
        let pid = process.pid.to_string();
        let bytes = process.bytes.map_or("not told".into(), human::bytes);
        foreign.row([device.id.clone(), pid, process.name.clone(), bytes]);
    }
    if !foreign.is_empty() {
        screen::out("")?;
        screen::out(foreign.render())?;
    }
    Ok(ProgramExit::Success)
}

/// `sdctl cancel`.
pub(super) async fn cancel(global: &Global, id: &str) -> Result<ProgramExit, Trouble> {
    let job = existing(global).await?.client().cancel(id).await?;
    if global.json {
        screen::out(format_args!("{:#}", json::job(&job)))?;
    } else if !global.quiet {
        match job.state() {
            JobState::Cancelled => screen::out(format_args!("job {} is cancelled", human::line(&job.id)))?,
            state @ (JobState::Succeeded
            | JobState::Failed
            | JobState::Queued
            | JobState::Running
            | JobState::Unspecified) => {
                screen::out(format_args!("job {} had {} already", human::line(&job.id), names::job_state(state)))?;
            }
        }
    }
    Ok(ProgramExit::Success)
}

/// `sdctl drain`.
pub(super) async fn drain(global: &Global, args: DrainArgs) -> Result<ProgramExit, Trouble> {
    let session = existing(global).await?;
    if !global.quiet && !global.json {
        screen::say(format_args!("draining {}", session.client().endpoint()));
    }
    let done = session.client().drain(args.timeout).await?;
    if global.json {
        let summary = json!({
            "jobs_finished": done.jobs_finished,
            "jobs_cancelled": done.jobs_cancelled,
            "jobs_kept": done.jobs_kept,
        });
        screen::out(format_args!("{summary:#}"))?;
    } else if !global.quiet {
        let finished = human::count(done.jobs_finished.into(), "job");
        let kept = match done.jobs_kept {
            0 => String::new(),
            kept => format!(", {kept} kept for the next start"),
        };
        screen::out(format_args!("drained: {finished} finished, {} cancelled{kept}", done.jobs_cancelled))?;
    }
    Ok(ProgramExit::Success)
}

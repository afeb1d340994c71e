//! `sdctl fit` and `sdctl config show`: what would be, and what is set.

use sd_client::Client;
use sd_client::names;
use sd_client::proto::{FitResponse, ImageRequest};
use sd_proto::exit::ProgramExit;

use super::args::{ConfigArgs, ConfigCommand, FitArgs, Global};
use super::generate::{model, positive};
use super::lists::{ask, or_dash, print_json, print_table};
use super::report::Trouble;
use super::table::Table;
use super::{human, input, json, screen};

/// What stands for a prompt where none is given: memory depends on its length alone.
const ANY_PROMPT: &str = "a picture";

/// `sdctl fit`.
pub(super) async fn run(global: &Global, args: FitArgs) -> Result<ProgramExit, Trouble> {
    let request = build(&args)?;
    let fit = ask(global, async |client: &Client| client.fit(request.clone()).await).await?;
    if global.json {
        screen::out(format_args!("{:#}", json::fit(&fit)))?;
    } else {
        print(&fit)?;
    }
    Ok(if fit.fits { ProgramExit::Success } else { ProgramExit::Capacity })
}

fn build(args: &FitArgs) -> Result<ImageRequest, Trouble> {
    let picture = |file: &Option<std::path::PathBuf>, what| match file {
        Some(file) => input::image(file, what),
        None => Ok(Vec::new()),
    };
    Ok(ImageRequest {
        model: model(&args.model)?,
        prompt: args.prompt.clone().unwrap_or_else(|| ANY_PROMPT.into()),
        width: positive(args.width, "--width")?,
        height: positive(args.height, "--height")?,
        guidance_scale: args.cfg,
        count: args.count,
        seed: Some(0),
        init_image: picture(&args.init_img, "initial picture")?,
        mask: picture(&args.mask, "mask")?,
        memory: args.memory.request(),
        ..Default::default()
    })
}

fn print(fit: &FitResponse) -> Result<(), Trouble> {
    let verdict = if fit.fits { "It fits" } else { "It does not fit" };
    let mode = if fit.mode.is_empty() { String::new() } else { format!(" in mode {}", human::line(&fit.mode)) };
    let (device, budget) = (human::line(&fit.device), human::bytes(fit.budget_bytes));
    screen::out(format_args!("{verdict}{mode} on {device}, where {budget} may be used."))?;
    if let Some(plan) = fit.plan.as_ref().filter(|plan| plan.vae_tile > 0) {
        screen::out(format_args!(
            "It is decoded in tiles of {} pixels, {} of overlap.",
            plan.vae_tile, plan.vae_tile_overlap
        ))?;
    }
    if !fit.advice.is_empty() {
        screen::out(human::lines(&fit.advice))?;
    }
    // The daemon's advice may have said so already.
    let new = |text: &str| !fit.fits && !fit.advice.contains(text);
    if !fit.fitting_mode.is_empty() && new(&fit.fitting_mode) {
        screen::out(format_args!("It would fit with --offload-mode {}.", human::line(&fit.fitting_mode)))?;
    }
    if fit.largest_width > 0 && new(&fit.largest_width.to_string()) {
        screen::out(format_args!("The largest size of this shape is {}x{}.", fit.largest_width, fit.largest_height))?;
    }
    let mut table =
        Table::new(&["STAGE", "DEVICE", ">CONTEXT", ">WEIGHTS", ">AT LEAST", ">WORKING SET", ">TOGETHER", "FROM"]);
    for stage in &fit.stages {
        let least = stage.context_bytes + stage.weights_floor_bytes + stage.working_set_bytes;
        let all = stage.context_bytes + stage.weights_bytes + stage.working_set_bytes;
        let together =
            if least == all { human::bytes(all) } else { format!("{} to {}", human::bytes(least), human::bytes(all)) };
        table.row([
            names::stage(stage.stage()).into(),
            stage.device.clone(),
            human::bytes(stage.context_bytes),
            human::bytes(stage.weights_bytes),
            human::bytes(stage.weights_floor_bytes),
            human::bytes(stage.working_set_bytes),
            together,
            or_dash(&stage.source),
        ]);
    }
    if !table.is_empty() {
        screen::out("")?;
        screen::out(table.render())?;
    }
    Ok(())
}

/// `sdctl config show`.
pub(super) async fn config(global: &Global, args: ConfigArgs) -> Result<ProgramExit, Trouble> {
    match args.command {
        ConfigCommand::Show => {}
    }
    let values = ask(global, async |client: &Client| client.config().await).await?;
    if global.json {
        return print_json(values.iter().map(json::config));
    }
    let mut table = Table::new(&["KEY", "VALUE", "ORIGIN"]);
    for value in &values {
        table.row([value.key.clone(), or_dash(&value.value), value.origin.clone()]);
    }
    print_table(global, &table, "nothing is configured")
}

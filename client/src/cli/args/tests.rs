//! The command line as a whole.

use super::*;
use clap::CommandFactory as _;

fn parse(args: &[&str]) -> Result<Arguments, clap::Error> {
    Arguments::try_parse_from(["sdctl"].iter().chain(args))
}

#[test]
fn the_definition_is_sound() {
    Arguments::command().debug_assert();
}

#[test]
fn every_command_explains_itself() {
    let mut command = Arguments::command();
    // Hands the common options down to every subcommand.
    command.build();
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    for expected in "generate models jobs watch ps leases status cancel drain inspect doctor completions why events fit load unload \
                     pin unpin release quarantine config"
            .split(' ')
    {
        assert!(names.iter().any(|name| name == expected), "{expected} is missing among {names:?}");
    }
    for name in names.into_iter().filter(|name| name != "help") {
        let sub = command.find_subcommand_mut(&name).unwrap();
        assert!(sub.get_about().is_some(), "{name}");
        for argument in sub.get_arguments() {
            assert!(argument.get_help().is_some(), "{name} {}", argument.get_id());
        }
    }
    let help = command.find_subcommand_mut("generate").unwrap().render_long_help().to_string();
    for part in [
        "--model",
        "--count",
        "--negative",
        "--width",
        "--height",
        "--steps",
        "--cfg",
        "--seed",
        "--sampler",
        "--schedule",
        "--zero-snr",
        "--eta",
        "--cfg-rescale",
        "--clip-skip",
        "--no-emphasis",
        "--init-img",
        "--mask",
        "--strength",
        "--output",
        "--force",
        "--keep",
        "--show",
        "--offload-mode",
        "--no-reload-diffusion",
        "--vae-tile-overlap",
        "layer_streaming",
        "--endpoint",
        "--json",
        "--quiet",
        "Examples:",
        "dpmpp_2m_sde",
        "sgm_uniform",
        "{seed}",
        "{n:03}",
    ] {
        assert!(help.contains(part), "generate --help lacks {part}");
    }
}

#[test]
fn a_full_command_line_is_read() {
    let line = [
        "generate",
        "a cat",
        "-m",
        "sd15",
        "-n",
        "2",
        "--negative",
        "-blurry",
        "-W",
        "512",
        "-H",
        "768",
        "--steps",
        "9",
        "--cfg",
        "7.5",
        "--seed",
        "18446744073709551615",
        "--sampler",
        "DPM++ 2M Karras",
        "--zero-snr",
        "--endpoint",
        "unix:/x.sock",
        "-o",
        "x.png",
        "--force",
        "--show",
        "never",
    ];
    let Command::Generate(args) = parse(&line).unwrap().command else { panic!("not generate") };
    let expected = SamplerChoice { sampler: Sampler::Dpmpp2m, schedule: Some(Schedule::Karras) };
    assert_eq!(args.sampler, Some(expected));
    assert_eq!((args.seed, args.zero_snr, args.height), (Some(u64::MAX), Some(true), Some(768)));
    assert_eq!(args.negative.as_deref(), Some("-blurry"));
    let Command::Generate(args) = parse(&["generate", "--zero-snr=false", "x"]).unwrap().command else { panic!() };
    assert_eq!((args.zero_snr, args.prompt.as_deref()), (Some(false), Some("x")));
}

#[test]
fn bad_lines_are_refused() {
    for line in [
        &["generate"][..],
        &["generate", "x", "--sampler", "plms"],
        &["generate", "x", "--mask", "m.png"],
        &["generate", "x", "-n", "0"],
        &["generate", "x", "--endpoint", "nonsense"],
        &["generate", "x", "--prompt-file", "y"],
        &["drain", "--timeout", "soon"],
    ] {
        assert!(parse(line).is_err(), "{line:?}");
    }
    let error = parse(&["generate", "x", "--sampler", "plms"]).unwrap_err().to_string();
    assert!(error.contains("dpmpp_2m_sde") && error.contains("unipc"), "{error}");
}

#[test]
fn memory_is_asked_for_under_the_names_that_users_know() {
    use sd_client::proto::{MemoryRequest, OffloadMode};
    let request = |more: &[&str]| {
        let line: Vec<&str> = ["generate", "x"].iter().chain(more).copied().collect();
        let Command::Generate(args) = parse(&line).unwrap().command else { panic!("not generate") };
        args.memory.request()
    };
    assert_eq!(request(&[]), None);
    let line = [
        "--offload-mode",
        "cond-diffusion",
        "--no-offload-cond-stage",
        "--offload-diffusion",
        "--no-reload-cond-stage",
        "--reload-diffusion",
        "--vae-tiling",
        "--vae-tile-size",
        "256",
        "--vae-tile-overlap",
        "64",
    ];
    let expected = MemoryRequest {
        mode: OffloadMode::CondDiffusion.into(),
        offload_cond_stage: Some(false),
        offload_diffusion: Some(true),
        reload_cond_stage: Some(false),
        reload_diffusion: Some(true),
        vae_tiling: Some(true),
        vae_tile_size: 256,
        vae_tile_overlap: 64,
    };
    assert_eq!(request(&line), Some(expected));
    let last = request(&["--vae-tiling", "--no-vae-tiling"]).unwrap();
    assert_eq!(last.vae_tiling, Some(false), "the last of two opposites counts");
    let Command::Fit(args) = parse(&["fit", "sd15", "-W", "64", "--offload-mode", "none"]).unwrap().command else {
        panic!("not fit")
    };
    assert_eq!(args.memory.request().unwrap().mode(), OffloadMode::None);
}

#[test]
fn operators_commands_are_read() {
    let Command::Load(args) = parse(&["load", "sd15", "--stage", "unet", "-s", "vae", "--pin"]).unwrap().command else {
        panic!("not load")
    };
    assert_eq!((args.stage.as_slice(), args.pin), (&[StageName::Diffusion, StageName::Vae][..], true));
    let Command::Release(args) = parse(&["release", "cpu", "--for", "10m"]).unwrap().command else {
        panic!("not release")
    };
    assert_eq!((args.device.as_str(), args.hold), ("cpu", Some(Duration::from_secs(600))));
    let Command::Quarantine(args) = parse(&["quarantine"]).unwrap().command else { panic!("not quarantine") };
    assert!(args.command.is_none());
    let line = ["quarantine", "clear", "sd15", "text"];
    let Command::Quarantine(args) = parse(&line).unwrap().command else { panic!("not quarantine") };
    let Some(QuarantineCommand::Clear { model, stage }) = args.command else { panic!("not clear") };
    assert_eq!((model.as_deref(), stage), (Some("sd15"), Some(StageName::Text)));
    for line in [
        &["load"][..],
        &["load", "sd15", "--stage", "sampler"],
        &["release"],
        &["release", "cpu", "--for", "soon"],
        &["generate", "x", "--offload-mode", "lazy"],
        &["generate", "x", "--vae-tile-size", "0"],
        &["fit"],
        &["fit", "sd15", "--mask", "m.png"],
        &["config"],
    ] {
        assert!(parse(line).is_err(), "{line:?}");
    }
}

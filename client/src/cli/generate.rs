//! `sdctl generate`.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use sd_client::proto::{Emphasis, ImageRequest, Sampler, Schedule};
use sd_client::{CallError, Closed, Events, Notice, Places, Session, Source, StartPolicy};
use sd_proto::exit::ProgramExit;
use tokio::time::Instant;

use super::args::{GenerateArgs, Global};
use super::follow::{Follower, Outcome, Sink};
use super::interrupts::Interrupts;
use super::naming::{Facts, Naming};
use super::report::Trouble;
use super::{human, input, screen, show};

/// How often a daemon that went away before it took the job is replaced by another.
const ATTEMPTS: u32 = 6;
/// How long a cancelled job may take to end before we leave; the daemon's own bound is below it.
const CANCEL_LIMIT: Duration = Duration::from_secs(5);

/// Runs the command.
pub(super) async fn run(global: &Global, args: GenerateArgs) -> Result<ProgramExit, Trouble> {
    // What blocks (stdin, files) comes before the signals are taken over, so that Ctrl-C ends it.
    let request = build(&args)?;
    let sink = sink(global, &args)?;
    let places = Places::from_environment(global.endpoint.clone())?;
    let mut interrupts = Interrupts::listen()?;
    let policy = StartPolicy { verbose: global.verbose, ..StartPolicy::default() };
    let facts = Facts::now(&request.prompt, &request.model);
    let mut follower = Follower::new(global, sink, facts, show::method(args.show));
    let mut attempt = 1;
    loop {
        // With the model's name in the file's, the daemon is asked for its default first.
        if !follower.wants_model() || !request.model.is_empty() {
            follower.check(&request)?;
        }
        let mut notify = |notice| tell(&follower, global, notice);
        let session = tokio::select! {
            session = Session::open(&places, &policy, &mut notify) => session?,
            () = interrupts.next() => return interrupted(&follower, false),
        };
        let ended = one(global, &args, &request, &session, &mut follower, &mut interrupts).await;
        let again = matches!(&ended, Err(Gone::Early(_))) && session.replaceable() && attempt < ATTEMPTS;
        let ended = close(session, &follower, &mut interrupts, ended).await;
        match ended {
            Err(Gone::Early(_)) if again => {
                attempt += 1;
                follower.note("the daemon went away before it took the job; looking for another");
            }
            Ok(exit) => return Ok(exit),
            Err(Gone::Early(trouble) | Gone::For(trouble)) => return Err(trouble),
        }
    }
}

/// Why a call has no exit code of its own.
#[derive(Debug)]
enum Gone {
    /// The daemon went away before it took the job: another may take it.
    Early(Trouble),
    /// For good.
    For(Trouble),
}

impl From<Trouble> for Gone {
    fn from(trouble: Trouble) -> Self {
        Self::For(trouble)
    }
}

impl From<CallError> for Gone {
    fn from(error: CallError) -> Self {
        if error.daemon_is_gone() { Self::Early(error.into()) } else { Self::For(error.into()) }
    }
}

/// One job on one daemon, from submission to the terminal event.
async fn one(
    global: &Global,
    args: &GenerateArgs,
    request: &ImageRequest,
    session: &Session,
    follower: &mut Follower,
    interrupts: &mut Interrupts,
) -> Result<ProgramExit, Gone> {
    if args.keep && session.source() == Source::Private {
        let message = "--keep needs a daemon that runs on, and none does: start one with `sdd` first";
        return Err(Trouble::usage(message).into());
    }
    if follower.wants_model() && request.model.is_empty() {
        let models = session.client().models().await?;
        let default = models.into_iter().find(|model| model.is_default);
        follower.model_is(&default.map_or_else(|| "default".into(), |model| model.name));
        follower.check(request)?;
    }
    follower.progress.waiting("submitting");
    let events = tokio::select! {
        events = session.client().generate(request.clone(), args.keep) => events?,
        () = interrupts.next() => return Ok(interrupted(follower, false)?),
    };
    let mut call = Call { session, keep: args.keep, global, events, cancelling: None };
    call.follow(follower, interrupts).await
}

struct Call<'a> {
    session: &'a Session,
    global: &'a Global,
    keep: bool,
    events: Events,
    /// Since the user asked for it: when we leave at the latest.
    cancelling: Option<Instant>,
}

impl Call<'_> {
    async fn follow(&mut self, follower: &mut Follower, interrupts: &mut Interrupts) -> Result<ProgramExit, Gone> {
        let mut first = true;
        loop {
            let until = self.cancelling.unwrap_or_else(|| Instant::now() + CANCEL_LIMIT);
            let event = tokio::select! {
                event = self.events.next() => event,
                () = interrupts.next() => match self.interrupt(follower)? {
                    Some(exit) => return Ok(exit),
                    None => continue,
                },
                () = tokio::time::sleep_until(until), if self.cancelling.is_some() => {
                    return Ok(interrupted(follower, false)?);
                }
            };
            let event = match event {
                Some(Ok(event)) => event,
                // The user wanted it to end, and it has.
                Some(Err(_)) | None if self.cancelling.is_some() => return Ok(interrupted(follower, false)?),
                Some(Err(error)) if first => return Err(error.into()),
                Some(Err(error)) => return Err(Gone::For(error.into())),
                None => return Err(Gone::For(Trouble::internal("the events ended without a last one"))),
            };
            first = false;
            let outcome = match follower.take(&event) {
                Ok(outcome) => outcome,
                Err(trouble) => {
                    // What it makes cannot be kept: no reason to go on computing it.
                    self.cancel(follower);
                    return Err(trouble.into());
                }
            };
            match outcome {
                None => {}
                Some(Outcome::Succeeded) => return Ok(ProgramExit::Success),
                Some(Outcome::Cancelled(_)) if self.cancelling.is_some() => return Ok(interrupted(follower, true)?),
                Some(Outcome::Cancelled(reason)) => return Err(Trouble::cancelled_elsewhere(&reason).into()),
                Some(Outcome::Failed(_)) if self.cancelling.is_some() => return Ok(interrupted(follower, true)?),
                Some(Outcome::Failed(failure)) => return Err(Trouble::from(&*failure).into()),
            }
        }
    }

    /// Ctrl-C: the first cancels (or leaves a kept job), the second leaves at once.
    fn interrupt(&mut self, follower: &mut Follower) -> Result<Option<ProgramExit>, Trouble> {
        if self.cancelling.is_some() {
            leave_at_once(follower);
        }
        let Some(job) = follower.job_id().map(str::to_owned) else {
            // Not a job yet; dropping the events withdraws it.
            return interrupted(follower, false).map(Some);
        };
        if self.keep {
            follower.progress.finish();
            screen::say(format_args!("sdctl: job {job} goes on; follow it with `sdctl watch {job}`"));
            return Ok(Some(ProgramExit::Interrupted));
        }
        self.cancelling = Some(Instant::now() + CANCEL_LIMIT);
        follower.progress.waiting("cancelling");
        if self.global.verbose {
            follower.note("cancelling; press Ctrl-C again to leave at once");
        }
        self.cancel(follower);
        Ok(None)
    }

    /// Asks the daemon to cancel; the answer is the job's last event.
    fn cancel(&self, follower: &Follower) {
        let Some(job) = follower.job_id().map(str::to_owned) else { return };
        let client = self.session.client().clone();
        tokio::spawn(async move { client.cancel(&job).await });
    }
}

/// Leaves without waiting. A private daemon ends as its pipe closes with this process.
fn leave_at_once(follower: &Follower) -> ! {
    follower.progress.finish();
    screen::say("sdctl: left at once");
    std::process::exit(ProgramExit::Interrupted.code())
}

fn interrupted(follower: &Follower, told: bool) -> Result<ProgramExit, Trouble> {
    follower.interrupted(told)?;
    Ok(ProgramExit::Interrupted)
}

/// Ends a private daemon; where the call failed because of it, its last words explain why.
async fn close(
    mut session: Session,
    follower: &Follower,
    interrupts: &mut Interrupts,
    mut ended: Result<ProgramExit, Gone>,
) -> Result<ProgramExit, Gone> {
    follower.progress.finish();
    let broken = |trouble: &Trouble| trouble.exit == ProgramExit::Unavailable || trouble.exit == ProgramExit::Internal;
    if let Err(Gone::Early(trouble) | Gone::For(trouble)) = &mut ended
        && broken(trouble)
        && let Some((how, log)) = session.post_mortem().await
    {
        let title = match how {
            Some(how) => format!("the private daemon ended ({how}); its last lines"),
            None => "the private daemon's last lines".into(),
        };
        trouble.add_lines(&title, &log);
    }
    let closed = tokio::select! {
        closed = session.close() => closed,
        () = interrupts.next() => leave_at_once(follower),
    };
    match closed {
        None | Some(Closed::Ended) => {}
        Some(Closed::Forced) => follower.note("the private daemon did not end by itself and was killed"),
        Some(Closed::Shared) => follower.note("other calls use the private daemon; it ends after them"),
    }
    ended
}

/// Prints what happens while a daemon is looked for.
fn tell(follower: &Follower, global: &Global, notice: Notice) {
    match notice {
        Notice::Skipped(why) => follower.note(&why),
        Notice::Starting => follower.progress.waiting("starting a daemon for this call"),
        Notice::Waiting(who) => follower.note(&format!("{who}; waiting for its end (Ctrl-C gives up)")),
        Notice::Joined(endpoint) if global.verbose => follower.note(&format!("joined the daemon at {endpoint}")),
        Notice::Joined(_) => {}
    }
}

fn sink(global: &Global, args: &GenerateArgs) -> Result<Sink, Trouble> {
    if args.output.as_deref() != Some("-") {
        return Naming::parse(args.output.as_deref(), args.force, args.count).map(Sink::Files);
    }
    if args.count > 1 {
        let pictures = human::count(args.count.into(), "picture");
        return Err(Trouble::usage(format!(
            "-o - writes one picture to stdout, not {pictures}: give a pattern or -n 1"
        )));
    }
    if global.json {
        return Err(Trouble::usage("-o - and --json both want stdout: leave one of them out"));
    }
    if std::io::stdout().is_terminal() {
        return Err(Trouble::usage("-o - writes PNG bytes, and stdout is a terminal: redirect it, or leave -o out"));
    }
    Ok(Sink::Stdout)
}

/// The request that the arguments ask for.
fn build(args: &GenerateArgs) -> Result<ImageRequest, Trouble> {
    let prompt = match (args.prompt.as_deref(), args.prompt_file.as_deref()) {
        (Some("-"), _) => input::prompt(Path::new("-"))?,
        (Some(prompt), _) => prompt.to_owned(),
        (None, Some(file)) => input::prompt(file)?,
        (None, None) => return Err(Trouble::usage("no prompt")),
    };
    let picture = |file: &Option<std::path::PathBuf>, what| match file {
        Some(file) => input::image(file, what),
        None => Ok(Vec::new()),
    };
    let (sampler, schedule) = sampling(args)?;
    Ok(ImageRequest {
        model: model(args.model.as_deref().unwrap_or_default())?,
        prompt,
        negative_prompt: args.negative.clone().unwrap_or_default(),
        width: positive(args.width, "--width")?,
        height: positive(args.height, "--height")?,
        steps: args.steps,
        guidance_scale: args.cfg,
        seed: Some(match args.seed {
            Some(seed) => seed,
            None => draw_seed()?,
        }),
        count: args.count,
        sampler: sampler.into(),
        schedule: schedule.into(),
        zero_terminal_snr: args.zero_snr,
        eta: args.eta,
        guidance_rescale: args.cfg_rescale,
        emphasis: if args.no_emphasis { Emphasis::Off } else { Emphasis::Unspecified }.into(),
        clip_skip: args.clip_skip.unwrap_or(0),
        init_image: picture(&args.init_img, "initial picture")?,
        mask: picture(&args.mask, "mask")?,
        strength: args.strength,
        memory: args.memory.request(),
    })
}

/// On the wire zero means the model's own; on the command line it is a mistake.
pub(super) fn positive(pixels: Option<u32>, flag: &str) -> Result<u32, Trouble> {
    match pixels {
        Some(0) => Err(Trouble::usage(format!("{flag} must be above zero: leave it out for the model's own"))),
        Some(pixels) => Ok(pixels),
        None => Ok(0),
    }
}

fn sampling(args: &GenerateArgs) -> Result<(Sampler, Schedule), Trouble> {
    let Some(choice) = args.sampler else {
        return Ok((Sampler::Unspecified, args.schedule.unwrap_or(Schedule::Unspecified)));
    };
    match (choice.schedule, args.schedule) {
        (Some(named), Some(given)) if named != given => {
            let name = sd_client::names::schedule;
            let message = format!("the sampler's name says {}, --schedule says {}", name(named), name(given));
            Err(Trouble::usage(format!("{message}: leave one out")))
        }
        (named, given) => Ok((choice.sampler, named.or(given).unwrap_or(Schedule::Unspecified))),
    }
}

/// A model's name as it is, or the whole path of a folder: the daemon has another working folder.
pub(super) fn model(name: &str) -> Result<String, Trouble> {
    if !name.contains('/') && name != "." && name != ".." {
        return Ok(name.to_owned());
    }
    let path = std::fs::canonicalize(name)
        .map_err(|error| Trouble::unavailable(format!("model folder {name} cannot be used: {error}")))?;
    let text = path.to_str().ok_or_else(|| Trouble::usage(format!("the path {} is not UTF-8", path.display())))?;
    Ok(text.to_owned())
}

/// Within 32 bits, which every web UI takes.
fn draw_seed() -> Result<u64, Trouble> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).map_err(|error| Trouble::internal(format!("no random numbers: {error}")))?;
    Ok(u32::from_le_bytes(random).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn args(line: &[&str]) -> GenerateArgs {
        let line = ["sdctl", "generate"].iter().chain(line);
        match super::super::args::Arguments::try_parse_from(line).unwrap().command {
            super::super::args::Command::Generate(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn arguments_become_the_request() {
        let request = build(&args(&[
            "a cat",
            "-n",
            "2",
            "-W",
            "64",
            "--steps",
            "0",
            "--cfg",
            "1",
            "--seed",
            "7",
            "--sampler",
            "DPM++ 2M Karras",
            "--no-emphasis",
            "--clip-skip",
            "2",
        ]))
        .unwrap();
        let expected = ImageRequest {
            prompt: "a cat".into(),
            count: 2,
            width: 64,
            steps: Some(0),
            guidance_scale: Some(1.0),
            seed: Some(7),
            sampler: Sampler::Dpmpp2m.into(),
            schedule: Schedule::Karras.into(),
            emphasis: Emphasis::Off.into(),
            clip_skip: 2,
            ..Default::default()
        };
        assert_eq!(request, expected);
    }

    #[test]
    fn a_seed_is_drawn_where_none_is_given() {
        let seeds: Vec<_> = (0..4).map(|_| build(&args(&["x"])).unwrap().seed.unwrap()).collect();
        assert!(seeds.iter().any(|seed| *seed != seeds[0]) && seeds.iter().all(|seed| *seed <= u32::MAX.into()));
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(build(&args(&["x", "--sampler", "DPM++ 2M Karras", "--schedule", "trailing"])).is_err());
        assert!(build(&args(&["x", "--sampler", "DPM++ 2M Karras", "--schedule", "karras"])).is_ok());
        assert!(build(&args(&["x", "--width", "0"])).is_err());
        let error = build(&args(&["x", "-m", "./absent-model"])).unwrap_err();
        assert_eq!(error.exit, ProgramExit::Unavailable);
        assert_eq!(model("sd15").unwrap(), "sd15");
        assert!(model(".").unwrap().starts_with('/'));
    }
}

//! `sdctl watch`.

use sd_proto::exit::ProgramExit;

use super::args::{Global, WatchArgs};
use super::follow::{Follower, Outcome, Sink};
use super::interrupts::Interrupts;
use super::lists::existing;
use super::naming::{Facts, Naming};
use super::report::Trouble;
use super::{screen, show};

/// Follows a job from its first event to its last.
pub(super) async fn run(global: &Global, args: WatchArgs) -> Result<ProgramExit, Trouble> {
    // A bad pattern is told without a daemon; how many pictures there are only the job knows.
    let sink = |count| match args.no_save {
        true => Ok(Sink::Nowhere),
        false => Naming::parse(args.output.as_deref(), args.force, count).map(Sink::Files),
    };
    sink(1)?;
    let mut interrupts = Interrupts::listen()?;
    let session = tokio::select! {
        session = existing(global) => session?,
        () = interrupts.next() => return Ok(ProgramExit::Interrupted),
    };
    let request = session.client().get(&args.job).await?.request.unwrap_or_default();
    let facts = Facts::now(&request.prompt, &request.model);
    let mut follower = Follower::new(global, sink(request.count.max(1))?, facts, show::method(args.show));
    follower.check(&request)?;
    let mut events = session.client().watch(&args.job, 0).await?;
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            () = interrupts.next() => {
                follower.progress.finish();
                screen::say(format_args!("sdctl: left; the job goes on (`sdctl cancel {}` ends it)", args.job));
                return Ok(ProgramExit::Interrupted);
            }
        };
        let event = event.ok_or_else(|| Trouble::internal("the events ended without a last one"))??;
        match follower.take(&event)? {
            None => {}
            Some(Outcome::Succeeded) => return Ok(ProgramExit::Success),
            Some(Outcome::Failed(failure)) => return Err(Trouble::from(&*failure)),
            Some(Outcome::Cancelled(reason)) => return Err(Trouble::cancelled_elsewhere(&reason)),
        }
    }
}

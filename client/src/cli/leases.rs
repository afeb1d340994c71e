//! `sdctl leases`: who holds how much memory, once or on every change.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::Duration;

use sd_client::proto::Lease;
use sd_client::{Decisions, names};
use sd_proto::exit::ProgramExit;
use serde_json::json;

use super::args::{Global, LeasesArgs};
use super::interrupts::Interrupts;
use super::lists::{existing, or_dash, print_json, print_table};
use super::report::Trouble;
use super::table::Table;
use super::{human, json, screen};

/// Leases are looked at again at least this often: some change without a decision that this user may see.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// `sdctl leases`.
pub(super) async fn run(global: &Global, args: LeasesArgs) -> Result<ProgramExit, Trouble> {
    if args.watch {
        return watch(global).await;
    }
    let leases = existing(global).await?.client().leases().await?;
    if global.json {
        return print_json(leases.iter().map(json::lease));
    }
    print_table(global, &table(&leases), "no leases")
}

fn table(leases: &[Lease]) -> Table {
    let mut table = Table::new(&[">LEASE", "DEVICE", "HOLDER", ">WORKER", "PURPOSE", ">BYTES", "STATE", ">AGE", "JOB"]);
    for lease in leases {
        table.row([
            lease.id.to_string(),
            lease.device.clone(),
            or_dash(&lease.holder),
            lease.incarnation.to_string(),
            names::lease_purpose(lease.purpose()).into(),
            human::bytes(lease.bytes),
            names::lease_state(lease.state()).into(),
            human::duration(human::wire_duration(lease.age.as_ref())),
            or_dash(&lease.job_id),
        ]);
    }
    table
}

/// Shows them on every change until Ctrl-C or the daemon's end.
async fn watch(global: &Global) -> Result<ProgramExit, Trouble> {
    let mut interrupts = Interrupts::listen()?;
    let session = tokio::select! {
        session = existing(global) => session?,
        () = interrupts.next() => return Ok(ProgramExit::Interrupted),
    };
    let client = session.client();
    let mut decisions = client.decisions("", true).await?;
    let mut view = View { redraw: std::io::stdout().is_terminal() && !global.json, json: global.json, shown: None };
    loop {
        let step = async {
            view.show(client.leases().await?)?;
            until_changed(&mut decisions).await
        };
        let more = tokio::select! {
            more = step => more?,
            () = interrupts.next() => return Ok(ProgramExit::Interrupted),
        };
        if !more {
            if !global.quiet {
                screen::say("sdctl: the daemon has ended");
            }
            return Ok(ProgramExit::Success);
        }
    }
}

/// Waits until something was decided, or for a while; false once the daemon ends.
async fn until_changed(decisions: &mut Decisions) -> Result<bool, Trouble> {
    match tokio::time::timeout(LOOK_AGAIN, decisions.next()).await {
        Ok(Some(decision)) => decision.map(|_| true).map_err(Trouble::from),
        Ok(None) => Ok(false),
        Err(_) => Ok(true),
    }
}

/// What was shown last.
struct View {
    redraw: bool,
    json: bool,
    shown: Option<BTreeMap<u64, Lease>>,
}

impl View {
    fn show(&mut self, leases: Vec<Lease>) -> Result<(), Trouble> {
        let timeless = |lease: &Lease| Lease { age: None, ..lease.clone() };
        let now: BTreeMap<u64, Lease> = leases.iter().map(|lease| (lease.id, timeless(lease))).collect();
        if self.shown.as_ref() == Some(&now) {
            return Ok(());
        }
        let before = self.shown.replace(now.clone()).unwrap_or_default();
        if self.redraw {
            // Home, then clear to the end: nothing flickers, and what is longer than the screen scrolls.
            let table = table(&leases);
            let text = if table.is_empty() { "no leases".into() } else { table.render() };
            return screen::out(format_args!("\u{1b}[H\u{1b}[J{text}"));
        }
        for change in changes(&before, &now) {
            match self.json {
                true => screen::out(json!({ "change": change.word(), "lease": json::lease(change.lease()) }))?,
                false => screen::out(human::line(&change.text()))?,
            }
        }
        Ok(())
    }
}

/// What became of one lease.
#[derive(Debug, PartialEq)]
enum Change<'a> {
    New(&'a Lease),
    Changed(&'a Lease, &'a Lease),
    Gone(&'a Lease),
}

fn changes<'a>(before: &'a BTreeMap<u64, Lease>, now: &'a BTreeMap<u64, Lease>) -> Vec<Change<'a>> {
    let gone = before.iter().filter(|(id, _)| !now.contains_key(id)).map(|(_, lease)| Change::Gone(lease));
    let rest = now.iter().filter_map(|(id, lease)| match before.get(id) {
        None => Some(Change::New(lease)),
        Some(old) if old == lease => None,
        Some(old) => Some(Change::Changed(old, lease)),
    });
    gone.chain(rest).collect()
}

impl<'a> Change<'a> {
    fn lease(&self) -> &'a Lease {
        match self {
            Self::New(lease) | Self::Changed(_, lease) | Self::Gone(lease) => lease,
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::New(_) => "new",
            Self::Changed(..) => "changed",
            Self::Gone(_) => "gone",
        }
    }

    fn text(&self) -> String {
        let lease = self.lease();
        let what = format!(
            "lease {} ({} of {}, worker {}, {})",
            lease.id,
            names::lease_purpose(lease.purpose()).replace('_', " "),
            or_dash(&lease.holder),
            lease.incarnation,
            lease.device
        );
        let job = if lease.job_id.is_empty() { String::new() } else { format!(" for job {}", lease.job_id) };
        let state = names::lease_state(lease.state());
        match self {
            Self::New(_) => format!("new      {what}: {} {state}{job}", human::bytes(lease.bytes)),
            Self::Gone(_) => format!("gone     {what}: {} are free", human::bytes(lease.bytes)),
            Self::Changed(old, _) if old.bytes != lease.bytes => {
                let (from, to) = (human::bytes(old.bytes), human::bytes(lease.bytes));
                format!("changed  {what}: {from} to {to} {state}{job}")
            }
            Self::Changed(..) => format!("changed  {what}: {} {state}{job}", human::bytes(lease.bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_client::proto::{LeasePurpose, LeaseState};

    #[test]
    fn every_change_of_a_lease_is_one_line() {
        let lease = |id: u64, bytes: u64, state: LeaseState| Lease {
            id,
            bytes,
            state: state.into(),
            purpose: LeasePurpose::WorkingSet.into(),
            device: "cpu".into(),
            holder: "vae of tiny".into(),
            incarnation: 3,
            ..Default::default()
        };
        let of = |leases: &[Lease]| leases.iter().map(|lease| (lease.id, lease.clone())).collect::<BTreeMap<_, _>>();
        let before = of(&[lease(1, 1 << 20, LeaseState::Granted), lease(2, 2 << 20, LeaseState::Unproven)]);
        let now = of(&[lease(1, 3 << 20, LeaseState::Revoked), lease(4, 4 << 20, LeaseState::Granted)]);
        let texts: Vec<String> = changes(&before, &now).iter().map(Change::text).collect();
        assert_eq!(
            texts,
            [
                "gone     lease 2 (working set of vae of tiny, worker 3, cpu): 2.00 MiB are free",
                "changed  lease 1 (working set of vae of tiny, worker 3, cpu): 1.00 MiB to 3.00 MiB revoked",
                "new      lease 4 (working set of vae of tiny, worker 3, cpu): 4.00 MiB granted",
            ]
        );
        assert!(changes(&now, &now).is_empty());
    }
}

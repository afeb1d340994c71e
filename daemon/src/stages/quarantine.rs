//! Stages of models whose workers die again and again: not started any more until an operator says so.
//!
//! Three deaths of workers while they worked, none of them by a decision of the daemon, without a success between them and
//! within ten minutes: then jobs that need the stage fail at once with the last death's reason, instead of killing one worker
//! after the other for ever. Another state of the model's files is another model and starts without a record.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use sd_proto::v1::{Failure, Quarantined};
use sd_proto::worker::v1::WorkerStage;
use tokio::time::Instant;

use crate::workers::stage_name;

/// Deaths in a row after which a stage is not started again.
pub const DEATHS: usize = 3;
/// Within which they must come.
pub const WINDOW: Duration = Duration::from_secs(600);

/// Which stage of which model.
#[derive(Debug, Clone, Copy)]
pub struct Suspect<'a> {
    /// The model's name.
    pub model: &'a str,
    /// Its folder.
    pub dir: &'a Path,
    /// The state of its files.
    pub fingerprint: &'a str,
    /// The stage.
    pub stage: WorkerStage,
}

#[derive(Debug)]
struct Entry {
    model: String,
    fingerprint: String,
    deaths: Vec<Instant>,
    last: Failure,
    since: Option<SystemTime>,
}

/// The quarantine. Clones are handles to the same one.
#[derive(Debug, Clone, Default)]
pub struct Quarantine {
    entries: Arc<Mutex<BTreeMap<(PathBuf, WorkerStage), Entry>>>,
}

impl Quarantine {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<(PathBuf, WorkerStage), Entry>> {
        // Every change is whole in itself.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker died while it worked, and no decision of ours ended it. Returns the failure to tell where the stage is
    /// quarantined by that.
    pub fn died(&self, suspect: Suspect<'_>, failure: &Failure, now: Instant) -> Option<Failure> {
        let mut entries = self.entries();
        let entry = entries.entry((suspect.dir.into(), suspect.stage)).or_insert_with(|| Entry {
            model: suspect.model.into(),
            fingerprint: suspect.fingerprint.into(),
            deaths: Vec::new(),
            last: failure.clone(),
            since: None,
        });
        if entry.fingerprint != suspect.fingerprint {
            entry.fingerprint = suspect.fingerprint.into();
            entry.deaths.clear();
            entry.since = None;
        }
        entry.model = suspect.model.into();
        entry.deaths.retain(|death| now.duration_since(*death) < WINDOW);
        entry.deaths.push(now);
        entry.last = failure.clone();
        if entry.deaths.len() < DEATHS {
            return None;
        }
        entry.since.get_or_insert_with(SystemTime::now);
        let message = format!("{}; {}", failure.message, advice(suspect, entry.deaths.len()));
        Some(Failure { message, ..failure.clone() })
    }

    /// A run of the stage succeeded: the record is clean.
    pub fn survived(&self, suspect: Suspect<'_>) {
        self.entries().remove(&(suspect.dir.to_owned(), suspect.stage));
    }

    /// Why the stage is not started; `None` where it may be.
    pub fn refusal(&self, suspect: Suspect<'_>) -> Option<Failure> {
        let mut entries = self.entries();
        let key = (suspect.dir.to_owned(), suspect.stage);
        let entry = entries.get(&key)?;
        if entry.fingerprint != suspect.fingerprint {
            entries.remove(&key);
            return None;
        }
        entry.since?;
        let message = format!("{}; the last time: {}", advice(suspect, entry.deaths.len()), entry.last.message);
        Some(Failure { message, ..entry.last.clone() })
    }

    /// What is quarantined, by model and stage.
    pub fn list(&self) -> Vec<Quarantined> {
        let entries = self.entries();
        let quarantined = entries.iter().filter_map(|((_, stage), entry)| {
            Some(Quarantined {
                model: entry.model.clone(),
                stage: stage_name(*stage).into(),
                since: Some(entry.since?.into()),
                deaths: entry.deaths.len() as u32,
                reason: entry.last.message.clone(),
                stderr: entry.last.stderr.clone(),
            })
        });
        let mut quarantined: Vec<_> = quarantined.collect();
        quarantined.sort_by(|a, b| (&a.model, &a.stage).cmp(&(&b.model, &b.stage)));
        quarantined
    }

    /// Lets stages be started again: those of one model, or of all where it is empty; one stage, or all. Deaths that had not
    /// led to a quarantine yet are forgotten too. Returns how many were quarantined.
    pub fn clear(&self, model: &str, stage: &str) -> u32 {
        let mut cleared = 0;
        self.entries().retain(|(_, of), entry| {
            let meant = (model.is_empty() || entry.model == model) && (stage.is_empty() || stage_name(*of) == stage);
            cleared += u32::from(meant && entry.since.is_some());
            !meant
        });
        cleared
    }
}

fn advice(suspect: Suspect<'_>, deaths: usize) -> String {
    format!(
        "{} of {} is quarantined, {deaths} of its workers died one after the other: it is not started again before \
         `sdctl quarantine clear {}`",
        stage_name(suspect.stage),
        suspect.model,
        suspect.model
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stages::failure::failure;
    use sd_proto::v1::{FailureReason, Stage};

    fn suspect<'a>(fingerprint: &'a str, stage: WorkerStage) -> Suspect<'a> {
        Suspect { model: "m", dir: Path::new("/models/m"), fingerprint, stage }
    }

    fn death() -> Failure {
        Failure {
            stderr: vec!["last words".into()],
            ..failure(FailureReason::WorkerHung, Stage::Denoise, "worker 4 hung")
        }
    }

    #[test]
    fn three_deaths_in_a_row_close_the_stage_with_the_last_reason() {
        let (quarantine, now) = (Quarantine::default(), Instant::now());
        let diffusion = suspect("a", WorkerStage::Diffusion);
        for _ in 1..DEATHS {
            assert_eq!(quarantine.died(diffusion, &death(), now), None);
            assert_eq!(quarantine.refusal(diffusion), None);
            assert!(quarantine.list().is_empty());
        }
        let told = quarantine.died(diffusion, &death(), now).expect("quarantined");
        let refused = quarantine.refusal(diffusion).expect("refused");
        for failure in [told, refused] {
            assert_eq!((failure.reason(), failure.stderr.len()), (FailureReason::WorkerHung, 1));
            let message = failure.message;
            assert!(message.contains("worker 4 hung") && message.contains("sdctl quarantine clear m"), "{message}");
        }
        assert_eq!(quarantine.refusal(suspect("a", WorkerStage::Text)), None, "the other stages are not to blame");
        let list = quarantine.list();
        assert_eq!((list.len(), list[0].stage.as_str(), list[0].deaths), (1, "diffusion", 3));
    }

    #[test]
    fn a_success_time_or_other_files_clean_the_record() {
        let (quarantine, now) = (Quarantine::default(), Instant::now());
        let vae = suspect("a", WorkerStage::Vae);
        for _ in 0..10 {
            assert_eq!(quarantine.died(vae, &death(), now), None);
            assert_eq!(quarantine.died(vae, &death(), now), None);
            quarantine.survived(vae);
        }
        for minute in 0..20 {
            let later = now + Duration::from_secs(301 * minute);
            assert_eq!(quarantine.died(vae, &death(), later), None, "two in ten minutes are too few");
        }
        quarantine.survived(vae);
        for _ in 0..DEATHS {
            quarantine.died(vae, &death(), now);
        }
        assert!(quarantine.refusal(vae).is_some());
        assert_eq!(quarantine.refusal(suspect("b", WorkerStage::Vae)), None, "the files are others now");
        assert_eq!(quarantine.refusal(vae), None, "and the record of the old ones is gone");
    }

    #[test]
    fn clearing_names_a_model_and_a_stage_or_all() {
        let (quarantine, now) = (Quarantine::default(), Instant::now());
        let stages = [WorkerStage::Text, WorkerStage::Diffusion, WorkerStage::Vae];
        let fill = || {
            for stage in stages {
                for _ in 0..DEATHS {
                    quarantine.died(suspect("a", stage), &death(), now);
                }
            }
        };
        fill();
        assert_eq!(quarantine.clear("other", ""), 0);
        assert_eq!(quarantine.clear("m", "diffusion"), 1);
        assert_eq!(quarantine.refusal(suspect("a", WorkerStage::Diffusion)), None);
        assert_eq!(quarantine.clear("m", ""), 2);
        fill();
        assert_eq!(quarantine.clear("", "vae"), 1);
        assert_eq!(quarantine.clear("", ""), 2);
        quarantine.died(suspect("a", WorkerStage::Text), &death(), now);
        assert_eq!(quarantine.clear("", ""), 0, "one death is no quarantine");
    }
}

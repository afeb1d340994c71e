//! How long a waiting job waits, from what earlier jobs took.

use std::collections::HashMap;
use std::time::Duration;

use sd_proto::v1::Stage;

use super::request::Admitted;
use crate::stages::plan::StagePlan;

/// Weight of the newest run in the mean.
const NEWEST: f64 = 0.4;

/// What stage runs took, per model and stage, in seconds per unit of work.
#[derive(Debug, Default)]
pub struct Durations {
    seconds_per_unit: HashMap<(String, Stage), f64>,
}

/// Units of work of one run of a stage: what its duration grows with.
fn units(stage: Stage, request: &Admitted) -> f64 {
    let pixels = f64::from(request.width) * f64::from(request.height);
    match stage {
        Stage::Unspecified => 0.0,
        Stage::Encode => 1.0,
        Stage::VaeEncode | Stage::Decode => pixels,
        Stage::Denoise => {
            let passes = if request.guided() { 2.0 } else { 1.0 };
            let share = request.initial.as_ref().map_or(1.0, |initial| initial.strength);
            (f64::from(request.steps) * share).max(1.0) * passes * pixels
        }
    }
}

impl Durations {
    /// Learns from a finished run.
    pub fn learn(&mut self, stage: Stage, request: &Admitted, took: Duration) {
        let units = units(stage, request);
        if units > 0.0 {
            let measured = took.as_secs_f64() / units;
            self.seconds_per_unit
                .entry((request.model.name.clone(), stage))
                .and_modify(|mean| *mean += NEWEST * (measured - *mean))
                .or_insert(measured);
        }
    }

    /// How long the runs of a job's plan take from run `finished` on; `None` where a stage of its model has never run.
    pub fn remaining(&self, request: &Admitted, plan: &StagePlan, finished: usize) -> Option<Duration> {
        let mut seconds = 0.0;
        for run in plan.runs().iter().skip(finished) {
            let rate = self.seconds_per_unit.get(&(request.model.name.clone(), run.stage))?;
            seconds += rate * units(run.stage, request);
        }
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// When a job begins that stands behind `running` and `queued` jobs, whose remaining durations these are, where `places`
/// jobs run by turns and share the device evenly. `None` where one of the durations is unknown.
pub fn until_start(running: &[Option<Duration>], queued: &[Option<Duration>], places: usize) -> Option<Duration> {
    let known =
        |jobs: &[Option<Duration>]| jobs.iter().map(|job| job.map(|d| d.as_secs_f64())).collect::<Option<Vec<_>>>();
    let (mut running, queued) = (known(running)?, known(queued)?);
    let mut queued = queued.into_iter();
    let mut elapsed = 0.0;
    loop {
        // One after the other takes a free place; the job in question comes when nobody else is left to take it.
        while running.len() < places {
            match queued.next() {
                Some(job) => running.push(job),
                None => return Duration::try_from_secs_f64(elapsed).ok(),
            }
        }
        let first = running.iter().copied().fold(f64::INFINITY, f64::min);
        if !first.is_finite() {
            return None;
        }
        elapsed += first * running.len() as f64;
        running.retain_mut(|job| {
            *job -= first;
            *job > 1e-9
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(values: &[f64]) -> Vec<Option<Duration>> {
        values.iter().map(|v| Some(Duration::from_secs_f64(*v))).collect()
    }

    #[test]
    fn a_free_place_means_no_wait() {
        assert_eq!(until_start(&[], &[], 1), Some(Duration::ZERO));
        assert_eq!(until_start(&[None], &[], 2), None, "nothing is promised on an unknown duration");
        assert_eq!(until_start(&seconds(&[5.0]), &[], 2), Some(Duration::ZERO));
    }

    #[test]
    fn one_place_serves_one_after_the_other() {
        let wait = until_start(&seconds(&[2.0]), &seconds(&[3.0, 4.0]), 1).unwrap();
        assert!((wait.as_secs_f64() - 9.0).abs() < 1e-6, "{wait:?}");
    }

    #[test]
    fn two_places_share_the_device() {
        // Both run at half speed: the shorter (2 s) is done after 4 s, and then a place is free.
        let wait = until_start(&seconds(&[2.0, 6.0]), &[], 2).unwrap();
        assert!((wait.as_secs_f64() - 4.0).abs() < 1e-6, "{wait:?}");
        // The queued job takes that place; 4 s are left of the longer, 1 s of the new one: 2 s more.
        let wait = until_start(&seconds(&[2.0, 6.0]), &seconds(&[1.0]), 2).unwrap();
        assert!((wait.as_secs_f64() - 6.0).abs() < 1e-6, "{wait:?}");
    }
}

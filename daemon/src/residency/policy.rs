//! What to take back when somebody needs room: the cheapest set of offers that frees enough.
//!
//! An offer's cost is what it will take to undo it, times the chance that it must be undone: reload time × chance of reuse.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::lease::Incarnation;

/// How far a process goes in giving back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// It gives leases back in part and stays.
    Shrink,
    /// It gives all its weights back and stays, with its context alone.
    Park,
    /// It frees everything and exits.
    Retire,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shrink => "shrink",
            Self::Park => "park",
            Self::Retire => "retire",
        })
    }
}

/// What one process could give back by one rung.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offer {
    /// The process.
    pub incarnation: Incarnation,
    /// The rung.
    pub rung: Rung,
    /// Bytes that it frees.
    pub frees: u64,
    /// Bytes that it frees at least, if it is taken at all: less than `frees` where part of it can be had.
    pub least: u64,
    /// What undoing it as a whole will cost, in seconds, weighted by the chance that it must be undone.
    pub cost: f64,
}

impl Offer {
    /// What so many bytes of it cost.
    fn cost_of(&self, bytes: u64) -> f64 {
        self.cost * (bytes as f64 / self.frees.max(1) as f64)
    }

    /// Bytes that it frees where `need` is enough.
    fn part(&self, need: u64) -> u64 {
        need.clamp(self.least.min(self.frees), self.frees)
    }
}

/// An offer that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Which one.
    pub offer: usize,
    /// Bytes that it is to free.
    pub bytes: u64,
}

/// Bytes a second at which weights come back from the page cache and are converted; measured 0.8 to 2.5 GB/s on a CPU device.
const RELOAD_BYTES_PER_SECOND: f64 = 1.0e9;
/// Bytes a second at which fresh pages are touched for the first time (1.4 ms per MiB).
const TOUCH_BYTES_PER_SECOND: f64 = 0.75e9;
/// Seconds from spawning a process to its handshake.
const START_SECONDS: f64 = 0.1;
/// An idle process is half as likely to be used again after this long.
const REUSE_HALF_LIFE: Duration = Duration::from_secs(60);
/// Passes that a busy process is taken to have before it: what it no longer holds is brought in again for each of them.
const PASSES_AHEAD: f64 = 8.0;

/// What is known of a process that decides its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worth {
    /// Since its last task.
    pub idle: Duration,
    /// A waiting request names it.
    pub wanted: bool,
    /// Stages before the next one in the queue that it serves; `None`: the queue does not name it.
    pub next_use: Option<usize>,
}

impl Worth {
    /// Chance of reuse, 0 to 1: certain when a waiting request names it; above one half when the queue does, and the less the
    /// farther its next use (so that of two, the one that is needed later goes first); else one half or less, falling with the
    /// time since its last use.
    pub fn reuse(self) -> f64 {
        match (self.wanted, self.next_use) {
            (true, _) => 1.0,
            (false, Some(distance)) => 0.5 + 0.5 / (2.0 + distance as f64),
            (false, None) => 0.5 / (1.0 + self.idle.as_secs_f64() / REUSE_HALF_LIFE.as_secs_f64()),
        }
    }
}

/// Cost of giving back `bytes` of working set: they are touched anew by the next task.
pub fn shrink_cost(bytes: u64, worth: Worth) -> f64 {
    worth.reuse() * bytes as f64 / TOUCH_BYTES_PER_SECOND
}

/// Cost of taking `bytes` of weights from a process in the middle of its task.
pub fn luxury_cost(bytes: u64) -> f64 {
    PASSES_AHEAD * bytes as f64 / RELOAD_BYTES_PER_SECOND
}

/// Cost of parking: `weights` bytes to load, `working_set` to touch anew.
pub fn park_cost(weights: u64, working_set: u64, worth: Worth) -> f64 {
    worth.reuse() * weights as f64 / RELOAD_BYTES_PER_SECOND + shrink_cost(working_set, worth)
}

/// Cost of a retirement: that of parking, and a process to start.
pub fn retire_cost(weights: u64, working_set: u64, worth: Worth) -> f64 {
    worth.reuse() * START_SECONDS + park_cost(weights, working_set, worth)
}

/// The offers to take to free `need` bytes at little cost, at most one a process. `None` where all together do not
/// free enough: then nothing is to be taken in vain.
///
/// Takes offers by cost a byte until enough is freed, gives back those that turn out superfluous and what is too much of those
/// that can be had in part, and prefers a single offer where one is cheaper.
pub fn choose(offers: &[Offer], need: u64) -> Option<Vec<Taken>> {
    if need == 0 {
        return Some(Vec::new());
    }
    let enough = (0..offers.len()).filter(|&i| offers[i].frees >= need);
    let alone = enough.map(|i| Taken { offer: i, bytes: offers[i].part(need) });
    let cost = |taken: &[Taken]| taken.iter().map(|taken| offers[taken.offer].cost_of(taken.bytes)).sum::<f64>();
    let single = alone.min_by(|a, b| cost(&[*a]).total_cmp(&cost(&[*b])));
    let several = by_rate(offers, need);
    match (single, several) {
        (Some(one), Some(many)) if cost(&[one]) <= cost(&many) => Some(vec![one]),
        (_, Some(many)) => Some(many),
        (Some(one), None) => Some(vec![one]),
        (None, None) => None,
    }
}

fn by_rate(offers: &[Offer], need: u64) -> Option<Vec<Taken>> {
    let rate = |i: usize| offers[i].cost / offers[i].frees.max(1) as f64;
    let mut order: Vec<usize> = (0..offers.len()).filter(|&i| offers[i].frees > 0).collect();
    order.sort_by(|&a, &b| rate(a).total_cmp(&rate(b)));
    let mut chosen: BTreeMap<Incarnation, usize> = BTreeMap::new();
    let freed = |chosen: &BTreeMap<Incarnation, usize>| {
        chosen.values().fold(0u64, |sum, &i| sum.saturating_add(offers[i].frees))
    };
    for i in order {
        if freed(&chosen) >= need {
            break;
        }
        // A second offer of one process replaces its first where it frees more.
        let entry = chosen.entry(offers[i].incarnation).or_insert(i);
        if offers[*entry].frees < offers[i].frees {
            *entry = i;
        }
    }
    if freed(&chosen) < need {
        return None;
    }
    let mut dearest: Vec<(Incarnation, usize)> = chosen.iter().map(|(&incarnation, &i)| (incarnation, i)).collect();
    dearest.sort_by(|a, b| offers[b.1].cost.total_cmp(&offers[a.1].cost));
    for &(incarnation, i) in &dearest {
        if freed(&chosen) - offers[i].frees >= need {
            chosen.remove(&incarnation);
        }
    }
    // What is too much now is less than any one of them: it is left to the dearest a byte.
    let mut surplus = freed(&chosen) - need;
    let mut taken: Vec<Taken> = chosen.into_values().map(|i| Taken { offer: i, bytes: offers[i].frees }).collect();
    taken.sort_by(|a, b| rate(b.offer).total_cmp(&rate(a.offer)));
    for one in &mut taken {
        let kept = surplus.min(offers[one.offer].frees - offers[one.offer].least.min(offers[one.offer].frees));
        one.bytes -= kept;
        surplus -= kept;
    }
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(incarnation: Incarnation, rung: Rung, frees: u64, cost: f64) -> Offer {
        Offer { incarnation, rung, frees, least: frees, cost }
    }

    fn indices(taken: Option<Vec<Taken>>) -> Option<Vec<usize>> {
        let mut indices: Vec<usize> = taken?.into_iter().map(|taken| taken.offer).collect();
        indices.sort_unstable();
        Some(indices)
    }

    fn worth(seconds: u64, wanted: bool, next_use: Option<usize>) -> Worth {
        Worth { idle: Duration::from_secs(seconds), wanted, next_use }
    }

    #[test]
    fn the_cheapest_single_offer_that_is_enough_wins() {
        let offers =
            [offer(1, Rung::Retire, 100, 5.0), offer(2, Rung::Retire, 80, 2.0), offer(3, Rung::Retire, 10, 0.1)];
        assert_eq!(indices(choose(&offers, 70)), Some(vec![1]));
        assert_eq!(indices(choose(&offers, 90)), Some(vec![1, 2]), "two cheap ones beat one dear one");
        assert_eq!(indices(choose(&offers, 10)), Some(vec![2]));
    }

    #[test]
    fn nothing_is_taken_in_vain() {
        assert_eq!(choose(&[offer(1, Rung::Retire, 100, 1.0)], 101), None);
        assert_eq!(choose(&[], 1), None);
        assert_eq!(choose(&[], 0), Some(vec![]));
    }

    #[test]
    fn a_process_shrinks_before_it_parks_and_parks_before_it_retires() {
        let parks = Offer { least: 30, ..offer(1, Rung::Park, 90, 1.0) };
        let offers = [offer(1, Rung::Shrink, 30, 0.1), parks, offer(1, Rung::Retire, 100, 1.2)];
        assert_eq!(choose(&offers, 20), Some(vec![Taken { offer: 0, bytes: 30 }]));
        assert_eq!(choose(&offers, 90), Some(vec![Taken { offer: 1, bytes: 90 }]));
        assert_eq!(choose(&offers, 100), Some(vec![Taken { offer: 2, bytes: 100 }]));
        assert_eq!(choose(&offers, 110), None);
    }

    #[test]
    fn of_weights_no_more_is_taken_than_is_needed() {
        let parks = |incarnation, frees| Offer { least: 0, ..offer(incarnation, Rung::Park, frees, frees as f64) };
        assert_eq!(choose(&[parks(1, 100)], 30), Some(vec![Taken { offer: 0, bytes: 30 }]));
        let taken = choose(&[parks(1, 100), parks(2, 50)], 120).unwrap();
        assert_eq!(taken.iter().map(|taken| taken.bytes).sum::<u64>(), 120);
        // Part of the dear one costs less than the whole of the cheap one.
        let offers = [offer(1, Rung::Retire, 200, 50.0), parks(2, 100)];
        assert_eq!(choose(&offers, 30), Some(vec![Taken { offer: 1, bytes: 30 }]));
    }

    #[test]
    fn reuse_falls_with_idleness_and_is_certain_for_the_wanted() {
        assert!(worth(1, false, None).reuse() > worth(100, false, None).reuse());
        assert_eq!(worth(1000, true, None).reuse(), 1.0);
        let (wanted, not) = (worth(1, true, None), worth(1, false, None));
        assert!(retire_cost(1 << 30, 0, wanted) > retire_cost(1 << 30, 0, not));
        assert!(shrink_cost(1 << 20, not) < park_cost(0, 2 << 20, not));
        assert!(park_cost(1 << 20, 1 << 20, not) < retire_cost(1 << 20, 1 << 20, not));
        assert!(luxury_cost(1 << 30) > park_cost(1 << 30, 0, wanted), "an idle process gives before a busy one");
    }

    #[test]
    fn the_farthest_next_use_goes_first_and_what_the_queue_does_not_name_before_it() {
        let near = worth(100, false, Some(0)).reuse();
        let far = worth(1, false, Some(9)).reuse();
        let never = worth(0, false, None).reuse();
        assert!(near > far && far > never, "{near} {far} {never}");
        assert!(worth(0, false, Some(1000)).reuse() > never);
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_enough_and_minimal(
            raw in proptest::collection::vec((1u64..6, 0usize..3, 0u64..1000, 0.0f64..1.0, 0.0f64..10.0), 0..12),
            need in 0u64..3000,
        ) {
            let rungs = [Rung::Shrink, Rung::Park, Rung::Retire];
            let offers: Vec<Offer> = raw
                .into_iter()
                .map(|(i, rung, frees, least, cost)| {
                    Offer { least: (frees as f64 * least) as u64, ..offer(i, rungs[rung], frees, cost) }
                })
                .collect();
            let mut best: BTreeMap<Incarnation, u64> = BTreeMap::new();
            for o in &offers {
                let most = best.entry(o.incarnation).or_default();
                *most = o.frees.max(*most);
            }
            match choose(&offers, need) {
                None => prop_assert!(best.values().sum::<u64>() < need),
                Some(chosen) => {
                    let freed: u64 = chosen.iter().map(|taken| taken.bytes).sum();
                    prop_assert!(freed >= need);
                    let mut incarnations: Vec<_> = chosen.iter().map(|t| offers[t.offer].incarnation).collect();
                    incarnations.sort_unstable();
                    incarnations.dedup();
                    prop_assert_eq!(incarnations.len(), chosen.len(), "one offer a process");
                    for taken in &chosen {
                        let offer = offers[taken.offer];
                        prop_assert!(taken.bytes <= offer.frees && taken.bytes >= offer.least);
                        prop_assert!(freed - taken.bytes < need, "offer {} is superfluous", taken.offer);
                        // Nothing that could have been left is taken.
                        prop_assert!(freed == need || taken.bytes == offer.least, "{:?} of {:?}", taken, offer);
                    }
                }
            }
        }
    }
}

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
    /// It frees everything and exits.
    Retire,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shrink => "shrink",
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
    /// What undoing it will cost, in seconds, weighted by the chance that it must be undone.
    pub cost: f64,
}

/// Bytes a second at which weights come back from the page cache and are converted; measured 0.8 to 2.5 GB/s on a CPU device.
const RELOAD_BYTES_PER_SECOND: f64 = 1.0e9;
/// Bytes a second at which fresh pages are touched for the first time (1.4 ms per MiB).
const TOUCH_BYTES_PER_SECOND: f64 = 0.75e9;
/// Seconds from spawning a process to its handshake.
const START_SECONDS: f64 = 0.1;
/// An idle process is half as likely to be used again after this long.
const REUSE_HALF_LIFE: Duration = Duration::from_secs(60);

/// What is known of a process that decides its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worth {
    /// Since its last task.
    pub idle: Duration,
    /// A waiting request names it.
    pub wanted: bool,
}

impl Worth {
    /// Chance of reuse, 0 to 1: certain when a waiting request names it, else falling with the time since its last use.
    pub fn reuse(self) -> f64 {
        if self.wanted { 1.0 } else { 0.5 / (1.0 + self.idle.as_secs_f64() / REUSE_HALF_LIFE.as_secs_f64()) }
    }
}

/// Cost of giving back `bytes` of working set: they are touched anew by the next task.
pub fn shrink_cost(bytes: u64, worth: Worth) -> f64 {
    worth.reuse() * bytes as f64 / TOUCH_BYTES_PER_SECOND
}

/// Cost of a retirement: a process to start, `weights` bytes to load, `working_set` to touch anew.
pub fn retire_cost(weights: u64, working_set: u64, worth: Worth) -> f64 {
    worth.reuse() * (START_SECONDS + weights as f64 / RELOAD_BYTES_PER_SECOND) + shrink_cost(working_set, worth)
}

/// The offers to take (indices) to free `need` bytes at little cost, at most one a process. `None` where all together do not
/// free enough: then nothing is to be taken in vain.
///
/// Takes offers by cost a byte until enough is freed, gives back those that turn out superfluous, and prefers a
/// single offer where one is cheaper.
pub fn choose(offers: &[Offer], need: u64) -> Option<Vec<usize>> {
    if need == 0 {
        return Some(Vec::new());
    }
    let single = (0..offers.len())
        .filter(|&i| offers[i].frees >= need)
        .min_by(|&a, &b| offers[a].cost.total_cmp(&offers[b].cost));
    let several = by_rate(offers, need);
    let cost = |chosen: &[usize]| chosen.iter().map(|&i| offers[i].cost).sum::<f64>();
    match (single, several) {
        (Some(one), Some(many)) if offers[one].cost <= cost(&many) => Some(vec![one]),
        (_, Some(many)) => Some(many),
        (Some(one), None) => Some(vec![one]),
        (None, None) => None,
    }
}

fn by_rate(offers: &[Offer], need: u64) -> Option<Vec<usize>> {
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
    for (incarnation, i) in dearest {
        if freed(&chosen) - offers[i].frees >= need {
            chosen.remove(&incarnation);
        }
    }
    Some(chosen.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(incarnation: Incarnation, rung: Rung, frees: u64, cost: f64) -> Offer {
        Offer { incarnation, rung, frees, cost }
    }

    #[test]
    fn the_cheapest_single_offer_that_is_enough_wins() {
        let offers =
            [offer(1, Rung::Retire, 100, 5.0), offer(2, Rung::Retire, 80, 2.0), offer(3, Rung::Retire, 10, 0.1)];
        assert_eq!(choose(&offers, 70), Some(vec![1]));
        assert_eq!(choose(&offers, 90), Some(vec![1, 2]), "two cheap ones beat one dear one");
        assert_eq!(choose(&offers, 10), Some(vec![2]));
    }

    #[test]
    fn nothing_is_taken_in_vain() {
        assert_eq!(choose(&[offer(1, Rung::Retire, 100, 1.0)], 101), None);
        assert_eq!(choose(&[], 1), None);
        assert_eq!(choose(&[], 0), Some(vec![]));
    }

    #[test]
    fn a_process_shrinks_before_it_retires_and_never_does_both() {
        let offers = [offer(1, Rung::Shrink, 30, 0.1), offer(1, Rung::Retire, 100, 5.0)];
        assert_eq!(choose(&offers, 20), Some(vec![0]));
        assert_eq!(choose(&offers, 100), Some(vec![1]));
        assert_eq!(choose(&offers, 110), None);
    }

    #[test]
    fn reuse_falls_with_idleness_and_is_certain_for_the_wanted() {
        let worth = |seconds, wanted| Worth { idle: Duration::from_secs(seconds), wanted };
        assert!(worth(1, false).reuse() > worth(100, false).reuse());
        assert_eq!(worth(1000, true).reuse(), 1.0);
        assert!(retire_cost(1 << 30, 0, worth(1, true)) > retire_cost(1 << 30, 0, worth(1, false)));
        assert!(shrink_cost(1 << 20, worth(1, false)) < retire_cost(0, 1 << 20, worth(1, false)));
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_enough_and_minimal(
            raw in proptest::collection::vec((1u64..6, any::<bool>(), 0u64..1000, 0.0f64..10.0), 0..12),
            need in 0u64..3000,
        ) {
            let offers: Vec<Offer> = raw
                .into_iter()
                .map(|(i, retire, frees, cost)| offer(i, if retire { Rung::Retire } else { Rung::Shrink }, frees, cost))
                .collect();
            let mut best: BTreeMap<Incarnation, u64> = BTreeMap::new();
            for o in &offers {
                let most = best.entry(o.incarnation).or_default();
                *most = o.frees.max(*most);
            }
            match choose(&offers, need) {
                None => prop_assert!(best.values().sum::<u64>() < need),
                Some(chosen) => {
                    let freed: u64 = chosen.iter().map(|&i| offers[i].frees).sum();
                    prop_assert!(freed >= need);
                    let mut incarnations: Vec<_> = chosen.iter().map(|&i| offers[i].incarnation).collect();
                    incarnations.sort_unstable();
                    incarnations.dedup();
                    prop_assert_eq!(incarnations.len(), chosen.len(), "one offer a process");
                    for &i in &chosen {
                        prop_assert!(freed - offers[i].frees < need, "offer {} is superfluous", i);
                    }
                }
            }
        }
    }
}

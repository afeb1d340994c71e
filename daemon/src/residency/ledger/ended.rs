//! Which incarnations have ended, for ever: none is granted anything again.

use std::collections::BTreeMap;

use super::super::lease::Incarnation;

/// A set of incarnations, kept as ranges: since they are numbered in order and few live at a time, a daemon that has seen
/// a million processes die keeps a handful of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(in crate::residency) struct Ended {
    /// First of each range → last of it.
    ranges: BTreeMap<Incarnation, Incarnation>,
}

impl Ended {
    pub(in crate::residency) fn contains(&self, incarnation: Incarnation) -> bool {
        self.ranges.range(..=incarnation).next_back().is_some_and(|(_, last)| incarnation <= *last)
    }

    pub(super) fn insert(&mut self, incarnation: Incarnation) {
        if self.contains(incarnation) {
            return;
        }
        let before = self.ranges.range(..incarnation).next_back().map(|(&first, &last)| (first, last));
        let first = match before {
            Some((first, last)) if last + 1 == incarnation => first,
            Some(_) | None => incarnation,
        };
        let last = incarnation.checked_add(1).and_then(|next| self.ranges.remove(&next)).unwrap_or(incarnation);
        self.ranges.insert(first, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_and_its_ranges_do_not_touch(numbers in proptest::collection::vec(0u64..40, 0..60)) {
            let mut ended = Ended::default();
            numbers.iter().for_each(|number| ended.insert(*number));
            for number in 0..41 {
                prop_assert_eq!(ended.contains(number), numbers.contains(&number));
            }
            let ranges: Vec<_> = ended.ranges.into_iter().collect();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0), "{:?}", ranges);
        }
    }

    #[test]
    fn a_long_life_takes_no_room() {
        let mut ended = Ended::default();
        (0..100_000).filter(|number| *number != 777).for_each(|number| ended.insert(number));
        assert_eq!(ended.ranges.len(), 2);
        ended.insert(u64::MAX);
        assert!(ended.contains(u64::MAX) && !ended.contains(777));
    }
}

//! Which segments stay and how much passes beside them: a pure function of sizes, limit and policy.

use super::declare::Role;

/// Where weights that do not stay bound are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// In the host's memory: pages of the mapped files stay as long as the system lets them.
    #[default]
    Ram,
    /// Nowhere: once a segment is bound, its pages of the files are let go.
    Disk,
}

/// How a model's memory is used within its limit. Never changes a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Whether the next streamed segments are bound while one runs.
    pub prefetch: bool,
    /// Where weights that do not stay are kept.
    pub storage: Storage,
    /// Blocks that may stay at most, prelude and epilogue beside them; `None`: as many as the limit holds.
    pub blocks: Option<usize>,
}

/// What stays, and what the rest passes through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Which segments stay.
    pub(super) keep: Vec<bool>,
    /// Bytes of the ring that the others pass through, the running one included; 0 where none has to.
    pub(super) ring: u64,
    /// Whether the ring is filled ahead.
    pub(super) ahead: bool,
}

impl Plan {
    /// The plan under a limit: as many segments as leave room for the ring, which is the largest of the others, twice that
    /// where they are read ahead. A limit that holds one of them but not two is read by without looking ahead; one that
    /// holds none is below what streaming takes ([`floor`]) and keeps nothing.
    pub(super) fn of(sizes: &[(Role, u64)], limit: u64, policy: Policy) -> Self {
        let order = order(sizes);
        let ends = sizes.iter().filter(|(role, _)| *role != Role::Block).count();
        let most = policy.blocks.map_or(order.len(), |blocks| ends.saturating_add(blocks).min(order.len()));
        let depths: &[u64] = if policy.prefetch { &[2, 1] } else { &[1] };
        for &depth in depths {
            if let Some((count, ring)) = longest(sizes, &order, most, limit, depth) {
                let mut keep = vec![false; sizes.len()];
                order[..count].iter().for_each(|&i| keep[i] = true);
                return Self { keep, ring, ahead: depth > 1 && ring > 0 };
            }
        }
        Self { keep: vec![false; sizes.len()], ring: 0, ahead: false }
    }
}

/// The least limit under which a model runs: its largest segment passes alone.
pub(super) fn floor(sizes: &[(Role, u64)]) -> u64 {
    sizes.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0)
}

/// How many segments from the start of `order` may stay, `most` at most, and the ring for the rest.
fn longest(sizes: &[(Role, u64)], order: &[usize], most: usize, limit: u64, depth: u64) -> Option<(usize, u64)> {
    let mut rings = vec![0; order.len() + 1];
    let mut largest = 0;
    for (at, &i) in order.iter().enumerate().rev() {
        largest = largest.max(sizes[i].1);
        rings[at] = depth * largest;
    }
    let mut held: u64 = order[..most].iter().map(|&i| sizes[i].1).sum();
    for count in (0..=most).rev() {
        if held.saturating_add(rings[count]) <= limit {
            return Some((count, rings[count]));
        }
        held -= count.checked_sub(1).map_or(0, |last| sizes[order[last]].1);
    }
    None
}

/// In which order segments are kept: prelude and epilogue, which run with every pass and are mostly small, then blocks in
/// an order that spreads them evenly (van der Corput, base 2). What a smaller limit keeps is so a part of what a larger one
/// does, as long as both look equally far ahead.
fn order(sizes: &[(Role, u64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&i| sizes[i].0 != Role::Block).collect();
    let blocks = (0..sizes.len()).filter(|&i| sizes[i].0 == Role::Block);
    let mut spread: Vec<(u32, usize)> = blocks.enumerate().map(|(rank, i)| ((rank as u32).reverse_bits(), i)).collect();
    spread.sort_unstable();
    order.extend(spread.into_iter().map(|(_, i)| i));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(blocks: usize) -> Vec<(Role, u64)> {
        let mut sizes = vec![(Role::Prelude, 10)];
        sizes.extend((0..blocks).map(|_| (Role::Block, 100)));
        sizes.push((Role::Epilogue, 10));
        sizes
    }

    fn is_whole(plan: &Plan) -> bool {
        plan.keep.iter().all(|keep| *keep)
    }

    fn plan(sizes: &[(Role, u64)], limit: u64, prefetch: bool) -> Plan {
        Plan::of(sizes, limit, Policy { prefetch, ..Policy::default() })
    }

    #[test]
    fn ends_come_first_and_blocks_are_spread() {
        let sizes = sizes(8);
        assert!(is_whole(&plan(&sizes, 820, false)) && is_whole(&plan(&sizes, 820, true)));
        assert_eq!(plan(&sizes, 820, true).ring, 0, "what is held whole needs no ring");
        let half = plan(&sizes, 20 + 450 + 100, false);
        assert!(half.keep[0] && half.keep[9]);
        let kept: Vec<usize> = (1..9).filter(|&i| half.keep[i]).collect();
        assert_eq!((kept, half.ring), (vec![1, 3, 5, 7], 100), "every other block, and room for one more");
    }

    #[test]
    fn what_stays_and_the_ring_never_exceed_the_limit() {
        for prefetch in [false, true] {
            let sizes: Vec<_> = [30, 170, 20, 90, 60, 110, 10].map(|bytes| (Role::Block, bytes)).to_vec();
            let total: u64 = sizes.iter().map(|(_, bytes)| bytes).sum();
            for limit in 170..total + 10 {
                let plan = plan(&sizes, limit, prefetch);
                let held: u64 = sizes.iter().zip(&plan.keep).filter(|(_, keep)| **keep).map(|(s, _)| s.1).sum();
                assert!(held + plan.ring <= limit, "{held} + {} above {limit}", plan.ring);
                let rest = sizes.iter().zip(&plan.keep).filter(|(_, keep)| !**keep).map(|(s, _)| s.1).max();
                assert_eq!(plan.ring, rest.unwrap_or(0) * if plan.ahead { 2 } else { 1 });
                assert_eq!(is_whole(&plan), limit >= total);
            }
        }
    }

    #[test]
    fn a_smaller_limit_keeps_a_subset() {
        let sizes: Vec<_> = (0..13).map(|i| (Role::Block, 50 + i)).collect();
        let mut before = plan(&sizes, 0, false);
        for limit in 1..900 {
            let now = plan(&sizes, limit, false);
            assert!(before.keep.iter().zip(&now.keep).all(|(few, many)| !few || *many), "at {limit}");
            before = now;
        }
        assert!(is_whole(&before));
    }

    #[test]
    fn reading_ahead_needs_room_for_two() {
        let sizes = sizes(4);
        assert!(plan(&sizes, 200, true).ahead);
        let one = plan(&sizes, 199, true);
        assert!(!one.ahead && one.ring == 100, "{one:?}");
        assert_eq!((plan(&sizes, 99, true).ring, floor(&sizes)), (0, 100), "below the floor");
    }

    #[test]
    fn a_bound_on_blocks_holds_whatever_the_limit() {
        let sizes = sizes(8);
        for (blocks, expected) in [(0, 2), (3, 5), (8, 10), (100, 10)] {
            let plan = Plan::of(&sizes, u64::MAX, Policy { blocks: Some(blocks), ..Policy::default() });
            assert_eq!(plan.keep.iter().filter(|keep| **keep).count(), expected);
        }
    }
}

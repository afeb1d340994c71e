//! Conditioning that was encoded before, kept in shared memory: the same prompt again costs no text encoding.
//!
//! An entry is the sealed segment that a text encoder wrote, under everything that decides it. Tenants do not share entries
//! unless the configuration says so: that a prompt is answered faster tells that somebody has asked it before. What is kept
//! here is a luxury: least recently used entries go when the bound is reached, and at once when a task needs the room.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::segments::Tensor;
use crate::arena::Arena;
use crate::ids::Tenant;
use crate::jobs::request::Admitted;

/// Share of the arena that remembered conditioning may take at most.
const ARENA_SHARE: u64 = 4;

/// Everything that decides a prompt's conditioning, and who may have it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    /// Whose; `None` where tenants share.
    tenant: Option<Tenant>,
    /// The model's files: encoder, tokenizer and their configuration.
    fingerprint: String,
    prompt: String,
    /// Only with guidance.
    negative_prompt: Option<String>,
    emphasis: bool,
    clip_skip: u32,
    /// The numbers' version, kernels, type and device.
    numerics: (u32, String, String, String),
}

/// How much is kept, and for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheConfig {
    /// Bytes of segments at most; 0 keeps nothing.
    pub bytes: u64,
    /// Whether one tenant's conditioning serves another.
    pub shared: bool,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self { bytes: 64 << 20, shared: false }
    }
}

#[derive(Debug)]
struct Entry {
    tensor: Tensor,
    bytes: u64,
    used: u64,
}

#[derive(Debug, Default)]
struct Kept {
    entries: HashMap<Key, Entry>,
    bytes: u64,
    /// Counts uses, to tell the least recent.
    clock: u64,
    /// Shared memory that tasks wait for.
    wanted: u64,
}

impl Kept {
    fn evict_oldest(&mut self) -> bool {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
        let Some(entry) = oldest.and_then(|key| self.entries.remove(&key)) else { return false };
        self.bytes -= entry.bytes;
        true
    }

    /// Lets go of entries until what tasks wait for is free. One that a job still reads frees its bytes only with that job.
    fn make_room(&mut self, arena: &Arena) {
        while self.wanted > 0 && arena.usage().free < self.wanted && self.evict_oldest() {}
    }
}

/// The cache. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Conditioning {
    kept: Arc<Mutex<Kept>>,
    arena: Arena,
    limit: u64,
    shared: bool,
}

impl Conditioning {
    /// An empty cache of segments of `arena`.
    pub fn new(arena: Arena, config: CacheConfig) -> Self {
        let limit = config.bytes.min(arena.usage().limit / ARENA_SHARE);
        Self { kept: Arc::default(), arena, limit, shared: config.shared }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // The sums follow the entries within one statement each.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a request's conditioning.
    pub fn key(&self, tenant: &Tenant, request: &Admitted) -> Key {
        let plan = &request.plan;
        Key {
            tenant: (!self.shared).then(|| tenant.clone()),
            fingerprint: request.model.report.fingerprint.clone(),
            prompt: request.prompt.clone(),
            negative_prompt: request.guided().then(|| request.negative_prompt.clone()),
            emphasis: request.emphasis,
            clip_skip: request.clip_skip,
            numerics: (plan.version, plan.backend.clone(), plan.dtype.clone(), plan.device.clone()),
        }
    }

    /// What was remembered, if it is still what its header says.
    pub fn get(&self, key: &Key) -> Option<Tensor> {
        let mut kept = self.kept();
        kept.clock += 1;
        let now = kept.clock;
        let entry = kept.entries.get_mut(key)?;
        entry.used = now;
        let tensor = entry.tensor.clone();
        if tensor.holds() {
            return Some(tensor);
        }
        if let Some(entry) = kept.entries.remove(key) {
            kept.bytes -= entry.bytes;
        }
        None
    }

    /// Remembers a conditioning, unless it alone exceeds the bound.
    pub fn put(&self, key: Key, tensor: Tensor) {
        let bytes = tensor.bytes();
        if bytes > self.limit {
            return;
        }
        let mut kept = self.kept();
        kept.clock += 1;
        let used = kept.clock;
        if let Some(old) = kept.entries.insert(key, Entry { tensor, bytes, used }) {
            kept.bytes -= old.bytes;
        }
        kept.bytes += bytes;
        while kept.bytes > self.limit && kept.evict_oldest() {}
        kept.make_room(&self.arena);
    }

    /// Makes room for a task that needs `bytes` of shared memory, and keeps it while the answer lives: until the task has it
    /// or gives up.
    pub fn yield_to(&self, bytes: u64) -> Yielded<'_> {
        let mut kept = self.kept();
        kept.wanted = kept.wanted.saturating_add(bytes);
        kept.make_room(&self.arena);
        Yielded { cache: self, bytes }
    }
}

/// Room that is kept for a task.
#[derive(Debug)]
pub struct Yielded<'a> {
    cache: &'a Conditioning,
    bytes: u64,
}

impl Drop for Yielded<'_> {
    fn drop(&mut self) {
        let mut kept = self.cache.kept();
        kept.wanted = kept.wanted.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaLimits;
    use crate::jobs::fixtures;
    use crate::jobs::viewer::tenant_of_uid;
    use sd_proto::worker::v1::ElementType;

    const LIMIT: u64 = 256 << 10;

    fn arena() -> Arena {
        // Its own name, so that tests that run at the same time do not meet.
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Arena::new(&format!("cache{}x{number}", std::process::id()), ArenaLimits { bytes: LIMIT })
    }

    fn tensor(arena: &Arena) -> Tensor {
        let segment = arena.create(ElementType::F32, 4096, 0, "test").unwrap();
        let header = segment.write(&[1, 1024], &[7; 4096]).unwrap();
        Tensor::new(segment, header)
    }

    fn request(prompt: &str) -> Admitted {
        Admitted { prompt: prompt.into(), ..fixtures::admitted() }
    }

    fn cache(arena: &Arena, bytes: u64) -> Conditioning {
        Conditioning::new(arena.clone(), CacheConfig { bytes, shared: false })
    }

    #[test]
    fn a_key_holds_everything_that_decides_the_conditioning_and_nothing_else() {
        let arena = arena();
        let cache = cache(&arena, LIMIT);
        let (mine, plain) = (tenant_of_uid(1), request("a heart"));
        let key = |request: &Admitted| cache.key(&mine, request);
        let mut model = crate::models::Model::clone(&plain.model);
        model.report.fingerprint = "other files".into();
        let mut plan = plain.plan.clone();
        plan.backend = "other kernels".into();
        for other in [
            request("a star"),
            Admitted { negative_prompt: "blurry".into(), ..plain.clone() },
            Admitted { guidance_scale: 1.0, ..plain.clone() },
            Admitted { emphasis: !plain.emphasis, ..plain.clone() },
            Admitted { clip_skip: 2, ..plain.clone() },
            Admitted { model: Arc::new(model), ..plain.clone() },
            Admitted { plan, ..plain.clone() },
        ] {
            assert_ne!(key(&other), key(&plain));
        }
        let same = Admitted { seed: 99, steps: 3, width: 64, height: 512, guidance_scale: 9.0, ..plain.clone() };
        assert_eq!(key(&same), key(&plain));
        let unguided =
            |negative: &str| key(&Admitted { guidance_scale: 1.0, negative_prompt: negative.into(), ..plain.clone() });
        assert_eq!(unguided("x"), unguided("y"), "without guidance the negative prompt decides nothing");
    }

    #[test]
    fn tenants_do_not_see_each_others_entries_unless_they_share() {
        let arena = arena();
        for (shared, found) in [(false, false), (true, true)] {
            let cache = Conditioning::new(arena.clone(), CacheConfig { bytes: LIMIT, shared });
            let request = request("a heart");
            cache.put(cache.key(&tenant_of_uid(1), &request), tensor(&arena));
            assert!(cache.get(&cache.key(&tenant_of_uid(1), &request)).is_some());
            assert_eq!(cache.get(&cache.key(&tenant_of_uid(2), &request)).is_some(), found, "shared {shared}");
        }
    }

    #[test]
    fn the_least_recently_used_goes_when_the_bound_is_reached() {
        let arena = arena();
        // Each takes two pages; a quarter of the arena would be eight of them.
        let cache = cache(&arena, 3 * 8192);
        let key = |prompt: &str| cache.key(&tenant_of_uid(1), &request(prompt));
        for prompt in ["a", "b", "c"] {
            cache.put(key(prompt), tensor(&arena));
        }
        assert!(cache.get(&key("a")).is_some());
        cache.put(key("d"), tensor(&arena));
        let there: Vec<bool> = ["a", "b", "c", "d"].map(|prompt| cache.get(&key(prompt)).is_some()).into();
        assert_eq!(there, [true, false, true, true]);
        assert_eq!(arena.usage().segments, 3, "what is dropped is unlinked");
        let quarter = Conditioning::new(arena.clone(), CacheConfig { bytes: u64::MAX, shared: false });
        assert_eq!(quarter.limit, LIMIT / 4);
        let nothing = Conditioning::new(arena.clone(), CacheConfig { bytes: 0, shared: false });
        nothing.put(key("a"), tensor(&arena));
        assert!(nothing.get(&key("a")).is_none());
    }

    #[test]
    fn a_task_that_needs_the_room_gets_it_at_once() {
        let arena = arena();
        let cache = cache(&arena, LIMIT);
        let key = |prompt: &str| cache.key(&tenant_of_uid(1), &request(prompt));
        for prompt in ["a", "b", "c"] {
            cache.put(key(prompt), tensor(&arena));
        }
        let free = arena.usage().free;
        let yielded = cache.yield_to(free + 8192);
        assert_eq!((arena.usage().segments, arena.usage().free), (2, free + 8192), "no more than it takes");
        drop(yielded);
        let yielded = cache.yield_to(LIMIT);
        assert_eq!(arena.usage().segments, 0);
        cache.put(key("d"), tensor(&arena));
        assert!(cache.get(&key("d")).is_none(), "nothing is kept while somebody waits");
        drop(yielded);
        cache.put(key("d"), tensor(&arena));
        assert!(cache.get(&key("d")).is_some());
    }
}

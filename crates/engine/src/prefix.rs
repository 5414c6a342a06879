//! The prefix cache: full blocks by content.
//!
//! A block's key is a SHA-256 over its parent's key and its tokens, so that it names the whole text up to the
//! block's end; the first parent is the salt (model, block size). Two texts with equal keys would be a collision
//! of SHA-256, which is why a hit needs no second look at the tokens.

use std::collections::{BTreeMap, HashMap};

use paguro_backend::PageId;
use sha2::{Digest, Sha256};

/// The content of a block and of everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey([u8; 32]);

impl BlockKey {
    /// The parent of every first block.
    pub fn root(salt: &[u8]) -> Self {
        Self(Sha256::digest(salt).into())
    }

    /// The key of the block with these tokens after this one.
    pub fn child(&self, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        Self(hash.finalize().into())
    }
}

/// Which pages hold which blocks, and which of them nobody uses at the moment, the longest unused first. One
/// entry for each KV group: the groups of a block are found, used and evicted separately.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    /// Parent of every first block.
    root: BlockKey,
    pages: HashMap<(usize, BlockKey), PageId>,
    /// The entry of each page, `[pages]`.
    entries: Vec<Option<Entry>>,
    /// Unused pages by the time they became so.
    unused: BTreeMap<u64, PageId>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    group: usize,
    key: BlockKey,
    /// Its key in `unused`.
    unused_since: Option<u64>,
}

impl PrefixCache {
    /// For an arena of `pages` pages; `salt` tells models and block sizes apart.
    pub fn new(pages: usize, salt: &[u8]) -> Self {
        Self {
            root: BlockKey::root(salt),
            pages: HashMap::new(),
            entries: vec![None; pages],
            unused: BTreeMap::new(),
            clock: 0,
        }
    }

    /// The key of the block with these tokens after the block `parent`, or of a first block.
    pub fn key(&self, parent: Option<&BlockKey>, tokens: &[u32]) -> BlockKey {
        parent.unwrap_or(&self.root).child(tokens)
    }

    pub fn find(&self, group: usize, key: &BlockKey) -> Option<PageId> {
        self.pages.get(&(group, *key)).copied()
    }

    /// Makes a page that a sequence holds findable. A block that is already known, because two sequences
    /// computed it at the same time, keeps its first page; the other one stays private.
    pub fn publish(&mut self, group: usize, key: BlockKey, page: PageId) {
        let entry = &mut self.entries[page.0 as usize];
        if entry.is_none() && !self.pages.contains_key(&(group, key)) {
            *entry = Some(Entry { group, key, unused_since: None });
            self.pages.insert((group, key), page);
        }
    }

    pub fn contains(&self, page: PageId) -> bool {
        self.entries[page.0 as usize].is_some()
    }

    /// The page's last holder let it go. Returns whether the cache keeps it.
    pub fn unused(&mut self, page: PageId) -> bool {
        let Some(entry) = &mut self.entries[page.0 as usize] else { return false };
        debug_assert!(entry.unused_since.is_none());
        self.clock += 1;
        entry.unused_since = Some(self.clock);
        self.unused.insert(self.clock, page);
        true
    }

    /// Somebody holds the page again.
    pub fn used(&mut self, page: PageId) {
        if let Some(entry) = &mut self.entries[page.0 as usize]
            && let Some(since) = entry.unused_since.take()
        {
            self.unused.remove(&since);
        }
    }

    pub fn is_unused(&self, page: PageId) -> bool {
        self.entries[page.0 as usize].is_some_and(|entry| entry.unused_since.is_some())
    }

    /// Number of unused pages.
    pub fn evictable(&self) -> usize {
        self.unused.len()
    }

    /// Forgets the page that has been unused for the longest time.
    pub fn evict(&mut self) -> Option<PageId> {
        let (_, page) = self.unused.pop_first()?;
        let entry = self.entries[page.0 as usize].take().expect("an unused page has an entry");
        self.pages.remove(&(entry.group, entry.key));
        Some(page)
    }

    pub fn unused_pages(&self) -> impl Iterator<Item = PageId> {
        self.unused.values().copied()
    }

    /// Whether the three views of the entries agree.
    pub fn check(&self) -> Result<(), String> {
        for (&(group, key), page) in &self.pages {
            if !self.entries[page.0 as usize].is_some_and(|entry| entry.group == group && entry.key == key) {
                return Err(format!(
                    "the prefix cache finds page {page:?} under a key that is not the page's"
                ));
            }
        }
        let entries = self.entries.iter().flatten();
        if entries.clone().count() != self.pages.len() {
            return Err("a page of the prefix cache cannot be found by its key".into());
        }
        if entries.filter(|entry| entry.unused_since.is_some()).count() != self.unused.len() {
            return Err("the prefix cache's list of unused pages is wrong".into());
        }
        match self.unused.iter().find(|&(&since, &page)| {
            self.entries[page.0 as usize].is_none_or(|entry| entry.unused_since != Some(since))
        }) {
            Some((_, page)) => Err(format!("page {page:?} is listed as unused but is not")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_the_whole_text_up_to_its_block() {
        let root = BlockKey::root(b"model");
        let ab = root.child(&[1, 2]).child(&[3, 4]);
        assert_eq!(ab, root.child(&[1, 2]).child(&[3, 4]));
        assert_ne!(ab, root.child(&[9, 2]).child(&[3, 4]));
        assert_ne!(ab, root.child(&[3, 4]).child(&[1, 2]));
        assert_ne!(ab, BlockKey::root(b"other").child(&[1, 2]).child(&[3, 4]));
    }

    #[test]
    fn the_longest_unused_page_goes_first_and_use_refreshes() {
        let root = BlockKey::root(b"");
        let mut cache = PrefixCache::new(5, b"");
        for page in 1..5 {
            cache.publish(0, root.child(&[page]), PageId(page));
        }
        for page in [2, 1, 3].map(PageId) {
            assert!(cache.unused(page));
        }
        cache.used(PageId(2));
        assert!(cache.unused(PageId(2)));
        assert_eq!(cache.check(), Ok(()));
        let order: Vec<_> = std::iter::from_fn(|| cache.evict()).collect();
        assert_eq!(order, [1, 3, 2].map(PageId));
        assert_eq!(cache.find(0, &root.child(&[1])), None);
        assert_eq!(cache.find(0, &root.child(&[4])), Some(PageId(4)), "page 4 is in use");
        assert_eq!(cache.check(), Ok(()));
    }

    #[test]
    fn a_block_computed_twice_keeps_its_first_page() {
        let key = BlockKey::root(b"").child(&[1]);
        let mut cache = PrefixCache::new(4, b"");
        cache.publish(0, key, PageId(1));
        cache.publish(0, key, PageId(2));
        cache.publish(1, key, PageId(3));
        assert_eq!(cache.find(0, &key), Some(PageId(1)));
        assert_eq!(cache.find(1, &key), Some(PageId(3)), "groups do not mix");
        assert!(!cache.unused(PageId(2)), "the private one is not kept");
    }
}

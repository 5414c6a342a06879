//! The prefix cache: full blocks by content, and checkpoints: copies of the states of sequences at the ends of blocks.
//!
//! A block's key is a SHA-256 over its parent's key and its tokens, so that it names the whole text up to the
//! block's end; the first parent is the salt (model, block size). Two texts with equal keys would be a collision
//! of SHA-256, which is why a hit needs no second look at the tokens.
//!
//! A new prompt reuses all blocks of the prefix that it shares with earlier texts. A block that no sequence uses stays
//! cached until its page is needed; the least recently used one is evicted first. Checkpoints and blocks have one budget
//! and one order. A checkpoint is evicted before its block or together with it. Of a sequence with states, a cached
//! prefix ends at a checkpoint.

use std::collections::{BTreeMap, HashMap};

use paguro_backend::PageId;
use sha2::{Digest, Sha256};

use crate::{
    events::BlockSet,
    tiers::{Part, Unit},
};

/// The content of a block and of all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey([u8; 32]);

impl BlockKey {
    /// Returns the parent of every first block.
    pub fn root(salt: &[u8]) -> Self {
        Self(Sha256::digest(salt).into())
    }

    /// Returns the hash itself.
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Returns the key of the block with these tokens and [pictures](crate::pictures::Pictures::extras) after this one. The key of a
    /// block without pictures depends on its tokens only; what follows the tokens of others has another length than tokens.
    pub fn child(&self, tokens: &[u32], pictures: &[([u8; 32], i64)]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        for (key, offset) in pictures {
            hash.update([1]);
            hash.update(key);
            hash.update(offset.to_le_bytes());
        }
        Self(hash.finalize().into())
    }

    /// Returns the parent of first blocks of texts with this salt and the digest of adapters, where this is the parent of those without;
    /// `None` for the empty salt without adapters. It differs from all keys of blocks: a block's tokens are hashed as words of four bytes,
    /// and here another byte follows them.
    pub fn salted(&self, salt: &[u8], adapters: Option<&[u8; 32]>) -> Option<Self> {
        if salt.is_empty() && adapters.is_none() {
            return None;
        }
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(Sha256::digest(salt));
        adapters.iter().for_each(|digest| hash.update(digest));
        hash.update([0]);
        Some(Self(hash.finalize().into()))
    }
}

/// The cached blocks and their pages, and the unused ones in order of last use. There is one entry for each KV group:
/// the groups of a block are looked up, used and evicted separately.
///
/// Checkpoints are in the same order. No sequence holds one, so all can be evicted. A checkpoint is removed with the
/// block before it, because it is useless without it.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    /// Parent of every first block.
    root: BlockKey,
    pages: HashMap<(usize, BlockKey), PageId>,
    /// The entry of each page, `[pages]`.
    entries: Vec<Option<Entry>>,
    checkpoints: HashMap<BlockKey, Checkpoint>,
    /// Blocks and checkpoints that can be evicted, by the time of their last use.
    unused: BTreeMap<u64, Unused>,
    /// Pages of these.
    evictable: usize,
    clock: u64,
    /// Blocks by group.
    blocks: Vec<BlockSet>,
}

/// Something that can be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unused {
    Block(PageId),
    Checkpoint(BlockKey),
}

/// A copy of a sequence's states.
#[derive(Debug)]
struct Checkpoint {
    /// Its parts, in order.
    pages: Vec<PageId>,
    /// Its key in `unused`.
    used_at: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    group: usize,
    key: BlockKey,
    /// Its key in `unused`.
    unused_since: Option<u64>,
}

impl PrefixCache {
    /// Creates a cache for an arena of `pages` pages; `salt` distinguishes models and block sizes.
    pub fn new(pages: usize, salt: &[u8]) -> Self {
        Self {
            root: BlockKey::root(salt),
            pages: HashMap::new(),
            entries: vec![None; pages],
            checkpoints: HashMap::new(),
            unused: BTreeMap::new(),
            evictable: 0,
            clock: 0,
            blocks: Vec::new(),
        }
    }

    /// Returns the parent of first blocks without a salt.
    pub fn root(&self) -> BlockKey {
        self.root
    }

    /// Returns the key of the block with these tokens after the block `parent`, or of a first block.
    pub fn key(&self, parent: Option<&BlockKey>, tokens: &[u32], pictures: &[([u8; 32], i64)]) -> BlockKey {
        parent.unwrap_or(&self.root).child(tokens, pictures)
    }

    pub fn find(&self, group: usize, key: &BlockKey) -> Option<PageId> {
        self.pages.get(&(group, *key)).copied()
    }

    /// Adds a page of a sequence to the cache. If the block exists, because two sequences computed it concurrently, its
    /// first page is kept, and the other one stays private. Returns true if the block is new.
    pub fn publish(&mut self, group: usize, key: BlockKey, page: PageId) -> bool {
        let entry = &mut self.entries[page.0 as usize];
        let is_new = entry.is_none() && !self.pages.contains_key(&(group, key));
        if is_new {
            *entry = Some(Entry { group, key, unused_since: None });
            self.pages.insert((group, key), page);
            if self.blocks.len() <= group {
                self.blocks.resize(group + 1, BlockSet::default());
            }
            self.blocks[group].insert(&key);
        }
        is_new
    }

    /// Returns the blocks with a page of this group.
    pub fn blocks(&self, group: usize) -> BlockSet {
        self.blocks.get(group).copied().unwrap_or_default()
    }

    /// Keys of all blocks with a page of this group.
    pub fn keys(&self, group: usize) -> impl Iterator<Item = &BlockKey> {
        self.pages.keys().filter(move |(of, _)| *of == group).map(|(_, key)| key)
    }

    pub fn contains(&self, page: PageId) -> bool {
        self.entries[page.0 as usize].is_some()
    }

    /// Marks a page without holders. Returns true if the cache keeps it.
    pub fn unused(&mut self, page: PageId) -> bool {
        let Some(entry) = &mut self.entries[page.0 as usize] else { return false };
        debug_assert!(entry.unused_since.is_none());
        self.clock += 1;
        entry.unused_since = Some(self.clock);
        self.unused.insert(self.clock, Unused::Block(page));
        self.evictable += 1;
        true
    }

    /// Somebody holds the page again.
    pub fn used(&mut self, page: PageId) {
        if let Some(entry) = &mut self.entries[page.0 as usize]
            && let Some(since) = entry.unused_since.take()
        {
            self.unused.remove(&since);
            self.evictable -= 1;
        }
    }

    pub fn is_unused(&self, page: PageId) -> bool {
        self.entries[page.0 as usize].is_some_and(|entry| entry.unused_since.is_some())
    }

    /// Returns the number of pages that can be evicted.
    pub fn evictable(&self) -> usize {
        self.evictable
    }

    /// Evicts the least recently used block or checkpoint, and passes its pages and contents to `freed`. Returns false
    /// if there is none.
    pub fn evict(&mut self, mut freed: impl FnMut(Unit, PageId)) -> bool {
        let Some((_, oldest)) = self.unused.pop_first() else { return false };
        match oldest {
            Unused::Block(page) => {
                let entry = self.entries[page.0 as usize].take().expect("an unused page has an entry");
                self.pages.remove(&(entry.group, entry.key));
                self.blocks[entry.group].remove(&entry.key);
                self.evictable -= 1;
                freed(Unit { key: entry.key, part: Part::Kv(entry.group) }, page);
                self.evict_checkpoint(&entry.key, freed);
            }
            Unused::Checkpoint(key) => self.evict_checkpoint(&key, freed),
        }
        true
    }

    fn evict_checkpoint(&mut self, key: &BlockKey, mut freed: impl FnMut(Unit, PageId)) {
        let unit = Unit { key: *key, part: Part::Checkpoint };
        self.forget_checkpoint(key, |page| freed(unit, page));
    }

    /// Keeps a checkpoint after the block with this key, in these pages. There must be none yet.
    pub fn keep_checkpoint(&mut self, key: BlockKey, pages: Vec<PageId>) {
        self.clock += 1;
        self.unused.insert(self.clock, Unused::Checkpoint(key));
        self.evictable += pages.len();
        let other = self.checkpoints.insert(key, Checkpoint { pages, used_at: self.clock });
        assert!(other.is_none(), "there are two checkpoints of one block");
    }

    /// Returns the pages of the checkpoint after this block, in order.
    pub fn checkpoint(&self, key: &BlockKey) -> Option<&[PageId]> {
        self.checkpoints.get(key).map(|checkpoint| checkpoint.pages.as_slice())
    }

    /// Returns the number of checkpoints.
    pub fn checkpoints(&self) -> usize {
        self.checkpoints.len()
    }

    /// Makes a checkpoint the last one that was used, if it exists.
    pub fn touch_checkpoint(&mut self, key: &BlockKey) {
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            self.clock += 1;
            self.unused.remove(&checkpoint.used_at);
            self.unused.insert(self.clock, Unused::Checkpoint(*key));
            checkpoint.used_at = self.clock;
        }
    }

    /// Forgets a checkpoint, if it exists, and passes its pages to `freed`.
    pub fn forget_checkpoint(&mut self, key: &BlockKey, freed: impl FnMut(PageId)) {
        if let Some(Checkpoint { pages, used_at }) = self.checkpoints.remove(key) {
            self.unused.remove(&used_at);
            self.evictable -= pages.len();
            pages.into_iter().for_each(freed);
        }
    }

    /// Removes an unused block and returns its page.
    pub fn forget(&mut self, group: usize, key: &BlockKey) -> Option<PageId> {
        let page = self.find(group, key).filter(|page| self.is_unused(*page))?;
        self.used(page);
        self.entries[page.0 as usize] = None;
        self.blocks[group].remove(key);
        self.pages.remove(&(group, *key))
    }

    /// Returns the pages that can be evicted.
    pub fn unused_pages(&self) -> impl Iterator<Item = PageId> {
        let blocks = self.unused.values().filter_map(|unused| match unused {
            Unused::Block(page) => Some(*page),
            Unused::Checkpoint(_) => None,
        });
        blocks.chain(self.checkpoints.values().flat_map(|checkpoint| checkpoint.pages.iter().copied()))
    }

    /// Checks that the three views of the entries agree.
    pub fn check(&self) -> Result<(), String> {
        for (&(group, key), page) in &self.pages {
            if !self.entries[page.0 as usize].is_some_and(|entry| entry.group == group && entry.key == key) {
                return Err(format!(
                    "the prefix cache finds page {page:?} under a key that is not the page's"
                ));
            }
        }
        for (group, blocks) in self.blocks.iter().enumerate() {
            let mut counted = BlockSet::default();
            self.keys(group).for_each(|key| counted.insert(key));
            if counted != *blocks {
                return Err(format!("group {group} counts {blocks:?} of {counted:?}"));
            }
        }
        let entries = self.entries.iter().flatten();
        if entries.clone().count() != self.pages.len() {
            return Err("a page of the prefix cache cannot be found by its key".into());
        }
        let blocks = entries.filter(|entry| entry.unused_since.is_some()).count();
        if blocks + self.checkpoints.len() != self.unused.len() {
            return Err("the prefix cache's list of what is unused is wrong".into());
        }
        if self.unused_pages().count() != self.evictable {
            return Err(format!("{} pages can be evicted, but {} are counted", blocks, self.evictable));
        }
        let is_right = |&(&since, unused): &(&u64, &Unused)| match unused {
            Unused::Block(page) => {
                self.entries[page.0 as usize].is_some_and(|entry| entry.unused_since == Some(since))
            }
            Unused::Checkpoint(key) => {
                self.checkpoints.get(key).is_some_and(|checkpoint| checkpoint.used_at == since)
            }
        };
        match self.unused.iter().find(|entry| !is_right(entry)) {
            Some((_, unused)) => Err(format!("{unused:?} is listed as unused but is not")),
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
        let ab = root.child(&[1, 2], &[]).child(&[3, 4], &[]);
        assert_eq!(ab, root.child(&[1, 2], &[]).child(&[3, 4], &[]));
        assert_ne!(ab, root.child(&[9, 2], &[]).child(&[3, 4], &[]));
        assert_ne!(ab, root.child(&[3, 4], &[]).child(&[1, 2], &[]));
        let picture = [([7; 32], 0)];
        assert_ne!(ab, root.child(&[1, 2], &[]).child(&[3, 4], &picture));
        assert_ne!(ab, root.child(&[1, 2], &picture).child(&[3, 4], &[]));
        assert_ne!(root.child(&[1, 2], &picture), root.child(&[1, 2], &[([8; 32], 0)]));
        assert_ne!(root.child(&[1, 2], &picture), root.child(&[1, 2], &[([7; 32], -1)]));
        assert_ne!(ab, BlockKey::root(b"other").child(&[1, 2], &[]).child(&[3, 4], &[]));
    }

    #[test]
    fn the_longest_unused_page_goes_first_and_use_refreshes() {
        let root = BlockKey::root(b"");
        let mut cache = PrefixCache::new(5, b"");
        for page in 1..5 {
            cache.publish(0, root.child(&[page], &[]), PageId(page));
        }
        for page in [2, 1, 3].map(PageId) {
            assert!(cache.unused(page));
        }
        cache.used(PageId(2));
        assert!(cache.unused(PageId(2)));
        assert_eq!(cache.check(), Ok(()));
        let mut order = Vec::new();
        while cache.evict(|_, page| order.push(page)) {}
        assert_eq!(order, [1, 3, 2].map(PageId));
        assert_eq!(cache.find(0, &root.child(&[1], &[])), None);
        assert_eq!(cache.find(0, &root.child(&[4], &[])), Some(PageId(4)), "page 4 is in use");
        assert_eq!(cache.check(), Ok(()));
    }

    #[test]
    fn a_checkpoint_goes_with_its_block_or_before() {
        let root = BlockKey::root(b"");
        let keys: Vec<_> = (1..5).map(|block| root.child(&[block], &[])).collect();
        let mut cache = PrefixCache::new(12, b"");
        for (&key, page) in keys.iter().zip(1..) {
            cache.publish(0, key, PageId(page));
        }
        cache.keep_checkpoint(keys[0], vec![PageId(5), PageId(6)]);
        cache.keep_checkpoint(keys[1], vec![PageId(7), PageId(8)]);
        cache.keep_checkpoint(keys[2], vec![PageId(9), PageId(10)]);
        assert_eq!(cache.checkpoint(&keys[1]), Some(&[PageId(7), PageId(8)][..]));
        for page in [4, 3, 2, 1].map(PageId) {
            assert!(cache.unused(page));
        }
        cache.touch_checkpoint(&keys[1]);
        assert_eq!((cache.evictable(), cache.checkpoints(), cache.check()), (10, 3, Ok(())));
        let mut order = Vec::new();
        let mut evict = |cache: &mut PrefixCache| {
            order.clear();
            cache.evict(|_, page| order.push(page.0));
            order.clone()
        };
        // The first and the third one have not been used for the longest time.
        assert_eq!(evict(&mut cache), [5, 6]);
        assert_eq!(evict(&mut cache), [9, 10]);
        assert_eq!(evict(&mut cache), [4]);
        assert_eq!(evict(&mut cache), [3]);
        assert_eq!(evict(&mut cache), [2, 7, 8]);
        assert_eq!((evict(&mut cache), evict(&mut cache)), (vec![1], vec![]));
        assert_eq!((cache.evictable(), cache.check()), (0, Ok(())));
    }

    #[test]
    fn a_block_computed_twice_keeps_its_first_page() {
        let key = BlockKey::root(b"").child(&[1], &[]);
        let mut cache = PrefixCache::new(4, b"");
        cache.publish(0, key, PageId(1));
        cache.publish(0, key, PageId(2));
        cache.publish(1, key, PageId(3));
        assert_eq!(cache.find(0, &key), Some(PageId(1)));
        assert_eq!(cache.find(1, &key), Some(PageId(3)), "groups do not mix");
        assert!(!cache.unused(PageId(2)), "the private one is not kept");
    }
}

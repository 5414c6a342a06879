//! Events for routers that track the location of blocks: a block is stored in a tier, or removed from it.
//!
//! A block is one entry, although each K/V group has a page of its own: the pages of one group stand for all.
//!
//! The texts of blocks are remembered as long as a tier has them: an event has the tokens, pictures and salt of its
//! block. The engine's thread appends to a bounded queue and never waits for it.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
    sync::Arc,
};

use crate::prefix::BlockKey;

/// Place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Pages of the device.
    Device,
    /// Memory of the host.
    Host,
    /// The disk.
    Disk,
}

/// An input of a block's hash besides the tokens up to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// [`Request::prefix_salt`](crate::Request::prefix_salt), for the first block of a text.
    Salt(Arc<[u8]>),
    /// Name of the request's adapters, for all blocks of a text. The hash depends on their digest instead.
    Adapter(Arc<str>),
    /// A picture with rows in the block.
    Picture {
        /// [`Picture::key`](crate::Picture::key)
        key: [u8; 32],
        /// Position of the picture's first row, counted from the beginning of the block: negative if the picture begins before it.
        offset: i64,
    },
}

/// A change of which blocks are where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks of one text, in order, are there.
    Stored {
        /// Hashes of the blocks. Each identifies all tokens up to the end of the block, and the salt of the request.
        hashes: Vec<u64>,
        /// Hash of the block before the first one. `None` for the beginning of a text.
        parent: Option<u64>,
        /// Tokens of the blocks. Empty if they are not known any more, so that only hashes are left.
        tokens: Vec<u32>,
        /// Other inputs of the hashes, by block.
        extra: Vec<Vec<ExtraKey>>,
        /// Tokens in a block.
        block_size: usize,
        /// Tokens that the layers of the blocks attend to; `None` for all.
        window: Option<usize>,
        /// Their place.
        medium: Medium,
    },
    /// Blocks are not there any more.
    Removed {
        /// Their hashes.
        hashes: Vec<u64>,
        /// The place.
        medium: Medium,
    },
}

/// Receiver of the events of a step. It is called on the engine's thread and must not wait.
#[derive(Clone)]
pub struct EventSink(pub Arc<dyn Fn(Vec<KvEvent>) + Send + Sync>);

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventSink")
    }
}

/// Receiver of the reason for which an engine fails. It is called on the engine's thread and must not wait.
#[derive(Clone)]
pub struct FailureSink(pub Arc<dyn Fn(&str) + Send + Sync>);

impl fmt::Debug for FailureSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FailureSink")
    }
}

/// The blocks of a tier, as their number and the exclusive or of their hashes. A reader of the events can compute both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSet {
    /// Number of blocks.
    pub count: u64,
    /// Exclusive or of their hashes.
    pub digest: u64,
}

impl BlockSet {
    pub(crate) fn insert(&mut self, key: &BlockKey) {
        self.insert_hash(hash(key));
    }

    pub(crate) fn remove(&mut self, key: &BlockKey) {
        self.remove_hash(hash(key));
    }

    pub(crate) fn insert_hash(&mut self, hash: u64) {
        self.count += 1;
        self.digest ^= hash;
    }

    pub(crate) fn remove_hash(&mut self, hash: u64) {
        self.count -= 1;
        self.digest ^= hash;
    }
}

/// Texts of blocks that no tier has are remembered for this number of blocks: an evicted block is copied a little later.
const REMEMBERED: usize = 8192;

/// Text of a block.
#[derive(Debug)]
struct Text {
    parent: Option<u64>,
    tokens: Box<[u32]>,
    extra: Vec<ExtraKey>,
    /// Bits of the tiers that have the block.
    media: u8,
}

/// Events that were not sent yet.
#[derive(Debug)]
pub(crate) struct Events {
    sink: EventSink,
    block_size: usize,
    /// The group whose pages stand for a block.
    pub group: usize,
    /// Window of this group.
    window: Option<usize>,
    /// Blocks whose pages were filled from other tiers, until the end of the load: its tiers deliver blocks in no order.
    pub placed: HashSet<BlockKey>,
    /// Texts of all blocks that are in a tier, and of the last ones that were.
    texts: HashMap<BlockKey, Text>,
    /// Blocks that have left their last tier, the oldest first.
    gone: VecDeque<BlockKey>,
    new: Vec<KvEvent>,
}

/// Returns the name of a block for others: the end of its key, as vLLM shortens its hashes.
pub(crate) fn hash(key: &BlockKey) -> u64 {
    let bytes = key.bytes();
    u64::from_be_bytes([24, 25, 26, 27, 28, 29, 30, 31].map(|at| bytes[at]))
}

fn bit(medium: Medium) -> u8 {
    1 << medium as u8
}

impl Events {
    pub fn new(sink: EventSink, block_size: usize, group: usize, window: Option<usize>) -> Self {
        Self {
            sink,
            block_size,
            group,
            window,
            placed: HashSet::new(),
            texts: HashMap::new(),
            gone: VecDeque::new(),
            new: Vec::new(),
        }
    }

    /// A block is in pages of the device, after the block `parent`.
    pub fn stored(&mut self, parent: Option<&BlockKey>, key: &BlockKey, block: &[u32], extra: Vec<ExtraKey>) {
        self.texts.entry(*key).or_insert_with(|| Text {
            parent: parent.map(hash),
            tokens: block.into(),
            extra,
            media: 0,
        });
        self.copied(key, Medium::Device);
    }

    /// A block was evicted from the device.
    pub fn evicted(&mut self, key: &BlockKey) {
        if !self.placed.remove(key) {
            self.removed(key, Medium::Device);
        }
    }

    /// A block that was stored before is in this tier as well.
    pub fn copied(&mut self, key: &BlockKey, to: Medium) {
        let Self { texts, new, .. } = self;
        let (parent, tokens, extra) = match texts.get_mut(key) {
            Some(text) => {
                text.media |= bit(to);
                (text.parent, &text.tokens[..], Some(text.extra.clone()))
            }
            None => (None, &[][..], None),
        };
        match new.last_mut() {
            Some(KvEvent::Stored { hashes, tokens: all, extra: all_extra, medium, .. })
                if *medium == to
                    && extra.is_some() != all_extra.is_empty()
                    && (extra.is_none() || parent.is_some() && hashes.last().copied() == parent) =>
            {
                hashes.push(hash(key));
                all.extend_from_slice(tokens);
                all_extra.extend(extra);
            }
            _ => new.push(KvEvent::Stored {
                hashes: vec![hash(key)],
                parent,
                tokens: tokens.to_vec(),
                extra: extra.into_iter().collect(),
                block_size: self.block_size,
                window: self.window,
                medium: to,
            }),
        }
    }

    /// A block is not in a tier any more.
    pub fn removed(&mut self, key: &BlockKey, from: Medium) {
        if let Some(text) = self.texts.get_mut(key) {
            text.media &= !bit(from);
            if text.media == 0 {
                self.gone.push_back(*key);
                self.forget_oldest();
            }
        }
        match self.new.last_mut() {
            Some(KvEvent::Removed { hashes, medium }) if *medium == from => hashes.push(hash(key)),
            _ => self.new.push(KvEvent::Removed { hashes: vec![hash(key)], medium: from }),
        }
    }

    /// Forgets texts of blocks that left their last tier long ago.
    fn forget_oldest(&mut self) {
        while self.gone.len() > REMEMBERED {
            let Some(oldest) = self.gone.pop_front() else { return };
            if self.texts.get(&oldest).is_some_and(|text| text.media == 0) {
                self.texts.remove(&oldest);
            }
        }
    }

    /// Sends what is new.
    pub fn send(&mut self) {
        if !self.new.is_empty() {
            (self.sink.0)(std::mem::take(&mut self.new));
        }
    }
}

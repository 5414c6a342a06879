//! Events for routers that track the location of blocks: a block is stored in a tier, or removed from it.
//!
//! A block is one entry, although each K/V group has a page of its own: the pages of one group stand for all.

use std::{collections::HashSet, fmt, sync::Arc};

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

/// A change of which blocks are where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks of one text, in order, are there.
    Stored {
        /// Hashes of the blocks. Each identifies all tokens up to the end of the block, and the salt of the request.
        hashes: Vec<u64>,
        /// Hash of the block before the first one. `None` for the beginning of a text, and on the host and the disk.
        parent: Option<u64>,
        /// Tokens of the blocks. Empty for the host and the disk, where hashes suffice.
        tokens: Vec<u32>,
        /// Tokens in a block.
        block_size: usize,
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

/// Events that were not sent yet.
#[derive(Debug)]
pub(crate) struct Events {
    sink: EventSink,
    block_size: usize,
    /// The group whose pages stand for a block.
    pub group: usize,
    /// Blocks whose pages were filled from other tiers, until the end of the load: its tiers deliver blocks in no order.
    pub placed: HashSet<BlockKey>,
    new: Vec<KvEvent>,
}

/// Returns the name of a block for others: the end of its key, as vLLM shortens its hashes.
pub(crate) fn hash(key: &BlockKey) -> u64 {
    let bytes = key.bytes();
    u64::from_be_bytes([24, 25, 26, 27, 28, 29, 30, 31].map(|at| bytes[at]))
}

impl Events {
    pub fn new(sink: EventSink, block_size: usize, group: usize) -> Self {
        Self { sink, block_size, group, placed: HashSet::new(), new: Vec::new() }
    }

    /// A block is in pages of the device, after the block `parent`.
    pub fn stored(&mut self, parent: Option<&BlockKey>, key: &BlockKey, block: &[u32]) {
        let parent = parent.map(hash);
        if let Some(KvEvent::Stored { hashes, tokens, medium: Medium::Device, .. }) = self.new.last_mut()
            && parent.is_some()
            && hashes.last().copied() == parent
        {
            hashes.push(hash(key));
            tokens.extend_from_slice(block);
            return;
        }
        self.new.push(KvEvent::Stored {
            hashes: vec![hash(key)],
            parent,
            tokens: block.to_vec(),
            block_size: self.block_size,
            medium: Medium::Device,
        });
    }

    /// A block was evicted from the device.
    pub fn evicted(&mut self, key: &BlockKey) {
        if !self.placed.remove(key) {
            self.removed(hash(key), Medium::Device);
        }
    }

    /// A block is in another tier.
    pub fn copied(&mut self, key: &BlockKey, to: Medium) {
        match self.new.last_mut() {
            Some(KvEvent::Stored { hashes, medium, .. }) if *medium == to => hashes.push(hash(key)),
            _ => self.new.push(KvEvent::Stored {
                hashes: vec![hash(key)],
                parent: None,
                tokens: Vec::new(),
                block_size: self.block_size,
                medium: to,
            }),
        }
    }

    /// A block is not in a tier any more.
    pub fn removed(&mut self, hash: u64, from: Medium) {
        match self.new.last_mut() {
            Some(KvEvent::Removed { hashes, medium }) if *medium == from => hashes.push(hash),
            _ => self.new.push(KvEvent::Removed { hashes: vec![hash], medium: from }),
        }
    }

    /// Sends what is new.
    pub fn send(&mut self) {
        if !self.new.is_empty() {
            (self.sink.0)(std::mem::take(&mut self.new));
        }
    }
}

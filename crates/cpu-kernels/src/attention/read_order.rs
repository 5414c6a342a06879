//! Read order and prefetch of K and V.

use std::ops::Range;

use super::{LANES, SPLIT, SplitJob};

/// Prefetch distance of K and V, in units of 16 tokens.
const PREFETCH_TILES: usize = 4;

/// Addresses of K and V of the 16-token tiles of a split in read order: K of all tiles, then V of all tiles, then K of
/// some tiles after the split.
pub(super) struct ReadOrder {
    places: [*const u8; 2 * (SPLIT / LANES) + PREFETCH_TILES],
    tiles: Range<usize>,
}

impl ReadOrder {
    /// Creates the read order of at least one tile.
    pub(super) fn new(job: &SplitJob<'_>, tiles: Range<usize>) -> Self {
        let shape = job.pages.shape();
        let block_tiles = shape.block_size / LANES;
        let first_block = job.split * SPLIT / shape.block_size;
        let blocks = tiles.start / block_tiles..(tiles.end + PREFETCH_TILES).div_ceil(block_tiles);
        let valid = job.pages.read(job.table[first_block + blocks.start], job.layer_slot, job.kv_head).0;
        let mut places = [valid.as_ptr(); 2 * (SPLIT / LANES) + PREFETCH_TILES];
        let end = tiles.end + PREFETCH_TILES;
        for block in blocks {
            // After the last page there is no prefetch.
            let Some(&page) = job.table.get(first_block + block) else { break };
            let (k, v) = job.pages.read(page, job.layer_slot, job.kv_head);
            for tile in (block * block_tiles).max(tiles.start)..((block + 1) * block_tiles).min(end) {
                let offset = tile % block_tiles * shape.tile_bytes();
                let at = tile - tiles.start;
                if tile < tiles.end {
                    places[at] = k[offset..].as_ptr();
                    places[tiles.len() + at] = v[offset..].as_ptr();
                } else {
                    places[tiles.len() + at] = k[offset..].as_ptr();
                }
            }
        }
        Self { places, tiles }
    }
}

/// Read order of a register group of queries, which prefetches its share.
#[derive(Clone, Copy)]
pub(super) struct GroupOrder<'a> {
    pub(super) order: &'a ReadOrder,
    pub(super) group: usize,
    pub(super) groups: usize,
}

impl GroupOrder<'_> {
    /// Returns the addresses of a tile's K and of its prefetch.
    #[inline(always)]
    pub(super) fn keys(&self, tile: usize) -> (*const u8, *const u8) {
        self.at(tile - self.order.tiles.start)
    }

    /// Returns the addresses of a tile's V and of its prefetch.
    #[inline(always)]
    pub(super) fn values(&self, tile: usize) -> (*const u8, *const u8) {
        self.at(self.order.tiles.len() + tile - self.order.tiles.start)
    }

    #[inline(always)]
    fn at(&self, index: usize) -> (*const u8, *const u8) {
        let (at, prefetch) = (self.order.places[index], self.order.places[index + PREFETCH_TILES]);
        // The prefetches of other groups get an address that is in the cache: a useless prefetch is cheaper than a branch.
        (at, if index % self.groups == self.group { prefetch } else { at })
    }
}

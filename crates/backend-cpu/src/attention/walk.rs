//! In which order K and V are read, and what is fetched ahead.

use std::ops::Range;

use super::{LANES, SPLIT, SplitJob};

/// How far ahead of their use K and V are asked for, in tokens (of 16).
const AHEAD: usize = 4;

/// Where K and V of the 16-token tiles of a split are, in the order in which they are read: K of all tiles, then V of
/// all tiles, then K of some that come after the split.
pub(super) struct Walk {
    places: [*const u8; 2 * (SPLIT / LANES) + AHEAD],
    tiles: Range<usize>,
}

impl Walk {
    /// Of tiles that are at least one.
    pub(super) fn new(job: &SplitJob<'_>, tiles: Range<usize>) -> Self {
        let shape = job.pages.shape();
        let block_tiles = shape.block_size / LANES;
        let first_block = job.split * SPLIT / shape.block_size;
        let blocks = tiles.start / block_tiles..(tiles.end + AHEAD).div_ceil(block_tiles);
        let somewhere = job.pages.read(job.table[first_block + blocks.start], job.slot, job.kv_head).0;
        let mut places = [somewhere.as_ptr(); 2 * (SPLIT / LANES) + AHEAD];
        let end = tiles.end + AHEAD;
        for block in blocks {
            // After the last page there is nothing to fetch ahead.
            let Some(&page) = job.table.get(first_block + block) else { break };
            let (k, v) = job.pages.read(page, job.slot, job.kv_head);
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

/// How a part of a strip walks: it fetches its share of what comes next.
#[derive(Clone, Copy)]
pub(super) struct PartWalk<'a> {
    pub(super) walk: &'a Walk,
    pub(super) part: usize,
    pub(super) parts: usize,
}

impl PartWalk<'_> {
    /// K of a tile, and what to fetch meanwhile.
    #[inline(always)]
    pub(super) fn keys(&self, tile: usize) -> (*const u8, *const u8) {
        self.at(tile - self.walk.tiles.start)
    }

    /// V of a tile, and what to fetch meanwhile.
    #[inline(always)]
    pub(super) fn values(&self, tile: usize) -> (*const u8, *const u8) {
        self.at(self.walk.tiles.len() + tile - self.walk.tiles.start)
    }

    #[inline(always)]
    fn at(&self, index: usize) -> (*const u8, *const u8) {
        let (at, ahead) = (self.walk.places[index], self.walk.places[index + AHEAD]);
        // What is here already is fetched for nothing, and sooner than it is found out that nothing is to be fetched.
        (at, if index % self.parts == self.part { ahead } else { at })
    }
}

//! What the products assume about caches: fetching weights while others are multiplied, and how many rows stay near.

use crate::simd::Simd;

/// How far ahead of their use weights are asked for where they go straight into registers, in bytes.
pub const DISTANCE: usize = 8192;

/// The weights of `G` groups that come after a strip, asked for a few lines at a time while tiles compute.
pub struct Ahead<const G: usize> {
    at: [*const u8; G],
    lines: usize,
}

impl<const G: usize> Ahead<G> {
    /// `bytes` bytes at each of `at`, in `turns` turns.
    #[inline(always)]
    pub fn new(at: [*const u8; G], bytes: usize, turns: usize) -> Self {
        Self { at, lines: bytes.div_ceil(64 * turns) }
    }

    /// One turn.
    #[inline(always)]
    pub fn fetch<S: Simd>(&mut self, s: S) {
        for _ in 0..self.lines {
            for at in &mut self.at {
                s.prefetch(*at);
                *at = at.wrapping_add(64);
            }
        }
    }
}

/// Bytes of a row that go by before sums are put aside and the next rows come: as many rows as kernels keep sums of then fit
/// the second-level cache, whatever the number of inputs, so that weights are read a few times and not dozens of times.
pub const PANEL: usize = 4096;

/// How many rows of `row_bytes` to multiply with all groups before going on to the next: they stay in the second-level
/// cache (half of a megabyte of it) while weights pass by. Whole tiles, at most `most`.
pub fn rows_at_once(row_bytes: usize, tile: usize, most: usize) -> usize {
    ((512 << 10) / row_bytes.max(1)).clamp(4 * tile, most) / tile * tile
}

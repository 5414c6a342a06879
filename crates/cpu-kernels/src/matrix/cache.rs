//! Cache assumptions of matmuls: prefetch of weights, and the number of rows that stay in the cache.

use crate::simd::Simd;

/// Prefetch distance of weights that are loaded directly into registers, in bytes.
pub const DISTANCE: usize = 8192;

/// The weights of `G` groups after a panel, prefetched a few lines at a time while tiles are computed.
pub struct Prefetch<const G: usize> {
    at: [*const u8; G],
    lines: usize,
}

impl<const G: usize> Prefetch<G> {
    /// Prefetches `bytes` bytes at each of `at`, in `calls` calls.
    #[inline(always)]
    pub fn new(at: [*const u8; G], bytes: usize, calls: usize) -> Self {
        Self { at, lines: bytes.div_ceil(64 * calls) }
    }

    /// Prefetches the next lines.
    #[inline(always)]
    pub fn advance<S: Simd>(&mut self, s: S) {
        for _ in 0..self.lines {
            for at in &mut self.at {
                s.prefetch(*at);
                *at = at.wrapping_add(64);
            }
        }
    }
}

/// Bytes of a row that are processed before sums are stored and the next rows follow. As many rows as kernels keep sums
/// of then fit into the second-level cache for any number of inputs, so that weights are read a few times instead of
/// dozens of times.
pub const CHUNK_BYTES: usize = 4096;

/// Returns the number of rows of `row_bytes` to multiply with all groups before the next ones: they stay in the
/// second-level cache (half of a megabyte of it) while weights are streamed. Whole tiles, at most `most`.
pub fn rows_at_once(row_bytes: usize, tile: usize, most: usize) -> usize {
    ((512 << 10) / row_bytes.max(1)).clamp(4 * tile, most) / tile * tile
}

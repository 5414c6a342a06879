//! Fetching weights while others are multiplied.

use crate::simd::Simd;

/// How far ahead of their use weights are asked for where they go straight into registers, in bytes.
pub const DISTANCE: usize = 4096;

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

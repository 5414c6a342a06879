//! Matmuls of many rows: a panel of weights is unpacked to bytes in the first-level cache and used by all tiles
//! of rows. [`integer`](super::integer) defines the arithmetic.

// Tiles index several arrays of registers by row and group.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    block::{halved_block, whole_block},
    cache::{self, Prefetch},
    integer::{Job, parts},
    layout::{BLOCK, Format},
    packed_block::PackedBlock,
};
use crate::{
    quantize::QuantBlock,
    simd::{LANES, Simd},
};

/// Inputs that a panel holds: a whole number of packed blocks of every format, and two groups of it fit the first-level
/// cache next to the activations.
const PANEL_INPUTS: usize = 512;
/// Groups that a panel holds.
const PANEL_GROUPS: usize = 2;
/// Maximum rows whose sums are kept while panels are processed.
const PANEL_ROWS: usize = 240;
/// Rows of the largest tile.
const TILE_ROWS: usize = 6;

/// Unpacked weights of up to two groups, paired by [`Simd::pair_steps`], and sums of the rows that are multiplied by
/// them.
#[repr(C, align(64))]
pub(super) struct PanelData {
    pub(super) quants: [[[u8; 64]; PANEL_INPUTS / 4]; PANEL_GROUPS],
    /// Scales of blocks; of halves without `d`.
    pub(super) scales: [[[f32; LANES]; PANEL_INPUTS / 16]; PANEL_GROUPS],
    pub(super) minimums: [[[f32; LANES]; PANEL_INPUTS / 16]; PANEL_GROUPS],
    pub(super) halves: [Halves; PANEL_GROUPS],
    sums: [[[f32; LANES]; PANEL_GROUPS]; PANEL_ROWS + TILE_ROWS],
}

/// Data of formats with a scale for each half of a block.
pub(super) struct Halves {
    /// `d` of the block.
    pub(super) d: [[f32; LANES]; PANEL_INPUTS / BLOCK],
    /// Scales of the halves, each twice: for [`Simd::add_narrow_times`].
    pub(super) scales: [[[i16; 2]; LANES]; PANEL_INPUTS / 16],
    /// The scales of both halves, times the zero point: for [`Simd::dot2`].
    pub(super) zeros: [[[i16; 2]; LANES]; PANEL_INPUTS / BLOCK],
}

impl Halves {
    const ZERO: Self = Self {
        d: [[0.0; LANES]; PANEL_INPUTS / BLOCK],
        scales: [[[0; 2]; LANES]; PANEL_INPUTS / 16],
        zeros: [[[0; 2]; LANES]; PANEL_INPUTS / BLOCK],
    };

    /// Takes the scale of half `half % 2` of block `half / 2`, whole numbers.
    #[inline(always)]
    fn put<S: Simd>(&mut self, s: S, half: usize, scales: S::F32, zero: i32) {
        let mut numbers = [0; LANES];
        s.store_i32(s.to_i32(scales), &mut numbers);
        for (lane, &scale) in numbers.iter().enumerate() {
            // A signed byte and a zero point of at most 32, or a scale of at most 31 and a zero point of at most 62.
            self.scales[half][lane] = [scale as i16; 2];
            self.zeros[half / 2][lane][half % 2] = (scale * zero) as i16;
        }
    }
}

/// Unpacked weights and sums, of one thread.
pub struct Panel(Box<PanelData>);

impl Default for Panel {
    fn default() -> Self {
        Self(Box::new(PanelData {
            quants: [[[0; 64]; PANEL_INPUTS / 4]; PANEL_GROUPS],
            scales: [[[0.0; LANES]; PANEL_INPUTS / 16]; PANEL_GROUPS],
            minimums: [[[0.0; LANES]; PANEL_INPUTS / 16]; PANEL_GROUPS],
            halves: [Halves::ZERO; PANEL_GROUPS],
            sums: [[[0.0; LANES]; PANEL_GROUPS]; PANEL_ROWS + TILE_ROWS],
        }))
    }
}

/// Any number of rows: weights are unpacked to a panel, which tiles of rows then use.
#[inline(always)]
pub fn many<S: Simd, F: Format>(s: S, job: &Job<'_>, panel: &mut Panel) {
    let panel = &mut *panel.0;
    let at_once = const { if S::REGISTERS >= 32 { PANEL_GROUPS } else { 1 } };
    let layout = const { &F::LAYOUT };
    let all_packed_blocks = job.group_bytes / layout.bytes();
    let chunk_packed_blocks = cache::CHUNK_BYTES / size_of::<QuantBlock>() / layout.blocks();
    let row_bytes = cache::CHUNK_BYTES.min(job.stride * size_of::<QuantBlock>());
    let rows_at_once = cache::rows_at_once(row_bytes, TILE_ROWS, PANEL_ROWS);
    for first_packed in (0..all_packed_blocks).step_by(chunk_packed_blocks) {
        let packed_blocks = first_packed..all_packed_blocks.min(first_packed + chunk_packed_blocks);
        for first_row in (0..job.count).step_by(rows_at_once) {
            let rows = first_row..job.count.min(first_row + rows_at_once);
            let mut group = job.groups.start;
            while group < job.groups.end {
                let groups = at_once.min(job.groups.end - group);
                if const { S::REGISTERS >= 32 } && groups == 2 {
                    pass::<S, F, 2>(s, job, group, packed_blocks.clone(), rows.clone(), panel);
                } else {
                    pass::<S, F, 1>(s, job, group, packed_blocks.clone(), rows.clone(), panel);
                }
                group += groups;
            }
        }
    }
}

/// Computes `G` groups from `group` on, over the inputs of some packed blocks, for `rows`. Sums of earlier packed blocks are in the
/// destination.
#[inline(always)]
fn pass<S: Simd, F: Format, const G: usize>(
    s: S,
    job: &Job<'_>,
    group: usize,
    chunk: Range<usize>,
    rows: Range<usize>,
    panel: &mut PanelData,
) {
    let layout = const { &F::LAYOUT };
    let panel_packed_blocks = PANEL_INPUTS / layout.inputs;
    let stored = if chunk.start == 0 { 0 } else { G };
    for (row, sums) in rows.clone().zip(&mut panel.sums) {
        sums.fill([0.0; LANES]);
        for g in 0..stored {
            // SAFETY: the output was checked for all rows.
            sums[g] = unsafe { job.out.get(row, group + g, job.outputs) };
        }
    }
    for first_packed in chunk.clone().step_by(panel_packed_blocks) {
        let packed_blocks = panel_packed_blocks.min(chunk.end - first_packed);
        for g in 0..G {
            // SAFETY: these packed blocks are inside the group.
            unsafe {
                let at = job.group(group + g).add(first_packed * layout.bytes());
                unpack::<S, F>(s, at, packed_blocks, g, panel);
            }
        }
        let blocks = first_packed * layout.blocks()..(first_packed + packed_blocks) * layout.blocks();
        // While the tiles are computed, the data after this panel is prefetched, a few lines with every block.
        let next = std::array::from_fn(|g| match first_packed + packed_blocks == chunk.end {
            false => job.group(group + g).wrapping_add((first_packed + packed_blocks) * layout.bytes()),
            true => {
                job.group((group + G + g).min(job.groups.end - 1)).wrapping_add(chunk.start * layout.bytes())
            }
        });
        let calls = (blocks.len() * rows.len()).div_ceil(TILE_ROWS);
        let mut prefetch = Prefetch::new(next, packed_blocks * layout.bytes(), calls);
        let mut row = rows.start;
        while row < rows.end {
            let left = rows.end - row;
            let sums = row - rows.start;
            // With 8 registers, sums of four rows fit while a whole block is added up, those of three if scales change in it.
            // SAFETY: the panel holds these blocks; rows are at least as long as the group's packed blocks, see `few`.
            unsafe {
                if const { S::REGISTERS >= 32 } && left > 4 {
                    tile::<S, F, 6, G>(s, job, row, blocks.clone(), panel, sums, &mut prefetch);
                    row += 6;
                } else if const { fits_four::<S, F>() } && left > 2 {
                    tile::<S, F, 4, G>(s, job, row, blocks.clone(), panel, sums, &mut prefetch);
                    row += 4;
                } else if const { !fits_four::<S, F>() && S::NARROW } && left > 2 {
                    tile::<S, F, 3, G>(s, job, row, blocks.clone(), panel, sums, &mut prefetch);
                    row += 3;
                } else {
                    tile::<S, F, 2, G>(s, job, row, blocks.clone(), panel, sums, &mut prefetch);
                    row += 2;
                }
            }
        }
    }
    for row in rows.clone() {
        for g in 0..G {
            // SAFETY: the output was checked for all rows.
            unsafe { job.out.put(row, group + g, job.outputs, &panel.sums[row - rows.start][g]) };
        }
    }
}

/// Returns true if the registers hold the sums of four rows beside a block's weights and scales.
const fn fits_four<S: Simd, F: Format>() -> bool {
    S::REGISTERS >= 32 || (S::REGISTERS >= 8 && F::LAYOUT.sub_block == BLOCK)
}

/// Unpacks `packed_blocks` packed blocks as group `g` of the panel.
///
/// # Safety
/// `packed_blocks` whole packed blocks are at `at`, no more than a panel holds.
#[inline(always)]
unsafe fn unpack<S: Simd, F: Format>(
    s: S,
    at: *const u8,
    packed_blocks: usize,
    g: usize,
    panel: &mut PanelData,
) {
    let layout = const { &F::LAYOUT };
    let quants = panel.quants[g].as_chunks_mut::<4>().0;
    for b in 0..packed_blocks {
        // SAFETY: passed on to the caller.
        unsafe {
            let packed = PackedBlock::at::<F>(s, at.add(b * layout.bytes()));
            for block in 0..layout.blocks() {
                let first = packed.quants::<F, 0>(s, block);
                let second = packed.quants::<F, 1>(s, block);
                let half = 2 * (b * layout.blocks() + block);
                store_steps(s, first, &mut quants[half]);
                store_steps(s, second, &mut quants[half + 1]);
            }
            for sub in 0..layout.sub_blocks() {
                let (scales, minimums) = if const { parts::<F>() == 2 } {
                    packed.own_scales::<F>(s, sub)
                } else {
                    packed.scales::<F>(s, sub)
                };
                let sub = b * layout.sub_blocks() + sub;
                s.store(scales, &mut panel.scales[g][sub]);
                if const { F::LAYOUT.minimums } {
                    s.store(minimums, &mut panel.minimums[g][sub]);
                }
                if const { parts::<F>() == 2 } {
                    s.store(packed.d(), &mut panel.halves[g].d[sub / 2]);
                    if const { S::NARROW && F::LAYOUT.whole_scales() } {
                        panel.halves[g].put(s, sub, scales, layout.zero);
                    }
                }
            }
        }
    }
}

/// Four steps to the panel.
#[inline(always)]
fn store_steps<S: Simd>(s: S, steps: [S::U8; 4], out: &mut [[u8; 64]; 4]) {
    let low = s.pair_steps([steps[0], steps[1]]);
    let high = s.pair_steps([steps[2], steps[3]]);
    for step in 0..2 {
        s.store_u8(low[step], &mut out[step]);
        s.store_u8(high[step], &mut out[2 + step]);
    }
}

/// `R` rows from `row` on times `G` groups, over those of their blocks that the panel holds.
///
/// # Safety
/// The panel holds `blocks` of its groups, and rows have them.
#[inline(always)]
unsafe fn tile<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    job: &Job<'_>,
    row: usize,
    blocks: Range<usize>,
    panel: &mut PanelData,
    first_sum: usize,
    prefetch: &mut Prefetch<G>,
) {
    // SAFETY: passed on to the caller.
    let mut rows = [job.row(row).wrapping_add(blocks.start); R];
    for r in 1..R {
        rows[r] = job.row(row + r).wrapping_add(blocks.start);
    }
    let mut sums = [[s.zero(); G]; R];
    for r in 0..R {
        for g in 0..G {
            sums[r][g] = s.load(&panel.sums[first_sum + r][g]);
        }
    }
    for block in 0..blocks.len() {
        prefetch.advance(s);
        // SAFETY: passed on to the caller.
        unsafe {
            let mut x = [&*rows[0].add(block); R];
            for r in 1..R {
                x[r] = &*rows[r].add(block);
            }
            if const { parts::<F>() == 2 } {
                halved_block::<S, F, R, G>(s, panel, block, &x, &mut sums);
            } else {
                whole_block::<S, F, R, G>(s, panel, block, &x, &mut sums);
            }
        }
    }
    for r in 0..R {
        for g in 0..G {
            s.store(sums[r][g], &mut panel.sums[first_sum + r][g]);
        }
    }
}

//! Products of quantized weights and quantized activations.
//!
//! For each output and sub-block: an exact integer dot product, then `sum = fma(dot, weight scale * activation scale,
//! sum)`, and for formats with minimums `sum = fma(minimum, activation scale * activation sum, sum)`. Both ways below
//! do just these float operations in the order of the inputs, so it does not show which one ran:
//!
//! - few rows: weights go from memory through registers, once;
//! - many rows: a strip of weights is unpacked to bytes in the first-level cache and used by tile after tile of rows.

// Tiles index several arrays of registers by row and group.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    Output,
    ahead::{self, Ahead},
    brick::{Brick, array},
    layout::{BLOCK, Format},
};
use crate::{
    quantize::QuantBlock,
    simd::{LANES, Simd},
};

/// One thread's share of a product.
pub struct Job<'a> {
    /// All groups.
    pub weights: &'a [u8],
    /// From one group to the next.
    pub group_bytes: usize,
    /// The share.
    pub groups: Range<usize>,
    /// Outputs of the matrix; the last group may have fewer than 16.
    pub outputs: usize,
    /// Rows of activations.
    pub blocks: &'a [QuantBlock],
    /// From one row to the next.
    pub stride: usize,
    /// Rows, at least one.
    pub count: usize,
    /// Where the result goes; checked to be large enough.
    pub out: &'a Output<'a>,
}

impl Job<'_> {
    /// Start of row `row`, or of the last one: tiles may stick out, and nobody stores what they compute there.
    #[inline(always)]
    fn row(&self, row: usize) -> *const QuantBlock {
        self.blocks[row.min(self.count - 1) * self.stride..].as_ptr()
    }

    #[inline(always)]
    fn group(&self, group: usize) -> *const u8 {
        self.weights[group * self.group_bytes..][..self.group_bytes].as_ptr()
    }
}

/// Inputs that a strip holds: a whole number of bricks of every format, and two groups of it fit the first-level
/// cache next to the activations.
const STRIP_INPUTS: usize = 512;
/// Groups that a strip holds.
const STRIP_GROUPS: usize = 2;
/// Rows whose sums are kept while the strips pass by.
const STRIP_ROWS: usize = 240;
/// Rows of the largest tile.
const TILE_ROWS: usize = 6;

/// Unpacked weights of up to two groups, and sums of the rows that are multiplied with them.
#[repr(C, align(64))]
struct StripData {
    quants: [[[u8; 64]; STRIP_INPUTS / 4]; STRIP_GROUPS],
    scales: [[[f32; LANES]; STRIP_INPUTS / 16]; STRIP_GROUPS],
    minimums: [[[f32; LANES]; STRIP_INPUTS / 16]; STRIP_GROUPS],
    sums: [[[f32; LANES]; STRIP_GROUPS]; STRIP_ROWS + TILE_ROWS],
}

/// See [`StripData`].
pub struct Strip(Box<StripData>);

impl Default for Strip {
    fn default() -> Self {
        Self(Box::new(StripData {
            quants: [[[0; 64]; STRIP_INPUTS / 4]; STRIP_GROUPS],
            scales: [[[0.0; LANES]; STRIP_INPUTS / 16]; STRIP_GROUPS],
            minimums: [[[0.0; LANES]; STRIP_INPUTS / 16]; STRIP_GROUPS],
            sums: [[[0.0; LANES]; STRIP_GROUPS]; STRIP_ROWS + TILE_ROWS],
        }))
    }
}

/// Runs a job.
#[inline(always)]
pub fn multiply<S: Simd, F: Format>(s: S, job: &Job<'_>, scratch: &mut super::Scratch) {
    let strip = &mut *scratch.integer.0;
    if S::REGISTERS >= 32 {
        match job.count {
            1 => few::<S, F, 1>(s, job),
            2 => few::<S, F, 2>(s, job),
            3 => few::<S, F, 3>(s, job),
            4 => few::<S, F, 4>(s, job),
            5 => few::<S, F, 5>(s, job),
            6 => few::<S, F, 6>(s, job),
            7 | 8 => few::<S, F, 8>(s, job),
            _ => many::<S, F>(s, job, strip),
        }
    } else {
        match job.count {
            1 => few::<S, F, 1>(s, job),
            2 => few::<S, F, 2>(s, job),
            3 | 4 => few::<S, F, 4>(s, job),
            _ => many::<S, F>(s, job, strip),
        }
    }
}

/// What a dot product starts from: minus zero point times sum of the activations.
#[inline(always)]
fn start<S: Simd, F: Format>(s: S, negative_sum: i32) -> S::I32 {
    let layout = const { &F::LAYOUT };
    if layout.minimums {
        s.splat_i32(0)
    } else if layout.offset() {
        s.dot4_offset_start(negative_sum)
    } else {
        s.shl_i32(s.splat_i32(negative_sum), layout.zero_bits)
    }
}

#[inline(always)]
fn dot4<S: Simd, F: Format>(s: S, sum: S::I32, quants: S::U8, x: &[i8; 4]) -> S::I32 {
    if const { F::LAYOUT.offset() } { s.dot4_offset(sum, quants, x) } else { s.dot4(sum, quants, x) }
}

/// Four inputs of a block of activations.
#[inline(always)]
fn quad(x: &QuantBlock, step: usize) -> &[i8; 4] {
    // SAFETY: a block has eight steps.
    unsafe { array(x.quants.as_ptr().add(4 * step)) }
}

/// `sum + dot * scales + minimums * sum of activations` for one row.
#[inline(always)]
fn accumulate<S: Simd, F: Format>(
    s: S,
    sum: S::F32,
    dot: S::I32,
    (scales, minimums): (S::F32, S::F32),
    x_scale: f32,
    x_scaled_sum: f32,
) -> S::F32 {
    let sum = s.fma(s.to_f32(dot), s.mul(scales, s.splat(x_scale)), sum);
    if const { F::LAYOUT.minimums } { s.fma(minimums, s.splat(x_scaled_sum), sum) } else { sum }
}

/// Up to `R` rows: weights are unpacked in registers and used at once.
#[inline(always)]
fn few<S: Simd, F: Format, const R: usize>(s: S, job: &Job<'_>) {
    let layout = const { &F::LAYOUT };
    let bricks = job.group_bytes / layout.bytes();
    let rows: [*const QuantBlock; R] = std::array::from_fn(|r| job.row(r));
    for group in job.groups.clone() {
        let mut at = job.group(group);
        let mut sums = [s.zero(); R];
        let mut block = 0;
        for _ in 0..bricks {
            // SAFETY: a group is a whole number of bricks; rows are as long as the group's inputs, padded to a whole
            // number of the longest bricks.
            unsafe {
                let brick = Brick::at::<F>(s, at);
                for b in 0..layout.blocks() {
                    prefetch::<S, F>(s, at.wrapping_add(ahead::DISTANCE), b);
                    if layout.sub_block == BLOCK {
                        block_32::<S, F, R>(s, &brick, b, block, &rows, &mut sums);
                    } else {
                        half_block::<S, F, R, 0>(s, &brick, b, block, &rows, &mut sums);
                        half_block::<S, F, R, 1>(s, &brick, b, block, &rows, &mut sums);
                    }
                    block += 1;
                }
                at = at.add(layout.bytes());
            }
        }
        for (r, sum) in sums.into_iter().enumerate().take(job.count) {
            let mut lanes = [0.0; LANES];
            s.store(sum, &mut lanes);
            // SAFETY: the output was checked for all rows.
            unsafe { job.out.put(r, group, job.outputs, &lanes) };
        }
    }
}

/// Asks for block number `b`'s share of the brick at `at`.
#[inline(always)]
fn prefetch<S: Simd, F: Format>(s: S, at: *const u8, b: usize) {
    let share = const { F::LAYOUT.bytes() / F::LAYOUT.blocks() };
    for line in 0..share.div_ceil(64) {
        s.prefetch(at.wrapping_add(b * share + line * 64));
    }
}

/// One block of 32 inputs with one scale.
///
/// # Safety
/// See [`Brick`]; `block` is a block of the rows.
#[inline(always)]
unsafe fn block_32<S: Simd, F: Format, const R: usize>(
    s: S,
    brick: &Brick<S>,
    b: usize,
    block: usize,
    rows: &[*const QuantBlock; R],
    sums: &mut [S::F32; R],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let x: [&QuantBlock; R] = std::array::from_fn(|r| &*rows[r].add(block));
        let mut dots = [s.splat_i32(0); R];
        for r in 0..R {
            dots[r] = start::<S, F>(s, x[r].negative_sum);
        }
        let quants = brick.quants::<F, 0>(s, b);
        for (step, quants) in quants.into_iter().enumerate() {
            for r in 0..R {
                dots[r] = dot4::<S, F>(s, dots[r], quants, quad(x[r], step));
            }
        }
        let quants = brick.quants::<F, 1>(s, b);
        for (step, quants) in quants.into_iter().enumerate() {
            for r in 0..R {
                dots[r] = dot4::<S, F>(s, dots[r], quants, quad(x[r], 4 + step));
            }
        }
        let scales = brick.scales::<F>(s, b);
        for r in 0..R {
            sums[r] = accumulate::<S, F>(s, sums[r], dots[r], scales, x[r].scale, x[r].scaled_sum);
        }
    }
}

/// One sub-block of 16 inputs: half a block of activations.
///
/// # Safety
/// See [`Brick`]; `block` is a block of the rows.
#[inline(always)]
unsafe fn half_block<S: Simd, F: Format, const R: usize, const HALF: usize>(
    s: S,
    brick: &Brick<S>,
    b: usize,
    block: usize,
    rows: &[*const QuantBlock; R],
    sums: &mut [S::F32; R],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let x: [&QuantBlock; R] = std::array::from_fn(|r| &*rows[r].add(block));
        let mut dots = [s.splat_i32(0); R];
        for r in 0..R {
            dots[r] = start::<S, F>(s, x[r].half_negative_sums[HALF]);
        }
        let quants = brick.quants::<F, HALF>(s, b);
        for (step, quants) in quants.into_iter().enumerate() {
            for r in 0..R {
                dots[r] = dot4::<S, F>(s, dots[r], quants, quad(x[r], 4 * HALF + step));
            }
        }
        let scales = brick.scales::<F>(s, 2 * b + HALF);
        for r in 0..R {
            let (scale, scaled_sum) = (x[r].scale, x[r].half_scaled_sums[HALF]);
            sums[r] = accumulate::<S, F>(s, sums[r], dots[r], scales, scale, scaled_sum);
        }
    }
}

/// Any number of rows: weights are unpacked to a strip, which tiles of rows then use.
#[inline(always)]
fn many<S: Simd, F: Format>(s: S, job: &Job<'_>, strip: &mut StripData) {
    let at_once = if S::REGISTERS >= 32 { STRIP_GROUPS } else { 1 };
    let rows_at_once = ahead::rows_at_once(job.stride * size_of::<QuantBlock>(), TILE_ROWS, STRIP_ROWS);
    for first_row in (0..job.count).step_by(rows_at_once) {
        let rows = first_row..job.count.min(first_row + rows_at_once);
        let mut group = job.groups.start;
        while group < job.groups.end {
            let groups = at_once.min(job.groups.end - group);
            if groups == 2 {
                pass::<S, F, 2>(s, job, group, rows.clone(), strip);
            } else {
                pass::<S, F, 1>(s, job, group, rows.clone(), strip);
            }
            group += groups;
        }
    }
}

/// `G` groups from `group` on, with all inputs, for `rows`.
#[inline(always)]
fn pass<S: Simd, F: Format, const G: usize>(
    s: S,
    job: &Job<'_>,
    group: usize,
    rows: Range<usize>,
    strip: &mut StripData,
) {
    let layout = const { &F::LAYOUT };
    let strip_bricks = STRIP_INPUTS / layout.inputs;
    let all_bricks = job.group_bytes / layout.bytes();
    strip.sums[..rows.len()].fill([[0.0; LANES]; STRIP_GROUPS]);
    for first_brick in (0..all_bricks).step_by(strip_bricks) {
        let bricks = strip_bricks.min(all_bricks - first_brick);
        for g in 0..G {
            // SAFETY: these bricks are inside the group.
            unsafe {
                let at = job.group(group + g).add(first_brick * layout.bytes());
                unpack::<S, F>(s, at, bricks, g, strip);
            }
        }
        let blocks = first_brick * layout.blocks()..(first_brick + bricks) * layout.blocks();
        // While the tiles compute, what comes after this strip is fetched, a few lines with every block.
        let next = std::array::from_fn(|g| match first_brick + bricks == all_bricks {
            false => job.group(group + g).wrapping_add((first_brick + bricks) * layout.bytes()),
            true => job.group((group + G + g).min(job.groups.end - 1)),
        });
        let turns = (blocks.len() * rows.len()).div_ceil(TILE_ROWS);
        let mut ahead = Ahead::new(next, bricks * layout.bytes(), turns);
        let mut row = rows.start;
        while row < rows.end {
            let left = rows.end - row;
            let sums = row - rows.start;
            // With 16 registers, sums of four rows fit while a whole block is added up, but not if scales change in it.
            // SAFETY: the strip holds these blocks; rows are at least as long as the group's bricks, see `few`.
            unsafe {
                if S::REGISTERS >= 32 && left > 4 {
                    tile::<S, F, 6, G>(s, job, row, blocks.clone(), strip, sums, &mut ahead);
                    row += 6;
                } else if left > 2 && (S::REGISTERS >= 32 || layout.sub_block == BLOCK) {
                    tile::<S, F, 4, G>(s, job, row, blocks.clone(), strip, sums, &mut ahead);
                    row += 4;
                } else {
                    tile::<S, F, 2, G>(s, job, row, blocks.clone(), strip, sums, &mut ahead);
                    row += 2;
                }
            }
        }
    }
    for row in rows.clone() {
        for g in 0..G {
            // SAFETY: the output was checked for all rows.
            unsafe { job.out.put(row, group + g, job.outputs, &strip.sums[row - rows.start][g]) };
        }
    }
}

/// Unpacks `bricks` bricks as group `g` of the strip.
///
/// # Safety
/// `bricks` whole bricks are at `at`, no more than a strip holds.
#[inline(always)]
unsafe fn unpack<S: Simd, F: Format>(s: S, at: *const u8, bricks: usize, g: usize, strip: &mut StripData) {
    let layout = const { &F::LAYOUT };
    let quants = strip.quants[g].as_chunks_mut::<4>().0;
    for b in 0..bricks {
        // SAFETY: passed on to the caller.
        unsafe {
            let brick = Brick::at::<F>(s, at.add(b * layout.bytes()));
            for block in 0..layout.blocks() {
                let first = brick.quants::<F, 0>(s, block);
                let second = brick.quants::<F, 1>(s, block);
                let half = 2 * (b * layout.blocks() + block);
                for step in 0..4 {
                    s.store_u8(first[step], &mut quants[half][step]);
                    s.store_u8(second[step], &mut quants[half + 1][step]);
                }
            }
            for sub in 0..layout.sub_blocks() {
                let (scales, minimums) = brick.scales::<F>(s, sub);
                let sub = b * layout.sub_blocks() + sub;
                s.store(scales, &mut strip.scales[g][sub]);
                if layout.minimums {
                    s.store(minimums, &mut strip.minimums[g][sub]);
                }
            }
        }
    }
}

/// `R` rows from `row` on times `G` groups, over those of their blocks that the strip holds.
///
/// # Safety
/// The strip holds `blocks` of its groups, and rows have them.
#[inline(always)]
unsafe fn tile<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    job: &Job<'_>,
    row: usize,
    blocks: Range<usize>,
    strip: &mut StripData,
    first_sum: usize,
    ahead: &mut Ahead<G>,
) {
    let layout = const { &F::LAYOUT };
    // SAFETY: passed on to the caller.
    let rows: [*const QuantBlock; R] = std::array::from_fn(|r| unsafe { job.row(row + r).add(blocks.start) });
    let mut sums = [[s.zero(); G]; R];
    for r in 0..R {
        for g in 0..G {
            sums[r][g] = s.load(&strip.sums[first_sum + r][g]);
        }
    }
    let parts = BLOCK / layout.sub_block;
    for block in 0..blocks.len() {
        ahead.fetch(s);
        // SAFETY: passed on to the caller.
        let x: [&QuantBlock; R] = std::array::from_fn(|r| unsafe { &*rows[r].add(block) });
        for part in 0..parts {
            let mut dots = [[s.splat_i32(0); G]; R];
            for r in 0..R {
                let sum = if parts == 1 { x[r].negative_sum } else { x[r].half_negative_sums[part] };
                dots[r] = [start::<S, F>(s, sum); G];
            }
            for step in 0..layout.sub_block / 4 {
                let step = part * layout.sub_block / 4 + step;
                // SAFETY: the strip has as many steps as `blocks` blocks.
                let quants: [S::U8; G] = std::array::from_fn(|g| unsafe {
                    s.load_u8(strip.quants[g].get_unchecked(block * (BLOCK / 4) + step))
                });
                for r in 0..R {
                    for g in 0..G {
                        dots[r][g] = dot4::<S, F>(s, dots[r][g], quants[g], quad(x[r], step));
                    }
                }
            }
            let sub = block * parts + part;
            for g in 0..G {
                // SAFETY: the strip has as many sub-blocks as `blocks` blocks.
                let scales = unsafe {
                    (s.load(strip.scales[g].get_unchecked(sub)), s.load(strip.minimums[g].get_unchecked(sub)))
                };
                for r in 0..R {
                    let scaled_sum = if parts == 1 { x[r].scaled_sum } else { x[r].half_scaled_sums[part] };
                    sums[r][g] =
                        accumulate::<S, F>(s, sums[r][g], dots[r][g], scales, x[r].scale, scaled_sum);
                }
            }
        }
    }
    for r in 0..R {
        for g in 0..G {
            s.store(sums[r][g], &mut strip.sums[first_sum + r][g]);
        }
    }
}

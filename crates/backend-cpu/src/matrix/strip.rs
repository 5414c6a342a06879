//! Products of many rows: a strip of weights is unpacked to bytes in the first-level cache and used by tile after tile
//! of rows. See [`integer`](super::integer) for what is computed.

// Tiles index several arrays of registers by row and group.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    ahead::{self, Ahead},
    brick::{Brick, array},
    integer::{Job, accumulate, dot4, negative_sum, parts, quad, run_steps, scaled_sum, start},
    layout::{BLOCK, Format},
};
use crate::{
    quantize::QuantBlock,
    simd::{LANES, Simd},
};

/// Inputs that a strip holds: a whole number of bricks of every format, and two groups of it fit the first-level
/// cache next to the activations.
const STRIP_INPUTS: usize = 512;
/// Groups that a strip holds.
const STRIP_GROUPS: usize = 2;
/// Rows whose sums are kept while the strips pass by.
const STRIP_ROWS: usize = 240;
/// Rows of the largest tile.
const TILE_ROWS: usize = 6;

/// Unpacked weights of up to two groups, paired as [`Simd::pair_steps`] says, and sums of the rows that are multiplied
/// with them.
#[repr(C, align(64))]
struct StripData {
    quants: [[[u8; 64]; STRIP_INPUTS / 4]; STRIP_GROUPS],
    scales: [[[f32; LANES]; STRIP_INPUTS / 16]; STRIP_GROUPS],
    minimums: [[[f32; LANES]; STRIP_INPUTS / 16]; STRIP_GROUPS],
    sums: [[[f32; LANES]; STRIP_GROUPS]; STRIP_ROWS + TILE_ROWS],
}

/// Unpacked weights and sums, of one thread.
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

/// Eight inputs of a block of activations.
#[inline(always)]
fn oct(x: &QuantBlock, pair: usize) -> &[i8; 8] {
    // SAFETY: a block has four pairs of steps.
    unsafe { array(x.quants.as_ptr().add(8 * pair)) }
}

/// Any number of rows: weights are unpacked to a strip, which tiles of rows then use.
#[inline(always)]
pub fn many<S: Simd, F: Format>(s: S, job: &Job<'_>, strip: &mut Strip) {
    let strip = &mut *strip.0;
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
                store_steps(s, first, &mut quants[half]);
                store_steps(s, second, &mut quants[half + 1]);
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

/// Four steps to the strip.
#[inline(always)]
fn store_steps<S: Simd>(s: S, steps: [S::U8; 4], out: &mut [[u8; 64]; 4]) {
    let low = s.pair_steps([steps[0], steps[1]]);
    let high = s.pair_steps([steps[2], steps[3]]);
    for step in 0..2 {
        s.store_u8(low[step], &mut out[step]);
        s.store_u8(high[step], &mut out[2 + step]);
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
    // SAFETY: passed on to the caller.
    let rows: [*const QuantBlock; R] = std::array::from_fn(|r| unsafe { job.row(row + r).add(blocks.start) });
    let mut sums = [[s.zero(); G]; R];
    for r in 0..R {
        for g in 0..G {
            sums[r][g] = s.load(&strip.sums[first_sum + r][g]);
        }
    }
    let parts = const { parts::<F>() };
    for block in 0..blocks.len() {
        ahead.fetch(s);
        // SAFETY: passed on to the caller.
        let x: [&QuantBlock; R] = std::array::from_fn(|r| unsafe { &*rows[r].add(block) });
        for part in 0..parts {
            let mut dots = [[s.splat_i32(0); G]; R];
            for r in 0..R {
                dots[r] = [start::<S, F>(s, negative_sum::<F>(x[r], part)); G];
            }
            // SAFETY: the strip has as many steps as `blocks` blocks.
            unsafe {
                if S::PAIRS {
                    add_pairs::<S, F, R, G>(s, strip, block, part, &x, &mut dots);
                } else {
                    add_steps::<S, F, R, G>(s, strip, block, part, &x, &mut dots);
                }
            }
            let sub = block * parts + part;
            for g in 0..G {
                // SAFETY: the strip has as many sub-blocks as `blocks` blocks.
                let scales = unsafe {
                    (s.load(strip.scales[g].get_unchecked(sub)), s.load(strip.minimums[g].get_unchecked(sub)))
                };
                for r in 0..R {
                    let scaled_sum = scaled_sum::<F>(x[r], part);
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

/// Adds the products of sub-block `part` of a block, for all rows and groups of a tile.
///
/// # Safety
/// The strip holds this block; a block has as many parts.
#[inline(always)]
unsafe fn add_steps<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    strip: &StripData,
    block: usize,
    part: usize,
    x: &[&QuantBlock; R],
    dots: &mut [[S::I32; G]; R],
) {
    let (steps, run_steps) = const { (F::LAYOUT.sub_block / 4, run_steps::<S, F>()) };
    for run in 0..steps / run_steps {
        let mut narrow = [[s.zero_narrow(); G]; R];
        for step in 0..run_steps {
            let step = part * steps + run * run_steps + step;
            // SAFETY: passed on to the caller.
            let quants: [S::U8; G] = std::array::from_fn(|g| unsafe {
                s.load_u8(strip.quants[g].get_unchecked(block * (BLOCK / 4) + step))
            });
            for r in 0..R {
                for g in 0..G {
                    if run_steps > 1 {
                        narrow[r][g] = s.dot4_narrow(narrow[r][g], quants[g], quad(x[r], step));
                    } else {
                        dots[r][g] = dot4::<S, F>(s, dots[r][g], quants[g], quad(x[r], step));
                    }
                }
            }
        }
        if run_steps > 1 {
            for r in 0..R {
                for g in 0..G {
                    dots[r][g] = s.add_narrow(dots[r][g], narrow[r][g]);
                }
            }
        }
    }
}

/// [`add_steps`] for machines that multiply two steps with two rows at once. `R` is even.
///
/// # Safety
/// See [`add_steps`].
#[inline(always)]
unsafe fn add_pairs<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    strip: &StripData,
    block: usize,
    part: usize,
    x: &[&QuantBlock; R],
    dots: &mut [[S::I32; G]; R],
) {
    let (pairs, offset) = const { (F::LAYOUT.sub_block / 8, F::LAYOUT.offset()) };
    let dots = dots.as_chunks_mut::<2>().0;
    for [first, second] in dots.iter_mut() {
        for g in 0..G {
            [first[g], second[g]] = s.pair_rows([first[g], second[g]]);
        }
    }
    for pair in 0..pairs {
        let pair = part * pairs + pair;
        for g in 0..G {
            let at = block * (BLOCK / 4) + 2 * pair;
            // SAFETY: passed on to the caller.
            let quants = unsafe {
                let quants = &strip.quants[g];
                [s.load_u8(quants.get_unchecked(at)), s.load_u8(quants.get_unchecked(at + 1))]
            };
            for ([first, second], x) in dots.iter_mut().zip(x.as_chunks::<2>().0) {
                let x = x.map(|x| oct(x, pair));
                [first[g], second[g]] = s.dot8([first[g], second[g]], quants, x, offset);
            }
        }
    }
    for [first, second] in dots {
        for g in 0..G {
            [first[g], second[g]] = s.unpair_rows([first[g], second[g]]);
        }
    }
}

//! Matmuls of quantized weights and quantized activations.
//!
//! For each output and block of 32 inputs: an exact integer dot product, then `sum = fma(dot, weight scale * activation
//! scale, sum)`, and for formats with minimums `sum = fma(minimum, activation scale * activation sum, sum)`. For
//! sub-blocks of 16 inputs, `dot` is also an integer: the halves' dot products times their scales, at most
//! 2 * 128 * 16 * 32 * 127 < 2^24 (Q6_K), which single precision represents exactly, and `d` is the weight scale.
//! Minimums then follow, one per half. NVFP4's scales are not integers, so the sum of the two halves is rounded once. With
//! [ranged](crate::quantize) activations, the sum of the weights takes the place of the minimum, and the least activation that of
//! their sum.
//!
//! Both implementations perform exactly these float operations in the order of the inputs, so their results are equal:
//!
//! - few rows: weights are loaded from memory into registers once, see `few`;
//! - many rows: weights are unpacked once, see [`panel`](super::panel).

// Tiles index several arrays of registers by row and group.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    Destination, cache,
    layout::{BLOCK, Format},
    packed_block::{PackedBlock, array},
    panel::many,
};
use crate::{
    ops::even_share,
    quantize::QuantBlock,
    simd::{LANES, Simd},
};

/// One thread's share of a matmul.
pub struct Job<'a> {
    /// All groups.
    pub weights: &'a [u8],
    /// Distance of two groups.
    pub group_bytes: usize,
    /// The share.
    pub groups: Range<usize>,
    /// Outputs of the matrix; the last group may have fewer than 16.
    pub outputs: usize,
    /// Rows of activations.
    pub blocks: &'a [QuantBlock],
    /// Distance of two rows.
    pub stride: usize,
    /// Rows, at least one.
    pub count: usize,
    /// Destination; checked to be large enough.
    pub out: &'a Destination<'a>,
}

impl Job<'_> {
    /// Returns the start of row `row`, or of the last one: tiles may exceed the rows, and their results are not stored.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> *const QuantBlock {
        self.blocks[row.min(self.count - 1) * self.stride..].as_ptr()
    }

    #[inline(always)]
    pub(super) fn group(&self, group: usize) -> *const u8 {
        self.weights[group * self.group_bytes..][..self.group_bytes].as_ptr()
    }
}

/// Most rows for which weights are unpacked in registers, a few rows at a time. Without vector registers a panel is no
/// faster, and its kernels are most of the instances.
const fn few_limit<S: Simd>() -> usize {
    match S::REGISTERS {
        32.. => 8,
        8.. => 12,
        _ => usize::MAX,
    }
}

/// Runs a job.
#[inline(always)]
pub fn multiply<S: Simd, F: Format>(s: S, job: &Job<'_>, scratch: &mut super::Scratch) {
    if const { few_limit::<S>() == usize::MAX } || job.count <= const { few_limit::<S>() } {
        few::<S, F>(s, job)
    } else {
        many::<S, F>(s, job, &mut scratch.panel)
    }
}

/// Returns the initial value of a dot product: minus the zero point times the sum of the activations.
#[inline(always)]
pub(super) fn start<S: Simd, F: Format>(s: S, negative_sum: i32) -> S::I32 {
    let layout = const { &F::LAYOUT };
    if const { F::LAYOUT.minimums } {
        s.splat_i32(0)
    } else if const { F::LAYOUT.offset() } {
        s.dot4_offset_start(negative_sum)
    } else {
        // One of these remains after compilation.
        let zero = layout.zero as u32;
        if zero.is_power_of_two() {
            s.shl_i32(s.splat_i32(negative_sum), zero.ilog2())
        } else {
            s.splat_i32(negative_sum * layout.zero)
        }
    }
}

/// Sub-blocks of a block.
pub(super) const fn parts<F: Format>() -> usize {
    BLOCK / F::LAYOUT.sub_block
}

#[inline(always)]
pub(super) fn dot4<S: Simd, F: Format>(s: S, sum: S::I32, quants: S::U8, x: &[i8; 4]) -> S::I32 {
    s.dot4_of(const { F::LAYOUT.bytes_are() }, sum, quants, x)
}

/// Four inputs of a block of activations.
#[inline(always)]
pub(super) fn quad(x: &QuantBlock, step: usize) -> &[i8; 4] {
    // SAFETY: a block has eight steps.
    unsafe { array(x.quants.as_ptr().add(4 * step)) }
}

/// `sum + dot * scales + minimums * sum of activations` for one row.
#[inline(always)]
pub(super) fn accumulate<S: Simd, F: Format>(
    s: S,
    sum: S::F32,
    dot: S::I32,
    (scales, minimums): (S::F32, S::F32),
    x: &QuantBlock,
) -> S::F32 {
    let sum = s.fma(s.to_f32(dot), s.mul(scales, s.splat(x.scale)), sum);
    if const { F::LAYOUT.minimums } { s.fma(minimums, s.splat(x.scaled_sum), sum) } else { sum }
}

/// [`accumulate`] for a block in two halves, whose `dot` has the halves' scales in it, but not `d`.
#[inline(always)]
pub(super) fn accumulate_halves<S: Simd, F: Format>(
    s: S,
    sum: S::F32,
    dot: S::F32,
    d: S::F32,
    minimums: [S::F32; 2],
    x: &QuantBlock,
) -> S::F32 {
    let sum = s.fma(dot, s.mul(d, s.splat(x.scale)), sum);
    if const { !F::LAYOUT.minimums } {
        return sum;
    }
    let sum = s.fma(minimums[0], s.splat(x.half_scaled_sums[0]), sum);
    s.fma(minimums[1], s.splat(x.half_scaled_sums[1]), sum)
}

/// Adds a half's dot product, times its scale, to that of the first half, or starts with the first.
#[inline(always)]
pub(super) fn add_half<S: Simd>(s: S, half: usize, first: S::F32, dot: S::I32, scales: S::F32) -> S::F32 {
    if half == 0 { s.mul(s.to_f32(dot), scales) } else { s.fma(s.to_f32(dot), scales, first) }
}

/// Returns the number of rows that share the weights in registers: as many as fit beside them.
const fn rows_at_once<S: Simd>() -> usize {
    match S::REGISTERS {
        32.. => 8,
        8.. => 4,
        _ => 1,
    }
}

/// Few rows: weights are unpacked in registers and used at once. If not all rows fit beside them, a group is unpacked
/// again for the next rows, first from memory and then from a cache.
#[inline(always)]
fn few<S: Simd, F: Format>(s: S, job: &Job<'_>) {
    let most = const { rows_at_once::<S>() };
    for group in job.groups.clone() {
        let mut row = 0;
        while row < job.count {
            let rows = even_share(job.count - row, most);
            match rows {
                1 => few_rows::<S, F, 1>(s, job, group, row),
                2 if const { rows_at_once::<S>() >= 2 } => few_rows::<S, F, 2>(s, job, group, row),
                3 if const { rows_at_once::<S>() >= 3 } => few_rows::<S, F, 3>(s, job, group, row),
                4 if const { rows_at_once::<S>() >= 4 } => few_rows::<S, F, 4>(s, job, group, row),
                5 if const { rows_at_once::<S>() >= 5 } => few_rows::<S, F, 5>(s, job, group, row),
                6 if const { rows_at_once::<S>() >= 6 } => few_rows::<S, F, 6>(s, job, group, row),
                _ if const { rows_at_once::<S>() >= 8 } => few_rows::<S, F, 8>(s, job, group, row),
                _ => unreachable!("at most {most} rows at once"),
            }
            row += rows;
        }
    }
}

/// Up to `R` rows from `row` on times one group.
#[inline(always)]
fn few_rows<S: Simd, F: Format, const R: usize>(s: S, job: &Job<'_>, group: usize, row: usize) {
    let layout = const { &F::LAYOUT };
    // If weights are the only stream and are read in ascending order, the hardware prefetcher suffices.
    let fetches = const { R > 1 || F::LAYOUT.high_bits > 0 };
    let packed_blocks = job.group_bytes / layout.bytes();
    let mut rows = [job.row(row); R];
    for r in 1..R {
        rows[r] = job.row(row + r);
    }
    let mut at = job.group(group);
    let mut sums = [s.zero(); R];
    let mut block = 0;
    for _ in 0..packed_blocks {
        // SAFETY: a group is a whole number of packed blocks; rows are as long as the group's inputs, padded to a whole
        // number of the longest packed blocks.
        unsafe {
            let packed = PackedBlock::at::<F>(s, at);
            for b in 0..layout.blocks() {
                if fetches {
                    prefetch_block::<S, F>(s, at.wrapping_add(cache::DISTANCE), b);
                }
                let mut x = [&*rows[0].add(block); R];
                for r in 1..R {
                    x[r] = &*rows[r].add(block);
                }
                if const { parts::<F>() == 2 } {
                    halved_block::<S, F, R>(s, &packed, b, &x, &mut sums);
                } else {
                    whole_block::<S, F, R>(s, &packed, b, &x, &mut sums);
                }
                block += 1;
            }
            at = at.add(layout.bytes());
        }
    }
    for (r, sum) in sums.into_iter().enumerate().take(job.count - row) {
        let mut lanes = [0.0; LANES];
        s.store(sum, &mut lanes);
        // SAFETY: the output was checked for all rows.
        unsafe { job.out.put(row + r, group, job.outputs, &lanes) };
    }
}

/// Prefetches the share of block `b` of the packed block at `at`.
#[inline(always)]
fn prefetch_block<S: Simd, F: Format>(s: S, at: *const u8, b: usize) {
    let share = const { F::LAYOUT.bytes() / F::LAYOUT.blocks() };
    for line in 0..share.div_ceil(64) {
        s.prefetch(at.wrapping_add(b * share + line * 64));
    }
}

/// Steps whose sums are made in pairs before they join a dot product; 1 where they join one by one.
pub(super) const fn run_steps<S: Simd, F: Format>() -> usize {
    if S::NARROW { F::LAYOUT.narrow_steps() } else { 1 }
}

/// Adds the products of four steps from `first` on to the dot products.
#[inline(always)]
fn four_steps<S: Simd, F: Format, const R: usize>(
    s: S,
    dots: &mut [S::I32; R],
    quants: [S::U8; 4],
    x: &[&QuantBlock; R],
    first: usize,
) {
    let run_steps = const { if run_steps::<S, F>() < 4 { run_steps::<S, F>() } else { 4 } };
    if run_steps == 1 {
        for step in 0..4 {
            for r in 0..R {
                dots[r] = dot4::<S, F>(s, dots[r], quants[step], quad(x[r], first + step));
            }
        }
    } else {
        for run in 0..4 / run_steps {
            let start = run * run_steps;
            for r in 0..R {
                let mut narrow = s.first_narrow(quants[start], quad(x[r], first + start));
                for step in start + 1..start + run_steps {
                    narrow = s.dot4_narrow(narrow, quants[step], quad(x[r], first + step));
                }
                dots[r] = s.add_narrow(dots[r], narrow);
            }
        }
    }
}

/// Block `b` of a packed block whose blocks have one scale.
///
/// # Safety
/// See [`PackedBlock`].
#[inline(always)]
unsafe fn whole_block<S: Simd, F: Format, const R: usize>(
    s: S,
    packed: &PackedBlock<S>,
    b: usize,
    x: &[&QuantBlock; R],
    sums: &mut [S::F32; R],
) {
    let mut dots = [s.splat_i32(0); R];
    for r in 0..R {
        dots[r] = start::<S, F>(s, x[r].negative_sum);
    }
    // SAFETY: passed on to the caller.
    let scales = unsafe {
        four_steps::<S, F, R>(s, &mut dots, packed.quants::<F, 0>(s, b), x, 0);
        four_steps::<S, F, R>(s, &mut dots, packed.quants::<F, 1>(s, b), x, 4);
        packed.scales::<F>(s, b)
    };
    for r in 0..R {
        sums[r] = accumulate::<S, F>(s, sums[r], dots[r], scales, x[r]);
    }
}

/// Block `b` of a packed block whose blocks have a scale for each half.
///
/// # Safety
/// See [`PackedBlock`].
#[inline(always)]
unsafe fn halved_block<S: Simd, F: Format, const R: usize>(
    s: S,
    packed: &PackedBlock<S>,
    b: usize,
    x: &[&QuantBlock; R],
    sums: &mut [S::F32; R],
) {
    let mut dots = [s.zero(); R];
    let mut minimums = [s.zero(); 2];
    for half in 0..2 {
        let mut half_dots = [s.splat_i32(0); R];
        for r in 0..R {
            half_dots[r] = start::<S, F>(s, x[r].half_negative_sums[half]);
        }
        // SAFETY: passed on to the caller.
        let scales = unsafe {
            let quants = if half == 0 { packed.quants::<F, 0>(s, b) } else { packed.quants::<F, 1>(s, b) };
            four_steps::<S, F, R>(s, &mut half_dots, quants, x, 4 * half);
            let (scales, minimum) = packed.own_scales::<F>(s, 2 * b + half);
            minimums[half] = minimum;
            scales
        };
        for r in 0..R {
            dots[r] = add_half(s, half, dots[r], half_dots[r], scales);
        }
    }
    for r in 0..R {
        sums[r] = accumulate_halves::<S, F>(s, sums[r], dots[r], packed.d(), minimums, x[r]);
    }
}

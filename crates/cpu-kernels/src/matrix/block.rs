//! Computation of a tile of rows with one block of a panel; [`integer`](super::integer) defines the arithmetic.

// Tiles index several arrays of registers by row and group.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::{
    integer::{accumulate, accumulate_halves, add_half, dot4, quad, run_steps, start},
    layout::{BLOCK, Format},
    packed_block::array,
    panel::PanelData,
};
use crate::{quantize::QuantBlock, simd::Simd};

/// Eight inputs of a block of activations.
#[inline(always)]
fn oct(x: &QuantBlock, pair: usize) -> &[i8; 8] {
    // SAFETY: a block has four pairs of steps.
    unsafe { array(x.quants.as_ptr().add(8 * pair)) }
}

impl PanelData {
    /// The weights of a step of a block.
    ///
    /// # Safety
    /// The panel holds this block.
    #[inline(always)]
    unsafe fn step<S: Simd, const G: usize>(&self, s: S, block: usize, step: usize) -> [S::U8; G] {
        std::array::from_fn(|g| {
            // SAFETY: passed on to the caller.
            s.load_u8(unsafe { self.quants[g].get_unchecked(block * (BLOCK / 4) + step) })
        })
    }
}

/// Adds a block with one scale, for all rows and groups of a tile.
///
/// # Safety
/// The panel holds this block.
#[inline(always)]
pub(super) unsafe fn whole_block<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    panel: &PanelData,
    block: usize,
    x: &[&QuantBlock; R],
    sums: &mut [[S::F32; G]; R],
) {
    let mut dots = [[s.splat_i32(0); G]; R];
    for r in 0..R {
        dots[r] = [start::<S, F>(s, x[r].negative_sum); G];
    }
    // SAFETY: passed on to the caller.
    unsafe { add_steps::<S, F, R, G>(s, panel, block, 0..BLOCK / 4, x, &mut dots) };
    for g in 0..G {
        // SAFETY: passed on to the caller.
        let scales = unsafe {
            let panel = (panel.scales[g].get_unchecked(block), panel.minimums[g].get_unchecked(block));
            (s.load(panel.0), s.load(panel.1))
        };
        for r in 0..R {
            sums[r][g] = accumulate::<S, F>(s, sums[r][g], dots[r][g], scales, x[r]);
        }
    }
}

/// Adds a block with a scale for each half, for all rows and groups of a tile.
///
/// # Safety
/// The panel holds this block.
#[inline(always)]
pub(super) unsafe fn halved_block<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    panel: &PanelData,
    block: usize,
    x: &[&QuantBlock; R],
    sums: &mut [[S::F32; G]; R],
) {
    let mut dots = [[s.zero(); G]; R];
    if S::NARROW && const { F::LAYOUT.whole_scales() } {
        // SAFETY: passed on to the caller.
        let whole = unsafe { scaled_steps::<S, F, R, G>(s, panel, block, x) };
        for r in 0..R {
            for g in 0..G {
                dots[r][g] = s.to_f32(whole[r][g]);
            }
        }
    } else {
        for half in 0..2 {
            let mut half_dots = [[s.splat_i32(0); G]; R];
            for r in 0..R {
                half_dots[r] = [start::<S, F>(s, x[r].half_negative_sums[half]); G];
            }
            // SAFETY: passed on to the caller.
            unsafe { add_steps::<S, F, R, G>(s, panel, block, 4 * half..4 * half + 4, x, &mut half_dots) };
            for g in 0..G {
                // SAFETY: passed on to the caller.
                let scales = s.load(unsafe { panel.scales[g].get_unchecked(2 * block + half) });
                for r in 0..R {
                    dots[r][g] = add_half(s, half, dots[r][g], half_dots[r][g], scales);
                }
            }
        }
    }
    for g in 0..G {
        // SAFETY: passed on to the caller.
        let (d, minimums) = unsafe {
            let minimums = [2 * block, 2 * block + 1].map(|half| panel.minimums[g].get_unchecked(half));
            (s.load(panel.halves[g].d.get_unchecked(block)), [s.load(minimums[0]), s.load(minimums[1])])
        };
        for r in 0..R {
            sums[r][g] = accumulate_halves::<S, F>(s, sums[r][g], dots[r][g], d, minimums, x[r]);
        }
    }
}

/// The dot products of a block's halves times their scales, in whole numbers.
///
/// # Safety
/// The panel holds this block.
#[inline(always)]
unsafe fn scaled_steps<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    panel: &PanelData,
    block: usize,
    x: &[&QuantBlock; R],
) -> [[S::I32; G]; R] {
    let run_steps = const { run_steps::<S, F>() };
    let mut dots = [[s.splat_i32(0); G]; R];
    if const { F::LAYOUT.zero != 0 } {
        for r in 0..R {
            for g in 0..G {
                // SAFETY: passed on to the caller.
                let zeros = unsafe { panel.halves[g].zeros.get_unchecked(block) };
                dots[r][g] = s.dot2(&x[r].half_negative_pair, zeros);
            }
        }
    }
    for first in (0..BLOCK / 4).step_by(run_steps) {
        // SAFETY: passed on to the caller.
        unsafe {
            let narrow = narrow_steps::<S, R, G>(s, panel, block, first..first + run_steps, x);
            for r in 0..R {
                for g in 0..G {
                    let scales = panel.halves[g].scales.get_unchecked(2 * block + first / 4);
                    dots[r][g] = s.add_narrow_times(dots[r][g], narrow[r][g], scales);
                }
            }
        }
    }
    dots
}

/// Adds the products of some steps of a block, for all rows and groups of a tile.
///
/// # Safety
/// The panel holds this block.
#[inline(always)]
unsafe fn add_steps<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    panel: &PanelData,
    block: usize,
    steps: Range<usize>,
    x: &[&QuantBlock; R],
    dots: &mut [[S::I32; G]; R],
) {
    if S::PAIRS {
        // SAFETY: passed on to the caller.
        return unsafe { add_pairs::<S, F, R, G>(s, panel, block, steps, x, dots) };
    }
    let run_steps = const { run_steps::<S, F>() };
    for first in steps.step_by(run_steps) {
        // SAFETY: passed on to the caller.
        unsafe {
            if run_steps == 1 {
                let quants: [S::U8; G] = panel.step(s, block, first);
                for r in 0..R {
                    for g in 0..G {
                        dots[r][g] = dot4::<S, F>(s, dots[r][g], quants[g], quad(x[r], first));
                    }
                }
            } else {
                let narrow = narrow_steps::<S, R, G>(s, panel, block, first..first + run_steps, x);
                for r in 0..R {
                    for g in 0..G {
                        dots[r][g] = s.add_narrow(dots[r][g], narrow[r][g]);
                    }
                }
            }
        }
    }
}

/// The products of some steps of a block, as many as narrow sums hold.
///
/// # Safety
/// The panel holds this block.
#[inline(always)]
unsafe fn narrow_steps<S: Simd, const R: usize, const G: usize>(
    s: S,
    panel: &PanelData,
    block: usize,
    steps: Range<usize>,
    x: &[&QuantBlock; R],
) -> [[S::Narrow; G]; R] {
    // SAFETY: passed on to the caller.
    let first: [S::U8; G] = unsafe { panel.step(s, block, steps.start) };
    let mut narrow: [[S::Narrow; G]; R] =
        std::array::from_fn(|r| std::array::from_fn(|g| s.first_narrow(first[g], quad(x[r], steps.start))));
    for step in steps.start + 1..steps.end {
        // SAFETY: passed on to the caller.
        let quants: [S::U8; G] = unsafe { panel.step(s, block, step) };
        for r in 0..R {
            for g in 0..G {
                narrow[r][g] = s.dot4_narrow(narrow[r][g], quants[g], quad(x[r], step));
            }
        }
    }
    narrow
}

/// [`add_steps`] for machines that multiply two steps with two rows at once. `R` is even, and so are the steps.
///
/// # Safety
/// See [`add_steps`].
#[inline(always)]
unsafe fn add_pairs<S: Simd, F: Format, const R: usize, const G: usize>(
    s: S,
    panel: &PanelData,
    block: usize,
    steps: Range<usize>,
    x: &[&QuantBlock; R],
    dots: &mut [[S::I32; G]; R],
) {
    let bytes = const { F::LAYOUT.bytes_are() };
    let dots = dots.as_chunks_mut::<2>().0;
    for [first, second] in dots.iter_mut() {
        for g in 0..G {
            [first[g], second[g]] = s.pair_rows([first[g], second[g]]);
        }
    }
    for pair in steps.start / 2..steps.end / 2 {
        for g in 0..G {
            let at = block * (BLOCK / 4) + 2 * pair;
            // SAFETY: passed on to the caller.
            let quants = unsafe {
                let quants = &panel.quants[g];
                [s.load_u8(quants.get_unchecked(at)), s.load_u8(quants.get_unchecked(at + 1))]
            };
            for ([first, second], x) in dots.iter_mut().zip(x.as_chunks::<2>().0) {
                let x = x.map(|x| oct(x, pair));
                [first[g], second[g]] = s.dot8([first[g], second[g]], quants, x, bytes);
            }
        }
    }
    for [first, second] in dots {
        for g in 0..G {
            [first[g], second[g]] = s.unpair_rows([first[g], second[g]]);
        }
    }
}

//! Matmuls of weights in F32, F16 or BF16 with float rows.
//!
//! Every output is one chain of fused multiply-adds in the order of the inputs. Several groups and rows are computed
//! together to use the multipliers fully, which does not change any chain.

// Tiles index several arrays of registers by row and group.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use half::{bf16, f16};

use super::{
    Destination,
    cache::{self, Prefetch},
};
use crate::{
    ops::even_share,
    simd::{LANES, Simd},
};

/// One thread's share of a matmul; see [`super::integer::Job`].
pub struct Job<'a> {
    /// All groups, `[groups][inputs][16]` elements, each group padded to `group_bytes`.
    pub weights: &'a [u8],
    /// Distance of two groups.
    pub group_bytes: usize,
    /// The share.
    pub groups: Range<usize>,
    /// Outputs of the matrix.
    pub outputs: usize,
    /// Inputs of the matrix.
    pub inputs: usize,
    /// Rows of activations.
    pub values: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
    /// Rows, at least one.
    pub count: usize,
    /// Destination; checked to be large enough.
    pub out: &'a Destination<'a>,
    /// True if results are added to those in the destination.
    pub adds: bool,
}

impl Job<'_> {
    /// Returns the start of row `row`, or of the last one: tiles may exceed the rows, and their results are not stored.
    #[inline(always)]
    fn row(&self, row: usize) -> *const f32 {
        self.values[row.min(self.count - 1) * self.stride..][..self.inputs].as_ptr()
    }
}

/// An element of a file.
pub trait Element {
    /// Bytes.
    const BYTES: usize;
    /// 16 of them.
    ///
    /// # Safety
    /// `16 * BYTES` bytes are readable at `at`, which is aligned to `BYTES`.
    unsafe fn load<S: Simd>(s: S, at: *const u8) -> S::F32;
}

macro_rules! elements {
    ($($name:ident: $bytes:literal, $load:ident;)*) => { $(
        #[doc = concat!("Elements of ", stringify!($name), " files.")]
        pub struct $name;
        impl Element for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, at: *const u8) -> S::F32 {
                // SAFETY: passed on to the caller.
                s.$load(unsafe { &*at.cast() })
            }
        }
    )* };
}

elements! {
    F32: 4, load;
    F16: 2, from_f16;
    BF16: 2, from_bf16;
}

const _: () = assert!(size_of::<f16>() == 2 && size_of::<bf16>() == 2);

/// Vectors of 16 weights that a panel holds: three quarters of a first-level cache of 32 KiB.
const PANEL_VECTORS: usize = 384;
/// Maximum vectors of sums that are kept while panels are processed.
const SUMS: usize = 512;
/// Inputs between two prefetches.
const PREFETCH_INPUTS: usize = 8;
/// Rows of the largest tile.
const TILE_ROWS: usize = 6;

#[repr(C, align(64))]
struct PanelData {
    weights: [[f32; LANES]; PANEL_VECTORS], // [inputs][groups][16]
    sums: [[f32; LANES]; SUMS],             // [rows][groups][16]
}

/// Converted weights of a few groups, and sums of the rows that are multiplied with them.
pub struct Panel(Box<PanelData>);

impl Default for Panel {
    fn default() -> Self {
        Self(Box::new(PanelData { weights: [[0.0; LANES]; PANEL_VECTORS], sums: [[0.0; LANES]; SUMS] }))
    }
}

/// Runs a job. Tiles have as many groups and rows as there are registers for their sums: 24 of 32, or 12 of 16 that
/// hold half a vector each. With 32, many rows share weights that were converted once; with 16, converting them for every
/// tile is faster than keeping sums in memory (97 against 88 GOP/s on Zen 3).
#[inline(always)]
pub fn multiply<S: Simd, E: Element>(s: S, job: &Job<'_>, scratch: &mut super::Scratch) {
    let panel = &mut *scratch.float.0;
    if const { S::REGISTERS >= 32 } {
        match job.count {
            1 => few::<S, E, 1, 4>(s, job),
            2 => few::<S, E, 2, 4>(s, job),
            3 => few::<S, E, 3, 4>(s, job),
            4 => few::<S, E, 4, 4>(s, job),
            // A tile of several groups would compute the only one several times.
            _ if job.groups.len() == 1 => few::<S, E, 6, 1>(s, job),
            5..=6 => few::<S, E, 6, 4>(s, job),
            _ => many::<S, E, 4>(s, job, panel),
        }
    } else {
        match job.count {
            1 => few::<S, E, 1, 2>(s, job),
            2 => few::<S, E, 2, 2>(s, job),
            _ => few::<S, E, 6, 1>(s, job),
        }
    }
}

/// Returns the rows of the next tile for `left` remaining ones, at least one: 6, 4 or 2, so that the last tiles are not
/// much too large.
fn tile_rows(left: usize) -> usize {
    match left {
        1..=2 => 2,
        3..=4 | 7..=8 => 4,
        _ => TILE_ROWS,
    }
}

/// Up to `R` rows, or any number in tiles of up to six: weights are converted in registers and used at once. `G` groups
/// advance together.
#[inline(always)]
fn few<S: Simd, E: Element, const R: usize, const G: usize>(s: S, job: &Job<'_>) {
    let rows_at_once =
        cache::rows_at_once(job.stride * size_of::<f32>(), TILE_ROWS, job.count.max(4 * TILE_ROWS));
    for first_row in (0..job.count).step_by(rows_at_once) {
        let end = job.count.min(first_row + rows_at_once);
        for group in job.groups.clone().step_by(G) {
            if const { R < TILE_ROWS } {
                few_tile::<S, E, R, G>(s, job, group, 0);
                continue;
            }
            let mut row = first_row;
            while row < end {
                let rows = even_share(end - row, TILE_ROWS);
                match rows {
                    1 => few_tile::<S, E, 1, G>(s, job, group, row),
                    2 => few_tile::<S, E, 2, G>(s, job, group, row),
                    3 => few_tile::<S, E, 3, G>(s, job, group, row),
                    4 => few_tile::<S, E, 4, G>(s, job, group, row),
                    5 => few_tile::<S, E, 5, G>(s, job, group, row),
                    _ => few_tile::<S, E, TILE_ROWS, G>(s, job, group, row),
                }
                row += rows;
            }
        }
    }
}

#[inline(always)]
fn few_tile<S: Simd, E: Element, const R: usize, const G: usize>(
    s: S,
    job: &Job<'_>,
    group: usize,
    row: usize,
) {
    let rows: [*const f32; R] = std::array::from_fn(|r| job.row(row + r));
    let groups = starts::<G>(job, group);
    let mut sums = [[s.zero(); G]; R];
    if job.adds {
        for r in 0..R.min(job.count - row) {
            for g in 0..G.min(job.groups.end - group) {
                // SAFETY: the output was checked for all rows.
                sums[r][g] = s.load(&unsafe { job.out.get(row + r, group + g, job.outputs) });
            }
        }
    }
    for k in 0..job.inputs {
        for g in 0..G {
            // SAFETY: a group has `inputs` times 16 elements, a row `inputs`.
            unsafe {
                let at = groups[g].add(k * LANES * E::BYTES);
                // With one row the hardware does it better.
                if const { R > 1 } {
                    s.prefetch(at.wrapping_add(cache::DISTANCE));
                }
                let w = E::load(s, at);
                for r in 0..R {
                    sums[r][g] = s.fma(w, s.splat(*rows[r].add(k)), sums[r][g]);
                }
            }
        }
    }
    for r in 0..R.min(job.count - row) {
        for g in 0..G.min(job.groups.end - group) {
            let mut lanes = [0.0; LANES];
            s.store(sums[r][g], &mut lanes);
            // SAFETY: the output was checked for all rows.
            unsafe { job.out.put(row + r, group + g, job.outputs, &lanes) };
        }
    }
}

/// Starts of `G` groups from `group` on; past the share, the last one again.
#[inline(always)]
fn starts<const G: usize>(job: &Job<'_>, group: usize) -> [*const u8; G] {
    std::array::from_fn(|g| {
        let group = (group + g).min(job.groups.end - 1);
        job.weights[group * job.group_bytes..][..job.group_bytes].as_ptr()
    })
}

/// Any number of rows: weights are converted to a panel, which tiles of rows then use.
#[inline(always)]
fn many<S: Simd, E: Element, const G: usize>(s: S, job: &Job<'_>, panel: &mut PanelData) {
    // The last tile may extend past the last row.
    let most = SUMS / G - TILE_ROWS;
    let chunk_inputs = cache::CHUNK_BYTES / size_of::<f32>();
    let rows_at_once = cache::rows_at_once(job.inputs.min(chunk_inputs) * size_of::<f32>(), TILE_ROWS, most);
    for first in (0..job.inputs).step_by(chunk_inputs) {
        let inputs = first..job.inputs.min(first + chunk_inputs);
        for first_row in (0..job.count).step_by(rows_at_once) {
            let rows = first_row..job.count.min(first_row + rows_at_once);
            for group in job.groups.clone().step_by(G) {
                pass::<S, E, G>(s, job, group, inputs.clone(), rows.clone(), panel);
            }
        }
    }
}

/// Computes `G` groups from `group` on, over some inputs, for `rows`. Sums of earlier inputs, and those to which results are
/// added, are in the destination.
#[inline(always)]
fn pass<S: Simd, E: Element, const G: usize>(
    s: S,
    job: &Job<'_>,
    group: usize,
    chunk: Range<usize>,
    rows: Range<usize>,
    panel: &mut PanelData,
) {
    let panel_inputs = PANEL_VECTORS / G;
    let groups = starts::<G>(job, group);
    let stored = if chunk.start == 0 && !job.adds { 0 } else { G.min(job.groups.end - group) };
    for (row, sums) in rows.clone().zip(panel.sums.chunks_exact_mut(G)) {
        sums.fill([0.0; LANES]);
        for g in 0..stored {
            // SAFETY: the output was checked for all rows.
            sums[g] = unsafe { job.out.get(row, group + g, job.outputs) };
        }
    }
    for first in chunk.clone().step_by(panel_inputs) {
        let inputs = panel_inputs.min(chunk.end - first);
        for (g, start) in groups.iter().enumerate() {
            for k in 0..inputs {
                // SAFETY: a group has `inputs` times 16 elements.
                let w = unsafe { E::load(s, start.add((first + k) * LANES * E::BYTES)) };
                s.store(w, &mut panel.weights[k * G + g]);
            }
        }
        let next = match first + inputs == chunk.end {
            false => groups.map(|start| start.wrapping_add((first + inputs) * LANES * E::BYTES)),
            true => {
                starts::<G>(job, group + G).map(|start| start.wrapping_add(chunk.start * LANES * E::BYTES))
            }
        };
        let calls = (inputs * rows.len()).div_ceil(PREFETCH_INPUTS * TILE_ROWS);
        let mut prefetch = Prefetch::new(next, inputs * LANES * E::BYTES, calls);
        let inputs = first..first + inputs;
        let mut row = rows.start;
        while row < rows.end {
            let (count, sums) = (tile_rows(rows.end - row), (row - rows.start) * G);
            match count {
                2 => tile::<S, 2, G>(s, job, row, inputs.clone(), panel, sums, &mut prefetch),
                4 => tile::<S, 4, G>(s, job, row, inputs.clone(), panel, sums, &mut prefetch),
                _ => tile::<S, TILE_ROWS, G>(s, job, row, inputs.clone(), panel, sums, &mut prefetch),
            }
            row += count;
        }
    }
    for row in rows.clone() {
        for g in 0..G.min(job.groups.end - group) {
            let sums = &panel.sums[(row - rows.start) * G + g];
            // SAFETY: the output was checked for all rows.
            unsafe { job.out.put(row, group + g, job.outputs, sums) };
        }
    }
}

/// `R` rows from `row` on times `G` groups, over the inputs that the panel holds.
#[inline(always)]
fn tile<S: Simd, const R: usize, const G: usize>(
    s: S,
    job: &Job<'_>,
    row: usize,
    inputs: Range<usize>,
    panel: &mut PanelData,
    first_sum: usize,
    prefetch: &mut Prefetch<G>,
) {
    let rows: [*const f32; R] = std::array::from_fn(|r| job.row(row + r));
    let mut sums = [[s.zero(); G]; R];
    let kept = &mut panel.sums[first_sum..][..R * G];
    for r in 0..R {
        for g in 0..G {
            sums[r][g] = s.load(&kept[r * G + g]);
        }
    }
    for (k, weights) in inputs.zip(panel.weights.chunks_exact(G)) {
        if k % PREFETCH_INPUTS == 0 {
            prefetch.advance(s);
        }
        let mut w = [s.zero(); G];
        for g in 0..G {
            w[g] = s.load(&weights[g]);
        }
        for r in 0..R {
            // SAFETY: rows have all the job's inputs.
            let x = s.splat(unsafe { *rows[r].add(k) });
            for g in 0..G {
                sums[r][g] = s.fma(w[g], x, sums[r][g]);
            }
        }
    }
    for r in 0..R {
        for g in 0..G {
            s.store(sums[r][g], &mut kept[r * G + g]);
        }
    }
}

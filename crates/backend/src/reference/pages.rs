//! The reference's arena: f32 pages, `[slots, 2, block_size, kv_heads * head_dim]` each, with the shape of their group.

use std::ops::Range;

use half::f16;

use crate::{KV_BLOCK, KvDtype, KvGroup, KvLayout, KvSlot, Limits, PageId, hadamard, quantize_kv};

/// Rounding of K and V in pages of [`KvDtype::F16`]. Backends keep them in fewer bits than the reference does; rounding as
/// they do tells their other errors apart. Quantized pages are always rounded as they are defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvRounding {
    /// Not at all.
    #[default]
    F32,
    /// To f16.
    F16,
}

/// Rounds one head of a token's K or V, `[head_dim]`, to the type of the pages.
pub type RoundFn = fn(&mut [f32]);

/// Returns the rounding of a type of pages.
pub(crate) fn rounding(dtype: KvDtype, rounding: KvRounding) -> RoundFn {
    match (dtype, rounding) {
        (KvDtype::F16, KvRounding::F32) => |_| (),
        (KvDtype::F16, KvRounding::F16) => round_f16,
        (KvDtype::Q8, _) => round_q8,
        (KvDtype::Q4, _) => round_q4,
    }
}

/// Rounds a head to f16.
pub fn round_f16(head: &mut [f32]) {
    head.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
}

/// Rounds a head as [`KvDtype::Q8`] stores it.
pub fn round_q8(head: &mut [f32]) {
    round_quantized(KvDtype::Q8, head);
}

/// Rounds a head to what [`KvDtype::Q4`] stores.
pub fn round_q4(head: &mut [f32]) {
    round_quantized(KvDtype::Q4, head);
}

/// Rotates a head, rounds it to quants and scales, and rotates it back. The reference keeps K and V as they were before the
/// rotation; backends keep them rotated, and rotate queries and results instead.
fn round_quantized(dtype: KvDtype, head: &mut [f32]) {
    hadamard(head);
    for block in head.chunks_mut(KV_BLOCK) {
        let mut quants = [0; KV_BLOCK];
        let quants = &mut quants[..block.len()];
        let scale = quantize_kv(dtype, block, quants).to_f32();
        block.iter_mut().zip(quants).for_each(|(x, quant)| *x = scale * f32::from(*quant));
    }
    hadamard(head);
}

/// Large finite numbers without end.
pub(super) fn noise(mut state: u64) -> impl Iterator<Item = f32> {
    std::iter::repeat_with(move || {
        // Knuth's MMIX generator: any noise will do.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3e4
    })
}

/// K or V.
#[derive(Clone, Copy, Debug)]
pub(super) enum Half {
    K = 0,
    V = 1,
}

/// All pages of a loaded model.
pub(super) struct Arena {
    numbers: Vec<f32>,
    round: RoundFn,
    groups: Vec<KvGroup>,
    block_size: usize,
    /// Elements of a page: as many as the largest group needs.
    page: usize,
}

impl Arena {
    /// Creates an arena, filled with large finite noise if there is a seed, so that reads of unwritten data are
    /// detected.
    pub(super) fn new(kv: &KvLayout, limits: &Limits, round: RoundFn, poison: Option<u64>) -> Self {
        let page = kv.page_elements(limits.block_size);
        let mut numbers = vec![0.0; limits.pages * page];
        if let Some(seed) = poison {
            numbers.iter_mut().zip(noise(seed)).for_each(|(number, noise)| *number = noise);
        }
        Self { numbers, round, groups: kv.groups.clone(), block_size: limits.block_size, page }
    }

    /// Returns true if a program with this layout and these limits has the same pages.
    pub(super) fn has_shape(&self, kv: &KvLayout, limits: &Limits) -> bool {
        let shape = |group: &KvGroup| (group.layer_slots, group.kv_heads, group.head_dim);
        let page = kv.page_elements(limits.block_size);
        kv.groups.iter().map(shape).eq(self.groups.iter().map(shape))
            && (limits.block_size, limits.pages * page) == (self.block_size, self.numbers.len())
    }

    /// Returns the range of one page's tokens in one layer.
    fn tokens(&self, PageId(page): PageId, kv: KvSlot, half: Half) -> Range<usize> {
        let size = self.block_size * self.groups[kv.group].width();
        let start = page as usize * self.page + (2 * kv.layer_slot + half as usize) * size;
        start..start + size
    }

    /// Stores K or V of the token at `position`, `[kv_heads * head_dim]`.
    pub(super) fn store(
        &mut self,
        table: &[PageId],
        kv: KvSlot,
        half: Half,
        position: usize,
        values: &[f32],
    ) {
        let (width, head_dim) = (self.groups[kv.group].width(), self.groups[kv.group].head_dim);
        let tokens = self.tokens(table[position / self.block_size], kv, half);
        let stored = &mut self.numbers[tokens][position % self.block_size * width..][..width];
        stored.copy_from_slice(values);
        stored.chunks_exact_mut(head_dim).for_each(self.round);
    }

    /// Copies whole pages of a sequence one after the other: `[blocks * block_size, kv_heads * head_dim]`, by position.
    /// The result includes unwritten tokens of the last page and scratch pages, which must not be read.
    pub(super) fn gather(&self, table: &[PageId], kv: KvSlot, half: Half) -> Vec<f32> {
        table.iter().flat_map(|&page| &self.numbers[self.tokens(page, kv, half)]).copied().collect()
    }

    /// Copies a page over another one.
    pub(super) fn copy(&mut self, PageId(from): PageId, PageId(to): PageId) {
        let from = from as usize * self.page;
        self.numbers.copy_within(from..from + self.page, to as usize * self.page);
    }

    /// Copies all numbers of a page, whatever they are, into `out`.
    pub(super) fn read(&self, PageId(page): PageId, out: &mut [u8]) {
        let numbers = &self.numbers[page as usize * self.page..][..self.page];
        for (out, number) in out.as_chunks_mut().0.iter_mut().zip(numbers) {
            *out = number.to_bits().to_le_bytes();
        }
    }

    /// Fills a page with numbers that were read from one.
    pub(super) fn write(&mut self, page: PageId, bytes: &[u8]) {
        for (number, bytes) in self.page_mut(page).iter_mut().zip(bytes.as_chunks().0) {
            *number = f32::from_bits(u32::from_le_bytes(*bytes));
        }
    }

    /// Numbers of a page.
    pub(super) fn page_numbers(&self) -> usize {
        self.page
    }

    /// Returns all numbers of a page, for data other than K and V.
    pub(super) fn page_mut(&mut self, PageId(page): PageId) -> &mut [f32] {
        &mut self.numbers[page as usize * self.page..][..self.page]
    }
}

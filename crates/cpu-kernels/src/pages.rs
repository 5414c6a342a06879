//! The arena of K/V pages and the arrangement of a page.
//!
//! ```text
//! page     = [layer_slot][kv_head] { K: [block_size / 16] tiles, V: [block_size / 16] tiles }
//!
//! f16: K tile = [padded_dim][16 tokens]       V tile = [16 tokens][padded_dim]
//! q8:  K tile = [blocks][16] scales in f16, [padded_dim / 4][16 tokens][4 dims] bytes, each 128 more than its quant
//!      V tile = [blocks][16] scales in f16, [4][padded_dim][4 tokens] quants
//! q4:  K tile = [blocks][16] scales in f16, [padded_dim / 8][16 tokens][4] bytes of dims `i` and `i + 4`
//!      V tile = [blocks][16] scales in f16, [4][padded_dim / 32][16][4 tokens] bytes of dims `i` and `i + 16`
//! ```
//!
//! A tile is 16 tokens of one head. K is stored transposed, so that 16 tokens are the 16 lanes of a vector: a score is
//! one lane, and no sum crosses lanes. V is stored by token, so that 16 dimensions of the output are the lanes. With
//! eight bits ([`KvDtype::Q8`]), the four bytes of a lane are the operands of one dot product: four dimensions of K,
//! four tokens of V. With four bits ([`KvDtype::Q4`]), a byte has two quants, each raised by 8, the first one in the low
//! bits. Both are of one token, because different threads store tokens. Heads are rotated before they are quantized. All
//! data is read from front to back. The data of one K/V head in a page is contiguous, and a page is one block of memory.
//!
//! All numbers in the arena are finite at any time: initially zero, and clamped when stored. So kernels may multiply
//! masked data by zero, and data of an earlier sequence cannot affect another one. Pages with a part of a state are the
//! exception: they are cleared before a step writes K and V to them.

mod shape;
mod stored;
#[cfg(test)]
mod tests;

use std::ops::Range;

use half::f16;
use memmap2::MmapMut;
use paguro_backend::{KV_BLOCK, KvDtype, LoadError, PageContent, PageId};

use self::stored::{K_OFFSET, nibbles};
pub use self::{
    shape::{Half, PageShape},
    stored::{Q4_OFFSET, StoredHead},
};
use crate::simd::LANES;

/// All pages, allocated once.
pub struct Arena {
    memory: MmapMut,
    start: *mut u8,
    pages: usize,
    page_bytes: usize,
    /// Shapes by group.
    shapes: Vec<PageShape>,
    /// True for pages that have a part of a state, `[pages]`.
    has_state: Vec<bool>,
}

// SAFETY: `start` points into `memory`, which moves with it.
unsafe impl Send for Arena {}
// SAFETY: shared access goes through methods whose callers promise not to race.
unsafe impl Sync for Arena {}

impl Arena {
    /// Allocates `pages` pages of zeros. Memory that no token has reached is not resident.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn new(pages: usize, shapes: Vec<PageShape>) -> Result<Self, LoadError> {
        let page_bytes = PageShape::page_bytes(&shapes);
        let bytes = pages.checked_mul(page_bytes);
        let memory = bytes.and_then(|bytes| MmapMut::map_anon(bytes).ok());
        let mut memory = memory.ok_or_else(|| LoadError::OutOfMemory {
            device: "cpu".into(),
            what: format!("{pages} K/V pages"),
            needed: bytes.map_or(u64::MAX, |bytes| bytes as u64),
        })?;
        // Advice only: with small pages, every stretch of a sequence would be a miss in the TLB.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        let start = memory.as_mut_ptr();
        let has_state = vec![false; pages];
        Ok(Self { memory, start, pages, page_bytes, shapes, has_state })
    }

    /// Returns true if it has as many pages, whose groups have these shapes.
    pub fn has_shape(&self, pages: usize, shapes: &[PageShape]) -> bool {
        self.pages == pages && self.shapes == shapes
    }

    /// Fills every slot of every page with large finite noise, so that reads of unwritten slots are detected.
    pub fn poison(&mut self) {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        for half in self.memory.as_chunks_mut::<2>().0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let sign = if state >> 63 == 0 { 1.0 } else { -1.0 };
            *half = f16::from_f32(sign * (20_000.0 + (state >> 50) as f32)).to_ne_bytes();
        }
    }

    /// Returns the byte at which one head's K and V of a page begin.
    fn head(&self, shape: &PageShape, page: PageId, layer_slot: usize, kv_head: usize) -> usize {
        let PageShape { kv_heads, layer_slots, .. } = *shape;
        assert!((page.0 as usize) < self.pages && layer_slot < layer_slots && kv_head < kv_heads);
        page.0 as usize * self.page_bytes + (layer_slot * kv_heads + kv_head) * 2 * shape.half_bytes()
    }

    /// Returns the pages of a group for kernels.
    ///
    /// # Safety
    /// While the value lives, no thread writes the data that is read through it.
    pub unsafe fn pages(&self, group: usize) -> Pages<'_> {
        Pages { arena: self, shape: self.shapes[group] }
    }

    /// Writes K or V, finite, of the token in slot `token` of a page.
    ///
    /// # Safety
    /// Nobody else reads or writes this half of this token's slot at the same time.
    pub unsafe fn write(&self, at: Place, half: Half, stored: &StoredHead) {
        let shape = self.shapes[at.group];
        assert!(at.token < shape.block_size);
        let head = self.head(&shape, at.page, at.layer_slot, at.kv_head)
            + if half == Half::V { shape.half_bytes() } else { 0 };
        let first = shape.element_at(half, at.token, 0);
        // SAFETY: `head` has checked that the head lies in the memory, and the token's elements and scales lie in it;
        // halves are at even bytes; the caller keeps others away.
        unsafe {
            let to = self.start.add(head);
            match (stored, half) {
                (StoredHead::F16(x), _) => {
                    assert!(shape.dtype == KvDtype::F16 && x.len() == shape.head_dim);
                    let to = to.add(first).cast::<f16>();
                    let step = if half == Half::K { LANES } else { 1 };
                    for (dim, &x) in x.iter().enumerate() {
                        *to.add(dim * step) = x;
                    }
                }
                (StoredHead::Quants { dtype, scales, quants }, _) => {
                    assert!(shape.dtype == *dtype && quants.len() == shape.blocks() * KV_BLOCK);
                    assert!(scales.len() == shape.blocks());
                    for (block, &scale) in scales.iter().enumerate() {
                        *to.add(shape.scale_at(at.token, block)).cast() = scale;
                    }
                    let to = to.add(first);
                    match (dtype, half) {
                        (KvDtype::Q4, Half::K) => {
                            for (line, eight) in quants.as_chunks::<8>().0.iter().enumerate() {
                                for i in 0..4 {
                                    *to.add(line * 4 * LANES + i) = nibbles(eight[i], eight[i + 4]);
                                }
                            }
                        }
                        (KvDtype::Q4, Half::V) => {
                            for (block, quants) in quants.as_chunks::<KV_BLOCK>().0.iter().enumerate() {
                                for i in 0..LANES {
                                    *to.add((block * LANES + i) * 4) = nibbles(quants[i], quants[i + LANES]);
                                }
                            }
                        }
                        (_, Half::K) => {
                            for (dim, &quant) in quants[..shape.head_dim].iter().enumerate() {
                                *to.add(dim / 4 * 4 * LANES + dim % 4) = (quant ^ K_OFFSET) as u8;
                            }
                        }
                        (_, Half::V) => {
                            for (dim, &quant) in quants[..shape.head_dim].iter().enumerate() {
                                *to.add(dim * 4) = quant as u8;
                            }
                        }
                    }
                }
            }
        }
    }

    /// Returns the number of bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Returns true if pages store rotated heads as integers.
    pub fn is_quantized(&self) -> bool {
        self.shapes.iter().any(|shape| shape.dtype.is_quantized())
    }

    fn page(&self, PageId(page): PageId) -> Range<usize> {
        let bytes = self.page_bytes();
        page as usize * bytes..(page as usize + 1) * bytes
    }

    /// Copies a page over another one.
    pub fn copy(&mut self, from: PageId, to: PageId) {
        let (from_bytes, to_bytes) = (self.page(from), self.page(to));
        self.memory.copy_within(from_bytes, to_bytes.start);
        self.has_state[to.0 as usize] = self.has_state[from.0 as usize];
    }

    /// Copies a part of a state into a page. All parts except the last have the length of a page.
    pub fn save(&mut self, to: PageId, state: &[u8], part: usize) {
        let state = &state[part * self.page_bytes()..];
        let page = self.page(to);
        let bytes = state.len().min(page.len());
        self.memory[page][..bytes].copy_from_slice(&state[..bytes]);
        self.has_state[to.0 as usize] = true;
    }

    /// Copies a part of a state back from its page.
    pub fn restore(&self, from: PageId, state: &mut [u8], part: usize) {
        let state = &mut state[part * self.page_bytes()..];
        let page = &self.memory[self.page(from)];
        let bytes = state.len().min(page.len());
        state[..bytes].copy_from_slice(&page[..bytes]);
    }

    /// Returns the bytes of a page.
    pub fn bytes(&self, page: PageId) -> &[u8] {
        &self.memory[self.page(page)]
    }

    /// Fills a page with bytes from outside.
    pub fn fill(&mut self, page: PageId, bytes: &[u8], content: PageContent) {
        let to = self.page(page);
        self.memory[to].copy_from_slice(bytes);
        self.has_state[page.0 as usize] = content == PageContent::State;
    }

    /// Fills a page with zeros if it has a part of a state, whose bytes need not be finite numbers of K and V.
    pub fn clear_state(&mut self, page: PageId) {
        if std::mem::take(&mut self.has_state[page.0 as usize]) {
            let page = self.page(page);
            self.memory[page].fill(0);
        }
    }
}

/// Pages that no thread writes; see [`Arena::pages`].
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    arena: &'a Arena,
    shape: PageShape,
}

impl<'a> Pages<'a> {
    /// Returns the sizes inside a page.
    #[inline]
    pub fn shape(self) -> PageShape {
        self.shape
    }

    /// Returns the tiles of K, and those of V, of one head in one page.
    #[inline]
    pub fn read(self, page: PageId, layer_slot: usize, kv_head: usize) -> (&'a [u8], &'a [u8]) {
        let len = self.shape.half_bytes();
        let head = self.arena.head(&self.shape, page, layer_slot, kv_head);
        // SAFETY: `head` has checked that both lie in the memory; nobody writes, see `Arena::pages`.
        unsafe {
            let start = self.arena.start.add(head);
            (std::slice::from_raw_parts(start, len), std::slice::from_raw_parts(start.add(len), len))
        }
    }

    /// K and V, `[head_dim]` each, of the token in a slot, as numbers; rotated, if the pages are quantized.
    pub fn token(self, at: Place, k: &mut [f32], v: &mut [f32]) {
        let shape = self.shape;
        let (k_bytes, v_bytes) = self.read(at.page, at.layer_slot, at.kv_head);
        for (half, bytes, out) in [(Half::K, k_bytes, k), (Half::V, v_bytes, v)] {
            let f16_at = |at: usize| f16::from_ne_bytes([bytes[at], bytes[at + 1]]).to_f32();
            for (dim, out) in out.iter_mut().enumerate() {
                let element = shape.element_at(half, at.token, dim);
                let quant = |offset| f32::from(bytes[element] as i8 ^ offset);
                let scale = || f16_at(shape.scale_at(at.token, dim / KV_BLOCK));
                let four_bits = || {
                    let shift = if PageShape::is_high(half, dim) { 4 } else { 0 };
                    f32::from((bytes[element] >> shift & 15) as i8 - Q4_OFFSET)
                };
                *out = match (shape.dtype, half) {
                    (KvDtype::F16, _) => f16_at(element),
                    (KvDtype::Q8, Half::K) => quant(K_OFFSET) * scale(),
                    (KvDtype::Q8, Half::V) => quant(0) * scale(),
                    (KvDtype::Q4, _) => four_bits() * scale(),
                };
            }
        }
    }
}

/// One token's slot of one head.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// K/V group.
    pub group: usize,
    /// Page.
    pub page: PageId,
    /// Layer slot.
    pub layer_slot: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Token in the page.
    pub token: usize,
}

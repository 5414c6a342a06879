//! The arena of K/V pages and how one page is arranged.
//!
//! ```text
//! page = [slot][kv_head] { K: [head_dim][block_size], V: [block_size][head_dim] }     all f16
//! ```
//!
//! K is stored transposed, so that 16 tokens are the 16 lanes of a vector: a score is one lane, and no sum runs
//! across lanes. V is stored by token, so that 16 dimensions of the output are the lanes. Both are read from front
//! to back. What one K/V head needs of a page is one contiguous stretch, and a page is one block of memory.

use half::f16;
use memmap2::MmapMut;
use paguro_backend::{KvLayout, LoadError, PageId, PageMove};

use crate::simd::LANES;

/// Sizes inside a page, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Tokens of a page, a multiple of 16.
    pub block_size: usize,
    /// Elements of a head, a multiple of 16.
    pub head_dim: usize,
    /// K/V heads of a layer.
    pub kv_heads: usize,
    /// Layers of a page.
    pub slots: usize,
}

impl PageShape {
    /// The shape of a program's pages.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for sizes that are not whole vectors.
    pub fn new(kv: &KvLayout, block_size: usize) -> Result<Self, LoadError> {
        let unsupported = |what: String| {
            let supported = format!("sizes that are multiples of {LANES} work");
            Err(LoadError::Unsupported { device: "cpu".into(), what, supported })
        };
        if block_size == 0 || !block_size.is_multiple_of(LANES) {
            return unsupported(format!("pages of {block_size} tokens"));
        }
        if !kv.head_dim.is_multiple_of(LANES) {
            return unsupported(format!("attention heads of {} elements (head_dim)", kv.head_dim));
        }
        Ok(Self { block_size, head_dim: kv.head_dim, kv_heads: kv.kv_heads, slots: kv.slots })
    }

    /// Elements of K, and of V, of one head in one page.
    pub fn head_elements(&self) -> usize {
        self.block_size * self.head_dim
    }

    /// Elements of a page.
    pub fn page_elements(&self) -> usize {
        self.slots * self.kv_heads * 2 * self.head_elements()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.page_elements() * size_of::<f16>()
    }
}

/// All pages, allocated once.
pub struct Arena {
    memory: MmapMut,
    start: *mut f16,
    pages: usize,
    shape: PageShape,
}

// SAFETY: `start` points into `memory`, which moves with it.
unsafe impl Send for Arena {}
// SAFETY: shared access goes through methods whose callers promise not to race.
unsafe impl Sync for Arena {}

impl Arena {
    /// `pages` pages of zeros; memory that no token has reached is not resident.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn new(pages: usize, shape: PageShape) -> Result<Self, LoadError> {
        let bytes = pages.checked_mul(shape.page_bytes());
        let memory = bytes.and_then(|bytes| MmapMut::map_anon(bytes).ok());
        let mut memory = memory.ok_or_else(|| LoadError::OutOfMemory {
            device: "cpu".into(),
            what: format!("{pages} K/V pages"),
            needed: bytes.map_or(u64::MAX, |bytes| bytes as u64),
        })?;
        let start = memory.as_mut_ptr().cast();
        Ok(Self { memory, start, pages, shape })
    }

    /// Sizes inside a page.
    pub fn shape(&self) -> PageShape {
        self.shape
    }

    /// Fills every slot of every page with large finite numbers: a kernel that reads a slot which nobody wrote
    /// then shows.
    pub fn poison(&mut self) {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        for half in self.memory.as_chunks_mut::<2>().0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let sign = if state >> 63 == 0 { 1.0 } else { -1.0 };
            *half = f16::from_f32(sign * (20_000.0 + (state >> 50) as f32)).to_ne_bytes();
        }
    }

    /// Where one head's K and V of a page begin.
    fn head(&self, page: PageId, slot: usize, kv_head: usize) -> usize {
        let PageShape { kv_heads, slots, .. } = self.shape;
        assert!((page.0 as usize) < self.pages && slot < slots && kv_head < kv_heads);
        ((page.0 as usize * slots + slot) * kv_heads + kv_head) * 2 * self.shape.head_elements()
    }

    /// K, `[head_dim][block_size]`, and V, `[block_size][head_dim]`, of one head in one page.
    ///
    /// # Safety
    /// Nobody writes this head in this page while the slices live.
    pub unsafe fn read(&self, page: PageId, slot: usize, kv_head: usize) -> (&[f16], &[f16]) {
        let len = self.shape.head_elements();
        let head = self.head(page, slot, kv_head);
        // SAFETY: `head` has checked that both lie in the memory; the caller keeps writers away.
        unsafe {
            let start = self.start.add(head);
            (std::slice::from_raw_parts(start, len), std::slice::from_raw_parts(start.add(len), len))
        }
    }

    /// Writes K and V, `[head_dim]` each, of the token in slot `token` of a page.
    ///
    /// # Safety
    /// Nobody else reads or writes this token's slot at the same time.
    pub unsafe fn write(&self, at: Place, k: &[f32], v: &[f32]) {
        let PageShape { block_size, head_dim, .. } = self.shape;
        assert!(at.token < block_size && k.len() == head_dim && v.len() == head_dim);
        let head = self.head(at.page, at.slot, at.kv_head);
        // SAFETY: `head` has checked that the head lies in the memory, and the token's column and row in it; the
        // caller keeps others away.
        unsafe {
            let (to_k, to_v) = (self.start.add(head), self.start.add(head + self.shape.head_elements()));
            for (dim, (&k, &v)) in k.iter().zip(v).enumerate() {
                *to_k.add(dim * block_size + at.token) = f16::from_f32(k);
                *to_v.add(at.token * head_dim + dim) = f16::from_f32(v);
            }
        }
    }

    /// Does the moves in order.
    pub fn move_pages(&mut self, moves: &[PageMove]) {
        let bytes = self.shape.page_bytes();
        for page_move in moves {
            match *page_move {
                PageMove::Copy { from, to } => {
                    let from = from.0 as usize * bytes;
                    self.memory.copy_within(from..from + bytes, to.0 as usize * bytes);
                }
                ref other => unreachable!("{other:?} is not one of this version's moves"),
            }
        }
    }
}

/// One token's slot of one head.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Page.
    pub page: PageId,
    /// Layer slot.
    pub slot: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Token in the page.
    pub token: usize,
}

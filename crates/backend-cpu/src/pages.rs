//! The arena of K/V pages and how one page is arranged.
//!
//! ```text
//! page = [slot][kv_head] { K: [block_size / 16][head_dim][16], V: [block_size][head_dim] }     all f16
//! ```
//!
//! K is stored transposed, so that 16 tokens are the 16 lanes of a vector: a score is one lane, and no sum runs
//! across lanes. V is stored by token, so that 16 dimensions of the output are the lanes. Both are read from front
//! to back. What one K/V head needs of a page is one contiguous stretch, and a page is one block of memory.
//!
//! Everything in the arena is a finite number at any time: zeros at first, and what is stored is clamped. So kernels
//! may multiply what they must not see by zero, and what one sequence left behind cannot spoil another one.

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

    /// Bytes of a page. The pages of a sequence are read at one place each, one page after the other: if they were
    /// a large power of two apart, all of these places would compete for the same few cache sets.
    pub fn page_bytes(&self) -> usize {
        let bytes = self.page_elements() * size_of::<f16>();
        if bytes.is_multiple_of(1 << 14) { bytes + (1 << 12) } else { bytes }
    }

    /// Where element `dim` of a token's K is in its head's K.
    pub fn k_at(&self, token: usize, dim: usize) -> usize {
        (token / LANES * self.head_dim + dim) * LANES + token % LANES
    }

    /// Where element `dim` of a token's V is in its head's V.
    pub fn v_at(&self, token: usize, dim: usize) -> usize {
        token * self.head_dim + dim
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
        // Advice only: with small pages, every stretch of a sequence would be a miss in the TLB.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        let start = memory.as_mut_ptr().cast();
        Ok(Self { memory, start, pages, shape })
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
        let page = page.0 as usize * (self.shape.page_bytes() / size_of::<f16>());
        page + (slot * kv_heads + kv_head) * 2 * self.shape.head_elements()
    }

    /// The pages, to be read by kernels.
    ///
    /// # Safety
    /// While the value lives, nobody writes what is read through it.
    pub unsafe fn pages(&self) -> Pages<'_> {
        Pages(self)
    }

    /// Writes K and V, `[head_dim]` each, finite, of the token in slot `token` of a page.
    ///
    /// # Safety
    /// Nobody else reads or writes this token's slot at the same time.
    pub unsafe fn write(&self, at: Place, k: &[f16], v: &[f16]) {
        let shape = self.shape;
        assert!(at.token < shape.block_size && k.len() == shape.head_dim && v.len() == shape.head_dim);
        let head = self.head(at.page, at.slot, at.kv_head);
        // SAFETY: `head` has checked that the head lies in the memory, and the token's column and row lie in it; the
        // caller keeps others away.
        unsafe {
            let (to_k, to_v) = (self.start.add(head), self.start.add(head + shape.head_elements()));
            let column = to_k.add(shape.k_at(at.token, 0));
            for (dim, &k) in k.iter().enumerate() {
                *column.add(dim * LANES) = k;
            }
            std::ptr::copy_nonoverlapping(v.as_ptr(), to_v.add(shape.v_at(at.token, 0)), v.len());
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

/// Pages that nobody writes; see [`Arena::pages`].
#[derive(Clone, Copy)]
pub struct Pages<'a>(&'a Arena);

impl<'a> Pages<'a> {
    /// Sizes inside a page.
    #[inline]
    pub fn shape(self) -> PageShape {
        self.0.shape
    }

    /// K, `[block_size / 16][head_dim][16]`, and V, `[block_size][head_dim]`, of one head in one page.
    #[inline]
    pub fn read(self, page: PageId, slot: usize, kv_head: usize) -> (&'a [f16], &'a [f16]) {
        let len = self.0.shape.head_elements();
        let head = self.0.head(page, slot, kv_head);
        // SAFETY: `head` has checked that both lie in the memory; nobody writes, see `Arena::pages`.
        unsafe {
            let start = self.0.start.add(head);
            (std::slice::from_raw_parts(start, len), std::slice::from_raw_parts(start.add(len), len))
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

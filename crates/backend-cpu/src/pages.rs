//! The arena of K/V pages and how one page is arranged.
//!
//! ```text
//! page = [slot][kv_head] { K: [block_size / 16][padded_dim][16], V: [block_size][padded_dim] }     all f16
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
    /// Elements of a head, an even number.
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
        if !kv.head_dim.is_multiple_of(2) {
            return Err(LoadError::Unsupported {
                device: "cpu".into(),
                what: format!("attention heads of {} elements (head_dim)", kv.head_dim),
                supported: "even sizes work".into(),
            });
        }
        Ok(Self { block_size, head_dim: kv.head_dim, kv_heads: kv.kv_heads, slots: kv.slots })
    }

    /// Elements of a head in whole vectors: what a token's K and V take. Those past `head_dim` are never written, and
    /// nobody looks at what comes of them.
    pub fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Elements of K, and of V, of one head in one page.
    pub fn head_elements(&self) -> usize {
        self.block_size * self.padded_dim()
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
        (token / LANES * self.padded_dim() + dim) * LANES + token % LANES
    }

    /// Where element `dim` of a token's V is in its head's V.
    pub fn v_at(&self, token: usize, dim: usize) -> usize {
        token * self.padded_dim() + dim
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

    /// K, `[block_size / 16][padded_dim][16]`, and V, `[block_size][padded_dim]`, of one head in one page.
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use paguro_backend::KvGroup;

    use super::*;

    fn shape(block_size: usize, head_dim: usize) -> PageShape {
        let kv = KvLayout { groups: vec![KvGroup { window: None }], slots: 3, kv_heads: 2, head_dim };
        PageShape::new(&kv, block_size).unwrap()
    }

    #[test]
    fn every_element_has_a_place_of_its_own() {
        for (block_size, head_dim) in [(16, 16), (32, 80), (64, 48), (32, 72), (16, 8)] {
            let shape = shape(block_size, head_dim);
            let elements = || (0..block_size).flat_map(|token| (0..head_dim).map(move |dim| (token, dim)));
            let k: HashSet<usize> = elements().map(|(token, dim)| shape.k_at(token, dim)).collect();
            let v: HashSet<usize> = elements().map(|(token, dim)| shape.v_at(token, dim)).collect();
            for places in [k, v] {
                assert_eq!(places.len(), block_size * head_dim);
                assert!(places.iter().all(|&at| at < shape.head_elements()));
            }
        }
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_changes() {
        let shape = shape(32, 48);
        let mut arena = Arena::new(4, shape).unwrap();
        arena.poison();
        let all = |arena: &Arena| {
            let mut halves = Vec::new();
            for page in (0..4).map(PageId) {
                for (slot, kv_head) in (0..3).flat_map(|slot| [(slot, 0), (slot, 1)]) {
                    // SAFETY: nobody writes.
                    let (k, v) = unsafe { arena.pages() }.read(page, slot, kv_head);
                    halves.extend(k.iter().chain(v).copied());
                }
            }
            halves
        };
        let before = all(&arena);
        assert!(before.iter().all(|x| x.is_finite() && x.to_f32().abs() > 1e4), "noise is large and finite");

        let k: Vec<f16> = (0..48).map(|i| f16::from_f32(i as f32)).collect();
        let v: Vec<f16> = (0..48).map(|i| f16::from_f32(100.0 + i as f32)).collect();
        // SAFETY: nobody else is here.
        unsafe { arena.write(Place { page: PageId(2), slot: 1, kv_head: 1, token: 19 }, &k, &v) };
        // SAFETY: nobody writes.
        let (read_k, read_v) = unsafe { arena.pages() }.read(PageId(2), 1, 1);
        assert!(
            (0..48).all(|dim| read_k[shape.k_at(19, dim)] == k[dim] && read_v[shape.v_at(19, dim)] == v[dim])
        );
        let changed = all(&arena).iter().zip(&before).filter(|(a, b)| a != b).count();
        assert_eq!(changed, 96);

        arena.move_pages(&[PageMove::Copy { from: PageId(2), to: PageId(1) }]);
        let halves = all(&arena);
        let page = shape.page_elements();
        assert!(halves[page..2 * page] == halves[2 * page..3 * page]);
        assert!(halves[..page] == before[..page] && halves[3 * page..] == before[3 * page..]);
    }

    #[test]
    fn pages_do_not_share_cache_sets() {
        // TinyLlama: 22 layers of 4 heads of 64 would make pages a multiple of 64 KiB.
        let kv = KvLayout { groups: vec![KvGroup { window: None }], slots: 22, kv_heads: 4, head_dim: 64 };
        let shape = PageShape::new(&kv, 32).unwrap();
        assert!(shape.page_bytes() >= 2 * shape.page_elements());
        let sets: HashSet<usize> = (0..16).map(|page| page * shape.page_bytes() % (1 << 16)).collect();
        assert_eq!(sets.len(), 16);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_by_name() {
        let kv = |head_dim| KvLayout { groups: Vec::new(), slots: 1, kv_heads: 1, head_dim };
        let error = |kv: &KvLayout, block_size| PageShape::new(kv, block_size).unwrap_err().to_string();
        assert!(error(&kv(63), 16).contains("heads of 63 elements"));
        assert!(error(&kv(64), 24).contains("pages of 24 tokens"));
        assert!(error(&kv(64), 0).contains("pages of 0 tokens"));
    }
}

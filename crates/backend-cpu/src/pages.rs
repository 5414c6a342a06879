//! The arena of K/V pages and the arrangement of a page.
//!
//! ```text
//! page     = [slot][kv_head] { K: [block_size / 16] tiles, V: [block_size / 16] tiles }
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

use std::ops::Range;

use half::f16;
use memmap2::MmapMut;
use paguro_backend::{KV_BLOCK, KvDtype, KvGroup, KvLayout, LoadError, PageContent, PageId};

use crate::{ops::RowKernels, simd::LANES};

/// Sizes inside a page.
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
    /// Type of stored K and V.
    pub dtype: KvDtype,
}

/// K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    K,
    V,
}

impl PageShape {
    /// The shapes of a program's pages, by group.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for sizes that are not whole vectors.
    pub fn of_groups(kv: &KvLayout, block_size: usize, dtype: KvDtype) -> Result<Vec<Self>, LoadError> {
        let unsupported = |what: String| {
            let supported = format!("sizes that are multiples of {LANES} work");
            Err(LoadError::Unsupported { device: "cpu".into(), what, supported })
        };
        if block_size == 0 || !block_size.is_multiple_of(LANES) {
            return unsupported(format!("pages of {block_size} tokens"));
        }
        if kv.groups.is_empty() {
            return Err(LoadError::BadProgram("no groups of K and V".into()));
        }
        let shape = |group: &KvGroup| {
            let KvGroup { slots, kv_heads, head_dim, .. } = *group;
            if !head_dim.is_multiple_of(2) {
                return Err(LoadError::Unsupported {
                    device: "cpu".into(),
                    what: format!("attention heads of {head_dim} elements (head_dim)"),
                    supported: "even sizes work".into(),
                });
            }
            Ok(Self { block_size, head_dim, kv_heads, slots, dtype })
        };
        kv.groups.iter().map(shape).collect()
    }

    /// Returns the elements of a head in whole vectors: the size of a token's K and V. Those past `head_dim` are never
    /// written, and their results are not used.
    pub fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(if self.dtype == KvDtype::Q4 { KV_BLOCK } else { LANES })
    }

    /// Scales of a head.
    pub fn blocks(&self) -> usize {
        self.head_dim.div_ceil(KV_BLOCK)
    }

    /// Bytes in front of a tile's elements: scales, in whole cache lines.
    pub fn scale_bytes(&self) -> usize {
        match self.dtype {
            KvDtype::F16 => 0,
            KvDtype::Q8 | KvDtype::Q4 => (self.blocks() * LANES * size_of::<f16>()).next_multiple_of(64),
        }
    }

    /// Bytes of K, or V, of 16 tokens of one head: whole cache lines.
    pub fn tile_bytes(&self) -> usize {
        let bits = match self.dtype {
            KvDtype::F16 => 16,
            KvDtype::Q8 => 8,
            KvDtype::Q4 => 4,
        };
        self.scale_bytes() + self.padded_dim() * LANES * bits / 8
    }

    /// Bytes of K, and of V, of one head in one page.
    pub fn half_bytes(&self) -> usize {
        self.block_size / LANES * self.tile_bytes()
    }

    /// Bytes that the group needs of a page.
    fn used_bytes(&self) -> usize {
        self.slots * self.kv_heads * 2 * self.half_bytes()
    }

    /// Bytes of a page that any of the groups may use. The pages of a sequence are read at one place each, one page after the
    /// other: if they were a large power of two apart, all of these places would compete for the same few cache sets.
    pub fn page_bytes(groups: &[Self]) -> usize {
        let bytes = groups.iter().map(Self::used_bytes).max().unwrap_or(0);
        if bytes.is_multiple_of(1 << 14) { bytes + (1 << 12) } else { bytes }
    }

    /// The byte at which element `dim` of a token is in its head's K or V. With four bits, see [`Self::is_high`].
    pub fn element_at(&self, half: Half, token: usize, dim: usize) -> usize {
        let (tile, token) = (token / LANES, token % LANES);
        let tile = tile * self.tile_bytes() + self.scale_bytes();
        tile + match (self.dtype, half) {
            (KvDtype::F16, Half::K) => size_of::<f16>() * (dim * LANES + token),
            (KvDtype::F16, Half::V) => size_of::<f16>() * (token * self.padded_dim() + dim),
            (KvDtype::Q8, Half::K) => (dim / 4 * LANES + token) * 4 + dim % 4,
            (KvDtype::Q8, Half::V) => (token / 4 * self.padded_dim() + dim) * 4 + token % 4,
            (KvDtype::Q4, Half::K) => (dim / 8 * LANES + token) * 4 + dim % 4,
            (KvDtype::Q4, Half::V) => {
                let dims = token / 4 * self.padded_dim() / 2 + dim / KV_BLOCK * LANES + dim % LANES;
                dims * 4 + token % 4
            }
        }
    }

    /// Returns true if element `dim` has the high bits of its byte, with four bits.
    fn is_high(half: Half, dim: usize) -> bool {
        let together = if half == Half::K { 4 } else { LANES };
        dim / together % 2 == 1
    }

    /// The byte at which a block's scale of a token is in its head's K or V.
    pub fn scale_at(&self, token: usize, block: usize) -> usize {
        let (tile, token) = (token / LANES, token % LANES);
        tile * self.tile_bytes() + size_of::<f16>() * (block * LANES + token)
    }
}

/// One head of a token in stored form.
#[derive(Clone, Debug)]
pub enum StoredHead {
    /// `[head_dim]`
    F16(Vec<f16>),
    /// Rotated and quantized: see [`paguro_backend::quantize_kv`].
    Quants {
        /// Eight or four bits.
        dtype: KvDtype,
        /// `[blocks]`
        scales: Vec<f16>,
        /// `[blocks * KV_BLOCK]`; those past the head are zeros.
        quants: Vec<i8>,
    },
}

impl StoredHead {
    /// With room for heads of up to `head_dim` elements.
    pub fn new(dtype: KvDtype, head_dim: usize) -> Self {
        match dtype {
            KvDtype::F16 => Self::F16(Vec::with_capacity(head_dim)),
            KvDtype::Q8 | KvDtype::Q4 => Self::Quants {
                dtype,
                scales: Vec::with_capacity(head_dim.div_ceil(KV_BLOCK)),
                quants: Vec::with_capacity(head_dim.next_multiple_of(KV_BLOCK)),
            },
        }
    }

    /// Becomes `x`, `[head_dim]`, as pages store it. If they are quantized, `x` is rotated in place.
    pub fn set(&mut self, kernels: &RowKernels, x: &mut [f32]) {
        match self {
            Self::F16(halves) => {
                halves.resize(x.len(), f16::ZERO);
                kernels.round_f16(x, halves);
            }
            Self::Quants { dtype, scales, quants } => {
                scales.resize(x.len().div_ceil(KV_BLOCK), f16::ZERO);
                quants.clear();
                quants.resize(x.len().next_multiple_of(KV_BLOCK), 0);
                kernels.hadamard(x);
                kernels.quantize_kv(*dtype, x, scales, &mut quants[..x.len()]);
            }
        }
    }
}

/// Offset of K's stored quants, which makes them unsigned bytes: see
/// [`Simd::dot4_offset`](crate::simd::Simd::dot4_offset).
/// [`Simd::dot4_offset`](crate::simd::Simd::dot4_offset).
const K_OFFSET: i8 = -128;

/// Four-bit quants are stored with this added.
pub const Q4_OFFSET: i8 = 8;

/// Two quants in a byte.
fn nibbles(low: i8, high: i8) -> u8 {
    (low + Q4_OFFSET) as u8 | ((high + Q4_OFFSET) as u8) << 4
}

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
    /// `pages` pages of zeros; memory that no token has reached is not resident.
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

    /// Fills every slot of every page with large finite noise, so that reads of unwritten slots are detected.
    pub fn poison(&mut self) {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        for half in self.memory.as_chunks_mut::<2>().0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let sign = if state >> 63 == 0 { 1.0 } else { -1.0 };
            *half = f16::from_f32(sign * (20_000.0 + (state >> 50) as f32)).to_ne_bytes();
        }
    }

    /// The byte at which one head's K and V of a page begin.
    fn head(&self, shape: &PageShape, page: PageId, slot: usize, kv_head: usize) -> usize {
        let PageShape { kv_heads, slots, .. } = *shape;
        assert!((page.0 as usize) < self.pages && slot < slots && kv_head < kv_heads);
        page.0 as usize * self.page_bytes + (slot * kv_heads + kv_head) * 2 * shape.half_bytes()
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
        let head = self.head(&shape, at.page, at.slot, at.kv_head)
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

    /// Bytes of a page.
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
    /// Sizes inside a page.
    #[inline]
    pub fn shape(self) -> PageShape {
        self.shape
    }

    /// The tiles of K, and those of V, of one head in one page.
    #[inline]
    pub fn read(self, page: PageId, slot: usize, kv_head: usize) -> (&'a [u8], &'a [u8]) {
        let len = self.shape.half_bytes();
        let head = self.arena.head(&self.shape, page, slot, kv_head);
        // SAFETY: `head` has checked that both lie in the memory; nobody writes, see `Arena::pages`.
        unsafe {
            let start = self.arena.start.add(head);
            (std::slice::from_raw_parts(start, len), std::slice::from_raw_parts(start.add(len), len))
        }
    }

    /// K and V, `[head_dim]` each, of the token in a slot, as numbers; rotated, if the pages are quantized.
    pub fn token(self, at: Place, k: &mut [f32], v: &mut [f32]) {
        let shape = self.shape;
        let (k_bytes, v_bytes) = self.read(at.page, at.slot, at.kv_head);
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
    pub slot: usize,
    /// K/V head.
    pub kv_head: usize,
    /// Token in the page.
    pub token: usize,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use paguro_backend::{KvGroup, hadamard};

    use super::*;
    use crate::isa::Isa;

    const DTYPES: [KvDtype; 3] = KvDtype::ALL;

    fn shape(block_size: usize, head_dim: usize, dtype: KvDtype) -> PageShape {
        let kv = KvLayout { groups: vec![KvGroup { window: None, slots: 3, kv_heads: 2, head_dim }] };
        PageShape::of_groups(&kv, block_size, dtype).unwrap()[0]
    }

    #[test]
    fn every_element_has_a_place_of_its_own() {
        for (block_size, head_dim) in [(16, 16), (32, 80), (64, 48), (32, 72), (16, 8)] {
            for dtype in DTYPES {
                let shape = shape(block_size, head_dim, dtype);
                // In half bytes.
                let width = [4, 2, 1][DTYPES.iter().position(|&other| other == dtype).unwrap()];
                for half in [Half::K, Half::V] {
                    let mut free = vec![true; 2 * shape.half_bytes()];
                    let mut take = |at: usize, width: usize| {
                        assert!(
                            free[at..at + width].iter().all(|&free| free),
                            "{shape:?}, {half:?}, half byte {at}"
                        );
                        free[at..at + width].fill(false);
                    };
                    for token in 0..block_size {
                        for dim in 0..head_dim {
                            let is_high = dtype == KvDtype::Q4 && PageShape::is_high(half, dim);
                            take(2 * shape.element_at(half, token, dim) + usize::from(is_high), width);
                        }
                        if dtype.is_quantized() {
                            (0..shape.blocks()).for_each(|block| take(2 * shape.scale_at(token, block), 4));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_changes() {
        let kernels = RowKernels::new(Isa::detect());
        for dtype in DTYPES {
            let shape = shape(32, 48, dtype);
            let mut arena = Arena::new(4, vec![shape]).unwrap();
            arena.poison();
            let all = |arena: &Arena| {
                let mut numbers = Vec::new();
                for (page, slot, kv_head) in
                    (0..4).flat_map(|page| (0..6).map(move |head| (PageId(page), head / 2, head % 2)))
                {
                    for token in 0..32 {
                        let (mut k, mut v) = ([0.0; 48], [0.0; 48]);
                        // SAFETY: nobody writes.
                        unsafe { arena.pages(0) }.token(
                            Place { group: 0, page, slot, kv_head, token },
                            &mut k,
                            &mut v,
                        );
                        numbers.extend(k.into_iter().chain(v));
                    }
                }
                numbers
            };
            let before = all(&arena);
            assert!(before.iter().all(|x| x.is_finite()), "noise is finite");

            let k: Vec<f32> = (0..48).map(|i| 127.0 - i as f32).collect();
            let v: Vec<f32> = (0..48).map(|i| 120.0 - i as f32).collect();
            let place = Place { group: 0, page: PageId(2), slot: 1, kv_head: 1, token: 19 };
            for (half, x) in [(Half::K, &k), (Half::V, &v)] {
                let mut stored = StoredHead::new(shape.dtype, shape.head_dim);
                stored.set(&kernels, &mut x.clone());
                // SAFETY: nobody else is here.
                unsafe { arena.write(place, half, &stored) };
            }
            let (mut read_k, mut read_v) = (vec![0.0; 48], vec![0.0; 48]);
            // SAFETY: nobody writes.
            unsafe { arena.pages(0) }.token(place, &mut read_k, &mut read_v);
            if dtype.is_quantized() {
                hadamard(&mut read_k);
                hadamard(&mut read_v);
            }
            // The first element of a transformed part is its sum, which is far larger than the others.
            let most = [0.0, 5.0, 50.0][DTYPES.iter().position(|&other| other == dtype).unwrap()];
            for (read, x) in read_k.iter().chain(&read_v).zip(k.iter().chain(&v)) {
                assert!((read - x).abs() <= most, "{dtype:?}: {read} is not {x}");
            }
            let changed = all(&arena).iter().zip(&before).filter(|(a, b)| a != b).count();
            // Quants that are zeros in the noise may stay zeros.
            let least = if dtype == KvDtype::F16 { 96 } else { 70 };
            assert!((least..=96).contains(&changed), "{dtype:?}: {changed}");

            arena.copy(PageId(2), PageId(1));
            let numbers = all(&arena);
            let page = numbers.len() / 4;
            assert!(numbers[page..2 * page] == numbers[2 * page..3 * page]);
            assert!(numbers[..page] == before[..page] && numbers[3 * page..] == before[3 * page..]);
        }
    }

    #[test]
    fn pages_do_not_share_cache_sets() {
        // TinyLlama: 22 layers of 4 heads of 64 would make pages of f16 a multiple of 64 KiB.
        let kv = KvLayout { groups: vec![KvGroup { window: None, slots: 22, kv_heads: 4, head_dim: 64 }] };
        for dtype in DTYPES {
            let bytes = PageShape::page_bytes(&PageShape::of_groups(&kv, 32, dtype).unwrap());
            assert!(bytes >= kv.page_bytes(32, dtype));
            let sets: HashSet<usize> = (0..16).map(|page| page * bytes % (1 << 16)).collect();
            assert_eq!(sets.len(), 16);
        }
    }

    #[test]
    fn eight_bits_take_about_half_the_bytes_and_four_a_quarter() {
        for (head_dim, most_q8, most_q4) in [(64, 0.54, 0.29), (128, 0.54, 0.29), (80, 0.58, 0.38)] {
            let [f16, q8, q4] =
                DTYPES.map(|dtype| PageShape::page_bytes(&[shape(32, head_dim, dtype)]) as f64);
            assert!(q8 <= most_q8 * f16, "{head_dim}: {q8} of {f16}");
            assert!(q4 <= most_q4 * f16, "{head_dim}: {q4} of {f16}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_by_name() {
        let kv =
            |head_dim| KvLayout { groups: vec![KvGroup { window: None, slots: 1, kv_heads: 1, head_dim }] };
        let error = |kv: &KvLayout, block_size| {
            PageShape::of_groups(kv, block_size, KvDtype::F16).unwrap_err().to_string()
        };
        assert!(error(&kv(63), 16).contains("heads of 63 elements"));
        assert!(error(&kv(64), 24).contains("pages of 24 tokens"));
        assert!(error(&kv(64), 0).contains("pages of 0 tokens"));
    }
}

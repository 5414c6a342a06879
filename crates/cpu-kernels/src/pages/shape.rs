//! Sizes inside a page.

use half::f16;
use paguro_backend::{KV_BLOCK, KvDtype, KvGroup, KvLayout, LoadError};

use crate::simd::LANES;

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
    pub layer_slots: usize,
    /// Type of stored K and V.
    pub dtype: KvDtype,
}

/// K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Keys.
    K,
    /// Values.
    V,
}

impl PageShape {
    /// Returns the shapes of a program's pages, by group.
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
            let KvGroup { window: _, spans: _, layer_slots, kv_heads, head_dim } = *group;
            if !head_dim.is_multiple_of(2) {
                return Err(LoadError::Unsupported {
                    device: "cpu".into(),
                    what: format!("attention heads of {head_dim} elements (head_dim)"),
                    supported: "even sizes work".into(),
                });
            }
            Ok(Self { block_size, head_dim, kv_heads, layer_slots, dtype })
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

    /// Returns the number of bytes in front of a tile's elements: scales, in whole cache lines.
    pub fn scale_bytes(&self) -> usize {
        match self.dtype {
            KvDtype::F16 => 0,
            KvDtype::Q8 | KvDtype::Q4 => (self.blocks() * LANES * size_of::<f16>()).next_multiple_of(64),
        }
    }

    /// Returns the number of bytes of K, or V, of 16 tokens of one head: whole cache lines.
    pub fn tile_bytes(&self) -> usize {
        let bits = match self.dtype {
            KvDtype::F16 => 16,
            KvDtype::Q8 => 8,
            KvDtype::Q4 => 4,
        };
        self.scale_bytes() + self.padded_dim() * LANES * bits / 8
    }

    /// Returns the number of bytes of K, and of V, of one head in one page.
    pub fn half_bytes(&self) -> usize {
        self.block_size / LANES * self.tile_bytes()
    }

    /// Returns the number of bytes that the group needs of a page.
    fn used_bytes(&self) -> usize {
        self.layer_slots * self.kv_heads * 2 * self.half_bytes()
    }

    /// Returns the number of bytes of a page that any of the groups may use. The pages of a sequence are read at one
    /// place each, one page after the other: if they were a large power of two apart, all of these places would compete
    /// for the same few cache sets.
    pub fn page_bytes(groups: &[Self]) -> usize {
        let bytes = groups.iter().map(Self::used_bytes).max().unwrap_or(0);
        if bytes.is_multiple_of(1 << 14) { bytes + (1 << 12) } else { bytes }
    }

    /// Returns the byte at which element `dim` of a token is in its head's K or V. With four bits, see
    /// [`Self::is_high`].
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
    pub(super) fn is_high(half: Half, dim: usize) -> bool {
        let together = if half == Half::K { 4 } else { LANES };
        dim / together % 2 == 1
    }

    /// Returns the byte at which a block's scale of a token is in its head's K or V.
    pub fn scale_at(&self, token: usize, block: usize) -> usize {
        let (tile, token) = (token / LANES, token % LANES);
        tile * self.tile_bytes() + size_of::<f16>() * (block * LANES + token)
    }
}

//! Arrangement of a page of K, or of V, of one layer on the device (`page_words` is the distance of two pages), such
//! that neighbouring threads read neighbouring 16 bytes, or 8.
//!
//! ```text
//! page = [kv_head] { numbers, scales }
//!
//! f16: K = [DIM / 8][PAGE] of eight dimensions   V = [PAGE][DIM / 4] of four dimensions
//!      K = [DIM / 16][PAGE] of 16 dimensions     V = [PAGE / 16][DIM] of 16 tokens, for attend_few.wgsl
//! q8:  K = [DIM / 16][PAGE] of 16 dimensions     V = [PAGE / 4][DIM / 4] of four tokens with four dimensions each
//! q4:  K = [DIM / 32][PAGE] of 32 dimensions     V = [PAGE / 4][DIM / 8] of four tokens with eight dimensions each
//!      scales of both = [DIM / 64][PAGE] of two f16, each for 32 dimensions
//! ```
//!
//! Fractions are rounded up, and V of eight or four bits takes as many bytes as K. A word of four-bit quants, each raised by 8, has
//! four dimensions in the low halves of its bytes and the next four in the high halves. Each word has numbers of one token only, so that
//! workgroups that store different tokens never write the same word; where V has 16 tokens of a dimension, it is stored in halves.

use paguro_backend::{KvDtype, KvSlot, Program};

use crate::heads::{KvGroup, KvLayout};

/// Words of one token's K, or V, of one head.
pub fn head_words(head_dim: usize, dtype: KvDtype) -> usize {
    match dtype {
        KvDtype::F16 => head_dim / 2,
        KvDtype::Q8 => 4 * head_dim.div_ceil(16) + head_dim.div_ceil(64),
        KvDtype::Q4 => 4 * head_dim.div_ceil(32) + head_dim.div_ceil(64),
    }
}

/// Words of a page of K, or of V, of one layer of a group.
fn layer_words(group: &KvGroup, block_size: usize, dtype: KvDtype) -> usize {
    group.kv_heads * block_size * head_words(group.head_dim, dtype)
}

/// Words of a page in one buffer: of a layer of the group whose layers need most. Layers that need less share a buffer.
pub fn page_words(kv: &KvLayout, block_size: usize, dtype: KvDtype) -> usize {
    kv.groups.iter().map(|group| layer_words(group, block_size, dtype)).max().unwrap_or(0)
}

/// Layers of a group that share a buffer.
fn sharing(kv: &KvLayout, group: &KvGroup, block_size: usize, dtype: KvDtype) -> usize {
    page_words(kv, block_size, dtype) / layer_words(group, block_size, dtype).max(1)
}

/// Buffers of K, and of V.
pub fn buffers(kv: &KvLayout, block_size: usize, dtype: KvDtype) -> usize {
    let of = |group: &KvGroup| group.layer_slots.div_ceil(sharing(kv, group, block_size, dtype).max(1));
    kv.groups.iter().map(of).max().unwrap_or(0)
}

/// Returns the buffer of a layer slot, and its first word in each page.
pub fn place(kv: &KvLayout, kv_slot: KvSlot, block_size: usize, dtype: KvDtype) -> (usize, usize) {
    let group = &kv.groups[kv_slot.group];
    let sharing = sharing(kv, group, block_size, dtype);
    (kv_slot.layer_slot / sharing, kv_slot.layer_slot % sharing * layer_words(group, block_size, dtype))
}

/// Returns true if pages of these groups are arranged alike.
pub fn alike(one: &KvGroup, other: &KvGroup) -> bool {
    (one.kv_heads, one.head_dim) == (other.kv_heads, other.head_dim)
}

/// Returns true if pages have contents of several kinds: states, or quants of several arrangements, where some bytes are
/// scales and numbers of another arrangement may be NaN.
pub fn have_kinds(program: &Program, kv: &KvLayout, dtype: KvDtype) -> bool {
    let groups = &kv.groups;
    !program.state.is_empty() || dtype.is_quantized() && groups.iter().any(|group| !alike(group, &groups[0]))
}

/// Bytes of a page: K and V of all layers.
pub fn page_bytes(kv: &KvLayout, block_size: usize, dtype: KvDtype) -> usize {
    buffers(kv, block_size, dtype) * 2 * 4 * page_words(kv, block_size, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_no_larger_than_what_is_in_them() {
        for head_dim in [64, 128, 192, 256] {
            for dtype in KvDtype::ALL {
                assert_eq!(4 * head_words(head_dim, dtype), dtype.head_bytes(head_dim));
            }
        }
        assert_eq!([80, 96, 112].map(|dim| 4 * head_words(dim, KvDtype::Q8)), [88, 104, 120]);
    }
}

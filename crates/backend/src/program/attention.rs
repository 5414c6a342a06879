//! Attention, and the arrangement of K and V in pages.

use std::ops::Range;

use super::{Linear, Norm, VectorId};
use crate::KvDtype;

/// ```text
/// h = norm(x)                      q, k, v = h·Wᵀ + b
/// q, k = qk_norm(rope(..))         either order, see QkNormKind
/// v = v_norm(v)                    q = q * position_scale           k and v go into the pages
/// a = softmax(q·Kᵀ * scale)·V      over the block table; see reference::attention
/// a = a ⊙ sigmoid(h·Wgateᵀ + b)    if there is a gate
/// x += branch_scale * post_norm(a·Wᵀ + b)
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
    /// Norm of the residual stream, `[hidden]`; `None` where only the branch's output is normed (OLMo 2).
    pub norm: Option<Norm>,
    /// Query heads: a multiple of the group's [`KvGroup::kv_heads`]; consecutive ones share a K/V head.
    pub heads: usize,
    /// `[heads * head_dim, hidden]`
    pub q: Linear,
    /// `[kv_heads * head_dim, hidden]`; `None` reads the K and V that an earlier layer has stored at [`Attention::kv`]
    /// (Gemma 4), or those of [another program](crate::Program::shares_pages).
    pub k: Option<Linear>,
    /// `[kv_heads * head_dim, hidden]`; `None` uses K as it is before its norm and rotation (Gemma 4).
    pub v: Option<Linear>,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Norm of each head of V, `[head_dim]` (Gemma 4).
    pub v_norm: Option<Norm>,
    /// Index into [`Program::ropes`](crate::Program::ropes); `None` in layers without positions (SmolLM3).
    pub rope: Option<usize>,
    /// Multiplies queries by a function of their position.
    pub position_scale: Option<PositionScale>,
    /// Multiplies scores, positive, usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// `cap * tanh(score / cap)` after scaling (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Added to scores by the distance of query and key (ALiBi, MPNet).
    pub distance_bias: Option<DistanceBias>,
    /// One additional score per head, `[heads]`, which is a term of the softmax and has no value (gpt-oss).
    pub sinks: Option<VectorId>,
    /// Slot of K and V; the group has their shape and the window.
    pub kv: KvSlot,
    /// Gate of the output, `[heads * head_dim, hidden]` (Qwen 3.5).
    pub gate: Option<Linear>,
    /// `[hidden, heads * head_dim]`
    pub out: Linear,
    /// Norm of the output before it is added (Gemma 2 and 3, OLMo 2).
    pub post_norm: Option<Norm>,
}

/// A score of head `h`, scaled and capped, gains `table[h][reach + key position - query position]`.
#[derive(Clone, Copy, Debug)]
pub struct DistanceBias {
    /// `[heads, 2 * reach + 1]`
    pub table: VectorId,
    /// Largest distance; no sequence may have more than `reach + 1` tokens.
    pub reach: usize,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm {
    /// Norm of queries, see [`QkNormKind`] for its width.
    pub q: Norm,
    /// Norm of keys; unused in a layer that reads another layer's keys.
    pub k: Norm,
    /// Width and position of the norm.
    pub kind: QkNormKind,
}

/// Width and position of a [`QkNorm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNormKind {
    /// Each head by itself, `[head_dim]`, before RoPE (Qwen 3, Gemma 3).
    Head,
    /// Each head by itself, `[head_dim]`, after RoPE (Hunyuan).
    HeadAfterRope,
    /// The whole row of a matrix, `[heads * head_dim]`, before RoPE (OLMo 2, MiniMax M2).
    Row,
}

/// A query at position `p` is multiplied by `1 + beta * ln(1 + floor(p / original))`, after RoPE (Ministral 3).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionScale {
    /// Slope.
    pub beta: f32,
    /// Context of the first training, in tokens, at least one.
    pub original: u32,
}

/// Arrangement of K and V of all layers in pages.
///
/// A page holds `block_size` tokens of K and V for all layers of *one group* of one sequence. Layers of a group have
/// heads of one shape and the same window, so that pages of a sliding-window group can be released while other groups
/// keep theirs. All pages have the same size, and all groups share one arena and one free list, so the layers of a
/// group should fill its pages. A model without alternating windows has one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// The groups; a sequence has one block table for each.
    pub groups: Vec<KvGroup>,
}

/// Layers that share pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGroup {
    /// A query at position `p` attends to keys at positions `> p - window`, and `<= p` or, in a
    /// [bidirectional](crate::Program::bidirectional) program, `< p + window`; `None` to all.
    pub window: Option<u32>,
    /// True if rows of a [span](crate::Step::spans) also see its later rows (Gemma 3, images) or, in a bidirectional program, see
    /// no row outside of their span (Qwen2.5-VL, windows of images).
    pub spans: bool,
    /// Layer slots in a page.
    pub layer_slots: usize,
    /// K/V heads of each layer.
    pub kv_heads: usize,
    /// Elements of one head, of K and of V.
    pub head_dim: usize,
}

/// Slot of a layer's K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSlot {
    /// Index into [`KvLayout::groups`].
    pub group: usize,
    /// Layer slot inside the group's pages, `< KvGroup::layer_slots`.
    pub layer_slot: usize,
}

/// A rotary position embedding, reduced to one frequency per rotated pair. Linear, llama3, YaRN and longrope scaling
/// only change these numbers, so backends do not distinguish them.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Elements of a pair.
    pub style: RopeStyle,
    /// Radians per position of each pair, `[rotated_dims / 2]`; elements past the rotated ones pass unchanged.
    pub frequencies: Vec<f32>,
    /// Index into a row's [coordinates](crate::Step::coordinates) for each pair (Qwen's M-RoPE, in sections or interleaved). Empty if
    /// all pairs are rotated by the position.
    pub axes: Vec<u8>,
    /// Multiplies both sine and cosine (YaRN's and longrope's attention factor; one elsewhere).
    pub magnitude: f32,
}

/// Pairs of elements that RoPE rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(0, 1), (2, 3), ...`: the original order, and that of GGUF files of the Llama family.
    Interleaved,
    /// `(0, n/2), (1, n/2 + 1), ...`: the order of Hugging Face's files and of NeoX.
    HalfSplit,
}

impl KvLayout {
    /// Returns the number of elements of K and V in one page: those of the largest group.
    pub fn page_elements(&self, block_size: usize) -> usize {
        self.groups.iter().map(|group| group.layer_slots * 2 * group.width() * block_size).max().unwrap_or(0)
    }

    /// Returns the number of bytes of K and V in one page, before any padding of the backend's.
    pub fn page_bytes(&self, block_size: usize, dtype: KvDtype) -> usize {
        self.groups
            .iter()
            .map(|group| group.layer_slots * group.token_bytes(dtype) * block_size)
            .max()
            .unwrap_or(0)
    }
}

/// Returns the positions of the keys to which a query at `position` attends, see [`KvGroup::window`]. `len` is the number of tokens
/// that rows [see in any order](crate::Program::seen_tokens), in programs that have such rows only. `spans` are the positions of the sequence's
/// spans, in a group that [sees](KvGroup::spans) them only. Neither end of the result decreases from one position to the next.
pub fn visible(
    window: Option<u32>,
    len: Option<usize>,
    spans: Option<&[Range<usize>]>,
    position: usize,
) -> Range<usize> {
    let window = window.map(|window| window as usize);
    let start = window.map_or(0, |window| (position + 1).saturating_sub(window));
    let span = spans.map(|spans| {
        let next = spans.partition_point(|span| span.end <= position);
        spans.get(next).filter(|span| span.start <= position).cloned().unwrap_or(position..position + 1)
    });
    match (len, span) {
        (None, None) => start..position + 1,
        (None, Some(span)) => start..span.end,
        (Some(len), span) => {
            let end = window.map_or(len, |window| len.min(position.saturating_add(window)));
            span.map_or(start..end, |span| start.max(span.start)..end.min(span.end))
        }
    }
}

impl KvGroup {
    /// Returns the number of elements of a token's K, or V, in one layer.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the number of bytes of a token's K and V in one layer.
    pub fn token_bytes(&self, dtype: KvDtype) -> usize {
        2 * self.kv_heads * dtype.head_bytes(self.head_dim)
    }
}

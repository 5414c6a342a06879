//! Attention with a defect.

use paguro_backend::reference::{AttentionShape, HeadVectors, attention};

pub(super) fn no_sinks(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    attention(q, k, v, HeadVectors { sinks: None, ..vectors }, shape, out);
}

/// Rows that see the tokens before them also see what is in the slot of their own.
pub(super) fn own_slot(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    let has_slot = (shape.start + 1) * shape.kv_heads * shape.head_dim <= k.len();
    attention(q, k, v, vectors, &AttentionShape { len: shape.len.filter(|_| !has_slot), ..*shape }, out);
}

pub(super) fn no_window(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    attention(q, k, v, vectors, &AttentionShape { window: None, ..*shape }, out);
}

pub(super) fn window_plus_one(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    attention(
        q,
        k,
        v,
        vectors,
        &AttentionShape { window: shape.window.map(|window| window + 1), ..*shape },
        out,
    );
}

pub(super) fn window_minus_one(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    attention(
        q,
        k,
        v,
        vectors,
        &AttentionShape { window: shape.window.map(|window| (window - 1).max(1)), ..*shape },
        out,
    );
}

pub(super) fn no_cap(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    attention(q, k, v, vectors, &AttentionShape { soft_cap: None, ..*shape }, out);
}

/// Computes attention row by row, each at a position that `position` returns for a row's position, the end of the rows and
/// the number of tokens in the pages.
fn by_rows(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
    position: fn(usize, usize, usize) -> usize,
) {
    let width = shape.heads * shape.head_dim;
    let (rows, tokens) = (q.len() / width, k.len() / (shape.kv_heads * shape.head_dim));
    for (row, (q, out)) in q.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
        let start = position(shape.start + row, shape.start + rows, tokens);
        attention(q, k, v, vectors, &AttentionShape { start, ..*shape }, out);
    }
}

pub(super) fn too_far(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    by_rows(q, k, v, vectors, shape, out, |position, _, tokens| (position + 1).min(tokens - 1));
}

pub(super) fn not_causal(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    by_rows(q, k, v, vectors, shape, out, |_, end, _| end - 1);
}

/// Query head `h` reads K/V head `h % kv_heads`.
pub(super) fn wrong_heads(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
    let place = |index: usize| {
        let (row, head) = (index / heads, index % heads);
        row * heads + head % kv_heads * (heads / kv_heads) + head / kv_heads
    };
    let mut moved = vec![0.0; q.len()];
    for (index, q) in q.chunks_exact(head_dim).enumerate() {
        moved[place(index) * head_dim..][..head_dim].copy_from_slice(q);
    }
    let mut answer = vec![0.0; q.len()];
    attention(&moved, k, v, vectors, shape, &mut answer);
    for (index, out) in out.chunks_exact_mut(head_dim).enumerate() {
        out.copy_from_slice(&answer[place(index) * head_dim..][..head_dim]);
    }
}

pub(super) fn skips_page_starts(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    let mut v = v.to_vec();
    for page in v.chunks_mut(16 * shape.kv_heads * shape.head_dim).skip(1) {
        page[..shape.kv_heads * shape.head_dim].fill(0.0);
    }
    attention(q, k, &v, vectors, shape, out);
}

pub(super) fn spans_without_window(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape<'_>,
    out: &mut [f32],
) {
    let window = shape.window.filter(|_| shape.spans.is_none_or(<[_]>::is_empty));
    attention(q, k, v, vectors, &AttentionShape { window, ..*shape }, out);
}

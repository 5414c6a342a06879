//! Defects of quantized pages: roundings of one head.

use std::cell::Cell;

use paguro_backend::{KV_BLOCK, KvDtype, quantize_kv};

/// Quantizes a block to eight bits with this scale, rounded by `round`.
fn to_scale(block: &mut [f32], scale: f32, round: fn(f32) -> f32) {
    block.iter_mut().for_each(|x| *x = if scale == 0.0 { 0.0 } else { round(*x / scale) * scale });
}

fn scale_of(block: &[f32]) -> f32 {
    quantize_kv(KvDtype::Q8, block, &mut vec![0; block.len()]).to_f32()
}

pub(super) fn untransformed(head: &mut [f32]) {
    head.chunks_mut(KV_BLOCK).for_each(|block| to_scale(block, scale_of(block), f32::round_ties_even));
}

pub(super) fn one_scale(head: &mut [f32]) {
    to_scale(head, scale_of(head), f32::round_ties_even);
}

pub(super) fn toward_zero(head: &mut [f32]) {
    head.chunks_mut(KV_BLOCK).for_each(|block| to_scale(block, scale_of(block), f32::trunc));
}

pub(super) fn wraps(head: &mut [f32]) {
    let round = |x: f32| f32::from(x.round() as i32 as i8);
    head.chunks_mut(KV_BLOCK).for_each(|block| to_scale(block, scale_of(block) * (127.0 / 128.0), round));
}

pub(super) fn remembers(head: &mut [f32]) {
    thread_local!(static LAST: Cell<f32> = const { Cell::new(0.0) });
    for block in head.chunks_mut(KV_BLOCK) {
        let scale = scale_of(block).max(0.9 * LAST.get());
        to_scale(block, scale, f32::round_ties_even);
        LAST.set(scale);
    }
}

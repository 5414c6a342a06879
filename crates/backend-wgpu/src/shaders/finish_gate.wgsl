// Computes activation(gate) * up, [OUTPUTS / 2], from the interleaved results of a matmul in a step of one row, or of a row and one
// of its EXPERTS. With EMBED, all results are gates, and `up` is a row of embeddings, [OUTPUTS].
//% provides finish prefetch needs activated publish
//% if HANDOFF
fn put(at: u32, value: f32) { publish(GATED_AT + at, bitcast<u32>(value)); }
//% else
@group(0) @binding(10) var<storage, read_write> gated: array<f32>; // [8, ACT_BLOCKS, 4]

//% if EXPERTS
var<private> gated_from: u32;

fn put(at: u32, value: f32) { gated[gated_from + at] = value; }
//% else
fn put(at: u32, value: f32) { gated[at] = value; }
//% end
//% end

fn put_gated(i: u32, value: f32) {
  put((i % 32u / 4u * ACT_BLOCKS + i / 32u) * 4u + i % 4u, value);
}

//% if EMBED
@group(0) @binding(8) var<storage, read> up: array<f32>; // [rows, embeddings]

fn prefetch(tid: u32, first: u32) -> f32 {
  return up[UP_FIRST + min(first + tid, OUTPUTS - 1u)];
}

fn finish(tid: u32, first: u32, prefetched: f32) {
  if (tid < TILE && first + tid < OUTPUTS) { put_gated(first + tid, activated(totals[tid], prefetched)); }
}
//% else
fn prefetch(tid: u32, first: u32) -> u32 {
  return 0u;
}

fn finish(tid: u32, first: u32, prefetched: u32) {
  let i = first / 2u + tid;
  if (tid < TILE / 2u && 2u * i < OUTPUTS) { put_gated(i, activated(totals[2u * tid], totals[2u * tid + 1u])); }
}
//% end

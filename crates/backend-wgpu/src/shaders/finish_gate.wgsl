// Computes activation(gate) * up, [OUTPUTS / 2], from the interleaved results of a matmul in a step of one row.
//% if HANDOFF
fn put(at: u32, value: f32) { publish(GATED_AT + at, bitcast<u32>(value)); }
//% else
@group(0) @binding(10) var<storage, read_write> gated: array<f32>; // [8, ACT_BLOCKS, 4]

fn put(at: u32, value: f32) { gated[at] = value; }
//% end

fn prefetch(tid: u32, first: u32) -> u32 {
  return 0u;
}

fn finish(tid: u32, first: u32, prefetched: u32) {
  let i = first / 2u + tid;
  if (tid < TILE / 2u && 2u * i < OUTPUTS) {
    put((i % 32u / 4u * ACT_BLOCKS + i / 32u) * 4u + i % 4u, activated(totals[2u * tid], totals[2u * tid + 1u]));
  }
}

// Prepares queries of latent attention: activations for the absorbed matrices, and the elements with RoPE in `queries`.
// One workgroup has one head of a row.
//% needs angle by_position emit rotated_by stage
@group(0) @binding(0) var<storage, read> q: array<f32>;             // [rows, HEADS, PLAIN + ROTATED]
@group(0) @binding(1) var<storage, read_write> queries: array<f32>; // [rows, HEADS, DIM]

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let place = wid.y * HEADS + wid.x;
  let position = step[args.positions + wid.y];
  let factor = by_position(position);
  let plain = place * (PLAIN + ROTATED);
  for (var i = tid; i < ACT_BLOCKS * 32u; i += 64u) {
    stage(i, select(0.0, q[plain + min(i, PLAIN - 1u)] * factor, i < PLAIN));
  }
  let from_ = plain + PLAIN;
  let to = place * DIM + LATENT;
  for (var i = 2u * PAIRS + tid; i < DIM - LATENT; i += 64u) {
    queries[to + i] = select(0.0, q[from_ + min(i, ROTATED - 1u)] * factor, i < ROTATED);
  }
//% if PAIRS
  for (var pair = tid; pair < PAIRS; pair += 64u) {
//% if INTERLEAVED
    let first = 2u * pair;
    let second = first + 1u;
//% else
    let first = pair;
    let second = pair + PAIRS;
//% end
    let both = rotated_by(vec2<f32>(q[from_ + first], q[from_ + second]), angle(wid.y, position, pair));
    queries[to + first] = both.x * factor;
    queries[to + second] = both.y * factor;
  }
//% end
  workgroupBarrier();
  for (var block = tid; block < ACT_BLOCKS; block += 64u) { emit(place, block, block, 1.0); }
}

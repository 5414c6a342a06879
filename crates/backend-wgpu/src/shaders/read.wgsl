// Reads a buffer, [VECS], and discards it. This speed is the ceiling of kernels that are bound by memory.
@group(0) @binding(0) var<storage, read> data: array<vec4<u32>>; // [VECS]
@group(0) @binding(1) var<storage, read_write> sink: array<vec4<u32>>;
//% if PIECE
// Pieces of PIECE vectors are read in this order.
@group(0) @binding(2) var<storage, read> order: array<u32>; // [VECS / PIECE]

fn vec_at(i: u32) -> vec4<u32> {
  return data[order[i / PIECE] * PIECE + i % PIECE];
}
//% else

fn vec_at(i: u32) -> vec4<u32> {
  return data[i];
}
//% end

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  var all = vec4<u32>(0u);
  for (var i = id.x; i + 3u * STRIDE < VECS; i += 4u * STRIDE) {
    all ^= vec_at(i) ^ vec_at(i + STRIDE) ^ vec_at(i + 2u * STRIDE) ^ vec_at(i + 3u * STRIDE);
  }
  // This is never true, but the compiler cannot know it.
  if (all.x == 0x12345678u && all.y == 0x9abcdef0u) { sink[0] = all; }
}

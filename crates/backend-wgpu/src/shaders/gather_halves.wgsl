// Copies half-precision activations of rows to their places (`route_tiles.wgsl`), in the layout of cooperative
// matrices. One thread copies eight elements.
@group(0) @binding(0) var<storage, read> from_halves: array<vec4<u32>>;       // from HALVES_AT on, see `put_halves` in emit.wgsl
@group(0) @binding(1) var<storage, read_write> to_halves: array<vec4<u32>>;   // see `put_halves`
@group(0) @binding(2) var<storage, read> sources: array<u32>;                 // [places] row of each place
@group(0) @binding(3) var<storage, read> tile_experts: array<u32>;            // [places / TILE]

fn eight_at(row: u32, block: u32, i: u32) -> u32 {
  return ((row / 16u * ACT_BLOCKS + block) * 32u + row % 16u) * 2u + i / 2u * 32u + i % 2u;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let place = wid.y;
  let eight = wid.x * 64u + tid;
  if (tile_experts[place / TILE] == NO_EXPERT || eight >= 4u * ACT_BLOCKS) { return; }
  to_halves[eight_at(place, eight / 4u, eight % 4u)] = from_halves[HALVES_AT + eight_at(sources[place], eight / 4u, eight % 4u)];
}

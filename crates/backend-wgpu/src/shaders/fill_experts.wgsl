// Copies experts from the host's memory to their places (`place_experts.wgsl`), plane by plane. Workgroup (x, y) copies a
// share of the y-th expert of the list, if both bindings have it: experts FROM_FIRST.. and places TO_FIRST...
@group(0) @binding(0) var<storage, read> fills: array<u32>; // number of copies; then the expert and the place of each
//% for p in 0..PLANES
//% if WIDE_${p}
@group(0) @binding(1${p}) var<storage, read> from_${p}: array<vec4<u32>>;     // [experts, UNITS_${p}]
@group(0) @binding(2${p}) var<storage, read_write> to_${p}: array<vec4<u32>>; // [places, UNITS_${p}]
//% else
@group(0) @binding(1${p}) var<storage, read> from_${p}: array<u32>;     // [experts, UNITS_${p}]
@group(0) @binding(2${p}) var<storage, read_write> to_${p}: array<u32>; // [places, UNITS_${p}]
//% end
//% end

const STEP = WORKGROUPS * 256u;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  if (wid.y >= fills[0]) { return; }
  let expert = fills[1u + 2u * wid.y] - FROM_FIRST;
  let place = fills[2u + 2u * wid.y] - TO_FIRST;
  if (expert >= FROM_HELD || place >= TO_HELD) { return; }
//% for p in 0..PLANES
  // Four loads are on their way at a time, because each takes about a microsecond.
  for (var i = wid.x * 256u + tid; i < UNITS_${p}; i += 4u * STEP) {
//% for k in 0..4
    let unit_${k} = from_${p}[expert * UNITS_${p} + min(i + ${k}u * STEP, UNITS_${p} - 1u)];
//% end
//% for k in 0..4
    if (i + ${k}u * STEP < UNITS_${p}) { to_${p}[place * UNITS_${p} + i + ${k}u * STEP] = unit_${k}; }
//% end
  }
//% end
}

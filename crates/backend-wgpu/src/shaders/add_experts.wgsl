// Adds the weighted results of a row's experts (CHOSEN), in ascending order of their ids, or one result for each row, to the result
// of the shared expert: out [rows, WIDTH]. One thread computes one element.
@group(0) @binding(0) var<storage, read> results: array<f32>;      // [places, WIDTH] results of experts, or [rows, WIDTH]
//% if CHOSEN
@group(0) @binding(1) var<storage, read> weights: array<f32>;      // [rows, USED] weights of experts
//% end
@group(0) @binding(2) var<storage, read_write> out: array<f32>;    // [rows, WIDTH]
//% if TILED
@group(0) @binding(3) var<storage, read> places: array<u32>;       // [rows, USED] see route_tiles.wgsl
//% end
//% if SHARED_EXPERT
@group(0) @binding(4) var<storage, read> shared_out: array<f32>;   // [rows, WIDTH]
//% end
//% if OUTPUT_GATE
@group(0) @binding(5) var<storage, read> output_gate: array<f32>;  // [rows]
//% end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let i = wid.x * 256u + tid;
  if (i >= WIDTH) { return; }
  var y = 0.0;
//% if SHARED_EXPERT
  y = shared_out[row * WIDTH + i];
//% end
//% if OUTPUT_GATE
  y /= 1.0 + exp(-output_gate[row]);
//% end
//% if CHOSEN
  for (var j = row * USED; j < (row + 1u) * USED; j++) {
//% if TILED
    let place = places[j];
//% else
    let place = j;
//% end
    y = fma(weights[j], results[place * WIDTH + i], y);
  }
//% else
  y += results[row * WIDTH + i];
//% end
//% if ADD
  out[row * WIDTH + i] = fma(y, SCALE, out[row * WIDTH + i]);
//% else
  out[row * WIDTH + i] = y;
//% end
}

// Computes rows from others, out [rows, OUT_STRIDE] from x [rows * JOINED, IN_STRIDE], with one thread for each of WIDTH elements.
// - With MEAN, a row is the mean of JOINED rows, times SCALE.
// - With AFFINE, it is x * scale + bias.
// - With ACTIVATES, it is the activation of x; with GATED, the activation of a gate times x.
// - With CLAMPS, it is x within bounds.
// - With ADDS, x is added to it.
//% needs activated activation
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
//% if AFFINE
@group(0) @binding(2) var<storage, read> scales: array<f32>; // [WIDTH]
@group(0) @binding(3) var<storage, read> biases: array<f32>; // [WIDTH]
//% end
//% if GATED
@group(0) @binding(2) var<storage, read> gate: array<f32>; // [rows, GATE_STRIDE]
//% end
//% if CLAMPS
@group(0) @binding(2) var<storage, read> bounds: array<f32>; // least, greatest
//% end

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= WIDTH) { return; }
  let to = id.y * OUT_STRIDE + OUT_FIRST + i;
//% if MEAN
  var sum = 0.0;
  for (var j = 0u; j < JOINED; j++) { sum += x[(id.y * JOINED + j) * IN_STRIDE + IN_FIRST + i]; }
  out[to] = sum / f32(JOINED) * SCALE;
//% else
  let own = x[id.y * IN_STRIDE + IN_FIRST + i];
//% if AFFINE
  out[to] = fma(own, scales[i], biases[i]);
//% else
//% if ACTIVATES
  out[to] = activation(own);
//% else
//% if GATED
  out[to] = activated(gate[id.y * GATE_STRIDE + i], own);
//% else
//% if CLAMPS
  out[to] = min(max(own, bounds[0]), bounds[1]);
//% else
//% if ADDS
  out[to] += own;
//% else
  out[to] = own;
//% end
//% end
//% end
//% end
//% end
//% end
}

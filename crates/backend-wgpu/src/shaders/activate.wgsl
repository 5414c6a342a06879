// g = activation(gate) * up, and what the next product wants of it; a workgroup for eight blocks.
@group(0) @binding(0) var<storage, read> gate: array<f32>; // [rows, GATE_STRIDE]
@group(0) @binding(1) var<storage, read> up: array<f32>;   // [rows, UP_STRIDE]

fn activation(x: f32) -> f32 {
//% if GELU
  let inner = 0.7978845608028654 * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1.0 + tanh(clamp(inner, -15.0, 15.0)));
//% else
  return x / (1.0 + exp(-x));
//% end
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let first = wid.x * 256u;
  for (var j = tid; j < 256u; j += 64u) {
    let i = first + j;
    var value = 0.0;
    if (i < WIDTH) {
      value = activation(gate[row * GATE_STRIDE + i]) * up[row * UP_STRIDE + UP_FIRST + i];
    }
    stage(j, value);
  }
  workgroupBarrier();
  if (tid < 8u && first / 32u + tid < ACT_BLOCKS) { emit(row, first / 32u + tid, tid); }
}

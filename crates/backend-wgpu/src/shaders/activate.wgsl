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
//% for s in 0..4
  let i_${s} = first + ${s}u * 64u + tid;
  let gate_${s} = gate[row * GATE_STRIDE + min(i_${s}, WIDTH - 1u)];
  let up_${s} = up[row * UP_STRIDE + UP_FIRST + min(i_${s}, WIDTH - 1u)];
//% end
//% for s in 0..4
  stage(${s}u * 64u + tid, select(0.0, activation(gate_${s}) * up_${s}, i_${s} < WIDTH));
//% end
  workgroupBarrier();
  if (tid < 8u && first / 32u + tid < ACT_BLOCKS) { emit(row, first / 32u + tid, tid); }
}

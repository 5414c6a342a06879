// Computes activation(gate) * up, or activation(up) without a gate, [rows, WIDTH], as activations of the next matmul
// (emit.wgsl). One workgroup computes eight blocks of 32 of a row. Consecutive elements of `gate` and `up` are EACH
// apart.
//% needs activated activation emit stage
//% if GATED
@group(0) @binding(0) var<storage, read> gate: array<f32>; // [rows, GATE_STRIDE]
//% end
@group(0) @binding(1) var<storage, read> up: array<f32>;   // [rows, UP_STRIDE]
//% if TILED
@group(0) @binding(2) var<storage, read> tile_experts: array<u32>; // [rows / TILE], see route_tiles.wgsl
//% end

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
//% if TILED
  if (tile_experts[row / TILE] == NO_EXPERT) { return; }
//% end
  let first = wid.x * 256u;
//% for s in 0..4
  let i_${s} = first + ${s}u * 64u + tid;
//% if GATED
  let gate_${s} = gate[row * GATE_STRIDE + EACH * min(i_${s}, WIDTH - 1u)];
//% end
  let up_${s} = up[row * UP_STRIDE + UP_FIRST + EACH * min(i_${s}, WIDTH - 1u)];
//% end
//% for s in 0..4
//% if GATED
  stage(${s}u * 64u + tid, select(0.0, activated(gate_${s}, up_${s}), i_${s} < WIDTH));
//% else
  stage(${s}u * 64u + tid, select(0.0, activation(up_${s}), i_${s} < WIDTH));
//% end
//% end
  workgroupBarrier();
  if (tid < 8u && first / 32u + tid < ACT_BLOCKS) { emit(row, first / 32u + tid, tid, 1.0); }
}

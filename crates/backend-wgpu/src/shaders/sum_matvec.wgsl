// Computes a matmul of one row with the matrices of each of its experts, and adds the results with the experts' weights,
// [OUTPUTS], with the sums of matvec.wgsl and the order of sum_experts.wgsl. A workgroup has TILE outputs, of which a group
// of 32 threads has OUTS, and `finish` stores them.
//% provides result_at needs accumulate finish load_acts load_block make_acts place_of_expert prefetch sum_of_experts
@group(0) @binding(20) var<storage, read> chosen: array<u32>; // [EXPERTS_OF_ROW]
//% if BIAS
@group(0) @binding(6) var<storage, read> bias: array<f32>;    // [experts, OUTPUTS]
//% end

const TILE = THREADS / 32u * OUTS;
var<workgroup> sums: array<f32, TILE * EXPERTS_OF_ROW * 33u>;
var<workgroup> results_of: array<f32, TILE * EXPERTS_OF_ROW>; // [TILE, EXPERTS_OF_ROW]
var<workgroup> totals: array<f32, TILE>;

// Accessor for sum_experts.wgsl.
fn result_at(place: u32, i: u32) -> f32 {
  return results_of[i % TILE * EXPERTS_OF_ROW + place];
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let lane = tid % 32u;
  let group = tid / 32u;
  let first = wid.y * TILE;
  let output = first + group * OUTS;
  // The weights of a lane's first block are loaded before activations are ready.
//% for e in 0..EXPERTS_OF_ROW
  let stack_${e} = place_of_expert(chosen[${e}u]) * OUTPUTS;
//% for o in 0..OUTS
  let from_${e}_${o} = stack_${e} + min(output + ${o}u, OUTPUTS - 1u);
  let early_${e}_${o} = load_block(from_${e}_${o}, min(lane, BLOCKS - 1u));
//% end
//% end
  let prefetched = prefetch(tid, first);
//% if OWN_ACTS
  make_acts(tid, 0u);
//% end
//% for e in 0..EXPERTS_OF_ROW
//% for o in 0..OUTS
  {
    var acc = 0.0;
    if (lane < BLOCKS) { acc = accumulate(acc, early_${e}_${o}, load_acts(${e}u, lane)); }
    for (var block = lane + 32u; block < BLOCKS; block += 32u) {
      acc = accumulate(acc, load_block(from_${e}_${o}, block), load_acts(${e}u, block));
    }
    sums[((group * OUTS + ${o}u) * EXPERTS_OF_ROW + ${e}u) * 33u + lane] = acc;
  }
//% end
//% end
  workgroupBarrier();
  for (var n = tid; n < TILE * EXPERTS_OF_ROW; n += THREADS) {
    var total = 0.0;
    for (var l = 0u; l < 32u; l++) { total += sums[n * 33u + l]; }
//% if BIAS
    total += bias[chosen[n % EXPERTS_OF_ROW] * OUTPUTS + min(first + n / EXPERTS_OF_ROW, OUTPUTS - 1u)];
//% end
    results_of[n] = total;
  }
  workgroupBarrier();
  if (tid < TILE) { totals[tid] = sum_of_experts(0u, min(first + tid, OUTPUTS - 1u)); }
  workgroupBarrier();
  finish(tid, first, prefetched);
}

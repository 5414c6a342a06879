// Applies skip connection, gate and norm to the results of a scan of Mamba-2, [rows, WIDTH], and writes activations of
// the next matmul. Each NORM_GROUP of elements has its own norm. One workgroup computes eight blocks of 32 of a row.
//% needs emit stage
@group(0) @binding(0) var<storage, read> values: array<f32>;    // [rows, WIDTH]
@group(0) @binding(1) var<storage, read> z: array<f32>;         // [rows, Z_STRIDE], from Z_FIRST on
@group(0) @binding(2) var<storage, read> convolved: array<f32>; // [rows, CHANNELS] values, from FIRST_VALUE on
@group(0) @binding(3) var<storage, read> skip: array<f32>;      // [HEADS]
//% if NORM
@group(0) @binding(4) var<storage, read> weight: array<f32>;    // [WIDTH]

var<workgroup> squares: array<f32, 64>;
var<workgroup> factors: array<f32, FACTORS_HERE>; // factors of the norms of the groups in these blocks
//% end

fn gate_of(row: u32, i: u32) -> f32 {
  let gate = GATE_SCALE * z[row * Z_STRIDE + Z_FIRST + i];
  return gate / (1.0 + exp(-gate));
}

// Returns an element before the norm.
fn element(row: u32, i: u32) -> f32 {
  let x = fma(skip[i / VALUE_DIM], convolved[row * CHANNELS + FIRST_VALUE + i], values[row * WIDTH + i]);
//% if NORM_FIRST
  return x;
//% else
  return x * gate_of(row, i);
//% end
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let first = wid.x * 256u;
//% if NORM
  let from_group = first / NORM_GROUP;
  let to_group = (min(first + 256u, WIDTH) - 1u) / NORM_GROUP;
  for (var group = from_group; group <= to_group; group++) {
    var sum = 0.0;
    for (var i = tid; i < NORM_GROUP; i += 64u) {
      let x = element(row, group * NORM_GROUP + i);
      sum = fma(x, x, sum);
    }
    squares[tid] = sum;
    workgroupBarrier();
    for (var n = 32u; n > 0u; n /= 2u) {
      if (tid < n) { squares[tid] += squares[tid + n]; }
      workgroupBarrier();
    }
    if (tid == 0u) { factors[group - from_group] = 1.0 / sqrt(squares[0] / f32(NORM_GROUP) + EPS); }
    workgroupBarrier();
  }
//% end
  for (var i = tid; i < 256u; i += 64u) {
    let at = min(first + i, WIDTH - 1u);
    var x = element(row, at);
//% if NORM
    x *= factors[at / NORM_GROUP - from_group] * weight[at];
//% end
//% if NORM_FIRST
    x *= gate_of(row, at);
//% end
    stage(i, select(0.0, x, first + i < WIDTH));
  }
  workgroupBarrier();
  if (tid < 8u && first / 32u + tid < ACT_BLOCKS) { emit(row, first / 32u + tid, tid, 1.0); }
}

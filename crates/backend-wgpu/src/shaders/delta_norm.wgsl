// Normalizes each value head of a delta rule's results, [rows, WIDTH], multiplies it by SiLU(z), and writes activations
// of the next matmul. One workgroup computes eight blocks of 32 of a row.
//% needs emit stage
@group(0) @binding(0) var<storage, read> values: array<f32>; // [rows, WIDTH]
@group(0) @binding(1) var<storage, read> z: array<f32>;      // [rows, Z_STRIDE], from Z_FIRST on
@group(0) @binding(2) var<storage, read> weight: array<f32>; // [VALUE_DIM]

var<workgroup> squares: array<f32, 64>;
var<workgroup> factors: array<f32, FACTORS_HERE>; // factors of the norms of the heads in these blocks

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let first = wid.x * 256u;
  let from_head = first / VALUE_DIM;
  let to_head = min((first + 255u) / VALUE_DIM, HEADS - 1u);
  for (var head = from_head; head <= to_head; head++) {
    var sum = 0.0;
    for (var i = tid; i < VALUE_DIM; i += 64u) {
      let x = values[row * WIDTH + head * VALUE_DIM + i];
      sum = fma(x, x, sum);
    }
    squares[tid] = sum;
    workgroupBarrier();
    for (var n = 32u; n > 0u; n /= 2u) {
      if (tid < n) { squares[tid] += squares[tid + n]; }
      workgroupBarrier();
    }
    if (tid == 0u) { factors[head - from_head] = 1.0 / sqrt(squares[0] / f32(VALUE_DIM) + EPS); }
    workgroupBarrier();
  }
  for (var i = tid; i < 256u; i += 64u) {
    let at = min(first + i, WIDTH - 1u);
    let gate = z[row * Z_STRIDE + Z_FIRST + at];
    let normed = values[row * WIDTH + at] * factors[at / VALUE_DIM - from_head] * weight[at % VALUE_DIM];
    stage(i, select(0.0, normed * (gate / (1.0 + exp(-gate))), first + i < WIDTH));
  }
  workgroupBarrier();
  if (tid < 8u && first / 32u + tid < ACT_BLOCKS) { emit(row, first / 32u + tid, tid, 1.0); }
}

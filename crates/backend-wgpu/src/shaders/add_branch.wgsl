// Computes x = (x + SCALE * norm(y)) * OUT_SCALE, [rows, WIDTH], with one workgroup per row. Without NORMS, y is added
// as it is; with WRITES, x = norm(y); without BRANCH, x is only scaled.
@group(0) @binding(0) var<storage, read_write> x: array<f32>;   // [rows, WIDTH]
//% if BRANCH
@group(0) @binding(1) var<storage, read> y: array<f32>;         // [rows, WIDTH]
//% end
//% if NORMS
@group(0) @binding(2) var<storage, read> weight: array<f32>;    // [WIDTH]
//% end
//% if NORM_BIAS
@group(0) @binding(3) var<storage, read> norm_bias: array<f32>; // [WIDTH]
//% end
//% if NORMS

var<workgroup> sums: array<f32, 256>;

fn sum_of(tid: u32, value: f32) -> f32 {
  sums[tid] = value;
  workgroupBarrier();
  for (var n = 128u; n > 0u; n /= 2u) {
    if (tid < n) { sums[tid] += sums[tid + n]; }
    workgroupBarrier();
  }
  let sum = sums[0];
  workgroupBarrier();
  return sum;
}
//% end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let base = wid.x * WIDTH;
//% if NORMS
  var mean = 0.0;
//% if LAYER
  var total = 0.0;
  for (var i = tid; i < WIDTH; i += 256u) { total += y[base + i]; }
  mean = sum_of(tid, total) / f32(WIDTH);
//% end
  var all = 0.0;
  for (var i = tid; i < WIDTH; i += 256u) {
    let d = y[base + i] - mean;
    all = fma(d, d, all);
  }
  let scale = 1.0 / sqrt(sum_of(tid, all) / f32(WIDTH) + EPS);
  for (var i = tid; i < WIDTH; i += 256u) {
//% if NORM_BIAS
    let branch = fma((y[base + i] - mean) * scale, weight[i], norm_bias[i]);
//% else
    let branch = (y[base + i] - mean) * scale * weight[i];
//% end
//% if WRITES
    x[base + i] = branch;
//% else
    x[base + i] = fma(branch, SCALE, x[base + i]) * OUT_SCALE;
//% end
  }
//% else
//% if BRANCH
  for (var i = tid; i < WIDTH; i += 256u) { x[base + i] = fma(y[base + i], SCALE, x[base + i]) * OUT_SCALE; }
//% else
  for (var i = tid; i < WIDTH; i += 256u) { x[base + i] *= OUT_SCALE; }
//% end
//% end
}

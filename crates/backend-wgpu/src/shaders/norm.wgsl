// Root-mean-square norm of the residual stream, one workgroup for each row. With POST, a product is normed and added first;
// with GATHER, the rows are those of outputs, and the normed row is kept as it is, too.
//% if POST
@group(0) @binding(0) var<storage, read_write> x: array<f32>;   // [rows, WIDTH]
@group(0) @binding(1) var<storage, read> y: array<f32>;         // [rows, WIDTH]
@group(0) @binding(2) var<storage, read> post: array<f32>;      // [WIDTH]
//% else
@group(0) @binding(0) var<storage, read> x: array<f32>;         // [rows, WIDTH]
//% end
@group(0) @binding(3) var<storage, read> weight: array<f32>;    // [WIDTH]
//% if GATHER
@group(0) @binding(4) var<storage, read> step: array<u32>;
@group(0) @binding(5) var<storage, read_write> normed: array<f32>; // [rows, WIDTH]
//% end

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

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
//% if GATHER
  let row = step[args.outputs + args.first + wid.x];
//% else
  let row = wid.x;
//% end
  let base = row * WIDTH;
  var squares = 0.0;
//% if POST
  for (var i = tid; i < WIDTH; i += 256u) {
    squares = fma(y[base + i], y[base + i], squares);
  }
  let post_scale = 1.0 / sqrt(sum_of(tid, squares) / f32(WIDTH) + POST_EPS);
  squares = 0.0;
  for (var i = tid; i < WIDTH; i += 256u) {
    x[base + i] = fma(y[base + i] * post_scale, post[i], x[base + i]);
  }
  storageBarrier();
  workgroupBarrier();
//% end
  for (var i = tid; i < WIDTH; i += 256u) {
    squares = fma(x[base + i], x[base + i], squares);
  }
  let scale = 1.0 / sqrt(sum_of(tid, squares) / f32(WIDTH) + EPS);
  for (var first = 0u; first < ACT_BLOCKS * 32u; first += 2048u) {
    for (var i = first + tid; i < min(first + 2048u, ACT_BLOCKS * 32u); i += 256u) {
      var value = 0.0;
      if (i < WIDTH) {
        value = x[base + i] * scale * weight[i];
//% if GATHER
        normed[wid.x * WIDTH + i] = value;
//% end
      }
      stage(i - first, value);
    }
    workgroupBarrier();
    if (tid < 64u && first / 32u + tid < ACT_BLOCKS) { emit(wid.x, first / 32u + tid, tid); }
    workgroupBarrier();
  }
}

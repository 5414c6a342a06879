// Normalizes the residual stream, [rows, WIDTH], and writes activations of the next matmul. One workgroup has one row.
// - With POST, a matmul's result is normalized and added to the stream first, and the sum is multiplied by OUT_SCALE.
// - With SUMS, the sum of a row's experts is added to the stream first.
// - With GATHER, the rows are those of outputs.
// - With STORES, the normalized rows are also stored.
// - With STRIDED, rows are IN_STRIDE elements apart, from IN_FIRST on.
// - With REPLACES, the normalized rows replace those of the stream.
// - For a plain RMS norm, the following matmuls apply the factor. With FULL (LayerNorm, biases, a stream without norm),
//   activations are complete and the factor is one.
// - With COMPLETE, rows are not those of the residual stream, and there is no factor.
//% provides squares_of needs add_squares emit row_scale stage sum_of_experts
//% if POST
@group(0) @binding(0) var<storage, read_write> x: array<f32>;   // [rows, WIDTH]
@group(0) @binding(1) var<storage, read> y: array<f32>;         // [rows, WIDTH]
@group(0) @binding(2) var<storage, read> post: array<f32>;      // [WIDTH]
//% else
//% if WRITES_X
@group(0) @binding(0) var<storage, read_write> x: array<f32>;   // [rows, WIDTH]
//% else
@group(0) @binding(0) var<storage, read> x: array<f32>;         // [rows, WIDTH]
//% end
//% end
//% if NORMS
@group(0) @binding(3) var<storage, read> weight: array<f32>;    // [WIDTH]
//% end
//% if NORM_BIAS
@group(0) @binding(7) var<storage, read> norm_bias: array<f32>; // [WIDTH]
//% end
//% if COMPLETE
//% else
@group(0) @binding(6) var<storage, read_write> factors: array<f32>; // [rows]
//% end
//% if GATHER
@group(0) @binding(4) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
//% end
//% if STORES
@group(0) @binding(5) var<storage, read_write> normed: array<f32>; // [rows, WIDTH]
//% end

var<workgroup> squares: array<f32, ROUNDS * SLICES * 8>; // sum of squares of each block; past the last block, zero

fn squares_of(four: u32) -> vec4<f32> {
  let at = 4u * four;
  return vec4<f32>(squares[at], squares[at + 1u], squares[at + 2u], squares[at + 3u]);
}

//% if REDUCES
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
//% if GATHER
  let row = step[args.outputs + args.first + wid.x];
//% else
  let row = wid.x;
//% end
//% if STRIDED
  let base = row * IN_STRIDE + IN_FIRST;
//% else
  let base = row * WIDTH;
//% end
  // A thread has one element of each of ROUNDS times SLICES slices of 256. All are loaded before the first is used,
  // because with a single workgroup no other work hides the latency of memory.
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  let i_${c}_${s} = (${c}u * SLICES + ${s}u) * 256u + tid;
  let at_${c}_${s} = min(i_${c}_${s}, WIDTH - 1u);
  var x_${c}_${s} = select(0.0, x[base + at_${c}_${s}], i_${c}_${s} < WIDTH);
//% if NORMS
  let w_${c}_${s} = weight[at_${c}_${s}];
//% end
//% if NORM_BIAS
  let b_${c}_${s} = norm_bias[at_${c}_${s}];
//% end
//% if POST
  let y_${c}_${s} = select(0.0, y[base + at_${c}_${s}], i_${c}_${s} < WIDTH);
  let p_${c}_${s} = post[at_${c}_${s}];
//% end
//% end
//% end
//% if POST
  var all = 0.0;
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  all = fma(y_${c}_${s}, y_${c}_${s}, all);
//% end
//% end
  let post_scale = 1.0 / sqrt(sum_of(tid, all) / f32(WIDTH) + POST_EPS);
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  x_${c}_${s} = fma(y_${c}_${s} * post_scale, p_${c}_${s}, x_${c}_${s}) * OUT_SCALE;
  if (i_${c}_${s} < WIDTH) { x[base + i_${c}_${s}] = x_${c}_${s}; }
//% end
//% end
//% end
//% if SUMS
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  if (i_${c}_${s} < WIDTH) {
    x_${c}_${s} = fma(sum_of_experts(row, i_${c}_${s}), SCALE, x_${c}_${s});
    x[base + i_${c}_${s}] = x_${c}_${s};
  }
//% end
//% end
//% end
//% if LAYER
  var total = 0.0;
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  total += x_${c}_${s};
//% end
//% end
  let mean = sum_of(tid, total) / f32(WIDTH);
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  x_${c}_${s} = select(0.0, x_${c}_${s} - mean, i_${c}_${s} < WIDTH);
//% end
//% end
//% end
//% if NORMS
//% for c in 0..ROUNDS
//% for s in 0..SLICES
  stage(${s}u * 256u + tid, x_${c}_${s});
//% end
  workgroupBarrier();
  if (tid < SLICES * 8u) {
    var sum = 0.0;
    for (var i = 0u; i < 32u; i++) { sum = fma(staged[tid * 33u + i], staged[tid * 33u + i], sum); }
    squares[${c}u * SLICES * 8u + tid] = sum;
  }
  workgroupBarrier();
//% end
  add_squares(tid);
  workgroupBarrier();
//% if FULL
  let full = row_scale();
  let scale = 1.0;
//% else
  let scale = row_scale();
//% end
//% else
  let scale = 1.0;
//% end
//% if COMPLETE
//% else
  if (tid == 0u) { factors[wid.x] = scale; }
//% end
//% for c in 0..ROUNDS
//% for s in 0..SLICES
//% if NORMS
//% if FULL
//% if NORM_BIAS
  let n_${c}_${s} = select(0.0, fma(x_${c}_${s} * full, w_${c}_${s}, b_${c}_${s}), i_${c}_${s} < WIDTH);
//% else
  let n_${c}_${s} = x_${c}_${s} * full * w_${c}_${s};
//% end
//% else
  let n_${c}_${s} = x_${c}_${s} * w_${c}_${s};
//% end
//% else
  let n_${c}_${s} = x_${c}_${s};
//% end
//% if STORES
  if (i_${c}_${s} < WIDTH) { normed[wid.x * WIDTH + i_${c}_${s}] = n_${c}_${s} * scale; }
//% end
//% if REPLACES
  if (i_${c}_${s} < WIDTH) { x[base + i_${c}_${s}] = n_${c}_${s}; }
//% end
  stage(${s}u * 256u + tid, n_${c}_${s});
//% end
  workgroupBarrier();
  if (tid < SLICES * 8u && ${c}u * SLICES * 8u + tid < ACT_BLOCKS) {
    emit(wid.x, ${c}u * SLICES * 8u + tid, tid, scale);
  }
  workgroupBarrier();
//% end
}

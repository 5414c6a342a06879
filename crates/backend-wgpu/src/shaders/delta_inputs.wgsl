// Computes the inputs of a delta rule: convolved queries and keys of unit length and values, [rows, CHANNELS]; decays
// and strengths, [rows, HEADS]. A workgroup computes a head of queries or keys of a row, or 128 of its values, or all
// of its decays and strengths.
//% needs convolve sequence_of
@group(0) @binding(5) var<storage, read_write> convolved: array<f32>; // [rows, CHANNELS]: queries, keys, values
@group(0) @binding(6) var<storage, read_write> decays: array<f32>;    // [rows, HEADS]
@group(0) @binding(7) var<storage, read_write> betas: array<f32>;     // [rows, HEADS] strengths
@group(0) @binding(8) var<storage, read> decay: array<f32>;           // [HEADS] factor of a decay
@group(0) @binding(9) var<storage, read> dt: array<f32>;              // [HEADS] added to a

var<workgroup> squares: array<f32, 128>;

fn silu(x: f32) -> f32 {
  return x / (1.0 + exp(-x));
}

fn softplus(x: f32) -> f32 {
  let e = exp(-abs(x));
  // This is ln(1 + e). For a small e, 1 + e would lose its digits, so a series is used.
  return max(x, 0.0) + select(log(1.0 + e), fma(-0.5 * e, e, e), e < 1.0e-3);
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  if (wid.x < KEY_UNITS) {
    let c = wid.x * KEY_DIM + tid;
    var x = 0.0;
    if (tid < KEY_DIM) { x = silu(convolve(row, c, sequence_of(row))); }
    squares[tid] = x * x;
    workgroupBarrier();
    for (var n = 64u; n > 0u; n /= 2u) {
      if (tid < n) { squares[tid] += squares[tid + n]; }
      workgroupBarrier();
    }
    let length = sqrt(squares[0] + UNIT_EPS) * select(1.0, QUERY_SCALE, wid.x < KEY_HEADS);
    if (tid < KEY_DIM) { convolved[row * CHANNELS + c] = x / length; }
  } else if (wid.x < KEY_UNITS + VALUE_UNITS) {
    let c = KEY_UNITS * KEY_DIM + (wid.x - KEY_UNITS) * 128u + tid;
    if (c < CHANNELS) { convolved[row * CHANNELS + c] = silu(convolve(row, c, sequence_of(row))); }
  } else {
    for (var head = tid; head < HEADS; head += 128u) {
      let a = mixed[row * MIXED_STRIDE + A_FIRST + head];
      let b = mixed[row * MIXED_STRIDE + B_FIRST + head];
      decays[row * HEADS + head] = decay[head] * softplus(a + dt[head]);
      betas[row * HEADS + head] = 1.0 / (1.0 + exp(-b));
    }
  }
}

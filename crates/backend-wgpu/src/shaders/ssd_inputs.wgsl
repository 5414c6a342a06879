// Computes the inputs of a scan of Mamba-2: convolved C, B and values, [rows, CHANNELS]; steps and decays, [rows,
// HEADS]. A workgroup computes 128 channels of a row, or all of its steps and decays.
//% needs convolve sequence_of
@group(0) @binding(5) var<storage, read_write> convolved: array<f32>; // [rows, CHANNELS]: C, B, values
@group(0) @binding(6) var<storage, read_write> decays: array<f32>;    // [rows, HEADS]
@group(0) @binding(7) var<storage, read_write> betas: array<f32>;     // [rows, HEADS] steps
@group(0) @binding(8) var<storage, read> decay: array<f32>;           // [HEADS] factor of a decay
@group(0) @binding(9) var<storage, read> dt: array<f32>;              // [HEADS] added to d

fn softplus(x: f32) -> f32 {
  let e = exp(-abs(x));
  // This is ln(1 + e). For a small e, 1 + e would lose its digits, so a series is used.
  return max(x, 0.0) + select(log(1.0 + e), fma(-0.5 * e, e, e), e < 1.0e-3);
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  if (wid.x < CHANNEL_UNITS) {
    let c = wid.x * 128u + tid;
    if (c < CHANNELS) {
      let x = convolve(row, c, sequence_of(row));
      convolved[row * CHANNELS + c] = x / (1.0 + exp(-x));
    }
  } else {
    for (var head = tid; head < HEADS; head += 128u) {
      let at = row * HEADS + head;
      let d = mixed[row * MIXED_STRIDE + D_FIRST + head];
      let step = clamp(softplus(fma(DT_SCALE, d, dt[head])), LEAST, MOST);
      betas[at] = step;
      decays[at] = decay[head] * step;
    }
  }
}

// Computes a short convolution, c * convolution(b * u), [rows, CHANNELS], as activations of the next matmul. One
// workgroup computes eight blocks of 32 of a row.
//% needs convolve emit sequence_of stage
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let own = sequence_of(row);
  let first = wid.x * 256u;
  for (var i = tid; i < 256u; i += 64u) {
    let c = min(first + i, CHANNELS - 1u);
    let y = mixed[row * MIXED_STRIDE + CHANNELS + c] * convolve(row, c, own);
    stage(i, select(0.0, y, first + i < CHANNELS));
  }
  workgroupBarrier();
  if (tid < 8u && first / 32u + tid < ACT_BLOCKS) { emit(row, first / 32u + tid, tid, 1.0); }
}

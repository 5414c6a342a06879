// Stores the sums of experts, or adds them to a branch: out [rows, WIDTH]. One thread computes one element.
//% needs sum_of_experts
@group(0) @binding(2) var<storage, read_write> out: array<f32>;    // [rows, WIDTH]

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let i = wid.x * 256u + tid;
  if (i >= WIDTH) { return; }
  let y = sum_of_experts(row, i);
//% if ADD
  out[row * WIDTH + i] = fma(y, SCALE, out[row * WIDTH + i]);
//% else
  out[row * WIDTH + i] = y;
//% end
}

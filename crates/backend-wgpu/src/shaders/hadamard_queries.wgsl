// Transforms queries of latent attention, [rows, HEADS, DIM], for quantized pages, in place. One workgroup has one head
// of a row.
//% provides number_at put_number needs hadamard
@group(0) @binding(0) var<storage, read_write> queries: array<f32>; // [rows, HEADS, DIM]

var<workgroup> head: array<f32, DIM>;

fn number_at(i: u32) -> f32 {
  return head[i];
}

fn put_number(i: u32, x: f32) {
  head[i] = x;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let at = (wid.y * HEADS + wid.x) * DIM;
  for (var i = tid; i < DIM; i += 64u) { head[i] = queries[at + i]; }
  workgroupBarrier();
  hadamard(tid, 64u, 1u);
  for (var i = tid; i < DIM; i += 64u) { queries[at + i] = head[i]; }
}

// Computes means of normed rows of outputs, [means, WIDTH]. A workgroup computes 32 elements of a mean: each of eight groups of
// threads adds every eighth row in order, and then their sums are added in order, so a mean depends on its own rows alone.
@group(0) @binding(0) var<storage, read> step: array<u32>;         // [means, 2] behind the rows of outputs: first row, rows
@group(0) @binding(1) var<storage, read> normed: array<f32>;       // [rows without logits, WIDTH]
@group(0) @binding(2) var<storage, read_write> means: array<f32>;  // [means, WIDTH]

var<workgroup> sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let at = args.outputs + args.first + 2u * wid.y;
  let first = step[at];
  let rows = step[at + 1u];
  let i = wid.x * 32u + tid % 32u;
  let own = min(i, WIDTH - 1u);
  var sum = 0.0;
  for (var row = tid / 32u; row < rows; row += 8u) { sum += normed[(first + row) * WIDTH + own]; }
  sums[tid] = sum;
  workgroupBarrier();
  if (tid < 32u && i < WIDTH) {
    var all = sums[tid];
    for (var other = 1u; other < 8u; other++) { all += sums[tid + 32u * other]; }
    means[wid.y * WIDTH + i] = all / f32(rows);
  }
}

// Computes per-layer embeddings, [rows, COUNT, WIDTH], in place: norm(projection) + table row * SCALE. One workgroup
// computes one embedding of a row.
@group(0) @binding(0) var<storage, read_write> embeds: array<f32>; // [rows, COUNT, WIDTH] projection, replaced by embeddings
@group(0) @binding(1) var<storage, read> table_rows: array<f32>;   // [rows, COUNT, WIDTH]
@group(0) @binding(2) var<storage, read> weight: array<f32>;       // [WIDTH]

var<workgroup> squares: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let base = (wid.y * COUNT + wid.x) * WIDTH;
  var sum = 0.0;
  for (var i = tid; i < WIDTH; i += 64u) { sum = fma(embeds[base + i], embeds[base + i], sum); }
  squares[tid] = sum;
  workgroupBarrier();
  sum = 0.0;
  for (var i = 0u; i < 64u; i++) { sum += squares[i]; }
  let scale = 1.0 / sqrt(sum / f32(WIDTH) + EPS);
  for (var i = tid; i < WIDTH; i += 64u) {
    embeds[base + i] = fma(table_rows[base + i], SCALE, embeds[base + i] * scale * weight[i]);
  }
}

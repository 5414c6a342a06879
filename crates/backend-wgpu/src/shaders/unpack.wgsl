// Copies activations in floats (emit.wgsl) to rows, out [rows, WIDTH], with one thread for each element.
@group(0) @binding(0) var<storage, read> x_floats: array<vec4<u32>>; // [rows, 8, ACT_BLOCKS]
@group(0) @binding(1) var<storage, read_write> out: array<f32>;      // [rows, WIDTH]

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x;
  if (i >= WIDTH) { return; }
  let four = x_floats[(id.y * 8u + i % 32u / 4u) * ACT_BLOCKS + i / 32u];
  out[id.y * WIDTH + i] = bitcast<f32>(four[i % 4u]);
}

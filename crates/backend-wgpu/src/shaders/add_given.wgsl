// Adds a part of the given rows of a step to x, with one thread for each element. With SETS, x becomes that part.
@group(0) @binding(0) var<storage, read> step: array<u32>;    // words of the step, see args.wgsl
@group(0) @binding(1) var<storage, read_write> x: array<f32>; // [rows, WIDTH]
@group(0) @binding(2) var<storage, read> given: array<f32>;   // [given rows, PARTS, WIDTH]

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  // As in embed.wgsl.
  let number = step[args.tokens + args.rows + id.y];
  if (number == 0u || id.x >= WIDTH) { return; }
//% if SETS
  x[id.y * WIDTH + id.x] = given[((number - 1u) * PARTS + PART) * WIDTH + id.x];
//% else
  x[id.y * WIDTH + id.x] += given[((number - 1u) * PARTS + PART) * WIDTH + id.x];
//% end
}

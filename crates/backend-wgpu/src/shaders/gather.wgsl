// Copies the pages of all sequences to one buffer, in order, [blocks, VECS]. Attention over this buffer is a reference
// for attention over pages.
@group(0) @binding(0) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
@group(0) @binding(1) var<storage, read> pages: array<vec4<u32>>;          // [pages, VECS]
@group(0) @binding(2) var<storage, read_write> gathered: array<vec4<u32>>; // [blocks, VECS]

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let block = wid.y * 32768u + wid.x;
  if (block >= args.rows) { return; }
  let page = step[args.tokens + block];
  for (var i = tid; i < VECS; i += 64u) {
    gathered[block * VECS + i] = pages[page * VECS + i];
  }
}

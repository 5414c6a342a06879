// Loads weights of 16 bits, which f16.wgsl or bf16.wgsl decodes.
//% provides accumulate load_block quad Block needs Acts add_quad widen
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<u32>>; // [rows, 4, BLOCKS] eight elements each

struct Block { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * 4u * BLOCKS + block;
  return Block(w_quants[at], w_quants[at + BLOCKS], w_quants[at + 2u * BLOCKS], w_quants[at + 3u * BLOCKS]);
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  let a = add_quad(add_quad(acc, widen(w.a.x, w.a.y), x.q0), widen(w.a.z, w.a.w), x.q1);
  let b = add_quad(add_quad(a, widen(w.b.x, w.b.y), x.q2), widen(w.b.z, w.b.w), x.q3);
  let c = add_quad(add_quad(b, widen(w.c.x, w.c.y), x.q4), widen(w.c.z, w.c.w), x.q5);
  return add_quad(add_quad(c, widen(w.d.x, w.d.y), x.q6), widen(w.d.z, w.d.w), x.q7);
}

fn quad(w: Block, j: u32) -> vec4<f32> {
  var eight = w.a;
  if (j / 2u == 1u) { eight = w.b; }
  if (j / 2u == 2u) { eight = w.c; }
  if (j / 2u == 3u) { eight = w.d; }
  if ((j & 1u) == 0u) { return widen(eight.x, eight.y); }
  return widen(eight.z, eight.w);
}

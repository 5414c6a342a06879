// Decodes weights of two bits with a scale and a minimum for every 16: w = d * q - m. Byte b of quad j is in bits
// 8 b + 2 (j % 4) and 8 b + 2 (j % 4) + 1 of word j / 4.
//% provides accumulate bytes line load_block Block needs Acts dot_half
@group(0) @binding(0) var<storage, read> w_quants: array<vec2<u32>>; // [rows, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<vec2<u32>>; // [rows, BLOCKS] d, m in f16 of both halves

struct Block { q: vec2<u32>, s: vec2<u32> }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * BLOCKS + block;
  return Block(w_quants[at], w_scales[at]);
}

fn quants(q: u32) -> vec4<u32> {
  return (vec4<u32>(q) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(0x03030303u);
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  let lo = unpack2x16float(w.s.x);
  let hi = unpack2x16float(w.s.y);
  let a = fma(lo.x * x.scale, f32(dot_half(quants(w.q.x), x.lo)), acc);
  let b = fma(-lo.y * x.scale, f32(x.sums.x), a);
  let c = fma(hi.x * x.scale, f32(dot_half(quants(w.q.y), x.hi)), b);
  return fma(-hi.y * x.scale, f32(x.sums.y), c);
}

const SIGNS = 0u;

fn bytes(w: Block, j: u32) -> u32 {
  return quants(w.q[j / 4u])[j % 4u];
}

fn line(w: Block, j: u32) -> vec2<f32> {
  return unpack2x16float(w.s[j / 4u]) * vec2<f32>(1.0, -1.0);
}

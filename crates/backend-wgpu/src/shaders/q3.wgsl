// Decodes weights of three bits with a scale for every 16: w = s * v, where v is ±8, ±25 or ±43. The magnitude of byte
// b of quad j is in bits 8 b + 2 (j % 4) and 8 b + 2 (j % 4) + 1 of word j / 4, and its sign is in bit 8 b + j of the
// high word.
//% provides accumulate bytes line load_block Block needs Acts dot_half
@group(0) @binding(0) var<storage, read> w_quants: array<vec2<u32>>; // [rows, BLOCKS]
@group(0) @binding(1) var<storage, read> w_high: array<u32>;         // [rows, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<u32>;       // [rows, BLOCKS] both scales in f16

struct Block { q: vec2<u32>, high: u32, s: u32 }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * BLOCKS + block;
  return Block(w_quants[at], w_high[at], w_scales[at]);
}

// Returns v + 43 for the bytes of four quads.
fn signed_values(q: u32, signs: u32) -> vec4<u32> {
  let shifts = vec4<u32>(0u, 1u, 2u, 3u);
  let codes = (vec4<u32>(q) >> (2u * shifts)) & vec4<u32>(0x03030303u);
  let magnitudes = vec4<u32>(0x08080808u) + 17u * codes + ((codes >> vec4<u32>(1u)) & vec4<u32>(0x01010101u));
  let minus = 255u * ((vec4<u32>(signs) >> shifts) & vec4<u32>(0x01010101u));
  let zero = vec4<u32>(0x2b2b2b2bu);
  return ((zero + magnitudes) & ~minus) | ((zero - magnitudes) & minus);
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  let s = unpack2x16float(w.s);
  let lo = dot_half(signed_values(w.q.x, w.high), x.lo) - 43 * x.sums.x;
  let hi = dot_half(signed_values(w.q.y, w.high >> 4u), x.hi) - 43 * x.sums.y;
  return fma(s.y * x.scale, f32(hi), fma(s.x * x.scale, f32(lo), acc));
}

const SIGNS = 0u;

fn bytes(w: Block, j: u32) -> u32 {
  return signed_values(w.q[j / 4u], w.high >> (4u * (j / 4u)))[j % 4u];
}

fn line(w: Block, j: u32) -> vec2<f32> {
  return unpack2x16float(w.s)[j / 4u] * vec2<f32>(1.0, -43.0);
}

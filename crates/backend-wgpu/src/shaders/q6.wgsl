// Decodes weights of six bits with a scale for every 16: w = s * (q - 32). The low four bits have the layout of
// q4.wgsl. The two high bits of byte b of quad j are bits 8 b + 2 (j % 4) and 8 b + 2 (j % 4) + 1 of high word j / 4.
//% provides accumulate bytes line load_block Block needs Acts dot_half
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<u32>>; // [rows, BLOCKS]
@group(0) @binding(1) var<storage, read> w_high: array<vec2<u32>>;   // [rows, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<u32>;       // [rows, BLOCKS] both scales in f16

struct Block { q: vec4<u32>, high: vec2<u32>, s: u32 }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * BLOCKS + block;
  return Block(w_quants[at], w_high[at], w_scales[at]);
}

fn with_high(low: vec4<u32>, high: u32) -> vec4<u32> {
  let bits = (vec4<u32>(high) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(0x03030303u);
  return (low & vec4<u32>(0x0f0f0f0fu)) | (bits << vec4<u32>(4u));
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  let s = unpack2x16float(w.s);
  let lo = dot_half(with_high(w.q, w.high.x), x.lo) - 32 * x.sums.x;
  let hi = dot_half(with_high(w.q >> vec4<u32>(4u), w.high.y), x.hi) - 32 * x.sums.y;
  return fma(s.y * x.scale, f32(hi), fma(s.x * x.scale, f32(lo), acc));
}

const SIGNS = 0u;

fn bytes(w: Block, j: u32) -> u32 {
  var half = with_high(w.q, w.high.x);
  if (j >= 4u) { half = with_high(w.q >> vec4<u32>(4u), w.high.y); }
  return half[j % 4u];
}

fn line(w: Block, j: u32) -> vec2<f32> {
  return unpack2x16float(w.s)[j / 4u] * vec2<f32>(1.0, -32.0);
}

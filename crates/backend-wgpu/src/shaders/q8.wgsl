// Decodes weights of eight bits: w = d * q.
//% provides accumulate bytes line load_block Block needs Acts dot_half
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<u32>>; // [rows, 2, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<u32>;       // [rows, ceil(BLOCKS / 2)] d in f16 of two blocks

struct Block { lo: vec4<u32>, hi: vec4<u32>, s: u32, shift: u32 }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * 2u * BLOCKS + block;
  return Block(w_quants[at], w_quants[at + BLOCKS], w_scales[row * ((BLOCKS + 1u) / 2u) + block / 2u], 16u * (block & 1u));
}

fn scale(w: Block) -> f32 {
  return unpack2x16float(w.s >> w.shift).x;
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  return fma(scale(w) * x.scale, f32(dot_half(w.lo, x.lo) + dot_half(w.hi, x.hi)), acc);
}

// The sign bits of four bytes.
const SIGNS = 0x80808080u;

fn bytes(w: Block, j: u32) -> u32 {
  var half = w.lo;
  if (j >= 4u) { half = w.hi; }
  return half[j % 4u];
}

fn line(w: Block, j: u32) -> vec2<f32> {
  return scale(w) * vec2<f32>(1.0, -128.0);
}

// Decodes weights of five bits: w = d * q - m. The low four bits have the layout of q4.wgsl. The fifth bit of byte b of
// quad j is bit 8 b + j of the block's high word.
//% provides accumulate bytes line load_block Block needs Acts dot_half
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<u32>>; // [rows, BLOCKS]
@group(0) @binding(1) var<storage, read> w_high: array<u32>;         // [rows, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<u32>;       // [rows, BLOCKS] d, m in f16

struct Block { q: vec4<u32>, high: u32, s: u32 }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * BLOCKS + block;
  return Block(w_quants[at], w_high[at], w_scales[at]);
}

fn quants_lo(w: Block) -> vec4<u32> {
  let high = (vec4<u32>(w.high) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(0x01010101u);
  return (w.q & vec4<u32>(0x0f0f0f0fu)) | (high << vec4<u32>(4u));
}

fn quants_hi(w: Block) -> vec4<u32> {
  let high = (vec4<u32>(w.high) >> vec4<u32>(4u, 5u, 6u, 7u)) & vec4<u32>(0x01010101u);
  return ((w.q >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu)) | (high << vec4<u32>(4u));
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  let dm = unpack2x16float(w.s);
  let sum = dot_half(quants_lo(w), x.lo) + dot_half(quants_hi(w), x.hi);
  let scaled = fma(dm.x * x.scale, f32(sum), acc);
  return fma(-dm.y * x.scale, f32(x.sums.x + x.sums.y), scaled);
}

const SIGNS = 0u;

fn bytes(w: Block, j: u32) -> u32 {
  var half = quants_lo(w);
  if (j >= 4u) { half = quants_hi(w); }
  return half[j % 4u];
}

fn line(w: Block, j: u32) -> vec2<f32> {
  return unpack2x16float(w.s) * vec2<f32>(1.0, -1.0);
}

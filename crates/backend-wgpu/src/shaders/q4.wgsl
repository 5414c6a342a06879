// Decodes weights of four bits: w = d * q - m. The low half of byte i of a block is element i, its high half element 16
// + i.
//% provides accumulate bytes line load_block Block needs Acts dot_half
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<u32>>; // [rows, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<u32>;       // [rows, BLOCKS] d, m in f16

struct Block { q: vec4<u32>, s: u32 }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * BLOCKS + block;
  return Block(w_quants[at], w_scales[at]);
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  let dm = unpack2x16float(w.s);
  let low = vec4<u32>(0x0f0f0f0fu);
  let sum = dot_half(w.q & low, x.lo) + dot_half((w.q >> vec4<u32>(4u)) & low, x.hi);
  let scaled = fma(dm.x * x.scale, f32(sum), acc);
  return fma(-dm.y * x.scale, f32(x.sums.x + x.sums.y), scaled);
}

const SIGNS = 0u;

fn bytes(w: Block, j: u32) -> u32 {
  return (w.q[j % 4u] >> (4u * (j / 4u))) & 0x0f0f0f0fu;
}

fn line(w: Block, j: u32) -> vec2<f32> {
  return unpack2x16float(w.s) * vec2<f32>(1.0, -1.0);
}

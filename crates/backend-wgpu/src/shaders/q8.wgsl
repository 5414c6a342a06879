// Eight bits: w = d * q.
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<u32>>; // [rows, 2, BLOCKS]
@group(0) @binding(2) var<storage, read> w_scales: array<u32>;       // [rows, ceil(BLOCKS / 2)] two of d in f16

struct Block { lo: vec4<u32>, hi: vec4<u32>, d: f32 }

fn load_block(row: u32, block: u32) -> Block {
  let at = row * 2u * BLOCKS + block;
  let s = unpack2x16float(w_scales[row * ((BLOCKS + 1u) / 2u) + block / 2u]);
  return Block(w_quants[at], w_quants[at + BLOCKS], select(s.x, s.y, (block & 1u) == 1u));
}

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  return fma(w.d * x.scale, f32(dot_half(w.lo, x.lo) + dot_half(w.hi, x.hi)), acc);
}

fn quad(w: Block, j: u32) -> vec4<f32> {
  var half = w.lo;
  if (j >= 4u) { half = w.hi; }
  return w.d * vec4<f32>(unpack4xI8(half[j % 4u]));
}

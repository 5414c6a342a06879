// Weights of quants in half precision, multiplied by 8 as activations are divided by it (`emit.wgsl`), with the elements of a quad in
// the order 0, 2, 1, 3.

// Masks of a word: the bits of two bytes, and 4 in two halves. Signed bytes become values that are 128 larger, by
// flipping a bit.
const MASKS = vec2<u32>(0x00ff00ffu, 0x44004400u ^ (SIGNS & 0x00800080u));

// Returns 4 + b / 256 for four bytes b in order, by placing their bits into half-precision numbers. With masks that the
// compiler does not know, both are one operation.
fn halves(bytes: u32) -> vec4<f16> {
  let even = (bytes & masks.x) ^ masks.y;
  let odd = ((bytes >> 8u) & masks.x) ^ masks.y;
  return vec4<f16>(vec4<f32>(unpack2x16float(even), unpack2x16float(odd)));
}

fn w_half(w: Block, j: u32) -> vec4<f16> {
  let l = clamp(line(w, j) * vec2<f32>(2048.0, 8.0), vec2<f32>(-65504.0), vec2<f32>(65504.0));
  return fma(halves(bytes(w, j)) - 4.0h, vec4<f16>(f16(l.x)), vec4<f16>(f16(l.y)));
}

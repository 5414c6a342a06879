// Converts quantized weights to half precision for coop.wgsl. They are multiplied by 8, because activations are divided
// by 8 (`emit.wgsl`). The elements of a quad are in the order 0, 2, 1, 3.
//% provides w_half needs Block bytes line

// Masks of a word: one selects two bytes, the other adds the bits of the half-precision number 4 twice. Flipping the
// sign bit of a signed byte adds 128.
const MASKS = vec2<u32>(0x00ff00ffu, 0x44004400u ^ (SIGNS & 0x00800080u));

// Returns 4 + b / 256 for four bytes b, by placing their bits into half-precision numbers. If the compiler does not
// know the masks, it applies both with one instruction.
fn halves(bytes: u32) -> vec4<f16> {
  let even = (bytes & masks.x) ^ masks.y;
  let odd = ((bytes >> 8u) & masks.x) ^ masks.y;
  return vec4<f16>(vec4<f32>(unpack2x16float(even), unpack2x16float(odd)));
}

fn w_half(w: Block, j: u32) -> vec4<f16> {
  let l = clamp(line(w, j) * vec2<f32>(2048.0, 8.0), vec2<f32>(-65504.0), vec2<f32>(65504.0));
  return fma(halves(bytes(w, j)) - 4.0h, vec4<f16>(f16(l.x)), vec4<f16>(f16(l.y)));
}

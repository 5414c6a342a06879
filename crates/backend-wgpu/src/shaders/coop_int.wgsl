// Weights and activations of quants in half precision, both with the elements of a quad in the order 0, 2, 1, 3. Activations are
// divided by 8 and weights multiplied by it, so that neither small scales nor large activations leave the range of halves.

// 4 + b / 256 of four bytes b, in that order: their bits, put where halves have them.
fn halves(bytes: u32) -> vec4<f16> {
  let even = (bytes & 0x00ff00ffu) | 0x44004400u;
  let odd = ((bytes >> 8u) & 0x00ff00ffu) | 0x44004400u;
  return vec4<f16>(vec4<f32>(unpack2x16float(even), unpack2x16float(odd)));
}

fn x_half(x: Acts, j: u32) -> vec4<f16> {
  var words = x.lo;
  if (j >= 4u) { words = x.hi; }
  return (halves(words[j % 4u] ^ 0x80808080u) - 4.5h) * f16(min(x.scale * 32.0, 65504.0));
}

fn w_half(w: Block, j: u32) -> vec4<f16> {
  let l = clamp(line(w, j) * vec2<f32>(2048.0, 8.0), vec2<f32>(-65504.0), vec2<f32>(65504.0));
  return fma(halves(bytes(w, j)) - 4.0h, vec4<f16>(f16(l.x)), vec4<f16>(f16(l.y)));
}

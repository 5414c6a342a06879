// Weights of quants in half precision, multiplied by 8 as activations are divided by it (`emit.wgsl`), with the elements of a quad in
// the order 0, 2, 1, 3.

// Not read; the kernels of few rows have it, and all kernels of a product have the same buffers.
@group(0) @binding(4) var<storage, read> x_scales: array<vec2<u32>>;

// 4 + b / 256 of four bytes b, in that order: their bits, put where halves have them.
fn halves(bytes: u32) -> vec4<f16> {
  let even = (bytes & 0x00ff00ffu) | 0x44004400u;
  let odd = ((bytes >> 8u) & 0x00ff00ffu) | 0x44004400u;
  return vec4<f16>(vec4<f32>(unpack2x16float(even), unpack2x16float(odd)));
}

fn w_half(w: Block, j: u32) -> vec4<f16> {
  let l = clamp(line(w, j) * vec2<f32>(2048.0, 8.0), vec2<f32>(-65504.0), vec2<f32>(65504.0));
  return fma(halves(bytes(w, j)) - 4.0h, vec4<f16>(f16(l.x)), vec4<f16>(f16(l.y)));
}

// Quads of elements.
//% provides add_quad half_quad
// Adds the products of a quad in order, so that the sum is the same in every kernel.
fn add_quad(acc: f32, w: vec4<f32>, x: vec4<f32>) -> f32 {
  return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, acc))));
}

// Decodes four halves.
fn half_quad(a: u32, b: u32) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(a), unpack2x16float(b));
}

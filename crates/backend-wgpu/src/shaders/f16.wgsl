// Decodes weights in half precision.
//% provides widen needs half_quad
fn widen(a: u32, b: u32) -> vec4<f32> {
  return half_quad(a, b);
}

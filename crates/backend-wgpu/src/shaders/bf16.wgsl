// Decodes weights in bf16, which is the upper half of a single.
//% provides widen
fn widen(a: u32, b: u32) -> vec4<f32> {
  return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}

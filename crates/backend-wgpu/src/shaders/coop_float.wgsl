//% provides w_half needs Block quad
const MASKS = vec2<u32>(); // not used with weights in floats

// Returns the weights of quad `j` in half precision, in the form of `coop_int.wgsl`.
fn w_half(w: Block, j: u32) -> vec4<f16> {
  return vec4<f16>(clamp(quad(w, j).xzyw * 8.0, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}

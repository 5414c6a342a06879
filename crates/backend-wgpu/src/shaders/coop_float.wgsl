const MASKS = vec2<u32>(); // for bytes, of which there are none

// Weights in half precision, as `coop_int.wgsl` has them.
fn w_half(w: Block, j: u32) -> vec4<f16> {
  return vec4<f16>(clamp(quad(w, j).xzyw * 8.0, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}

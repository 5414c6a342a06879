// Weights and activations in half precision.
fn x_half(x: Acts, j: u32) -> vec4<f16> {
  var v = x.q0;
//% for j in 1..8
  if (j == ${j}u) { v = x.q${j}; }
//% end
  return vec4<f16>(clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}

fn w_half(w: Block, j: u32) -> vec4<f16> {
  return vec4<f16>(quad(w, j));
}

// Of a gate.
fn activation(x: f32) -> f32 {
//% if GELU
  let inner = 0.7978845608028654 * fma(0.044715 * x * x, x, x);
  return 0.5 * x * (1.0 + tanh(clamp(inner, -15.0, 15.0)));
//% else
  return x / (1.0 + exp(-x));
//% end
}

// Activation functions of feed-forward networks, for one element.
//% provides activated activation
//% if GELU_ERF
// Returns 1 - erf(x) for x >= 0, with an error of at most 1.5e-7 (Abramowitz and Stegun, 7.1.26).
fn erfc_of(x: f32) -> f32 {
  let t = 1.0 / fma(0.3275911, x, 1.0);
  let p = fma(fma(fma(fma(1.061405429, t, -1.453152027), t, 1.421413741), t, -0.284496736), t, 0.254829592);
  return p * t * exp(-x * x);
}

//% end
// Returns the activation of a gate, or of an input without a gate.
fn activation(x: f32) -> f32 {
//% if GELU
  let inner = 0.7978845608028654 * fma(0.044715 * x * x, x, x);
  return 0.5 * x * (1.0 + tanh(clamp(inner, -15.0, 15.0)));
//% else
//% if GELU_ERF
  let tail = erfc_of(abs(x) * 0.7071067811865476);
  return 0.5 * x * select(tail, 2.0 - tail, x > 0.0);
//% else
//% if RELU2
  let positive = max(x, 0.0);
  return positive * positive;
//% else
  return x / (1.0 + exp(-x));
//% end
//% end
//% end
}

// Returns the activation of a gate times its input.
fn activated(gate: f32, up: f32) -> f32 {
//% if CLAMPED
  let x = min(gate, LIMIT);
  return x / (1.0 + exp(-SLOPE * x)) * (clamp(up, -LIMIT, LIMIT) + 1.0);
//% else
  return activation(gate) * up;
//% end
}

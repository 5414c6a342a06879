// Stores a result of a matmul, [rows, outputs], multiplied by the factor of its row.
//% provides store needs change
@group(0) @binding(5) var<storage, read_write> out: array<f32>; // [rows, OUT_STRIDE]
//% if BIAS
@group(0) @binding(6) var<storage, read> bias: array<f32>;      // [outputs], for each expert
//% if EXPERTS
var<private> bias_from: u32;
//% else
const bias_from = 0u;
//% end
//% end

fn store(row: u32, output: u32, product: f32, factor: f32) {
//% if BIAS
  var value = fma(product, factor, bias[bias_from + output]);
//% else
  var value = product * factor;
//% end
//% if CHANGES
  value += change(row, output);
//% end
//% if SCALED
  value *= SCALE;
//% end
//% if CAP
  value = SOFT_CAP * tanh(clamp(value / SOFT_CAP, -15.0, 15.0));
//% end
  let at = row * OUT_STRIDE + OUT_FIRST + output;
//% if ADD
  out[at] += value;
//% else
  out[at] = value;
//% end
}

// Stores four neighbouring results of a matmul, [rows, outputs]. With ADD, they are added to those that were there, which are loaded
// ahead of the stores of other results: the compiler keeps the order of loads and stores.
//% provides store_quad stored_quad needs change
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>; // [rows, OUT_STRIDE / 4]
//% if BIAS
@group(0) @binding(6) var<storage, read> bias: array<f32>;            // [outputs]
//% end

fn quad_at(row: u32, output: u32) -> u32 {
  return (row * OUT_STRIDE + OUT_FIRST + output) / 4u;
}

fn stored_quad(row: u32, output: u32) -> vec4<f32> {
  return out[quad_at(row, output)];
}

fn store_quad(row: u32, output: u32, sums: vec4<f32>, old: vec4<f32>) {
  var value = sums;
//% for i in 0..4
//% if BIAS
  value[${i}] += bias[output + ${i}u];
//% end
//% if CHANGES
  value[${i}] += change(row, output + ${i}u);
//% end
//% end
//% if SCALED
  value *= SCALE;
//% end
//% if CAP
  value = SOFT_CAP * tanh(clamp(value / SOFT_CAP, vec4<f32>(-15.0), vec4<f32>(15.0)));
//% end
//% if ADD
  out[quad_at(row, output)] = old + value;
//% else
  out[quad_at(row, output)] = value;
//% end
}

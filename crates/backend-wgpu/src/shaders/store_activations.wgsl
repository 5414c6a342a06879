// Stores activations for a matmul with cooperative matrices, from results, or with GATED from interleaved results of gate and up.
// EACH is their number for an activation.
//% provides store_activations needs activated activation change four_halves
@group(0) @binding(5) var<storage, read_write> to_halves: array<vec2<u32>>; // see `put_halves` in emit.wgsl
//% if BIAS
@group(0) @binding(6) var<storage, read> bias: array<f32>; // [outputs]
//% end

// Stores the four activations whose gates and ups are the outputs from `output` on. Without gates, both are the inputs.
fn store_activations(row: u32, output: u32, gates: vec4<f32>, ups: vec4<f32>) {
  var x: vec4<f32>;
//% for j in 0..4
  {
    var gate = gates[${j}];
    var up = ups[${j}];
//% if BIAS
    gate += bias[output + EACH * ${j}];
    up += bias[output + EACH * ${j} + EACH - 1u];
//% end
//% if CHANGES
    gate += change(row, output + EACH * ${j});
    up += change(row, output + EACH * ${j} + EACH - 1u);
//% end
//% if GATED
    x[${j}] = activated(gate, up);
//% else
    x[${j}] = activation(gate);
//% end
  }
//% end
  let input = output / EACH;
  let at = (row / 16u * 2u * ACT_BLOCKS + input / 16u) * 64u + row % 16u * 4u + input % 16u / 4u;
  to_halves[GATED_AT + at] = four_halves(x);
}

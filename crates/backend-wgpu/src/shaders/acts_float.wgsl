// Loads activations in single precision, [rows, 8, BLOCKS]: a block of 32 is eight quads.
//% provides load_acts Acts
//% if MATMUL
@group(0) @binding(3) var<storage, read> x_floats: array<vec4<f32>>; // [rows, 8, BLOCKS]
//% end

struct Acts {
//% for j in 0..8
  q${j}: vec4<f32>,
//% end
}

//% if MATMUL
fn load_acts(row: u32, block: u32) -> Acts {
  let at = row * 8u * BLOCKS + block;
  return Acts(
//% for j in 0..8
    x_floats[at + ${j}u * BLOCKS],
//% end
  );
}
//% end

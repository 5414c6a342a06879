// Activations in single precision, in blocks of 32 as eight quads.
//% if PRODUCT
@group(0) @binding(3) var<storage, read> x_floats: array<vec4<f32>>; // [rows, 8, BLOCKS]
//% end

struct Acts {
//% for j in 0..8
  q${j}: vec4<f32>,
//% end
}

//% if PRODUCT
fn load_acts(row: u32, block: u32) -> Acts {
  let at = row * 8u * BLOCKS + block;
  return Acts(
//% for j in 0..8
    x_floats[at + ${j}u * BLOCKS],
//% end
  );
}
//% end

// In order, so that the sum is the same in every kernel.
fn add_quad(acc: f32, w: vec4<f32>, x: vec4<f32>) -> f32 {
  return fma(w.w, x.w, fma(w.z, x.z, fma(w.y, x.y, fma(w.x, x.x, acc))));
}

// Decodes weights in single precision.
//% provides accumulate load_block quad Block needs Acts act_quad add_quad
@group(0) @binding(0) var<storage, read> w_quants: array<vec4<f32>>; // [rows, 8, BLOCKS] four elements each

struct Block {
//% for j in 0..8
  q${j}: vec4<f32>,
//% end
}

//% if SHRINKS
//% else
fn load_block(row: u32, block: u32) -> Block {
  let at = row * 8u * BLOCKS + block;
  return Block(
//% for j in 0..8
    w_quants[at + ${j}u * BLOCKS],
//% end
  );
}
//% end

fn accumulate(acc: f32, w: Block, x: Acts) -> f32 {
  var sum = acc;
//% for j in 0..8
//% if WEIGHTS_IN_FLOATS
  sum = add_quad(sum, w.q${j}, act_quad(x, ${j}u));
//% else
  sum = add_quad(sum, w.q${j}, x.q${j});
//% end
//% end
  return sum;
}

fn quad(w: Block, j: u32) -> vec4<f32> {
  var out = w.q0;
//% for j in 1..8
  if (j == ${j}u) { out = w.q${j}; }
//% end
  return out;
}

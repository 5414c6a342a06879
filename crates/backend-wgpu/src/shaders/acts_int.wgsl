// Activations in eight bits: x[i] = scale * quants[i] for each block of 32.
//% if OWN_ACTS
@group(0) @binding(3) var<storage, read> x_floats: array<vec4<f32>>; // [8, BLOCKS]

var<workgroup> x_quants: array<vec4<u32>, OWN_ACTS * 2>; // [2, BLOCKS]
var<workgroup> x_scales: array<vec2<u32>, OWN_ACTS>;     // [BLOCKS]

// Makes them of a row of floats.
fn make_acts(tid: u32) {
  for (var block = tid; block < BLOCKS; block += THREADS) {
    let q = quantized(array<vec4<f32>, 8>(
//% for j in 0..8
      x_floats[${j}u * BLOCKS + block],
//% end
    ));
    x_quants[block] = q.lo;
    x_quants[block + BLOCKS] = q.hi;
    x_scales[block] = vec2<u32>(bitcast<u32>(q.scale), q.sums);
  }
  workgroupBarrier();
}
//% else
//% if PRODUCT
@group(0) @binding(3) var<storage, read> x_quants: array<vec4<u32>>; // [rows, 2, BLOCKS]
@group(0) @binding(4) var<storage, read> x_scales: array<vec2<u32>>; // [rows, BLOCKS] scale, sums of both halves
//% end
//% end

struct Acts { lo: vec4<u32>, hi: vec4<u32>, scale: f32, sums: vec2<i32> }

//% if PRODUCT
fn load_acts(row: u32, block: u32) -> Acts {
  let s = x_scales[row * BLOCKS + block];
  let at = row * 2u * BLOCKS + block;
  let sums = vec2<i32>(i32(s.y << 16u) >> 16u, i32(s.y) >> 16u);
  return Acts(x_quants[at], x_quants[at + BLOCKS], bitcast<f32>(s.x), sums);
}
//% end

fn dot_half(a: vec4<u32>, b: vec4<u32>) -> i32 {
  return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// Quad `j` of a block, whose layout says what its quants are, as bytes, and how weights follow from them.
fn quad(w: Block, j: u32) -> vec4<f32> {
  let l = line(w, j);
  return fma(vec4<f32>(unpack4xU8(bytes(w, j) ^ SIGNS)), vec4<f32>(l.x), vec4<f32>(l.y));
}

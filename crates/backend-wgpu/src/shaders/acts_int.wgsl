// Activations in eight bits: x[i] = scale * quants[i] for each block of 32.
//% if OWN_ACTS
@group(0) @binding(3) var<storage, read> x_floats: array<vec4<f32>>; // [8, BLOCKS]

var<workgroup> x_quants: array<vec4<u32>, OWN_ACTS * 2>; // [2, BLOCKS]
// [2, BLOCKS] the largest number of each half; then scale, sums.
var<workgroup> x_scales: array<u32, OWN_ACTS * 2>;

// Makes them of a row of floats. A thread has half of a block, PARTS times.
fn make_acts(tid: u32) {
//% for p in 0..PARTS
  let at_${p} = tid + ${p}u * THREADS;
  let block_${p} = at_${p} % BLOCKS;
  let half_${p} = min(at_${p} / BLOCKS, 1u);
//% for j in 0..4
  let x_${p}_${j} = x_floats[(4u * half_${p} + ${j}u) * BLOCKS + block_${p}];
//% end
//% end
//% for p in 0..PARTS
  let most_${p} = max(max(abs(x_${p}_0), abs(x_${p}_1)), max(abs(x_${p}_2), abs(x_${p}_3)));
  if (at_${p} < 2u * BLOCKS) { x_scales[at_${p}] = bitcast<u32>(largest_in(most_${p})); }
//% end
  workgroupBarrier();
//% for p in 0..PARTS
  let largest_${p} = own_largest(block_${p});
  if (at_${p} < 2u * BLOCKS) {
    x_quants[at_${p}] = vec4<u32>(
//% for j in 0..4
      quants_of(x_${p}_${j}, largest_${p}),
//% end
    );
  }
//% end
  workgroupBarrier();
  for (var block = tid; block < BLOCKS; block += THREADS) {
    let q = with_sums(x_quants[block], x_quants[block + BLOCKS], own_largest(block));
    x_scales[block] = bitcast<u32>(q.scale);
    x_scales[block + BLOCKS] = q.sums;
  }
  workgroupBarrier();
}

fn own_largest(block: u32) -> f32 {
  return max(bitcast<f32>(x_scales[block]), bitcast<f32>(x_scales[block + BLOCKS]));
}

fn scale_and_sums(row: u32, block: u32) -> vec2<u32> {
  return vec2<u32>(x_scales[block], x_scales[block + BLOCKS]);
}
//% else
//% if PRODUCT
@group(0) @binding(3) var<storage, read> x_quants: array<vec4<u32>>; // [rows, 2, BLOCKS]
@group(0) @binding(4) var<storage, read> x_scales: array<vec2<u32>>; // [rows, BLOCKS] scale, sums of both halves

fn scale_and_sums(row: u32, block: u32) -> vec2<u32> {
  return x_scales[row * BLOCKS + block];
}
//% end
//% end

struct Acts { lo: vec4<u32>, hi: vec4<u32>, scale: f32, sums: vec2<i32> }

//% if PRODUCT
fn load_acts(row: u32, block: u32) -> Acts {
  let s = scale_and_sums(row, block);
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

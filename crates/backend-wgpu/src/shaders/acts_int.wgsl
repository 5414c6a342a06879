// Loads, receives or quantizes activations in eight bits: x[i] = scale * quants[i] for each block of 32.
//% provides act_quad dot_half load_acts make_acts quad take_acts Acts needs Block bytes give_up is_there largest_in line patience
//% quants_of with_sums
//% if OWN_ACTS
//% if AWAITED
//% else
@group(0) @binding(3) var<storage, read> x_floats: array<vec4<f32>>; // [rows, 8, BLOCKS]
//% end

var<workgroup> x_quants: array<vec4<u32>, OWN_ACTS * 2>; // [2, OWN_BLOCKS]
// [2, OWN_BLOCKS] First the largest magnitude of each half of a block; then the scales and the sums of blocks.
var<workgroup> x_scales: array<u32, OWN_ACTS * 2>;

// Quantizes a row of floats, or with EXPERTS_OF_ROW as many rows: OWN_BLOCKS. Each thread quantizes PARTS halves of blocks.
fn make_acts(tid: u32, row: u32) {
//% for p in 0..PARTS
  let at_${p} = tid + ${p}u * THREADS;
  let block_${p} = at_${p} % OWN_BLOCKS;
  let half_${p} = min(at_${p} / OWN_BLOCKS, 1u);
//% if AWAITED
//% for j in 0..4
  var word_${p}_${j} = vec4<u32>();
//% end
//% else
//% for j in 0..4
  let x_${p}_${j} = x_floats[(8u * (row + block_${p} / BLOCKS) + 4u * half_${p} + ${j}u) * BLOCKS + block_${p} % BLOCKS];
//% end
//% end
//% end
//% if AWAITED
  var all_there = false;
  for (var n = 0u; n < patience() && !all_there; n++) {
    all_there = true;
//% for p in 0..PARTS
//% for j in 0..4
    word_${p}_${j} = handoff[AWAIT_AT / 4u + (4u * half_${p} + ${j}u) * BLOCKS + block_${p}];
//% end
//% end
//% for p in 0..PARTS
//% for j in 0..4
    all_there = all_there && is_there(word_${p}_${j});
//% end
//% end
  }
  if (!all_there) { give_up(); }
//% for p in 0..PARTS
//% for j in 0..4
  let x_${p}_${j} = bitcast<vec4<f32>>(word_${p}_${j});
//% end
//% end
//% end
//% for p in 0..PARTS
  let most_${p} = max(max(abs(x_${p}_0), abs(x_${p}_1)), max(abs(x_${p}_2), abs(x_${p}_3)));
  if (at_${p} < 2u * OWN_BLOCKS) { x_scales[at_${p}] = bitcast<u32>(largest_in(most_${p})); }
//% end
  workgroupBarrier();
//% for p in 0..PARTS
  let largest_${p} = own_largest(block_${p});
  if (at_${p} < 2u * OWN_BLOCKS) {
    x_quants[at_${p}] = vec4<u32>(
//% for j in 0..4
      quants_of(x_${p}_${j}, largest_${p}),
//% end
    );
  }
//% end
  workgroupBarrier();
  for (var block = tid; block < OWN_BLOCKS; block += THREADS) {
    let q = with_sums(x_quants[block], x_quants[block + OWN_BLOCKS], own_largest(block));
    x_scales[block] = bitcast<u32>(q.scale);
    x_scales[block + OWN_BLOCKS] = q.sums;
  }
  workgroupBarrier();
}

fn quants_at(i: u32) -> vec4<u32> {
  return x_quants[i];
}

fn own_largest(block: u32) -> f32 {
  return max(bitcast<f32>(x_scales[block]), bitcast<f32>(x_scales[block + OWN_BLOCKS]));
}

fn scale_and_sums(row: u32, at: u32) -> vec2<u32> {
  return vec2<u32>(x_scales[at], x_scales[at + OWN_BLOCKS]);
}
//% else
//% if AWAITED
// Input by handoff: quants [2, BLOCKS] of four words, scales [BLOCKS], sums [BLOCKS], and further values.
var<workgroup> received: array<vec4<u32>, AWAITED / 4u>;

fn take_acts(tid: u32) {
//% for t in 0..AWAIT_ROUNDS
  var words_${t} = vec4<u32>();
//% end
  var all_there = false;
  for (var n = 0u; n < patience() && !all_there; n++) {
//% for t in 0..AWAIT_ROUNDS
    if (tid + ${t}u * THREADS < AWAITED / 4u) { words_${t} = handoff[AWAIT_AT / 4u + tid + ${t}u * THREADS]; }
//% end
    all_there = true;
//% for t in 0..AWAIT_ROUNDS
    all_there = all_there && is_there(words_${t});
//% end
  }
  if (!all_there) { give_up(); }
//% for t in 0..AWAIT_ROUNDS
  if (tid + ${t}u * THREADS < AWAITED / 4u) { received[tid + ${t}u * THREADS] = words_${t}; }
//% end
  workgroupBarrier();
}

fn quants_at(i: u32) -> vec4<u32> {
  return received[i];
}

fn taken_word(i: u32) -> u32 {
  return received[i / 4u][i % 4u];
}

fn scale_and_sums(row: u32, block: u32) -> vec2<u32> {
  return vec2<u32>(taken_word(8u * BLOCKS + block), taken_word(9u * BLOCKS + block));
}
//% else
//% if MATMUL
@group(0) @binding(3) var<storage, read> x_quants: array<vec4<u32>>; // [rows, 2, BLOCKS]
@group(0) @binding(4) var<storage, read> x_scales: array<vec2<u32>>; // [rows, BLOCKS] scale; sums of both halves

fn quants_at(i: u32) -> vec4<u32> {
  return x_quants[i];
}

fn scale_and_sums(row: u32, block: u32) -> vec2<u32> {
  return x_scales[row * BLOCKS + block];
}
//% end
//% end
//% end

struct Acts { lo: vec4<u32>, hi: vec4<u32>, scale: f32, sums: vec2<i32> }

//% if MATMUL
fn load_acts(row: u32, block: u32) -> Acts {
//% if OWN_ACTS
//% if EXPERTS_OF_ROW
  let at = row * BLOCKS + block;
//% else
  let at = block;
//% end
  let s = scale_and_sums(row, at);
  let behind = at + OWN_BLOCKS;
//% else
  let at = row * 2u * BLOCKS + block;
  let s = scale_and_sums(row, block);
  let behind = at + BLOCKS;
//% end
  let sums = vec2<i32>(i32(s.y << 16u) >> 16u, i32(s.y) >> 16u);
  return Acts(quants_at(at), quants_at(behind), bitcast<f32>(s.x), sums);
}
//% end

//% if WEIGHTS_IN_FLOATS
// Returns the four activations of quad `j`.
fn act_quad(x: Acts, j: u32) -> vec4<f32> {
  return x.scale * vec4<f32>(unpack4xI8(select(x.lo[j % 4u], x.hi[j % 4u], j >= 4u)));
}
//% else
fn dot_half(a: vec4<u32>, b: vec4<u32>) -> i32 {
  return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// Returns the four weights of quad `j` of a block. The layout defines `bytes`, their quants, and `line`, their scale
// and offset.
fn quad(w: Block, j: u32) -> vec4<f32> {
  let l = line(w, j);
  return fma(vec4<f32>(unpack4xU8(bytes(w, j) ^ SIGNS)), vec4<f32>(l.x), vec4<f32>(l.y));
}
//% end

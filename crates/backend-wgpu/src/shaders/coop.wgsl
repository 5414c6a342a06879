// Computes a matmul of many rows, [rows, OUTPUTS], with cooperative matrices of SIDE times SIDE. A workgroup computes
// COLUMNS adjacent tiles of TILE_ROWS rows and TILE_OUTS outputs. A tile has K_GROUPS teams of ROW_GROUPS subgroups. A
// team computes every K_GROUPS-th stage, which is DEEP blocks of the inputs, and each of its subgroups has ROWS times
// OUTS matrices of sums.
//
// A team stages weights in half precision in its own part of workgroup memory, while the weights of its next stages are
// being loaded. Activations have half precision, in the order of matrices. Each subgroup reads its own rows; adjacent
// tiles share them in the first-level cache. Sums have single precision: a team adds its inputs in order, and then the
// sums of teams are added in order.
//
// With SHRINKS, weights are those of A of adapters, and a workgroup has rows of one of them (`shrink.wgsl`). With
// WIDE_CHANGES, products with B of adapters are added to the sums (`change.wgsl`), in stages behind all others.
//% needs Outs Rows Sums b_half begin_item first_use last_use load_block low_matrix padded_ranks ranks_of store store_activations store_quad stored_quad w_half
//% if EXPERTS
@group(0) @binding(20) var<storage, read> tile_experts: array<u32>; // [tiles] see route_tiles.wgsl
//% end
const TILE_ROWS = ROW_GROUPS * ROWS * SIDE;
const TILE_OUTS = OUTS * SIDE;
const STRIDE = 8u * DEEP + 2u; // quads of a tile's row; two are padding against bank conflicts
const PIECE = TILE_OUTS * STRIDE;
const TEAM_ENDS = ROW_GROUPS * SIDE * SIDE;

// Activations are matrices of 16 times 16: [rows / 16, inputs / 16, 16, 16]. Activations and tiles are addressed in
// quads. With a side of 8 (Metal), they are addressed in single numbers.
//% if SIDE_8
const UNITS = 4u;
@group(0) @binding(3) var<storage, read> x_halves: array<f16>;
var<workgroup> w_tile: array<f16, COLUMNS * K_GROUPS * PIECE * UNITS>;
//% else
const UNITS = 1u;
@group(0) @binding(3) var<storage, read> x_halves: array<vec4<f16>>;
var<workgroup> w_tile: array<vec4<f16>, COLUMNS * K_GROUPS * PIECE>;
//% end
// [COLUMNS, K_GROUPS, ROW_GROUPS, SIDE, SIDE] Final sums of each subgroup, one matrix at a time.
//% if STORES_QUADS
var<workgroup> ends: array<vec4<f32>, COLUMNS * K_GROUPS * TEAM_ENDS / 4u>;
//% else
var<workgroup> ends: array<f32, COLUMNS * K_GROUPS * TEAM_ENDS>;
//% end

//% if ROLLED
@group(0) @binding(4) var<storage, read> zero: array<u32>; // [1] a zero that the compiler does not know
var<private> masks: vec2<u32>;
//% else
const masks = MASKS;
//% end

fn put_w(at: u32, w: vec4<f16>) {
//% if SIDE_8
//% for i in 0..4
  w_tile[4u * at + ${i}u] = w[${i}];
//% end
//% else
  w_tile[at] = w;
//% end
}

// Returns the offset of a matrix of activations.
fn x_at(row: u32, input: u32) -> u32 {
  return ((row / 16u * 2u * BLOCKS + input / 16u) * 64u + row % 16u * 4u + input % 16u / 4u) * UNITS;
}

//% if ACTIVATES
// Returns four sums that are EACH apart.
fn ends_quad(at: u32) -> vec4<f32> {
  return vec4<f32>(ends[at], ends[at + EACH], ends[at + 2u * EACH], ends[at + 3u * EACH]);
}

//% end
// Synchronizes a team. If a team is one subgroup, only that subgroup waits.
fn meet() {
//% if SHARED
  workgroupBarrier();
//% else
  subgroupBarrier();
//% end
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(subgroup_id) group: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
//% if SHRINKS
  let item = begin_item(wid.x);
  let row = item.x;
  let stack = item.y;
//% else
  let row = wid.x * TILE_ROWS;
//% end
  let piece = group / ROW_GROUPS;
  let team = piece % K_GROUPS;
  let output = (wid.y * COLUMNS + piece / K_GROUPS) * TILE_OUTS;
//% if EXPERTS
  // A tile of rows has one expert (`route_tiles.wgsl`). A stack has the weights of all experts.
  let expert = tile_experts[wid.x];
  // Validation takes the result of a function for one that differs between threads, which matrices do not permit.
//% if POOL
  let expert_at = select(pool[4u + min(expert, COUNT - 1u)], expert, expert >= COUNT) - FIRST_EXPERT;
//% else
  let expert_at = expert - FIRST_EXPERT;
//% end
  if (expert_at >= HELD_EXPERTS) { return; }
  let stack = expert_at * OUTPUTS;
//% if BIAS
  bias_from = expert * OUTPUTS;
//% end
//% else
//% if SHRINKS
//% else
  const stack = 0u;
//% end
//% end
  let own_row = row + group % ROW_GROUPS * ROWS * SIDE;
  let member = group % ROW_GROUPS * SUBGROUP + lane;
//% for r in 0..ROWS
//% for o in 0..OUTS
  var sums_${r}_${o}: Sums;
//% end
//% end
//% for i in 0..LOADS
  let row_${i} = (member + ${i}u * TEAM) / DEEP;
  let place_${i} = (member + ${i}u * TEAM) % DEEP;
  let from_${i} = stack + min(output + row_${i}, OUTPUTS - 1u);
  var w_${i} = load_block(from_${i}, min(team * DEEP + place_${i}, BLOCKS - 1u));
//% if ROLLED
  var later_${i} = load_block(from_${i}, min(DEEP * K_GROUPS + team * DEEP + place_${i}, BLOCKS - 1u));
//% end
//% end
//% if ROLLED
  masks = MASKS + zero[0];
  // NVIDIA's compiler does not unroll a loop whose end is read from memory in each iteration. The kernels of a layer
  // should fit into the instruction cache together.
  var stage = 0u;
  loop {
    if (stage >= BLOCKS + zero[0]) { break; }
//% else
  for (var stage = 0u; stage < BLOCKS; stage += DEEP * K_GROUPS) {
//% end
    let block = stage + team * DEEP;
    let x = HALVES_AT * 2u * UNITS + x_at(own_row, block * 32u);
    // Activations are loaded before the first wait.
//% for k in 0..STEPS
//% for r in 0..ROWS
    let rows_${k}_${r} = coopLoadT<Rows>(&x_halves[x + x_at(${r}u * SIDE, ${k}u * SIDE)], 4u * UNITS);
//% end
//% end
    meet();
//% for i in 0..LOADS
//% if WHOLE
    {
//% else
    if (row_${i} < TILE_OUTS) {
//% end
//% if TAIL
      // Blocks past the last one are zero.
      let counts = block + place_${i} < BLOCKS;
//% else
      let counts = true;
//% end
//% for j in 0..8
      put_w(piece * PIECE + row_${i} * STRIDE + 8u * place_${i} + ${j}u, select(vec4<f16>(), w_half(w_${i}, ${j}u), counts));
//% end
    }
//% end
    meet();
    // The last stage prefetches the last block again, because a branch would wait for the loads.
//% for i in 0..LOADS
//% if ROLLED
    w_${i} = later_${i};
    later_${i} = load_block(from_${i}, min(block + 2u * DEEP * K_GROUPS + place_${i}, BLOCKS - 1u));
//% else
    w_${i} = load_block(from_${i}, min(block + DEEP * K_GROUPS + place_${i}, BLOCKS - 1u));
//% end
//% end
//% for k in 0..STEPS
    {
//% for o in 0..OUTS
      let outs_${o} = coopLoad<Outs>(&w_tile[(piece * PIECE + ${o}u * SIDE * STRIDE + ${k}u * SIDE / 4u) * UNITS], STRIDE * UNITS);
//% end
//% for r in 0..ROWS
//% for o in 0..OUTS
      sums_${r}_${o} = coopMultiplyAdd(rows_${k}_${r}, outs_${o}, sums_${r}_${o});
//% end
//% end
    }
//% end
//% if ROLLED
    continuing { stage += DEEP * K_GROUPS; }
//% end
  }
//% if WIDE_CHANGES
  let end = last_use(min(row + TILE_ROWS, args.rows) - 1u);
  for (var use_ = first_use(row); use_ < end; use_++) {
    for (var rank = 0u; rank < ranks_of(use_); rank += 32u * DEEP) {
//% for k in 0..STEPS
//% for r in 0..ROWS
      let rows_${k}_${r} = coopLoadT<Rows>(&low_halves[low_matrix(use_, own_row + ${r}u * SIDE, rank + ${k}u * SIDE) * UNITS], 4u * UNITS);
//% end
//% end
      meet();
//% for i in 0..LOADS
//% if WHOLE
      {
//% else
      if (row_${i} < TILE_OUTS) {
//% end
//% for j in 0..8
        put_w(piece * PIECE + row_${i} * STRIDE + 8u * place_${i} + ${j}u,
          select(vec4<f16>(), b_half(use_, from_${i}, rank + 32u * place_${i} + 4u * ${j}u), team == 0u));
//% end
      }
//% end
      meet();
//% for k in 0..STEPS
      {
//% for o in 0..OUTS
        let outs_${o} = coopLoad<Outs>(&w_tile[(piece * PIECE + ${o}u * SIDE * STRIDE + ${k}u * SIDE / 4u) * UNITS], STRIDE * UNITS);
//% end
//% for r in 0..ROWS
//% for o in 0..OUTS
        sums_${r}_${o} = coopMultiplyAdd(rows_${k}_${r}, outs_${o}, sums_${r}_${o});
//% end
//% end
      }
//% end
    }
  }
//% end
//% if STORES_QUADS
  // Each subgroup stores its own sums, and waits for no other one.
//% for i in 0..QUADS
  let row_of_${i} = own_row + (lane + ${i}u * SUBGROUP) / 4u;
  let output_of_${i} = output + (lane + ${i}u * SUBGROUP) % 4u * 4u;
//% end
//% for r in 0..ROWS
//% if ADD
//% for o in 0..OUTS
//% for i in 0..QUADS
  let old_${r}_${o}_${i} = stored_quad(
    min(row_of_${i} + ${r}u * SIDE, args.rows - 1u), min(output_of_${i} + ${o}u * SIDE, OUTPUTS - 4u)
  );
//% end
//% end
//% end
//% for o in 0..OUTS
  subgroupBarrier();
  coopStoreT(sums_${r}_${o}, &ends[group * SIDE * SIDE / 4u], SIDE / 4u);
  subgroupBarrier();
//% for i in 0..QUADS
  if (row_of_${i} + ${r}u * SIDE < args.rows && output_of_${i} + ${o}u * SIDE < OUTPUTS) {
    let sums = ends[group * SIDE * SIDE / 4u + lane + ${i}u * SUBGROUP];
//% if ADD
    store_quad(row_of_${i} + ${r}u * SIDE, output_of_${i} + ${o}u * SIDE, sums, old_${r}_${o}_${i});
//% else
    store_quad(row_of_${i} + ${r}u * SIDE, output_of_${i} + ${o}u * SIDE, sums, vec4<f32>());
//% end
  }
//% end
//% end
//% end
//% else
//% if OWN_ACTIVATIONS
  // Each subgroup stores activations of its own sums.
//% for r in 0..ROWS
//% for o in 0..OUTS
  subgroupBarrier();
  coopStoreT(sums_${r}_${o}, &ends[group * SIDE * SIDE], SIDE);
  subgroupBarrier();
//% for i in 0..QUADS
  {
    let at = 4u * EACH * (lane + ${i}u * SUBGROUP);
    let r = own_row + ${r}u * SIDE + at / SIDE;
    let o = output + ${o}u * SIDE + at % SIDE;
    let from_ = group * SIDE * SIDE + at;
    if (r < args.rows && o < OUTPUTS) { store_activations(r, o, ends_quad(from_), ends_quad(from_ + EACH - 1u)); }
  }
//% end
//% end
//% end
//% else
//% for r in 0..ROWS
//% for o in 0..OUTS
  workgroupBarrier();
  coopStoreT(sums_${r}_${o}, &ends[group * SIDE * SIDE], SIDE);
  workgroupBarrier();
//% if ACTIVATES
  // The sums of four activations of a row at a time: four inputs, or four gates and ups.
  for (var i = group * SUBGROUP + lane; i < COLUMNS * TEAM_ENDS / (4u * EACH); i += THREADS) {
    let at = 4u * EACH * i;
    let from_ = at / TEAM_ENDS * K_GROUPS * TEAM_ENDS + at % TEAM_ENDS;
    var gates = ends_quad(from_);
    var ups = ends_quad(from_ + EACH - 1u);
    for (var t = 1u; t < K_GROUPS; t++) {
      gates += ends_quad(from_ + t * TEAM_ENDS);
      ups += ends_quad(from_ + t * TEAM_ENDS + EACH - 1u);
    }
//% else
  for (var i = group * SUBGROUP + lane; i < COLUMNS * TEAM_ENDS; i += THREADS) {
    let at = i;
    let from_ = i / TEAM_ENDS * K_GROUPS * TEAM_ENDS + i % TEAM_ENDS;
    var sum = ends[from_];
    for (var t = 1u; t < K_GROUPS; t++) { sum += ends[from_ + t * TEAM_ENDS]; }
//% end
    let r = row + (at % TEAM_ENDS / (SIDE * SIDE) * ROWS + ${r}u) * SIDE + at / SIDE % SIDE;
    let o = (wid.y * COLUMNS + at / TEAM_ENDS) * TILE_OUTS + ${o}u * SIDE + at % SIDE;
//% if ACTIVATES
    if (r < args.rows && o < OUTPUTS) { store_activations(r, o, gates, ups); }
//% else
//% if EXPERTS
    if (o < OUTPUTS) { store(r, o, sum, 1.0); }
//% else
//% if SHRINKS
    if (o < padded_ranks()) { store(r, o, sum, 1.0); }
//% else
    if (r < args.rows && o < OUTPUTS) { store(r, o, sum, 1.0); }
//% end
//% end
//% end
  }
//% end
//% end
//% end
//% end
}

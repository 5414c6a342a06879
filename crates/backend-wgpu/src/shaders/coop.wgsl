// Products of many rows with cooperative matrices of SIDE times SIDE, in tiles of TILE_ROWS rows and TILE_OUTS outputs: each of
// ROW_GROUPS times OUT_GROUPS subgroups has ROWS times OUTS matrices of sums. Weights and activations come in stages of DEEP blocks
// through workgroup memory, where they are in half precision, while those of the next stage are on their way. Sums are in single
// precision and add up the inputs from first to last, whatever the tiles are.
enable f16;
enable wgpu_cooperative_matrix;
//% if SIDE_8
alias Rows = coop_mat8x8<f16, A>;
alias Outs = coop_mat8x8<f16, B>;
alias Sums = coop_mat8x8<f32, C>;
//% else
alias Rows = coop_mat16x16<f16, A>;
alias Outs = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;
//% end

const TILE_ROWS = ROW_GROUPS * ROWS * SIDE;
const TILE_OUTS = OUT_GROUPS * OUTS * SIDE;
const STRIDE = 8u * DEEP + 2u; // quads of a tile's row; the two keep rows out of each other's banks

// Tiles are of quads. Where matrices have a side of 8 the way is to Metal, which wants to see halves.
//% if SIDE_8
const UNITS = 4u;
var<workgroup> x_tile: array<f16, TILE_ROWS * STRIDE * UNITS>;
var<workgroup> w_tile: array<f16, TILE_OUTS * STRIDE * UNITS>;
//% else
const UNITS = 1u;
var<workgroup> x_tile: array<vec4<f16>, TILE_ROWS * STRIDE>;
var<workgroup> w_tile: array<vec4<f16>, TILE_OUTS * STRIDE>;
//% end
var<workgroup> ends: array<f32, ROW_GROUPS * OUT_GROUPS * SIDE * SIDE>;

fn put_x(at: u32, x: vec4<f16>) {
//% if SIDE_8
//% for i in 0..4
  x_tile[4u * at + ${i}u] = x[${i}];
//% end
//% else
  x_tile[at] = x;
//% end
}

fn put_w(at: u32, w: vec4<f16>) {
//% if SIDE_8
//% for i in 0..4
  w_tile[4u * at + ${i}u] = w[${i}];
//% end
//% else
  w_tile[at] = w;
//% end
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
  @builtin(subgroup_id) group: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let output = wid.y * TILE_OUTS;
  let row = wid.x * TILE_ROWS;
  let own_row = group / OUT_GROUPS * ROWS * SIDE;
  let own_out = group % OUT_GROUPS * OUTS * SIDE;
//% for r in 0..ROWS
//% for o in 0..OUTS
  var sums_${r}_${o}: Sums;
//% end
//% end
//% for i in 0..W_LOADS
  let w_row_${i} = (tid + ${i}u * THREADS) / DEEP;
  let w_place_${i} = (tid + ${i}u * THREADS) % DEEP;
  let w_from_${i} = min(output + w_row_${i}, OUTPUTS - 1u);
  var w_${i} = load_block(w_from_${i}, min(w_place_${i}, BLOCKS - 1u));
//% end
//% for i in 0..X_LOADS
  let x_row_${i} = (tid + ${i}u * THREADS) / DEEP;
  let x_place_${i} = (tid + ${i}u * THREADS) % DEEP;
  let x_from_${i} = min(row + x_row_${i}, args.rows - 1u);
  var x_${i} = load_acts(x_from_${i}, min(x_place_${i}, BLOCKS - 1u));
//% end
  for (var block = 0u; block < BLOCKS; block += DEEP) {
    workgroupBarrier();
//% for i in 0..W_LOADS
//% if W_WHOLE
    {
//% else
    if (w_row_${i} < TILE_OUTS) {
//% end
//% for j in 0..8
      put_w(w_row_${i} * STRIDE + 8u * w_place_${i} + ${j}u, w_half(w_${i}, ${j}u));
//% end
    }
//% end
//% for i in 0..X_LOADS
//% if X_WHOLE
    {
//% else
    if (x_row_${i} < TILE_ROWS) {
//% end
//% if TAIL
      // Blocks past the last one do not count.
      let counts = block + x_place_${i} < BLOCKS;
//% else
      let counts = true;
//% end
//% for j in 0..8
      put_x(x_row_${i} * STRIDE + 8u * x_place_${i} + ${j}u, select(vec4<f16>(), x_half(x_${i}, ${j}u), counts));
//% end
    }
//% end
    workgroupBarrier();
    // The last stage asks for its own blocks again: a branch would make it wait.
//% for i in 0..W_LOADS
    w_${i} = load_block(w_from_${i}, min(block + DEEP + w_place_${i}, BLOCKS - 1u));
//% end
//% for i in 0..X_LOADS
    x_${i} = load_acts(x_from_${i}, min(block + DEEP + x_place_${i}, BLOCKS - 1u));
//% end
//% for k in 0..STEPS
    {
//% for r in 0..ROWS
      let rows_${r} = coopLoadT<Rows>(&x_tile[((own_row + ${r}u * SIDE) * STRIDE + ${k}u * SIDE / 4u) * UNITS], STRIDE * UNITS);
//% end
//% for o in 0..OUTS
      let outs_${o} = coopLoad<Outs>(&w_tile[((own_out + ${o}u * SIDE) * STRIDE + ${k}u * SIDE / 4u) * UNITS], STRIDE * UNITS);
//% end
//% for r in 0..ROWS
//% for o in 0..OUTS
      sums_${r}_${o} = coopMultiplyAdd(rows_${r}, outs_${o}, sums_${r}_${o});
//% end
//% end
    }
//% end
  }
//% for r in 0..ROWS
//% for o in 0..OUTS
  workgroupBarrier();
  coopStoreT(sums_${r}_${o}, &ends[group * SIDE * SIDE], SIDE);
  workgroupBarrier();
  for (var i = lane; i < SIDE * SIDE; i += SUBGROUP) {
    let r = row + own_row + ${r}u * SIDE + i / SIDE;
    let o = output + own_out + ${o}u * SIDE + i % SIDE;
    if (r < args.rows && o < OUTPUTS) { store(r, o, ends[group * SIDE * SIDE + i]); }
  }
//% end
//% end
}

// Products of many rows, in tiles of TILE_ROWS rows and TILE_OUTS outputs, a thread having ROWS times OUTS of them. Weights and
// activations come in stages of DEEP blocks through workgroup memory, while those of the next stage are on their way. Each output
// adds its inputs up in the order of matvec: lane by lane, the blocks of a lane in order.
const TILE_ROWS = 16u * ROWS;
const TILE_OUTS = 16u * OUTS;

var<workgroup> w_tile: array<Block, TILE_OUTS * DEEP>;
var<workgroup> x_tile: array<Acts, TILE_ROWS * DEEP>;

// The block that is at a place of a stage; past the end of a lane, one that does not count.
fn block_at(stage: u32, place: u32) -> u32 {
  let lane_stages = (BLOCKS + 32u * DEEP - 1u) / (32u * DEEP);
  return stage / lane_stages + 32u * (stage % lane_stages * DEEP + place);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let lane_stages = (BLOCKS + 32u * DEEP - 1u) / (32u * DEEP);
  let stages = min(32u, BLOCKS) * lane_stages;
  let output = wid.y * TILE_OUTS;
  let row = wid.x * TILE_ROWS;
  let to = tid % 16u;
  let tr = tid / 16u;
//% for r in 0..ROWS
//% for o in 0..OUTS
  var acc_${r}_${o} = 0.0;
  var total_${r}_${o} = 0.0;
//% end
//% end
//% for i in 0..W_LOADS
  let w_place_${i} = (tid + ${i}u * 256u) / TILE_OUTS;
  let w_row_${i} = min(output + (tid + ${i}u * 256u) % TILE_OUTS, OUTPUTS - 1u);
  var w_next_${i} = load_block(w_row_${i}, min(block_at(0u, w_place_${i}), BLOCKS - 1u));
//% end
//% for i in 0..X_LOADS
  let x_place_${i} = (tid + ${i}u * 256u) / TILE_ROWS;
  let x_row_${i} = min(row + (tid + ${i}u * 256u) % TILE_ROWS, args.rows - 1u);
  var x_next_${i} = load_acts(x_row_${i}, min(block_at(0u, x_place_${i}), BLOCKS - 1u));
//% end
  for (var stage = 0u; stage < stages; stage++) {
    workgroupBarrier();
//% for i in 0..W_LOADS
    if (tid + ${i}u * 256u < TILE_OUTS * DEEP) { w_tile[tid + ${i}u * 256u] = w_next_${i}; }
//% end
//% for i in 0..X_LOADS
    if (tid + ${i}u * 256u < TILE_ROWS * DEEP) { x_tile[tid + ${i}u * 256u] = x_next_${i}; }
//% end
    workgroupBarrier();
    if (stage + 1u < stages) {
//% for i in 0..W_LOADS
      w_next_${i} = load_block(w_row_${i}, min(block_at(stage + 1u, w_place_${i}), BLOCKS - 1u));
//% end
//% for i in 0..X_LOADS
      x_next_${i} = load_acts(x_row_${i}, min(block_at(stage + 1u, x_place_${i}), BLOCKS - 1u));
//% end
    }
    for (var place = 0u; place < DEEP; place++) {
      if (block_at(stage, place) >= BLOCKS) { break; }
//% for o in 0..OUTS
      let w_${o} = w_tile[place * TILE_OUTS + to + ${o}u * 16u];
//% end
//% for r in 0..ROWS
      let x_${r} = x_tile[place * TILE_ROWS + tr + ${r}u * 16u];
//% for o in 0..OUTS
      acc_${r}_${o} = accumulate(acc_${r}_${o}, w_${o}, x_${r});
//% end
//% end
    }
    if (stage % lane_stages == lane_stages - 1u) {
//% for r in 0..ROWS
//% for o in 0..OUTS
      total_${r}_${o} += acc_${r}_${o};
      acc_${r}_${o} = 0.0;
//% end
//% end
    }
  }
//% for r in 0..ROWS
//% for o in 0..OUTS
  if (row + tr + ${r}u * 16u < args.rows && output + to + ${o}u * 16u < OUTPUTS) {
    let at_${r}_${o} = row + tr + ${r}u * 16u;
    store(at_${r}_${o}, output + to + ${o}u * 16u, total_${r}_${o}, factor_of(at_${r}_${o}));
  }
//% end
//% end
}

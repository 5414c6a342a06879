// Computes a matmul of many rows, [rows, OUTPUTS], in tiles of TILE_ROWS rows and TILE_OUTS outputs. A thread computes
// ROWS times OUTS results. Weights and activations are staged in workgroup memory, DEEP blocks at a time, while those
// of the next stage are loaded. Each output sums its inputs in the order of matvec.wgsl: lane by lane, and the blocks
// of a lane in order.
//
// A stage has no branches. The loads of the next stage precede its arithmetic, and a branch would wait for them.
//
// With EXPERTS, a tile of rows has one expert (`route_tiles.wgsl`). A stack has the weights of all experts.
//% needs Acts Block accumulate factor_of load_acts load_block place_of_expert store
//% if EXPERTS
@group(0) @binding(20) var<storage, read> tile_experts: array<u32>; // [tiles] expert of each tile
@group(0) @binding(21) var<storage, read> sources: array<u32>;      // [tiles, TILE_ROWS] row of each place

//% end
const TILE_ROWS = THREADS / 16u * ROWS;
const TILE_OUTS = 16u * OUTS;

var<workgroup> w_tile: array<Block, TILE_OUTS * DEEP>;
var<workgroup> x_tile: array<Acts, TILE_ROWS * DEEP>;

// Returns the number of stages of a lane.
fn lane_stages() -> u32 {
  return (BLOCKS + 32u * DEEP - 1u) / (32u * DEEP);
}

// Returns the block at a place of a stage. Past the end of a lane, it is at least BLOCKS.
fn block_at(stage: u32, place: u32) -> u32 {
  return stage / lane_stages() + 32u * (stage % lane_stages() * DEEP + place);
}

fn weights_at(output: u32, stage: u32, place: u32) -> Block {
  return load_block(output, min(block_at(stage, place), BLOCKS - 1u));
}

fn acts_at(row: u32, stage: u32, place: u32) -> Acts {
  let block = block_at(stage, place);
//% if TAIL
  if (block >= BLOCKS) { return Acts(); }
//% end
  return load_acts(row, min(block, BLOCKS - 1u));
}

//% if EXPERTS
// Returns the row of activations of a place.
fn acts_row(place: u32) -> u32 {
//% if BY_SOURCE
  return sources[place];
//% else
  return place;
//% end
}
//% end

// Returns the place of a row's activations and results. With STACK, a row has one place for each matrix of the stack.
fn place_of(row: u32, number: u32) -> u32 {
//% if STACK
  return row * STACK + number;
//% else
  return row;
//% end
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
//% if EXPERTS
  let expert = tile_experts[wid.x];
  let place = place_of_expert(expert) - FIRST_EXPERT;
  if (place >= HELD_EXPERTS) { return; }
  let stack = place * OUTPUTS;
//% if BIAS
  bias_from = expert * OUTPUTS;
//% end
  let row = wid.x * TILE_ROWS;
//% else
//% if STACK
  let number = FIRST_NUMBER + wid.x % HELD_NUMBERS;
  let row = wid.x / HELD_NUMBERS * TILE_ROWS;
  let stack = wid.x % HELD_NUMBERS * OUTPUTS;
//% else
  const number = 0u;
  let row = wid.x * TILE_ROWS;
  const stack = 0u;
//% end
//% end
  let output = wid.y * TILE_OUTS;
  let to = tid % 16u;
  let tr = tid / 16u;
//% for r in 0..ROWS
//% for o in 0..OUTS
  var total_${r}_${o} = 0.0;
//% end
//% end
//% for i in 0..W_LOADS
  let w_at_${i} = tid + ${i}u * THREADS;
  let w_row_${i} = stack + min(output + w_at_${i} % TILE_OUTS, OUTPUTS - 1u);
  var w_next_${i} = weights_at(w_row_${i}, 0u, w_at_${i} / TILE_OUTS);
//% end
//% for i in 0..X_LOADS
  let x_at_${i} = tid + ${i}u * THREADS;
//% if EXPERTS
  let x_row_${i} = acts_row(row + x_at_${i} % TILE_ROWS);
//% else
  let x_row_${i} = place_of(min(row + x_at_${i} % TILE_ROWS, args.rows - 1u), number);
//% end
  var x_next_${i} = acts_at(x_row_${i}, 0u, x_at_${i} / TILE_ROWS);
//% end
  for (var lane = 0u; lane < min(32u, BLOCKS); lane++) {
//% for r in 0..ROWS
//% for o in 0..OUTS
    var acc_${r}_${o} = 0.0;
//% end
//% end
    for (var part = 0u; part < lane_stages(); part++) {
      let next = lane * lane_stages() + part + 1u;
      workgroupBarrier();
//% for i in 0..W_LOADS
//% if WHOLE
      w_tile[w_at_${i}] = w_next_${i};
//% else
      if (w_at_${i} < TILE_OUTS * DEEP) { w_tile[w_at_${i}] = w_next_${i}; }
//% end
//% end
//% for i in 0..X_LOADS
//% if WHOLE
      x_tile[x_at_${i}] = x_next_${i};
//% else
      if (x_at_${i} < TILE_ROWS * DEEP) { x_tile[x_at_${i}] = x_next_${i}; }
//% end
//% end
      workgroupBarrier();
      // The last stage prefetches a stage that does not exist.
//% for i in 0..W_LOADS
      w_next_${i} = weights_at(w_row_${i}, next, w_at_${i} / TILE_OUTS);
//% end
//% for i in 0..X_LOADS
      x_next_${i} = acts_at(x_row_${i}, next, x_at_${i} / TILE_ROWS);
//% end
//% for p in 0..DEEP
      {
//% for o in 0..OUTS
        let w_${o} = w_tile[${p}u * TILE_OUTS + to + ${o}u * 16u];
//% end
//% for r in 0..ROWS
        let x_${r} = x_tile[${p}u * TILE_ROWS + tr + ${r}u * (THREADS / 16u)];
//% for o in 0..OUTS
        acc_${r}_${o} = accumulate(acc_${r}_${o}, w_${o}, x_${r});
//% end
//% end
      }
//% end
    }
//% for r in 0..ROWS
//% for o in 0..OUTS
    total_${r}_${o} += acc_${r}_${o};
//% end
//% end
  }
//% for r in 0..ROWS
  let row_${r} = row + tr + ${r}u * (THREADS / 16u);
//% for o in 0..OUTS
//% if EXPERTS
  if (output + to + ${o}u * 16u < OUTPUTS) {
    store(row_${r}, output + to + ${o}u * 16u, total_${r}_${o}, factor_of(acts_row(row_${r})));
  }
//% else
  if (row_${r} < args.rows && output + to + ${o}u * 16u < OUTPUTS) {
    let at = place_of(row_${r}, number);
    store(at, output + to + ${o}u * 16u, total_${r}_${o}, factor_of(at));
  }
//% end
//% end
//% end
}

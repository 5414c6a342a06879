// Computes a matmul of few rows, [rows, OUTPUTS]. A group of LANES threads, which are 32 or a multiple, computes OUTS outputs
// of BATCH rows. Lane l sums blocks l, l + LANES, ... in order; then the sums of each 32 lanes are added in order, and these
// sums. A result depends only on its row and its weights, for any BATCH and OUTS.
//
// With one row, or one row and expert, a kernel may include other operations:
// - NORMED: activations are those of a norm, whose factor is computed here and applied to the results. So the matmul
//   does not wait for the factor.
// - OWN_ACTS: activations are floats, which every workgroup quantizes itself.
// - FINISHES: results stay in the workgroup, and its threads `finish` them.
// - CHOOSES: every workgroup chooses the experts of its row itself.
//
// With SHRINKS, weights are those of A of adapters, and a workgroup has rows of one of them (`shrink.wgsl`).
//% needs accumulate add_squares begin_item change_of_tile choose clear_next factor_of finish keep_b keep_use load_acts load_block look_ahead make_acts peek_low place_of_expert prefetch stage_change store take_acts wait_for_some
//% if EXPERTS
//% if CHOOSES
//% else
@group(0) @binding(20) var<storage, read> chosen: array<u32>; // [rows, experts of a row]
//% end
//% end
var<workgroup> sums: array<f32, SUMS>; // [groups, OUTS * BATCH, LANES + 1], at least
//% if FINISHES
const TILE = THREADS / LANES * OUTS;
var<workgroup> totals: array<f32, TILE>;
//% if CHANGES
var<workgroup> changes: array<f32, TILE>;
//% end
//% if BIAS
@group(0) @binding(6) var<storage, read> bias: array<f32>; // [OUTPUTS]
//% end
//% end
// Returns the sum of 32 lanes, from one on.
fn sum_from(at: u32) -> f32 {
  var sum = 0.0;
  for (var l = 0u; l < 32u; l++) { sum += sums[at + l]; }
  return sum;
}

// Returns result `n` of the workgroup: the sum over its lanes.
fn total_of(n: u32) -> f32 {
//% if PARTED
  // The first of each 32 lanes has their sum.
  var total = 0.0;
  for (var p = 0u; p < LANES / 32u; p++) { total += sums[n * (LANES + 1u) + 32u * p]; }
  return total;
//% else
  return sum_from(n * (LANES + 1u));
//% end
}

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
  let lane = tid % LANES;
  let group = tid / LANES;
  let output = (wid.y * (THREADS / LANES) + group) * OUTS;
//% if SHRINKS
  const number = 0u;
  let item = begin_item(wid.x);
//% if HANDS_NEXT
  if (wid.y == 0u) { clear_next(tid, BATCH, item.x); }
//% end
  let row = item.x;
  let stack = item.y;
//% else
//% if EXPERTS
  // This workgroup has one row and one expert. A stack has the weights of all experts.
//% if CHOOSES
  choose(tid, wid.x / PLACES_OF_ROW, wid.x % PLACES_OF_ROW == 0u && wid.y == 0u);
  let expert = workgroupUniformLoad(&choice[wid.x % PLACES_OF_ROW]);
//% else
  let expert = chosen[wid.x];
//% end
  let place = place_of_expert(expert) - FIRST_EXPERT;
  if (place >= HELD_EXPERTS) { return; }
  let row = wid.x / PLACES_OF_ROW;
  let stack = place * OUTPUTS;
//% if FINISHES
  gated_from = wid.x * 32u * ACT_BLOCKS;
//% else
//% if BIAS
  bias_from = expert * OUTPUTS;
//% end
//% end
//% else
//% if STACK
  let number = FIRST_NUMBER + wid.x % HELD_NUMBERS;
  let row = wid.x / HELD_NUMBERS * BATCH;
  let stack = wid.x % HELD_NUMBERS * OUTPUTS;
//% else
  const number = 0u;
  let row = wid.x * BATCH;
  const stack = 0u;
//% end
//% end
//% end
  // Past the end, the last outputs are computed again and not stored.
//% for o in 0..OUTS
  let from_${o} = stack + min(output + ${o}u, OUTPUTS - 1u);
//% for b in 0..BATCH
  var acc_${o}_${b} = 0.0;
//% end
//% end
//% if EARLY
  // The weights of the first EARLY blocks of a lane are loaded before activations are ready.
//% for e in 0..EARLY
//% for o in 0..OUTS
  let early_${e}_${o} = load_block(from_${o}, min(lane + ${e}u * LANES, BLOCKS - 1u));
//% end
//% end
//% end
//% if KEEPS_USE
//% if FINISHES
//% else
  keep_use(min(row + lane % BATCH, args.rows - 1u));
//% end
//% end
//% if FINISHES
  let first = wid.y * TILE;
  let prefetched = prefetch(tid, first);
//% if CHANGES
  let ahead = look_ahead(tid, first);
//% end
//% end
//% if AWAITED
  wait_for_some(wid.y, tid);
//% if OWN_ACTS
//% else
  take_acts(tid);
//% end
//% end
//% if NORMED
  add_squares(tid);
//% end
//% if OWN_ACTS
  make_acts(tid, row);
//% end
//% if FINISHES
//% if CHANGES
  let peeked = peek_low(tid);
//% end
//% end
  var block = lane;
//% if EARLY
//% for e in 0..EARLY
  if (block < BLOCKS) {
    let x = load_acts(row, block);
//% for o in 0..OUTS
    acc_${o}_0 = accumulate(acc_${o}_0, early_${e}_${o}, x);
//% end
  }
  block += LANES;
//% end
//% end
//% if TWICE
  // The weights of two blocks are loaded at a time.
  for (; block + LANES < BLOCKS; block += 2u * LANES) {
//% for o in 0..OUTS
    let w_${o} = load_block(from_${o}, block);
    let more_${o} = load_block(from_${o}, block + LANES);
//% end
    let x = load_acts(row, block);
    let more = load_acts(row, block + LANES);
//% for o in 0..OUTS
    acc_${o}_0 = accumulate(accumulate(acc_${o}_0, w_${o}, x), more_${o}, more);
//% end
  }
//% end
  for (; block < BLOCKS; block += LANES) {
//% for o in 0..OUTS
    let w_${o} = load_block(from_${o}, block);
//% end
//% for b in 0..BATCH
//% if EXPERTS
    let x_${b} = load_acts(row, block);
//% else
    let x_${b} = load_acts(place_of(min(row + ${b}u, args.rows - 1u), number), block);
//% end
//% end
//% for b in 0..BATCH
//% for o in 0..OUTS
    acc_${o}_${b} = accumulate(acc_${o}_${b}, w_${o}, x_${b});
//% end
//% end
  }
//% if KEEPS_USE
//% if FINISHES
//% else
  if (lane < OUTS * BATCH) { keep_b(min(output + lane / BATCH, OUTPUTS - 1u)); }
//% end
//% end
  let own = group * OUTS * BATCH;
//% for o in 0..OUTS
//% for b in 0..BATCH
  sums[(own + ${o}u * BATCH + ${b}u) * (LANES + 1u) + lane] = acc_${o}_${b};
//% end
//% end
//% if FINISHES
//% if CHANGES
  stage_change(tid, ahead, peeked);
//% end
//% end
  workgroupBarrier();
//% if FINISHES
  if (tid < TILE) {
//% if BIAS
//% if EXPERTS
    let bias_at = expert * OUTPUTS;
//% else
    let bias_at = 0u;
//% end
    totals[tid] = fma(total_of(tid), factor_of(row), bias[bias_at + min(first + tid, OUTPUTS - 1u)]);
//% else
    totals[tid] = total_of(tid) * factor_of(row);
//% end
  }
//% if CHANGES
  // Other threads compute the changes, from CHANGE_AT on, if there are enough.
  if (tid - CHANGE_AT < TILE) { changes[tid - CHANGE_AT] = change_of_tile(tid - CHANGE_AT, first); }
  workgroupBarrier();
  if (tid < TILE) { totals[tid] += changes[tid]; }
//% end
  workgroupBarrier();
  finish(tid, first, prefetched);
//% else
//% if PARTED
  for (var n = lane; n < OUTS * BATCH * (LANES / 32u); n += LANES) {
    let at = (own + n / (LANES / 32u)) * (LANES + 1u) + n % (LANES / 32u) * 32u;
    sums[at] = sum_from(at);
  }
  workgroupBarrier();
//% end
  for (var n = lane; n < OUTS * BATCH; n += LANES) {
    let total = total_of(own + n);
//% if EXPERTS
    if (output + n < OUTPUTS) { store(wid.x, output + n, total, factor_of(row)); }
//% else
    if (output + n / BATCH < OUTPUTS && row + n % BATCH < args.rows) {
      let at = place_of(row + n % BATCH, number);
      store(at, output + n / BATCH, total, factor_of(at));
    }
//% end
  }
//% end
}

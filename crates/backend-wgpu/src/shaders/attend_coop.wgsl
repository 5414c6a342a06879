// Computes attention over pages with cooperative matrices of SIDE times SIDE, for steps of many rows: partials of
// [rows, HEADS, DIM], or their sums as activations of the next matmul. A workgroup computes a tile of rows times
// TILE_HEADS query heads of one K/V head, 16 queries for each of GROUPS subgroups. It iterates over the visible tokens
// in blocks of TOKENS, which are staged in workgroup memory. Operands have half precision, sums single precision.
//
// The weights of a query are relative to a power of two. It is that of the first block of a run, until a score of a
// later block exceeds it by more than SLACK. Then the sums are rescaled through workgroup memory, which is exact. Runs
// are added in order, and their rescaling is exact as well. So a workgroup may compute one run or all, and a result
// depends only on its query and the tokens before it.
//% needs Outs Rows Sums distance_bias emit four_halves item_of partial_of power_of_two seen_by split_begin stage staged work_of
@group(0) @binding(0) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>;         // [rows, HEADS, DIM / 4]
@group(0) @binding(2) var<storage, read> k_pages: array<vec4<u32>>;         // [pages, KV_HEADS] of eight f16, see pages.rs
@group(0) @binding(3) var<storage, read> v_pages: array<vec4<u32>>;         // like k_pages
@group(0) @binding(4) var<storage, read_write> partial_sums: array<vec4<f32>>; // [partials, HEADS, DIM / 4]
@group(0) @binding(5) var<storage, read_write> partial_tops: array<vec2<f32>>; // [partials, HEADS] maximum, sum of weights

//% if EMITS_FOURS
@group(0) @binding(8) var<storage, read_write> to_halves: array<vec2<u32>>;    // see `put_halves` in emit.wgsl
//% end

const QUADS = DIM / 4u;
const EIGHTS = DIM / 8u;
const QUERIES = 16u * GROUPS;
const LANES = SUBGROUP / 16u; // threads that share a query
const UNSEEN = -3.0e38;
const SLACK = 8.0;
const RUN_TOKENS = RUN * COARSE;
const RUN_SKIPS = COARSE_FROM / FINE * COARSE - COARSE_FROM; // tokens by which the first run is shorter than others
// Strides of rows in workgroup memory, padded against bank conflicts.
const STRIDE = EIGHTS + 1u;
const WEIGHT_STRIDE = TOKENS / 4u + 2u;
const SCORE_STRIDE = TOKENS / 4u + 1u;
//% if SIXTEENS
const V_STRIDE = TOKENS / 8u + 1u; // stride of a dimension
const V_TILE = DIM * V_STRIDE;
//% else
const V_TILE = TOKENS * STRIDE;
//% end

// `tile` has the queries, and later K followed by V of a block. `scores` has scores, or sums of 32 dimensions. With a
// side of 8 (Metal), memory is addressed in single numbers.
//% if SIDE_8
const EIGHT = 8u;
const WEIGHT = 4u;
const SCORE = 4u;
var<workgroup> tile: array<f16, (TOKENS * STRIDE + V_TILE) * EIGHT>;
var<workgroup> scores: array<f32, (QUERIES * SCORE_STRIDE - 1u) * SCORE>;
var<workgroup> weights: array<f16, QUERIES * WEIGHT_STRIDE * WEIGHT>;
//% else
const EIGHT = 2u;
const WEIGHT = 1u;
const SCORE = 1u;
var<workgroup> tile: array<vec4<f16>, (TOKENS * STRIDE + V_TILE) * EIGHT>;
var<workgroup> scores: array<vec4<f32>, QUERIES * SCORE_STRIDE - 1u>;
var<workgroup> weights: array<vec4<f16>, QUERIES * WEIGHT_STRIDE>;
//% end

fn halves(x: u32, y: u32) -> vec4<f16> {
  return vec4<f16>(vec4<f32>(unpack2x16float(x), unpack2x16float(y)));
}

fn put_eight(at: u32, x: vec4<u32>) {
  let low = halves(x.x, x.y);
  let high = halves(x.z, x.w);
//% if SIDE_8
//% for i in 0..4
  tile[EIGHT * at + ${i}u] = low[${i}];
  tile[EIGHT * at + 4u + ${i}u] = high[${i}];
//% end
//% else
  tile[EIGHT * at] = low;
  tile[EIGHT * at + 1u] = high;
//% end
}

// Accessor for emit.wgsl.
fn staged_quad(query: u32, j: u32) -> vec4<f32> {
  return staged(query * SCORE_STRIDE + j);
}

// Stores weights, and returns their values in half precision.
fn put_weights(at: u32, x: vec4<f32>) -> vec4<f32> {
  let rounded = halves(pack2x16float(x.xy), pack2x16float(x.zw));
//% if SIDE_8
//% for i in 0..4
  weights[WEIGHT * at + ${i}u] = rounded[${i}];
//% end
//% else
  weights[at] = rounded;
//% end
  return vec4<f32>(rounded);
}

//% if EMITS_FOURS
// Writes four elements of a head as activations, from dimension `d` on, unless they are padding.
fn put_four(row: u32, head: u32, d: u32, x: vec4<f32>) {
  if (d >= HEAD) { return; }
  let input = head * HEAD + d;
  let at = (row / 16u * 2u * ACT_BLOCKS + input / 16u) * 64u + row % 16u * 4u + input % 16u / 4u;
  to_halves[FOURS_AT + at] = four_halves(x);
}

//% end
fn query_halves(x: vec2<f32>) -> u32 {
  return pack2x16float(clamp(x * SCALE, vec2<f32>(-65504.0), vec2<f32>(65504.0)));
}

// Returns the offset of the page with a token of a block.
fn place_of(kv_head: u32, table: u32, block: u32, token: u32, last_token: u32) -> u32 {
//% if ONE_PAGE
  let page = block / PAGE;
//% else
  let page = min(block + token, last_token) / PAGE;
//% end
  return (step[table + page] * PAGE_WORDS + LAYER_SLOT_AT) / 4u + kv_head * PAGE * EIGHTS;
}

fn load_k(kv_head: u32, table: u32, block: u32, token: u32, eight: u32, last_token: u32) -> vec4<u32> {
  let place = place_of(kv_head, table, block, token, last_token);
//% if SIXTEENS
  return k_pages[place + (eight / 2u * PAGE + (block + token) % PAGE) * 2u + eight % 2u];
//% else
  return k_pages[place + eight * PAGE + (block + token) % PAGE];
//% end
}

// Loads eight dimensions of a token, or with SIXTEENS a dimension of eight tokens.
fn load_v(kv_head: u32, table: u32, block: u32, token: u32, part: u32, last_token: u32) -> vec4<u32> {
  let place = place_of(kv_head, table, block, token, last_token);
//% if SIXTEENS
  return v_pages[place + ((block + token) % PAGE / 16u * DIM + part) * 2u + token % 16u / 8u];
//% else
  return v_pages[place + (block + token) % PAGE * EIGHTS + part];
//% end
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(subgroup_id) group: u32,
  @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
  let tid = group * SUBGROUP + in_subgroup;
  let work = work_of(wid);
  let item = item_of(work);
  let last_token = item.end - 1u;
  let end = min(split_begin(item.first_split + item.splits), item.end);
  // Tokens that all rows see.
  let last_row = item.rows - 1u;
  let all_from = seen_by(item.first_row + last_row, item.position + last_row).x;
  let all_to = seen_by(item.first_row, item.position).y;

//% for r in 0..ROWS
//% for d in 0..DIMS
  var query_${r}_${d}: Rows;
//% end
//% for p in 0..PIECES
//% for c in 0..PIECE_MATRICES
  var sums_${r}_${p}_${c}: Sums;
//% end
//% end
//% end
  // Queries are loaded through the tile, which has space for those of ROUND_GROUPS subgroups.
  for (var first_group = 0u; first_group < GROUPS; first_group += ROUND_GROUPS) {
    workgroupBarrier();
    for (var i = tid; i < 16u * ROUND_GROUPS * EIGHTS; i += THREADS) {
      let query = 16u * first_group + i / EIGHTS;
      let row = item.first_row + min(query / TILE_HEADS, item.rows - 1u);
      let head = item.first_head + min(query % TILE_HEADS, item.heads - 1u);
      let at = (row * HEADS + head) * QUADS + i % EIGHTS * 2u;
      let a = queries[at];
      let b = queries[at + 1u];
      put_eight(
        i / EIGHTS * STRIDE + i % EIGHTS,
        vec4<u32>(query_halves(a.xy), query_halves(a.zw), query_halves(b.xy), query_halves(b.zw)),
      );
    }
    workgroupBarrier();
    // This loop replaces an `if`. In control flow that differs between subgroups, the compiler permits matrix
    // operations only in loops.
    for (var own = group / ROUND_GROUPS * ROUND_GROUPS == first_group; own; own = false) {
//% for r in 0..ROWS
//% for d in 0..DIMS
      query_${r}_${d} = coopLoadT<Rows>(
        &tile[((16u * (group % ROUND_GROUPS) + ${r}u * SIDE) * STRIDE + ${d}u * SIDE / 8u) * EIGHT], STRIDE * EIGHT
      );
//% end
//% end
    }
  }

  // A thread loads every LANES-th quad of a query in workgroup memory.
  let query = tid / LANES;
  let lane = tid % LANES;
  let own = query * SCORE_STRIDE + lane;
  let own_weights = query * WEIGHT_STRIDE + lane;
  let own_scores = 16u * group * SCORE_STRIDE; // scores of the subgroup
  let own_row = min(query / TILE_HEADS, last_row);
  let seen = seen_by(item.first_row + own_row, item.position + own_row); // tokens that the query sees
  let head = item.first_head + query % TILE_HEADS;
  var partial = partial_of(query, work);
  if (query % TILE_HEADS >= item.heads) { partial = NO_PARTIAL; }
  var top = NOTHING;
  var total = vec4<f32>(0.0);
  // Maximum and sum of previous runs.
  var whole_top = NOTHING;
  var whole_total = 0.0;

  // Elements of K and V that this thread reads.
  let k_token = tid % TOKENS;
  let k_eight = tid / TOKENS;
  var from_ = max(split_begin(item.first_split), item.begin) / TOKENS * TOKENS;
//% for i in 0..LOADS
//% if SIXTEENS
  let v_token_${i} = (tid + ${i}u * THREADS) / (2u * DIM) * 16u + tid % 2u * 8u;
  let v_part_${i} = (tid + ${i}u * THREADS) / 2u % DIM;
  let v_to_${i} = TOKENS * STRIDE + v_part_${i} * V_STRIDE + v_token_${i} / 8u;
//% else
  let v_token_${i} = (tid + ${i}u * THREADS) / EIGHTS;
  let v_part_${i} = (tid + ${i}u * THREADS) % EIGHTS;
  let v_to_${i} = (TOKENS + v_token_${i}) * STRIDE + v_part_${i};
//% end
  var k_${i}: vec4<u32>;
  var v_${i}: vec4<u32>;
//% end
//% if AHEAD
//% for i in 0..LOADS
  k_${i} = load_k(item.kv_head, item.table, from_, k_token, k_eight + ${i}u * (THREADS / TOKENS), last_token);
  v_${i} = load_v(item.kv_head, item.table, from_, v_token_${i}, v_part_${i}, last_token);
//% end
//% end
  for (var block = from_; block < end; block += TOKENS) {
    workgroupBarrier();
//% if AHEAD
//% else
    from_ = block;
//% for i in 0..LOADS
    k_${i} = load_k(item.kv_head, item.table, from_, k_token, k_eight + ${i}u * (THREADS / TOKENS), last_token);
    v_${i} = load_v(item.kv_head, item.table, from_, v_token_${i}, v_part_${i}, last_token);
//% end
//% end
//% for i in 0..LOADS
    put_eight(k_token * STRIDE + k_eight + ${i}u * (THREADS / TOKENS), k_${i});
    put_eight(v_to_${i}, v_${i});
//% end
    workgroupBarrier();
//% if AHEAD
    // The last block prefetches itself again, because a branch would wait for the loads.
    from_ = min(block + TOKENS, (end - 1u) / TOKENS * TOKENS);
//% for i in 0..LOADS
    k_${i} = load_k(item.kv_head, item.table, from_, k_token, k_eight + ${i}u * (THREADS / TOKENS), last_token);
    v_${i} = load_v(item.kv_head, item.table, from_, v_token_${i}, v_part_${i}, last_token);
//% end
//% end

    // Scores of all tokens of the block.
//% for r in 0..ROWS
//% for t in 0..TOKEN_MATRICES
    var dots_${r}_${t} = Sums();
//% end
//% end
//% for d in 0..DIMS
//% for t in 0..TOKEN_MATRICES
    let k_${d}_${t} = coopLoad<Outs>(&tile[(${t}u * SIDE * STRIDE + ${d}u * SIDE / 8u) * EIGHT], STRIDE * EIGHT);
//% for r in 0..ROWS
    dots_${r}_${t} = coopMultiplyAdd(query_${r}_${d}, k_${d}_${t}, dots_${r}_${t});
//% end
//% end
//% end
//% for r in 0..ROWS
//% for t in 0..TOKEN_MATRICES
    coopStoreT(
      dots_${r}_${t}, &scores[(own_scores + ${r}u * SIDE * SCORE_STRIDE + ${t}u * SIDE / 4u) * SCORE], SCORE_STRIDE * SCORE
    );
//% end
//% end
    subgroupBarrier();

    // Weights of all tokens of the block.
//% for i in 0..SHARE
    var score_${i} = staged(own + ${i}u * LANES);
//% if CAP
    score_${i} = SOFT_CAP * tanh(clamp(score_${i} / SOFT_CAP, vec4<f32>(-15.0), vec4<f32>(15.0))) * 1.4426950408889634;
//% end
//% end
//% if BIASED
//% for i in 0..SHARE
//% for c in 0..4
    score_${i}[${c}] += distance_bias(min(head, HEADS - 1u), item.position + own_row, block + 4u * (${i}u * LANES + lane) + ${c}u);
//% end
//% end
//% end
    if (block + TOKENS > all_to || block < all_from) {
//% for i in 0..SHARE
      let token_${i} = vec4<u32>(0u, 1u, 2u, 3u) + block + 4u * (${i}u * LANES + lane);
      let sees_${i} = (token_${i} >= vec4<u32>(seen.x)) & (token_${i} < vec4<u32>(seen.y));
      score_${i} = select(vec4<f32>(UNSEEN), score_${i}, sees_${i});
//% end
    }
    var most = score_0;
//% for i in 1..SHARE
    most = max(most, score_${i});
//% end
    var largest = max(max(most.x, most.y), max(most.z, most.w));
//% for i in 0..LANE_BITS
    largest = max(largest, subgroupShuffleXor(largest, 1u << ${i}u));
//% end
    var factor = 1.0;
    var grows = false;
    if (largest > top + SLACK) {
      grows = top > NOTHING;
      factor = power_of_two(top - ceil(largest));
      top = ceil(largest);
      total *= factor;
    }
//% for i in 0..SHARE
    total += put_weights(own_weights + ${i}u * LANES, exp2(score_${i} - top));
//% end
    subgroupBarrier();

    // In rare cases, the sums are rescaled.
    for (var grown = subgroupAny(grows); grown; grown = false) {
//% for p in 0..PIECES
//% for r in 0..ROWS
//% for c in 0..PIECE_MATRICES
      coopStoreT(
        sums_${r}_${p}_${c}, &scores[(own_scores + ${r}u * SIDE * SCORE_STRIDE + ${c}u * SIDE / 4u) * SCORE], SCORE_STRIDE * SCORE
      );
//% end
//% end
      subgroupBarrier();
//% for i in 0..PIECE_SHARE
      stage(own + ${i}u * LANES, staged(own + ${i}u * LANES) * factor);
//% end
      subgroupBarrier();
//% for r in 0..ROWS
//% for c in 0..PIECE_MATRICES
      sums_${r}_${p}_${c} = coopLoadT<Sums>(
        &scores[(own_scores + ${r}u * SIDE * SCORE_STRIDE + ${c}u * SIDE / 4u) * SCORE], SCORE_STRIDE * SCORE
      );
//% end
//% end
      subgroupBarrier();
//% end
    }

    // Weighted sums of V.
//% for t in 0..TOKEN_MATRICES
//% for r in 0..ROWS
    let weights_${r}_${t} = coopLoadT<Rows>(
      &weights[((16u * group + ${r}u * SIDE) * WEIGHT_STRIDE + ${t}u * SIDE / 4u) * WEIGHT], WEIGHT_STRIDE * WEIGHT
    );
//% end
//% for p in 0..PIECES
//% for c in 0..PIECE_MATRICES
//% if SIXTEENS
    let v_${t}_${p}_${c} = coopLoad<Outs>(
      &tile[(TOKENS * STRIDE + (32u * ${p}u + ${c}u * SIDE) * V_STRIDE + ${t}u * SIDE / 8u) * EIGHT], V_STRIDE * EIGHT
    );
//% else
    let v_${t}_${p}_${c} = coopLoadT<Outs>(
      &tile[((TOKENS + ${t}u * SIDE) * STRIDE + 4u * ${p}u + ${c}u * SIDE / 8u) * EIGHT], STRIDE * EIGHT
    );
//% end
//% for r in 0..ROWS
    sums_${r}_${p}_${c} = coopMultiplyAdd(weights_${r}_${t}, v_${t}_${p}_${c}, sums_${r}_${p}_${c});
//% end
//% end
//% end
//% end

    let ends = block + TOKENS >= end;
    if (ends || (block + TOKENS + RUN_SKIPS) % RUN_TOKENS == 0u) {
      // The run is added to the previous runs.
      var run_total = total.x + total.y + (total.z + total.w);
//% for i in 0..LANE_BITS
      run_total += subgroupShuffleXor(run_total, 1u << ${i}u);
//% end
      let is_first = whole_top == NOTHING;
      let joined = max(whole_top, top);
      let old = power_of_two(whole_top - joined);
      factor = power_of_two(top - joined);
      whole_top = joined;
      whole_total = fma(whole_total, old, run_total * factor);
      top = NOTHING;
      total = vec4<f32>(0.0);
//% if EMITS
      // If no result of this step is in partials, this kernel computes the activations of the next matmul.
      let emits = ends && args.whole != 0u;
//% else
      let emits = false;
//% end
      let at = (partial * HEADS + head) * QUADS + lane;
//% for p in 0..PIECES
//% for r in 0..ROWS
//% for c in 0..PIECE_MATRICES
      coopStoreT(
        sums_${r}_${p}_${c}, &scores[(own_scores + ${r}u * SIDE * SCORE_STRIDE + ${c}u * SIDE / 4u) * SCORE], SCORE_STRIDE * SCORE
      );
      sums_${r}_${p}_${c} = Sums();
//% end
//% end
      workgroupBarrier();
      if (partial != NO_PARTIAL) {
//% for i in 0..PIECE_SHARE
        var sum_${i} = staged(own + ${i}u * LANES) * factor;
        if (!is_first) { sum_${i} = fma(partial_sums[at + 8u * ${p}u + ${i}u * LANES], vec4<f32>(old), sum_${i}); }
        if (emits) {
//% if EMITS_FOURS
          put_four(item.first_row + own_row, head, 32u * ${p}u + 4u * (lane + ${i}u * LANES), sum_${i} / whole_total);
//% else
          stage(own + ${i}u * LANES, sum_${i} / whole_total);
//% end
        } else {
          partial_sums[at + 8u * ${p}u + ${i}u * LANES] = sum_${i};
        }
//% end
      }
      workgroupBarrier();
//% if EMITS_BLOCKS
      if (emits && tid < min(QUERIES, item.rows * TILE_HEADS) && tid % TILE_HEADS < item.heads) {
        emit(item.first_row + tid / TILE_HEADS, (item.first_head + tid % TILE_HEADS) * (DIM / 32u) + ${p}u, tid, 1.0);
      }
      workgroupBarrier();
//% end
//% end
      if (ends && !emits && partial != NO_PARTIAL && lane == 0u) {
        partial_tops[partial * HEADS + head] = vec2<f32>(whole_top, whole_total);
      }
    }
  }
}

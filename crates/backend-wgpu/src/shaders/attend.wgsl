// Computes attention over pages: partials of [rows, HEADS, DIM], or their sums as activations of the next matmul. A
// workgroup computes a tile of TILE_ROWS rows times TILE_HEADS query heads of one K/V head over some splits, so that K
// and V are read once for all of them. Splits are at fixed positions, so a result depends only on its query and the
// tokens before it.
//
// A split has three phases:
// - Scores. A thread computes the scores of four queries and whole tokens of K.
// - Weights. A thread computes the exponentials of its scores.
// - V. A team of threads shares a token; each thread sums four dimensions for all queries. Each of TEAMS teams reads
//   every TEAMS-th group of UNROLL tokens.
//
// kv_f16.wgsl, kv_q8.wgsl and kv_q4.wgsl define the layout of K and V in pages. A read of K has K_FOURS quads of
// dimensions of a token. A read of V has four dimensions of V_TOKENS tokens.
//% provides number_at put_number needs Sum clear distance_bias emit_shared hadamard item_of join k_four k_scale k_scales
//% load_values page_of partial_of publish_partial seen_by split_begin stage sum_at top_at v_four values_at work_of
@group(0) @binding(0) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>; // [rows, HEADS, DIM / 4]
//% if HANDOFF_PARTIALS
//% else
@group(0) @binding(4) var<storage, read_write> partial_sums: array<vec4<f32>>; // [partials, HEADS, DIM / 4]
@group(0) @binding(5) var<storage, read_write> partial_tops: array<vec2<f32>>; // [partials, HEADS] maximum, sum of weights
//% end

const QUADS = DIM / 4u;
const TEAMS = THREADS / QUADS;
const QUERIES = TILE_ROWS * TILE_HEADS;
const SIDE = THREADS / FOURS; // threads that have the same four queries
const SUMS = 16u;             // sums of a split's weights; each adds every SUMSth token
const UNSEEN = -3.0e38;
//% if QUANTS
const K_BLOCKS = (K_QUADS + 7u) / 8u; // blocks of K, which have one scale each
//% end

var<workgroup> places: array<u32, COARSE / 16u>;             // offsets of the split's pages, in reads of K
var<workgroup> tile: array<vec4<f32>, FOURS * 4u * K_QUADS>; // the queries
var<workgroup> quads: array<vec4<f32>, SHARED>;              // weights [tokens, FOURS]; then sums [teams, 4, QUADS]
var<workgroup> tops: array<vec4<f32>, THREADS / 4u>;         // maximum of each subgroup, which has at least 4 threads
var<workgroup> split_tops: array<vec4<f32>, FOURS>;
var<workgroup> sums: array<vec4<f32>, SUMS * FOURS>;
var<workgroup> totals: array<f32, QUERIES>;
//% if QUANTS
var<workgroup> bases: array<vec4<f32>, FOURS * K_BLOCKS>;    // initial sums of four queries' products with a block
//% end

// Returns the size class of a split of `end` tokens: 0 fine, 1 coarse, 2 short enough for one token per thread.
fn size_of(end: u32) -> u32 {
//% if SHORT
  if (end <= SIDE) { return 2u; }
//% end
  return select(0u, 1u, end > FINE);
}

//% if EMITS
//% if QUANTS
// Accessors of staged results for hadamard.wgsl.
fn number_at(i: u32) -> f32 {
  return staged[i / 32u * 33u + i % 32u];
}

fn put_number(i: u32, x: f32) {
  stage(i, x);
}
//% end
//% end

fn dot_four(sum: f32, k: vec4<f32>, q: vec4<f32>) -> f32 {
  return fma(k.w, q.w, fma(k.z, q.z, fma(k.y, q.y, fma(k.x, q.x, sum))));
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(num_subgroups) subgroups: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
  let tid = subgroup * subgroup_size + in_subgroup;
  let work = work_of(wid);
  let item = item_of(work);
  let team = tid / QUADS;
  let lane = tid % QUADS;
  let own = tid / SIDE; // index of the thread's four queries

  // Page numbers are prefetched; those of the first split are loaded before the wait for queries.
  let page_index = min(tid, COARSE / PAGE - 1u);
  var page = page_of(item.first_split, page_index, item.table, item.end);
//% if CLEARED
  if (work.x == 0u) { clear(work.y * THREADS + tid, KV_HEADS * HEAD_TILES * THREADS); }
//% end

  for (var i = tid; i < FOURS * 4u * K_QUADS; i += THREADS) {
    let row = item.first_row + min(i / K_QUADS / TILE_HEADS, item.rows - 1u);
    let head = item.first_head + min(i / K_QUADS % TILE_HEADS, item.heads - 1u);
    let quad = i % K_QUADS;
    let query = queries[(row * HEADS + head) * QUADS + min(quad, QUADS - 1u)] * SCALE;
    // Padding of K may have any finite value, so queries are zero there.
    tile[i] = select(vec4<f32>(0.0), query, quad < QUADS);
  }
//% if QUANTS
  workgroupBarrier();
  for (var i = tid; i < FOURS * K_BLOCKS; i += THREADS) {
    let quad = i % K_BLOCKS * 8u;
//% for h in 0..4
    var all_${h} = vec4<f32>(0.0);
//% end
    for (var n = 0u; n < min(8u, K_QUADS - quad); n++) {
//% for h in 0..4
      all_${h} += tile[(i / K_BLOCKS * 4u + ${h}u) * K_QUADS + quad + n];
//% end
    }
//% for h in 0..4
    bases[i][${h}] = -RAISE * ((all_${h}.x + all_${h}.y) + (all_${h}.z + all_${h}.w));
//% end
  }
//% end

//% if RANGES
  // First and last token that each of the thread's queries sees.
  var firsts = vec4<i32>(0);
  var lasts = vec4<i32>(0);
//% for h in 0..4
  {
    let row = min((own * 4u + ${h}u) / TILE_HEADS, item.rows - 1u);
    let seen = seen_by(item.first_row + row, item.position + row);
    firsts[${h}] = i32(seen.x);
    lasts[${h}] = i32(seen.y) - 1;
  }
//% end
//% end
//% if BIASED
//% for h in 0..4
  let bias_head_${h} = item.first_head + min((own * 4u + ${h}u) % TILE_HEADS, item.heads - 1u);
  let bias_position_${h} = item.position + min((own * 4u + ${h}u) / TILE_HEADS, item.rows - 1u);
//% end
//% end
//% for v in 0..FOURS
//% for o in 0..OUTS
  var result_${v}_${o} = Sum(vec4<f32>(0.0), NOTHING);
  var run_${v}_${o} = Sum(vec4<f32>(0.0), NOTHING);
//% end
//% end
  var total = Sum(vec4<f32>(0.0), NOTHING);
  var run_total = Sum(vec4<f32>(0.0), NOTHING);
  for (var split = item.first_split; split < item.first_split + item.splits; split++) {
    let base = split_begin(split);
    let end = min(split_begin(split + 1u) - base, item.end - base);
    let begin = max(item.begin, base) - base;
    // Tokens outside of the mask are also read and get the weight zero. All numbers in pages are finite.
    if (tid < COARSE / PAGE) { places[tid] = (page * PAGE_WORDS + LAYER_SLOT_AT) / 4u + item.kv_head * (PAGE / 4u) * HEAD_WORDS; }
    workgroupBarrier();
    page = page_of(split + 1u, page_index, item.table, item.end);

    // Scores. In short splits, a thread has fewer tokens and reads more of each at once.
    let size = size_of(end);
//% for j in 0..TOKENS_1
    let t_${j} = tid % SIDE + ${j}u * SIDE;
    var score_${j} = vec4<f32>(0.0);
//% end
//% for size in 0..SIZES
    if (t_0 < end && size == ${size}u) {
//% for j in 0..TOKENS_${size}
      let place_${j} = places[t_${j} / PAGE];
      var at_${j} = place_${j} + t_${j} % PAGE;
//% if QUANTS
      var block_${j} = vec4<f32>(0.0);
//% end
//% end
      for (var i = 0u; i < K_QUADS; i += K_FOURS * K_LOADS_${size}) {
//% for e in 0..K_LOADS_${size}
//% for j in 0..TOKENS_${size}
        let k_${e}_${j} = k_pages[at_${j} + ${e}u * PAGE];
//% end
//% end
//% for j in 0..TOKENS_${size}
//% if QUANTS
        let scales_${j} = k_scales(place_${j}, t_${j} % PAGE, i);
//% end
        at_${j} += K_LOADS_${size} * PAGE;
//% end
//% for e in 0..K_LOADS_${size}
//% for j in 0..TOKENS_${size}
//% for f in 0..K_FOURS
        let four_${e}_${f}_${j} = k_four(k_${e}_${j}, ${f}u);
//% end
//% end
//% if QUANTS
        // A block is one read of four-bit quants or two of eight-bit quants. The last block may be shorter.
        let quad_${e} = i + ${e}u * K_FOURS;
        if (quad_${e} % 8u == 0u) {
//% for j in 0..TOKENS_${size}
          block_${j} = bases[own * K_BLOCKS + quad_${e} / 8u];
//% end
        }
//% end
//% for h in 0..QUERIES_0
//% for f in 0..K_FOURS
        let q_${e}_${f}_${h} = tile[(own * 4u + ${h}u) * K_QUADS + i + ${e}u * K_FOURS + ${f}u];
//% end
//% for j in 0..TOKENS_${size}
//% for f in 0..K_FOURS
//% if QUANTS
        block_${j}[${h}] = dot_four(block_${j}[${h}], four_${e}_${f}_${j}, q_${e}_${f}_${h});
//% else
        score_${j}[${h}] = dot_four(score_${j}[${h}], four_${e}_${f}_${j}, q_${e}_${f}_${h});
//% end
//% end
//% end
//% end
//% if QUANTS
        if ((quad_${e} + K_FOURS) % 8u == 0u || quad_${e} + K_FOURS == K_QUADS) {
//% for j in 0..TOKENS_${size}
          score_${j} = fma(block_${j}, vec4<f32>(k_scale(scales_${j}, quad_${e})), score_${j});
//% end
        }
//% end
//% end
      }
    }
//% end
//% if AHEAD
    // The first values of V are loaded while other threads still wait for K.
    let first_t = min((begin / (TEAMS * UNROLL) * TEAMS + team) * UNROLL, COARSE - UNROLL);
    let ahead_at = values_at(places[first_t / PAGE], first_t % PAGE, lane);
//% for r in 0..V_LOADS
    var ahead_${r} = load_values(ahead_at, ${r}u);
//% end
//% end

    // Weights. The maximum of the scores is rounded up to an integer.
    var top = vec4<f32>(NOTHING);
//% if RANGES
    let first = firsts - i32(base);
    let last = lasts - i32(base);
//% else
    // Last visible token of the split for each query.
    let last = vec4<i32>(min((vec4<u32>(0u, 1u, 2u, 3u) + own * 4u) / TILE_HEADS, vec4<u32>(item.rows - 1u))) + i32(item.position) - i32(base);
//% end
//% for j in 0..TOKENS_1
//% if CAP
    score_${j} = SOFT_CAP * tanh(clamp(score_${j} / SOFT_CAP, vec4<f32>(-15.0), vec4<f32>(15.0))) * 1.4426950408889634;
//% end
//% if BIASED
//% for h in 0..4
    score_${j}[${h}] += distance_bias(bias_head_${h}, bias_position_${h}, base + t_${j});
//% end
//% end
//% if RANGES
    score_${j} = select(vec4<f32>(UNSEEN), score_${j}, (vec4<i32>(i32(t_${j})) >= first) & (vec4<i32>(i32(t_${j})) <= last));
//% else
//% if WINDOW
    score_${j} = select(vec4<f32>(UNSEEN), score_${j}, (vec4<i32>(i32(t_${j})) <= last) & (vec4<i32>(i32(t_${j})) > last - WINDOW));
//% else
    score_${j} = select(vec4<f32>(UNSEEN), score_${j}, vec4<i32>(i32(t_${j})) <= last);
//% end
//% end
    top = max(top, score_${j});
//% end
    top = subgroupMax(top);
    if (in_subgroup == 0u) { tops[subgroup] = top; }
    workgroupBarrier();
    for (var i = 0u; i < subgroups / FOURS; i++) { top = max(top, tops[own * (subgroups / FOURS) + i]); }
    top = ceil(top);
    if (tid % SIDE == 0u) { split_tops[own] = top; }
//% for j in 0..TOKENS_1
    quads[t_${j} * FOURS + own] = exp2(score_${j} - top);
//% end
    workgroupBarrier();
    if (tid < SUMS * FOURS) {
      var all = vec4<f32>(0.0);
      for (var i = tid; i < end * FOURS; i += SUMS * FOURS) { all += quads[i]; }
      sums[tid] = all;
    }

    // V. Each thread sums four dimensions of its team's tokens.
//% for v in 0..FOURS
//% for h in 0..QUERIES_${v}
    var sum_${v}_${h} = vec4<f32>(0.0);
//% end
//% end
    for (var t = (begin / (TEAMS * UNROLL) * TEAMS + team) * UNROLL; t < end; t += TEAMS * UNROLL) {
      let n = min(t + TEAMS * UNROLL, (end - 1u) / UNROLL * UNROLL);
//% if AHEAD
//% for r in 0..V_LOADS
      let v_${r} = ahead_${r};
//% end
      let at = values_at(places[n / PAGE], n % PAGE, lane);
//% for r in 0..V_LOADS
      ahead_${r} = load_values(at, ${r}u);
//% end
//% else
      let at = values_at(places[t / PAGE], t % PAGE, lane);
//% for r in 0..V_LOADS
      let v_${r} = load_values(at, ${r}u);
//% end
//% end
//% for r in 0..V_LOADS
//% for u in 0..V_TOKENS
      let quad_${r}_${u} = v_four(v_${r}, ${u}u);
//% for v in 0..FOURS
      let weight_${r}_${u}_${v} = quads[(t + ${r}u * V_TOKENS + ${u}u) * FOURS + ${v}u];
//% for h in 0..QUERIES_${v}
      sum_${v}_${h} = fma(vec4<f32>(weight_${r}_${u}_${v}[${h}]), quad_${r}_${u}, sum_${v}_${h});
//% end
//% end
//% end
//% end
    }
    workgroupBarrier();

    // The sums of teams are added to the split, splits to runs, and runs to the total. The next split needs no barrier
    // here, because it writes this memory only after other barriers.
    let ends_run = (split + 1u) % RUN == 0u || split + 1u == item.first_split + item.splits;
//% for v in 0..FOURS
    if (team < TEAMS) {
//% for h in 0..QUERIES_${v}
      quads[(team * 4u + ${h}u) * QUADS + lane] = sum_${v}_${h};
//% end
    }
    workgroupBarrier();
//% for o in 0..OUTS
    if (tid + ${o}u * THREADS < QUERIES_${v} * QUADS) {
      var all = vec4<f32>(0.0);
      for (var i = 0u; i < TEAMS; i++) { all += quads[i * 4u * QUADS + tid + ${o}u * THREADS]; }
      run_${v}_${o} = join(run_${v}_${o}, Sum(all, split_tops[${v}][(tid + ${o}u * THREADS) / QUADS]));
      if (ends_run) {
        result_${v}_${o} = join(result_${v}_${o}, run_${v}_${o});
        run_${v}_${o} = Sum(vec4<f32>(0.0), NOTHING);
      }
    }
//% end
    if (${v}u + 1u < FOURS) { workgroupBarrier(); }
//% end
    if (tid < QUERIES) {
      var all = 0.0;
      for (var i = 0u; i < SUMS; i++) { all += sums[i * FOURS + tid / 4u][tid % 4u]; }
      run_total = join(run_total, Sum(vec4<f32>(all), split_tops[tid / 4u][tid % 4u]));
      if (ends_run) {
        total = join(total, run_total);
        run_total = Sum(vec4<f32>(0.0), NOTHING);
      }
    }
  }

//% if EMITS
  if (args.whole != 0u) {
    // If no result of this step is in partials, this kernel computes the activations of the next matmul.
    if (tid < QUERIES) { totals[tid] = total.sum.x; }
    workgroupBarrier();
//% for v in 0..FOURS
//% for o in 0..OUTS
    if (tid + ${o}u * THREADS < QUERIES_${v} * QUADS) {
      let quad = ${v}u * 4u * QUADS + tid + ${o}u * THREADS;
//% for c in 0..4
      stage(4u * quad + ${c}u, result_${v}_${o}.sum[${c}] / totals[quad / QUADS]);
//% end
    }
//% end
//% end
    workgroupBarrier();
//% if QUANTS
    hadamard(tid, THREADS, QUERIES);
//% end
    let block = tid / 8u;
    let row = block / (DIM / 32u) / TILE_HEADS;
    let head = block / (DIM / 32u) % TILE_HEADS;
    let has_block = block < QUERIES * (DIM / 32u) && row < item.rows && head < item.heads;
    emit_shared(has_block, item.first_row + row, (item.first_head + head) * (DIM / 32u) + block % (DIM / 32u), block, tid % 8u);
    return;
  }
//% end
//% for v in 0..FOURS
//% for o in 0..OUTS
  if (tid + ${o}u * THREADS < QUERIES_${v} * QUADS) {
    let quad = ${v}u * 4u * QUADS + tid + ${o}u * THREADS;
    let partial = partial_of(quad / QUADS, work);
    let head = quad / QUADS % TILE_HEADS;
    if (partial != NO_PARTIAL && head < item.heads) {
//% if HANDOFF_PARTIALS
      publish_partial(sum_at(partial, item.first_head + head) + quad % QUADS, result_${v}_${o}.sum);
//% else
      partial_sums[(partial * HEADS + item.first_head + head) * QUADS + quad % QUADS] = result_${v}_${o}.sum;
//% end
    }
  }
//% end
//% end
  if (tid < QUERIES) {
    let partial = partial_of(tid, work);
    let head = tid % TILE_HEADS;
    if (partial != NO_PARTIAL && head < item.heads) {
//% if HANDOFF_PARTIALS
      publish_partial(top_at(partial, item.first_head + head), vec4<f32>(total.top, total.sum.x, 0.0, 0.0));
//% else
      partial_tops[partial * HEADS + item.first_head + head] = vec2<f32>(total.top, total.sum.x);
//% end
    }
  }
}

// Paged attention: a tile of TILE_ROWS rows times TILE_HEADS query heads of one K/V head, so that K and V are read once for all of
// them, over splits at fixed positions. A result depends on nothing but its query and the tokens before it.
//
// A team of LANES neighbours in a subgroup takes a token, each lane VPL times eight dimensions; TEAMS teams take as many tokens
// side by side, UNROLL times that in a step of the loop. Which team takes a token at which step follows from its position.
@group(0) @binding(0) var<storage, read> step: array<u32>;
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>; // [rows, HEADS, DIM / 4]
@group(0) @binding(2) var<storage, read> k_pages: array<vec4<u32>>; // [pages, KV_HEADS, PAGE, DIM / 8] of eight f16
@group(0) @binding(3) var<storage, read> v_pages: array<vec4<u32>>; // [pages, KV_HEADS, PAGE, DIM / 8] of eight f16
@group(0) @binding(4) var<storage, read_write> part_sums: array<vec4<f32>>; // [parts, HEADS, DIM / 4]
@group(0) @binding(5) var<storage, read_write> part_tops: array<vec2<f32>>; // [parts, HEADS] maximum, sum of weights

const VECS = DIM / 8u;
const THREADS = LANES * TEAMS;
const QUERIES = HALVES * HALF;
const STRIDE = LANES / QUERIES; // lanes that end up with the score of one query
const OUTS = 2u * LANES;        // vectors that the teams bring together at a time, for each of HALVES queries
const UNSEEN = -3.0e38;
const NO_PART = 0xffffffffu;

var<workgroup> places: array<u32, COARSE / 16u>;          // of this split's pages, in vectors; the smallest have 16 tokens
var<workgroup> tops: array<f32, QUERIES * TEAMS>;         // maximum of each team
var<workgroup> totals: array<f32, QUERIES * TEAMS>;       // sum of its weights
var<workgroup> split_tops: array<f32, QUERIES>;
var<workgroup> scratch: array<vec4<f32>, HALVES * OUTS * TEAMS>;

fn dot_eight(sum: f32, k_a: vec4<f32>, k_b: vec4<f32>, a: vec4<f32>, b: vec4<f32>) -> f32 {
  let first = fma(k_a.w, a.w, fma(k_a.z, a.z, fma(k_a.y, a.y, fma(k_a.x, a.x, sum))));
  return fma(k_b.w, b.w, fma(k_b.z, b.z, fma(k_b.y, b.y, fma(k_b.x, b.x, first))));
}

fn low(x: vec4<u32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(x.x), unpack2x16float(x.y));
}

fn high(x: vec4<u32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(x.z), unpack2x16float(x.w));
}

// Splits are fine up to a position, so that short contexts are shared out, too, and coarse from there on.
fn split_of(token: u32) -> u32 {
  return select(COARSE_FROM / FINE + (token - COARSE_FROM) / COARSE, token / FINE, token < COARSE_FROM);
}

fn split_begin(split: u32) -> u32 {
  return select(COARSE_FROM + (split - COARSE_FROM / FINE) * COARSE, split * FINE, split < COARSE_FROM / FINE);
}

fn first_seen(position: u32) -> u32 {
//% if WINDOW
  return u32(max(0, i32(position) + 1 - WINDOW));
//% else
  return 0u;
//% end
}

// Where the result of a query of the tile goes, if it is one, and sees something.
fn part_of(query: u32, item: u32) -> u32 {
  let row = query / TILE_HEADS;
  let position = step[item + 2u] + row;
  let split = step[item + 5u];
  let whole = step[item + 7u] != 0u;
  let first = split_of(first_seen(position));
  let sees = whole || (split >= first && split <= split_of(position));
  if (row >= step[item + 1u] || !sees) { return NO_PART; }
  return step[args.parts + 2u * (step[item] + row)] + select(split - first, 0u, whole);
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
  let tid = subgroup * subgroup_size + in_subgroup;
  let item = args.items + wid.x * 8u;
  let first_row = step[item];
  let rows = step[item + 1u];
  let position = step[item + 2u]; // of the first row
  let table = step[item + 3u] + GROUP * step[item + 4u];
  let first_split = step[item + 5u];
  let splits = step[item + 6u];
  let kv_head = wid.y / HEAD_TILES;
  let first_head = kv_head * GROUP_HEADS + wid.y % HEAD_TILES * TILE_HEADS;
  let heads = min(TILE_HEADS, (kv_head + 1u) * GROUP_HEADS - first_head);
  let seen_from = first_seen(position);
  let team = tid / LANES;
  let lane = tid % LANES;
  let first_lane = in_subgroup - lane;
  // The query whose scores this lane ends up with, and which tokens it sees.
  let own = lane / STRIDE;
  let own_position = i32(position + min(own / TILE_HEADS, rows - 1u));

//% for p in 0..VPL
  let vec_${p} = lane + ${p}u * LANES;
  let read_${p} = min(vec_${p}, VECS - 1u);
//% for h in 0..HALVES
//% for r in 0..HALF
  var q_low_${h}_${r}_${p} = vec4<f32>(0.0);
  var q_high_${h}_${r}_${p} = vec4<f32>(0.0);
  if (vec_${p} < VECS) {
    let row = first_row + min((${h}u * HALF + ${r}u) / TILE_HEADS, rows - 1u);
    let head = first_head + min((${h}u * HALF + ${r}u) % TILE_HEADS, heads - 1u);
    let at = (row * HEADS + head) * (DIM / 4u) + 2u * vec_${p};
    q_low_${h}_${r}_${p} = queries[at] * SCALE;
    q_high_${h}_${r}_${p} = queries[at + 1u] * SCALE;
  }
//% end
//% end
//% end

//% for r in 0..HALF
  var result_top_${r} = NOTHING;
//% for p in 0..VPL
  var result_${r}_${p} = vec4<f32>(0.0);
//% end
//% end
  var total = 0.0;
  var total_top = NOTHING;
  for (var split = first_split; split < first_split + splits; split++) {
    let base = split_begin(split);
    let end = min(split_begin(split + 1u) - base, position + rows - base);
    let begin = max(seen_from, base) - base;
    // Teams also read what nobody sees, to weigh it with nothing: numbers in pages are finite. Past the last page, it is read again.
    for (var i = tid; i < COARSE / PAGE; i += THREADS) {
      let page = step[table + base / PAGE + min(i, (end - 1u) / PAGE)];
      places[i] = (page * KV_HEADS + kv_head) * PAGE * VECS;
    }
    workgroupBarrier();
    let own_last = own_position - i32(base);

    var top = NOTHING;
    var sum = 0.0;
//% for h in 0..HALVES
//% for r in 0..HALF
//% for p in 0..VPL
    var low_${h}_${r}_${p} = vec4<f32>(0.0);
    var high_${h}_${r}_${p} = vec4<f32>(0.0);
//% end
//% end
//% end
    let first = begin / (TEAMS * UNROLL) * (TEAMS * UNROLL) + team;
    for (var t = first; t < end + team; t += TEAMS * UNROLL) {
//% if ONE_PAGE
      let at = places[t / PAGE] + t % PAGE * VECS;
//% end
//% for u in 0..UNROLL
//% if ONE_PAGE
      let at_${u} = at + ${u}u * TEAMS * VECS;
//% else
      let at_${u} = places[(t + ${u}u * TEAMS) / PAGE] + (t + ${u}u * TEAMS) % PAGE * VECS;
//% end
//% for p in 0..VPL
      let k_${u}_${p} = k_pages[at_${u} + read_${p}];
//% end
//% end
//% for u in 0..UNROLL
//% for p in 0..VPL
      let v_${u}_${p} = v_pages[at_${u} + read_${p}];
//% end
//% end
//% for u in 0..UNROLL
//% for p in 0..VPL
      let k_low_${u}_${p} = low(k_${u}_${p});
      let k_high_${u}_${p} = high(k_${u}_${p});
//% end
//% for h in 0..HALVES
//% for r in 0..HALF
      var s_${u}_${h}_${r} = 0.0;
//% for p in 0..VPL
      s_${u}_${h}_${r} = dot_eight(s_${u}_${h}_${r}, k_low_${u}_${p}, k_high_${u}_${p}, q_low_${h}_${r}_${p}, q_high_${h}_${r}_${p});
//% end
//% end
//% end
      let score_${u} = fold(
        lane,
//% for h in 0..HALVES
//% for r in 0..HALF
        s_${u}_${h}_${r},
//% end
//% end
      );
//% if WINDOW
      let seen_${u} = i32(t + ${u}u * TEAMS) <= own_last && i32(t + ${u}u * TEAMS) > own_last - WINDOW;
//% else
      let seen_${u} = i32(t + ${u}u * TEAMS) <= own_last;
//% end
//% if CAP
      let z_${u} = select(UNSEEN, SOFT_CAP * tanh(clamp(score_${u} / SOFT_CAP, -15.0, 15.0)) * 1.4426950408889634, seen_${u});
//% else
      let z_${u} = select(UNSEEN, score_${u}, seen_${u});
//% end
//% end
      var most = top;
//% for u in 0..UNROLL
      most = max(most, z_${u});
//% end
      let shrink = exp2(top - most);
      top = most;
//% for u in 0..UNROLL
      let e_${u} = exp2(z_${u} - most);
//% end
      sum = fma(sum, shrink, e_0);
//% for u in 1..UNROLL
      sum += e_${u};
//% end
//% for h in 0..HALVES
//% for r in 0..HALF
      let shrink_${h}_${r} = subgroupShuffle(shrink, first_lane + (${h}u * HALF + ${r}u) * STRIDE);
//% for p in 0..VPL
      low_${h}_${r}_${p} *= shrink_${h}_${r};
      high_${h}_${r}_${p} *= shrink_${h}_${r};
//% end
//% end
//% end
//% for u in 0..UNROLL
//% for p in 0..VPL
      let v_low_${u}_${p} = low(v_${u}_${p});
      let v_high_${u}_${p} = high(v_${u}_${p});
//% end
//% for h in 0..HALVES
//% for r in 0..HALF
      let p_${u}_${h}_${r} = vec4<f32>(subgroupShuffle(e_${u}, first_lane + (${h}u * HALF + ${r}u) * STRIDE));
//% for p in 0..VPL
      low_${h}_${r}_${p} = fma(p_${u}_${h}_${r}, v_low_${u}_${p}, low_${h}_${r}_${p});
      high_${h}_${r}_${p} = fma(p_${u}_${h}_${r}, v_high_${u}_${p}, high_${h}_${r}_${p});
//% end
//% end
//% end
//% end
    }

    // The teams' results, brought to one scale: a whole power of two.
    if (lane % STRIDE == 0u) { tops[own * TEAMS + team] = top; }
    workgroupBarrier();
    var split_top = NOTHING;
    for (var i = 0u; i < TEAMS; i++) { split_top = max(split_top, tops[own * TEAMS + i]); }
    split_top = ceil(split_top);
    let factor = exp2(top - split_top);
    if (lane % STRIDE == 0u) { totals[own * TEAMS + team] = sum * factor; }
    if (team == 0u && lane % STRIDE == 0u) { split_tops[own] = split_top; }
//% for h in 0..HALVES
//% for r in 0..HALF
    let factor_${h}_${r} = subgroupShuffle(factor, first_lane + (${h}u * HALF + ${r}u) * STRIDE);
//% end
//% end
//% for r in 0..HALF
//% for p in 0..VPL
//% for h in 0..HALVES
    scratch[(${h}u * 2u * TEAMS + team) * LANES + lane] = low_${h}_${r}_${p} * factor_${h}_${r};
    scratch[((${h}u * 2u + 1u) * TEAMS + team) * LANES + lane] = high_${h}_${r}_${p} * factor_${h}_${r};
//% end
    workgroupBarrier();
    if (tid < HALVES * OUTS) {
      var all = vec4<f32>(0.0);
      for (var i = 0u; i < TEAMS; i++) { all += scratch[(tid / LANES * TEAMS + i) * LANES + lane]; }
      let split_top = split_tops[tid / OUTS * HALF + ${r}u];
      let now = max(result_top_${r}, split_top);
      all *= power_of_two(split_top - now);
      result_${r}_${p} = fma(result_${r}_${p}, vec4<f32>(power_of_two(result_top_${r} - now)), all);
    }
    workgroupBarrier();
//% end
    if (tid < HALVES * OUTS) { result_top_${r} = max(result_top_${r}, split_tops[tid / OUTS * HALF + ${r}u]); }
//% end
    if (tid < QUERIES) {
      var all = 0.0;
      for (var i = 0u; i < TEAMS; i++) { all += totals[tid * TEAMS + i]; }
      let now = max(total_top, split_tops[tid]);
      total = fma(total, power_of_two(total_top - now), all * power_of_two(split_tops[tid] - now));
      total_top = now;
    }
    workgroupBarrier();
  }

//% if EMITS
  if (args.whole != 0u) {
    // Every result of this step is whole: what the next product wants of it is made here.
    if (tid < QUERIES) { totals[tid] = total; }
    workgroupBarrier();
//% for r in 0..HALF
    if (tid < HALVES * OUTS) {
      let query = tid / OUTS * HALF + ${r}u;
//% for p in 0..VPL
      if (vec_${p} < VECS) {
        let at = query * DIM + 8u * vec_${p} + 4u * (tid % OUTS / LANES);
//% for c in 0..4
        stage(at + ${c}u, result_${r}_${p}[${c}] / totals[query]);
//% end
      }
//% end
    }
//% end
    workgroupBarrier();
    for (var block = tid; block < QUERIES * (DIM / 32u); block += THREADS) {
      let query = block / (DIM / 32u);
      let row = query / TILE_HEADS;
      let head = query % TILE_HEADS;
      if (row < rows && head < heads) {
        emit(first_row + row, (first_head + head) * (DIM / 32u) + block % (DIM / 32u), block);
      }
    }
    return;
  }
//% end
//% for r in 0..HALF
  {
    let query = tid / OUTS * HALF + ${r}u;
    let part = part_of(query, item);
    let head = query % TILE_HEADS;
    if (tid < HALVES * OUTS && part != NO_PART && head < heads) {
//% for p in 0..VPL
      if (vec_${p} < VECS) {
        let at = (part * HEADS + first_head + head) * (DIM / 4u) + 2u * vec_${p} + tid % OUTS / LANES;
        part_sums[at] = result_${r}_${p};
      }
//% end
    }
  }
//% end
  if (tid < QUERIES) {
    let part = part_of(tid, item);
    let head = tid % TILE_HEADS;
    if (part != NO_PART && head < heads) { part_tops[part * HEADS + first_head + head] = vec2<f32>(total_top, total); }
  }
}

// Computes attention over pages with cooperative matrices of SIDE times SIDE, for steps of few rows: partials of
// [rows, HEADS, DIM], or their sums as activations of the next matmul. A workgroup computes one row times TILE_HEADS
// (five to eight) query heads of one K/V head over some splits. Splits are at fixed positions as in `attend.wgsl`, so a
// result depends only on its query and the tokens before it.
//
// A split has three phases:
// - Scores. A subgroup computes every GROUPS-th block of 32 tokens.
// - Weights. They have half precision.
// - V. A subgroup sums 16 dimensions of all tokens, so no sums across subgroups are needed.
//
// K and V are loaded from pages into matrices without workgroup memory, two units ahead. They are rows of A, because
// NVIDIA's compiler needs five times as many instructions for columns of B.
//% needs Outs Rows Sum Sums clear emit_shared item_of join page_of partial_of publish_partial split_begin stage
//% staged sum_at top_at work_of
@group(0) @binding(0) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
@group(0) @binding(1) var<storage, read> queries: array<vec4<f32>>;         // [rows, HEADS, DIM / 4]
//% if HANDOFF_PARTIALS
//% else
@group(0) @binding(4) var<storage, read_write> partial_sums: array<vec4<f32>>; // [partials, HEADS, DIM / 4]
@group(0) @binding(5) var<storage, read_write> partial_tops: array<vec2<f32>>; // [partials, HEADS] maximum, sum of weights
//% end

const QUADS = DIM / 4u;
const GROUPS = DIM / 16u;              // subgroups of the workgroup
const UNSEEN = -3.0e38;
const BLOCK = 32u;                     // tokens of a block of K, and of a unit of V
const PIECES = 2u;                     // units of a block of K
const TILE_STRIDE = QUADS + 2u;        // quads of a query; two are padding against bank conflicts
const TILE = 8u * TILE_STRIDE;
const SCORE_STRIDE = 5u;               // quads of a token; one is padding against bank conflicts
const SCORES = 16u * SCORE_STRIDE;     // quads of a subgroup

// pages.rs defines the layout of K and V. With a side of 8 (Metal), memory is addressed in single numbers. `halves` has
// the queries, [8, TILE_STRIDE] quads, and the weights, [COARSE, 2] quads. In matrices with 16 queries, the last eight
// are not used.
//% if SIDE_8
const QUAD = 4u;
@group(0) @binding(2) var<storage, read> k_pages: array<f16>;
@group(0) @binding(3) var<storage, read> v_pages: array<f16>;
var<workgroup> halves: array<f16, (TILE + 2u * COARSE + 2u) * QUAD>;
var<workgroup> scores: array<f32, GROUPS * SCORES * QUAD>; // scores of 16 tokens; sums of 16 dimensions; results
//% else
const QUAD = 1u;
@group(0) @binding(2) var<storage, read> k_pages: array<vec4<f16>>;
@group(0) @binding(3) var<storage, read> v_pages: array<vec4<f16>>;
var<workgroup> halves: array<vec4<f16>, TILE + 2u * COARSE + 2u>;
var<workgroup> scores: array<vec4<f32>, GROUPS * SCORES>;
//% end
var<workgroup> places: array<u32, 2u * COARSE / 16u>;      // offsets of the pages of this split and the next
var<workgroup> tops: array<vec4<f32>, 2u * GROUPS>;        // maxima of each subgroup's scores
var<workgroup> totals: array<vec4<f32>, 2u * GROUPS>;      // sums of each subgroup's weights

fn put_quad(at: u32, x: vec4<f16>) {
//% if SIDE_8
//% for i in 0..4
  halves[QUAD * at + ${i}u] = x[${i}];
//% end
//% else
  halves[at] = x;
//% end
}

// Accessor for emit.wgsl.
fn staged_quad(block: u32, j: u32) -> vec4<f32> {
  return staged(8u * block + j);
}

// Returns the first token of the block of a subgroup's unit of K. A block has PIECES units.
fn block_of(group: u32, unit: u32) -> u32 {
  return (group + unit / PIECES * GROUPS) * BLOCK;
}

// Returns the offset of matrix `d` of a unit of K, in half `half` of its block, for tokens from `c` * SIDE on.
fn k_at(here: u32, group: u32, unit: u32, half: u32, d: u32, c: u32) -> u32 {
  let token = block_of(group, unit) + 16u * half;
  let place = (places[here + token / PAGE] + token % PAGE * 4u) * QUAD;
  let number = unit % PIECES * PIECE_MATRICES + d;
//% if SIDE_8
  return place + number / 2u * PAGE * 16u + number % 2u * 8u + c * 8u * 16u;
//% else
  return place + number * PAGE * 4u;
//% end
}

// Returns the offset of matrix `t` of a unit of V, for the subgroup's dimensions from `c` * SIDE on.
fn v_at(here: u32, group: u32, unit: u32, t: u32, c: u32) -> u32 {
  let token = unit * BLOCK + t * SIDE;
  let place = (places[here + token / PAGE] + (token % PAGE / 16u * DIM + group * 16u) * 4u) * QUAD;
//% if SIDE_8
  return place + token % 16u + c * 8u * 16u;
//% else
  return place;
//% end
}

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(subgroup_id) group: u32,
  @builtin(subgroup_invocation_id) lane: u32,
) {
  let tid = group * 32u + lane;
  let work = work_of(wid);
  let item = item_of(work);
  let page_index = min(tid, COARSE / PAGE - 1u);
  var page = page_of(item.first_split, page_index, item.table, item.end);
//% if CLEARED
  if (work.x == 0u) { clear(work.y * THREADS + tid, KV_HEADS * HEAD_TILES * THREADS); }
//% end

  for (var i = tid; i < 8u * QUADS; i += THREADS) {
    let head = item.first_head + min(i / QUADS, item.heads - 1u);
    let most = vec4<f32>(65504.0);
    let quad = clamp(queries[(item.first_row * HEADS + head) * QUADS + i % QUADS] * SCALE, -most, most);
    put_quad(i / QUADS * TILE_STRIDE + i % QUADS, vec4<f16>(quad));
  }
  if (tid < COARSE / PAGE) { places[tid] = (page * PAGE_WORDS + LAYER_SLOT_AT) / 2u + item.kv_head * PAGE * QUADS; }
  workgroupBarrier();

  let own_scores = group * SCORES;
  let own = lane / 16u;  // index of the four queries whose scores this thread has
  let query = lane / 4u; // query of whose result this thread has a quad
  var result = Sum(vec4<f32>(0.0), NOTHING);
  var run = Sum(vec4<f32>(0.0), NOTHING);
  var total = Sum(vec4<f32>(0.0), NOTHING);
  var run_total = Sum(vec4<f32>(0.0), NOTHING);
  for (var split = item.first_split; split < item.first_split + item.splits; split++) {
    let base = split_begin(split);
    let end = min(split_begin(split + 1u) - base, item.end - base);
    let begin = max(item.begin, base) - base;
    let here = (split - item.first_split) % 2u * (COARSE / 16u); // offset of this split in `places`
    page = page_of(split + 1u, page_index, item.table, item.end);

    // Scores. Tokens outside of the mask are also read and get the weight zero. All numbers in pages are finite.
//% for b in 0..K_BLOCKS
//% for m in 0..2
    var score_${b}_${m} = vec4<f32>(0.0);
//% end
//% end
//% for m in 0..2
//% for c in 0..PER_16
//% for n in 0..2
//% for d in 0..PIECE_MATRICES
    var keys_${n}_${d}_${m}_${c} = coopLoadT<Rows>(&k_pages[k_at(here, group, ${n}u, ${m}u, ${d}u, ${c}u)], 4u * QUAD);
//% end
//% end
//% end
//% end
//% for b in 0..K_BLOCKS
    // This loop replaces an `if`. In control flow that differs between subgroups, the compiler permits matrix
    // operations only in loops.
    for (var sees = block_of(group, ${b}u * PIECES) < end; sees; sees = false) {
//% for m in 0..2
//% for c in 0..PER_16
      var dots_${m}_${c} = Sums();
//% end
//% end
//% for n in 0..2
      {
        const unit = ${b}u * PIECES + ${n}u;
//% for d in 0..PIECE_MATRICES
        let query_${d} = coopLoad<Outs>(&halves[(unit % PIECES * PIECE_MATRICES + ${d}u) * SIDE / 4u * QUAD], TILE_STRIDE * QUAD);
//% for m in 0..2
//% for c in 0..PER_16
        dots_${m}_${c} = coopMultiplyAdd(keys_${n}_${d}_${m}_${c}, query_${d}, dots_${m}_${c});
//% end
//% end
//% end
        if (unit + 2u < K_BLOCKS * PIECES) {
//% for m in 0..2
//% for c in 0..PER_16
//% for d in 0..PIECE_MATRICES
          keys_${n}_${d}_${m}_${c} = coopLoadT<Rows>(&k_pages[k_at(here, group, unit + 2u, ${m}u, ${d}u, ${c}u)], 4u * QUAD);
//% end
//% end
//% end
        }
      }
//% end
      // Scores of 16 tokens at a time pass through a part of workgroup memory that only this subgroup uses.
//% for m in 0..2
//% for c in 0..PER_16
      coopStoreT(dots_${m}_${c}, &scores[(own_scores + ${c}u * SIDE * SCORE_STRIDE) * QUAD], SCORE_STRIDE * QUAD);
//% end
      subgroupBarrier();
      score_${b}_${m} = staged(own_scores + lane % 16u * SCORE_STRIDE + own);
      subgroupBarrier();
//% end
    }
//% end

    // The first units of V are loaded before the wait for scores.
    let first = begin / BLOCK / 2u * 2u;
    let units = (end + BLOCK - 1u) / BLOCK;
//% for n in 0..2
//% for t in 0..UNIT_TOKENS
//% for c in 0..PER_16
    var values_${n}_${t}_${c} = coopLoadT<Rows>(
      &v_pages[v_at(here, group, min(first + ${n}u, units - 1u), ${t}u, ${c}u)], 4u * QUAD
    );
//% end
//% end
//% end

    // Weights. The maximum of the split is rounded up to an integer.
    var top = vec4<f32>(NOTHING);
//% for b in 0..K_BLOCKS
//% for m in 0..2
    let token_${b}_${m} = block_of(group, ${b}u * PIECES) + 16u * ${m}u + lane % 16u;
//% if CAP
    score_${b}_${m} = SOFT_CAP * tanh(clamp(score_${b}_${m} / SOFT_CAP, vec4<f32>(-15.0), vec4<f32>(15.0))) * 1.4426950408889634;
//% end
    if (token_${b}_${m} < begin || token_${b}_${m} >= end) { score_${b}_${m} = vec4<f32>(UNSEEN); }
    top = max(top, score_${b}_${m});
//% end
//% end
//% for i in 0..4
    top = max(top, subgroupShuffleXor(top, 1u << ${i}u));
//% end
    if (lane % 16u == 0u) { tops[own * GROUPS + group] = top; }
    workgroupBarrier();
    var split_top = NOTHING; // maximum of the query whose result this thread has
    for (var i = 0u; i < GROUPS; i++) {
      top = max(top, tops[own * GROUPS + i]);
      split_top = max(split_top, tops[query / 4u * GROUPS + i][query % 4u]);
    }
    top = ceil(top);
    split_top = ceil(split_top);
    var all = vec4<f32>(0.0);
//% for b in 0..K_BLOCKS
//% for m in 0..2
    {
      let weight = vec4<f16>(exp2(score_${b}_${m} - top));
      put_quad(TILE + 2u * token_${b}_${m} + own, weight);
      all += vec4<f32>(weight);
    }
//% end
//% end
//% for i in 0..4
    all += subgroupShuffleXor(all, 1u << ${i}u);
//% end
    if (lane % 16u == 0u) { totals[own * GROUPS + group] = all; }
    // This part of `places` belongs to the previous split and is no longer read.
    if (tid < COARSE / PAGE) { places[COARSE / 16u - here + tid] = (page * PAGE_WORDS + LAYER_SLOT_AT) / 2u + item.kv_head * PAGE * QUADS; }
    workgroupBarrier();
    var split_total = 0.0;
    for (var i = 0u; i < GROUPS; i++) { split_total += totals[query / 4u * GROUPS + i][query % 4u]; }

    // Weighted sums of V.
//% for c in 0..PER_16
    var sums_${c} = Sums();
//% end
    for (var unit = first; unit < units; unit += 2u) {
//% for n in 0..2
//% for t in 0..UNIT_TOKENS
      {
        let weighed = coopLoadT<Outs>(&halves[(TILE + 2u * ((unit + ${n}u) * BLOCK + ${t}u * SIDE)) * QUAD], 2u * QUAD);
//% for c in 0..PER_16
        sums_${c} = coopMultiplyAdd(values_${n}_${t}_${c}, weighed, sums_${c});
        // The last units load the last one again, because a branch would wait for the loads.
        values_${n}_${t}_${c} = coopLoadT<Rows>(
          &v_pages[v_at(here, group, min(unit + ${n}u + 2u, units - 1u), ${t}u, ${c}u)], 4u * QUAD
        );
//% end
      }
//% end
//% end
    }

    // Splits are added to runs, and runs to the total.
//% for c in 0..PER_16
    coopStore(sums_${c}, &scores[(own_scores + 2u * ${c}u) * QUAD], 4u * QUAD);
//% end
    subgroupBarrier();
    run = join(run, Sum(staged(own_scores + lane), split_top));
    subgroupBarrier();
    run_total = join(run_total, Sum(vec4<f32>(split_total), split_top));
    if ((split + 1u) % RUN == 0u || split + 1u == item.first_split + item.splits) {
      result = join(result, run);
      total = join(total, run_total);
      run = Sum(vec4<f32>(0.0), NOTHING);
      run_total = run;
    }
  }

  if (args.whole != 0u) {
    // If no result of this step is in partials, this kernel computes the activations of the next matmul.
    workgroupBarrier();
    stage(query * QUADS + group * 4u + lane % 4u, result.sum / total.sum.x);
    workgroupBarrier();
    let block = tid / 8u;
    let has_block = block < item.heads * (DIM / 32u);
    emit_shared(has_block, item.first_row, item.first_head * (DIM / 32u) + block, block, tid % 8u);
    return;
  }
  let partial = partial_of(0u, work);
  if (partial != NO_PARTIAL && query < item.heads) {
//% if HANDOFF_PARTIALS
    publish_partial(sum_at(partial, item.first_head + query) + group * 4u + lane % 4u, result.sum);
    if (group == 0u && lane % 4u == 0u) {
      publish_partial(top_at(partial, item.first_head + query), vec4<f32>(total.top, total.sum.x, 0.0, 0.0));
    }
//% else
    let to = partial * HEADS + item.first_head + query;
    partial_sums[to * QUADS + group * 4u + lane % 4u] = result.sum;
    if (group == 0u && lane % 4u == 0u) { partial_tops[to] = vec2<f32>(total.top, total.sum.x); }
//% end
  }
}

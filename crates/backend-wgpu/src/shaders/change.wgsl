// Changes of a matmul's results by adapters (LoRA): the products of `shrink.wgsl`, multiplied with B. `low_rank.rs` describes the
// words of `adapted`.
//
// With FINISHES, where a launch has one row, most of a change's latency is hidden: B of the first ranks is loaded before
// activations are ready, and low-rank products are received in all threads at once (`stage_change`). With KEEPS_USE, a thread stores at
// most one result, and loads words of its row and B before its sum is complete.
//% provides b_half change change_of_tile first_use keep_b keep_use last_use look_ahead low_matrix peek_low ranks_of stage_change needs add_quad give_up half_quad is_there patience
@group(0) @binding(24) var<storage, read> adapted: array<u32>;
@group(0) @binding(26) var<storage, read> b: array<vec4<f32>>; // [ranks / 4, CHANGED], or [ranks / 8, CHANGED] with halves

// Returns the matrix of an output of the joined ones.
fn matrix_of(output: u32) -> u32 {
//% if ALTERNATES
  return output % 2u;
//% else
  return 0u
//% for m in 1..MATRICES
    + u32(output >= END_${m})
//% end
    ;
//% end
}

// Returns the column of B of an output. Outputs of one matrix follow those of another one.
fn column_of(output: u32) -> u32 {
//% if ALTERNATES
  return output % 2u * (CHANGED / 2u) + output / 2u;
//% else
  return output;
//% end
}

// Returns quad `quad` of ranks from the words that have it.
fn ranks_in(words: vec4<f32>, quad: u32, is_half: u32) -> vec4<f32> {
  if (is_half == 0u) { return words; }
  let halves = bitcast<vec4<u32>>(words);
  let pair = select(halves.xy, halves.zw, quad % 2u == 1u);
  return half_quad(pair.x, pair.y);
}

// Returns a quad of the ranks of an output, of the use whose first unit is `unit`.
fn b_quad(unit: u32, is_half: u32, quad: u32, column: u32) -> vec4<f32> {
  return ranks_in(b[(unit / 4u + (quad >> is_half)) * CHANGED + column], quad, is_half);
}

//% if WIDE_CHANGES
// See `shrink.wgsl`.
//% if SIDE_8
@group(0) @binding(25) var<storage, read> low_halves: array<f16>;
//% else
@group(0) @binding(25) var<storage, read> low_halves: array<vec4<f16>>;
//% end

// Returns the first use of an adapter by the 16 rows around `row`, and the end of the last one.
fn first_use(row: u32) -> u32 {
  return adapted[adapted[1] + 2u * (row / 16u)];
}

fn last_use(row: u32) -> u32 {
  return adapted[adapted[1] + 2u * (row / 16u) + 1u];
}

// Returns the ranks of all matrices.
fn ranks_of(use_: u32) -> u32 {
  return MATRICES * adapted[adapted[0] + 8u * use_ + 3u];
}

// Returns the place of a matrix of low-rank products, in quads. The first matrix is zero.
fn low_matrix(use_: u32, row: u32, rank: u32) -> u32 {
  let at = adapted[0] + 8u * use_;
  let ranks = adapted[at + 3u];
  let first = adapted[at] / 16u;
  let end = (adapted[at + 1u] + 15u) / 16u;
  let tile = row / 16u;
  let matrix = MATRICES * (adapted[at + 5u] + (tile - first) * ((ranks + 15u) / 16u)) + rank / 16u;
  let exists = tile >= first && tile < end && rank < MATRICES * ranks;
  return select(0u, matrix, exists) * 64u + row % 16u * 4u + rank % 16u / 4u;
}

// Returns four ranks of B of an output, in the form of `coop_int.wgsl`. Those of other matrices are zero.
fn b_half(use_: u32, output: u32, rank: u32) -> vec4<f16> {
  let at = adapted[0] + 8u * use_;
  let ranks = adapted[at + 3u];
  let own = FIRST_CHANGED + output;
  if (rank / ranks != matrix_of(own)) { return vec4<f16>(); }
  let quad = b_quad(adapted[at + 2u], adapted[at + 7u], rank % ranks / 4u, column_of(own));
  return vec4<f16>(clamp(quad.xzyw * 8.0, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
//% else
// Words of low-rank products, in quads: [rows of uses, ranks of all matrices / 4]
//% if TAKES_LOW
// Several matmuls share a buffer of handoff, of which each has a quad of LOW_STRIDE.
fn low_words(quad: u32) -> vec4<u32> {
  return handoff[LOW_AT / 4u + quad * LOW_STRIDE];
}
//% else
@group(0) @binding(25) var<storage, read> low: array<vec4<u32>>;

fn low_words(quad: u32) -> vec4<u32> {
  return low[quad];
}
//% end

struct Lows {
//% for k in 0..4
  quad_${k}: vec4<f32>,
//% end
}

// Returns four quads of products. Those behind `last` are the last one.
fn lows(first: u32, last: u32) -> Lows {
//% if TAKES_LOW
  for (var n = 0u; n < patience(); n++) {
//% for k in 0..4
    let words_${k} = low_words(min(first + ${k}u, last));
//% end
    if (is_there(words_0) && is_there(words_1) && is_there(words_2) && is_there(words_3)) {
      return Lows(
//% for k in 0..4
        bitcast<vec4<f32>>(words_${k}),
//% end
      );
    }
  }
  give_up();
  return Lows();
//% else
  return Lows(
//% for k in 0..4
    bitcast<vec4<f32>>(low_words(min(first + ${k}u, last))),
//% end
  );
//% end
}

// A use of an adapter by a row: its first unit, its ranks, and its products, in ranks of one matrix.
struct Use { unit: u32, ranks: u32, low: u32, is_half: u32 }

// Returns the number of uses of a row.
fn uses_of(row: u32) -> u32 {
  return adapted[ROWS_AT + 8u * row];
}

// Returns a use of a row. The words of the first one are at a place that depends on the row only.
fn use_of(row: u32, number: u32) -> Use {
  let at = ROWS_AT + 8u * row;
  if (number == 0u) { return Use(adapted[at + 1u], adapted[at + 2u], adapted[at + 3u], adapted[at + 4u]); }
  let other = adapted[0] + 8u * (adapted[at + 5u] + number);
  let ranks = adapted[other + 3u];
  return Use(adapted[other + 2u], ranks, adapted[other + 4u] + (row - adapted[other]) * ranks, adapted[other + 7u]);
}

// Adds the products of a use with B, from a quad of ranks on, in order. Sixteen ranks are loaded at once.
fn add_ranks(start: f32, own: Use, begin: u32, output: u32) -> f32 {
  let column = column_of(output);
  let from_ = (MATRICES * own.low + matrix_of(output) * own.ranks) / 4u;
  let last = own.ranks / 4u - 1u;
  var sum = start;
  for (var quad = begin; quad <= last; quad += 4u) {
//% for k in 0..4
    let b_${k} = b_quad(own.unit, own.is_half, min(quad + ${k}u, last), column);
//% end
    let low_quads = lows(from_ + quad, from_ + last);
//% for k in 0..4
    if (quad + ${k}u <= last) { sum = add_quad(sum, b_${k}, low_quads.quad_${k}); }
//% end
  }
  return sum;
}

// Adds the uses of a row behind the first one, of `count` in all.
fn add_others(start: f32, row: u32, count: u32, output: u32) -> f32 {
  var sum = start;
  for (var number = 1u; number < count; number++) {
    sum = add_ranks(sum, use_of(row, number), 0u, output);
  }
  return sum;
}

//% if FINISHES
// Words of B and quads of products of the first use's first ranks.
var<workgroup> staged_b: array<vec4<f32>, TILE * AHEAD>; // [AHEAD, TILE]
var<workgroup> staged_low: array<vec4<f32>, MATRICES * LOW_AHEAD>; // [MATRICES, LOW_AHEAD]

// Returns the first use of the only row. A read of its words would delay all loads after it.
fn only_use() -> Use {
  return Use(args.adapter_unit, args.adapter_ranks & 0xffffu, 0u, args.adapter_ranks >> 31u);
}

struct Ahead {
//% for i in 0..AHEAD_LOADS
  b_${i}: vec4<f32>,
//% end
}

// Returns B of the first ranks.
fn look_ahead(tid: u32, first: u32) -> Ahead {
  var ahead: Ahead;
  let own = only_use();
  let count = min(own.ranks >> (2u + own.is_half), AHEAD);
//% for i in 0..AHEAD_LOADS
  let at_${i} = tid + ${i}u * THREADS;
  if (at_${i} / TILE < count) {
    let column = column_of(FIRST_CHANGED + min(first + at_${i} % TILE, OUTPUTS - 1u));
    ahead.b_${i} = b[(own.unit / 4u + at_${i} / TILE) * CHANGED + column];
  }
//% end
  return ahead;
}

// Returns the number of staged quads of products of a matrix.
fn staged_quads(own: Use) -> u32 {
  return min(own.ranks / 4u, AHEAD << own.is_half);
}

// Returns true if the thread stages a quad of products, and its place.
fn has_low(tid: u32, own: Use) -> bool {
  return tid < MATRICES * LOW_AHEAD && tid % LOW_AHEAD < staged_quads(own);
}

fn low_place(tid: u32, own: Use) -> u32 {
  return (MATRICES * own.low + tid / LOW_AHEAD * own.ranks) / 4u + tid % LOW_AHEAD;
}

// Returns the quad of products of the thread as far as it is written.
fn peek_low(tid: u32) -> vec4<u32> {
  let own = only_use();
  if (has_low(tid, own)) { return low_words(low_place(tid, own)); }
  return vec4<u32>();
}

// Stores what the threads have loaded, and receives the other products. A barrier must follow before `change_of_tile`.
fn stage_change(tid: u32, ahead: Ahead, peeked: vec4<u32>) {
//% for i in 0..AHEAD_LOADS
  if (tid + ${i}u * THREADS < TILE * AHEAD) { staged_b[tid + ${i}u * THREADS] = ahead.b_${i}; }
//% end
  let own = only_use();
  if (has_low(tid, own)) {
    var words = peeked;
//% if TAKES_LOW
    for (var n = 0u; n < patience() && !is_there(words); n++) { words = low_words(low_place(tid, own)); }
    if (!is_there(words)) { give_up(); }
//% end
    staged_low[tid] = bitcast<vec4<f32>>(words);
  }
}

// Returns the change of output `tid` of the workgroup, whose first one is `first`.
fn change_of_tile(tid: u32, first: u32) -> f32 {
  let own = only_use();
  if (own.ranks == 0u) { return 0.0; }
  let output = FIRST_CHANGED + min(first + tid, OUTPUTS - 1u);
  let low_at = matrix_of(output) * LOW_AHEAD;
  let count = staged_quads(own);
  var sum = 0.0;
//% for i in 0..LOW_AHEAD
  if (${i}u < count) {
    sum = add_quad(sum, ranks_in(staged_b[(${i}u >> own.is_half) * TILE + tid], ${i}u, own.is_half), staged_low[low_at + ${i}u]);
  }
//% end
  sum = add_ranks(sum, own, count, output);
  if ((args.adapter_ranks >> 30u) % 2u == 1u) { sum = add_others(sum, 0u, uses_of(0u), output); }
  return sum;
}
//% else
//% if KEEPS_USE
// Uses of the row of the thread's result, the first one, and its first ranks of B.
var<private> kept_count: u32;
var<private> kept: Use;
//% for k in 0..4
var<private> kept_b_${k}: vec4<f32>;
//% end

// Loads the words of a row, long before they are used.
fn keep_use(row: u32) {
  kept_count = uses_of(row);
  kept = use_of(row, 0u);
}

// Loads B of an output, while the sums of other threads are awaited.
fn keep_b(output: u32) {
  if (kept_count == 0u) { return; }
  let column = column_of(FIRST_CHANGED + output);
//% for k in 0..4
  kept_b_${k} = b_quad(kept.unit, kept.is_half, min(${k}u, kept.ranks / 4u - 1u), column);
//% end
}

fn change(row: u32, output: u32) -> f32 {
  if (kept_count == 0u) { return 0.0; }
  let own = FIRST_CHANGED + output;
  let from_ = (MATRICES * kept.low + matrix_of(own) * kept.ranks) / 4u;
  let last = kept.ranks / 4u - 1u;
  let low_quads = lows(from_, from_ + last);
  var sum = 0.0;
//% for k in 0..4
  if (${k}u <= last) { sum = add_quad(sum, kept_b_${k}, low_quads.quad_${k}); }
//% end
  return add_others(add_ranks(sum, kept, 4u, own), row, kept_count, own);
}
//% else
fn change(row: u32, output: u32) -> f32 {
  let count = uses_of(row);
  if (count == 0u) { return 0.0; }
  let own = FIRST_CHANGED + output;
  return add_others(add_ranks(0.0, use_of(row, 0u), 0u, own), row, count, own);
}
//% end
//% end
//% end

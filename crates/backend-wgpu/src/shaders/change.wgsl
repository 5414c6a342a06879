// Changes of a matmul's results by adapters (LoRA): the products of `shrink.wgsl`, multiplied with B. `low_rank.rs` describes the
// words of `adapted`.
//% provides b_half change change_with first_use last_use look_ahead low_matrix ranks_of needs add_quad give_up half_quad is_there patience
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

// Returns four ranks of an output, from `rank` of the use at `at` on. Outputs of one matrix follow those of another one.
fn b_quad(at: u32, rank: u32, output: u32) -> vec4<f32> {
//% if ALTERNATES
  let column = output % 2u * (CHANGED / 2u) + output / 2u;
//% else
  let column = output;
//% end
  let is_half = adapted[at + 7u];
  let quad = b[(adapted[at + 2u] + (rank >> is_half)) / 4u * CHANGED + column];
  if (is_half == 0u) { return quad; }
  let words = bitcast<vec4<u32>>(quad);
  let pair = select(words.xy, words.zw, rank / 4u % 2u == 1u);
  return half_quad(pair.x, pair.y);
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
  return adapted[adapted[3] + 2u * (row / 16u)];
}

fn last_use(row: u32) -> u32 {
  return adapted[adapted[3] + 2u * (row / 16u) + 1u];
}

// Returns the ranks of all matrices.
fn ranks_of(use_: u32) -> u32 {
  return MATRICES * adapted[adapted[2] + 8u * use_ + 3u];
}

// Returns the place of a matrix of low-rank products, in quads. The first matrix is zero.
fn low_matrix(use_: u32, row: u32, rank: u32) -> u32 {
  let at = adapted[2] + 8u * use_;
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
  let at = adapted[2] + 8u * use_;
  let ranks = adapted[at + 3u];
  let own = FIRST_CHANGED + output;
  if (rank / ranks != matrix_of(own)) { return vec4<f16>(); }
  let quad = b_quad(at, rank % ranks, own);
  return vec4<f16>(clamp(quad.xzyw * 8.0, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
}
//% else
//% if TAKES_LOW
// Waits for four products by handoff.
fn low_quad(i: u32) -> vec4<f32> {
  for (var n = 0u; n < patience(); n++) {
    let words = handoff[LOW_AT / 4u + i];
    if (is_there(words)) { return bitcast<vec4<f32>>(words); }
  }
  give_up();
  return vec4<f32>();
}
//% else
@group(0) @binding(25) var<storage, read> low: array<vec4<f32>>; // [rows of uses, ranks of all matrices / 4]

fn low_quad(i: u32) -> vec4<f32> {
  return low[i];
}
//% end

// The uses of a row, and the first quads of the first one.
struct Ahead {
  first: u32,
  end: u32,
//% for k in 0..4
  quad_${k}: vec4<f32>,
//% end
}

// Returns the part of a change that does not depend on activations.
fn look_ahead(row: u32, output: u32) -> Ahead {
  var ahead: Ahead;
  ahead.first = adapted[ROWS_AT + 2u * row];
  ahead.end = ahead.first + adapted[ROWS_AT + 2u * row + 1u];
  if (ahead.first < ahead.end) {
    let at = adapted[2] + 8u * ahead.first;
    let ranks = adapted[at + 3u];
//% for k in 0..4
    ahead.quad_${k} = b_quad(at, min(4u * ${k}u, ranks - 4u), FIRST_CHANGED + output);
//% end
  }
  return ahead;
}

fn change_with(ahead: Ahead, row: u32, output: u32) -> f32 {
  let own = FIRST_CHANGED + output;
  var sum = 0.0;
  for (var use_ = ahead.first; use_ < ahead.end; use_++) {
    let at = adapted[2] + 8u * use_;
    let ranks = adapted[at + 3u];
    let from_ = MATRICES * adapted[at + 4u] + ((row - adapted[at]) * MATRICES + matrix_of(own)) * ranks;
    var rank = 0u;
    if (use_ == ahead.first) {
//% for k in 0..4
      if (rank < ranks) {
        sum = add_quad(sum, ahead.quad_${k}, low_quad((from_ + rank) / 4u));
        rank += 4u;
      }
//% end
    }
    for (; rank < ranks; rank += 4u) {
      sum = add_quad(sum, b_quad(at, rank, own), low_quad((from_ + rank) / 4u));
    }
  }
  return sum;
}

fn change(row: u32, output: u32) -> f32 {
  return change_with(look_ahead(row, output), row, output);
}
//% end
